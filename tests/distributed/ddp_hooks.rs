//! Communication hooks, buffers and statistics of `Ddp`.

use super::ddp_support::*;
use std::sync::{Arc, Mutex};
use tch::{Kind, Tensor};
use tch_extension::distributed::{CommHook, Ddp, DdpOptions, ReduceOp};

#[test]
fn compression_rounds_alike_on_all_ranks() {
    let hooks: [(fn() -> CommHook, f64); 2] =
        [(|| CommHook::Bf16, 1.0 / 256.0), (|| CommHook::Fp16, 1.0 / 2048.0)];
    for (hook, relative) in hooks {
        for n in [2, 3] {
            for view in [false, true] {
                all_ranks(n, |group| {
                    let options = DdpOptions {
                        hook: hook(),
                        gradient_as_bucket_view: view,
                        ..small_buckets()
                    };
                    let (vs, ddp, weights) = averaged(group, 1, options)?;
                    for step in 0..3 {
                        let x = batch(group.rank(), step);
                        let own = own_gradients(&weights, &(loss(&weights, &x) * 100.0))?;
                        let expected = means(group, &own)?;
                        let sizes: Vec<Tensor> = own.iter().map(Tensor::abs).collect();
                        let sizes = means(group, &sizes)?;
                        drop_gradients(&vs, step == 1)?;
                        let loss = ddp.forward(|| Ok(loss(&weights, &x) * 100.0))?;
                        ddp.backward(&loss)?;
                        for ((weight, expected), size) in weights.iter().zip(&expected).zip(&sizes)
                        {
                            let gradient = weight.grad();
                            assert_eq!(gradient.kind(), Kind::Float);
                            assert!(is_alike(group, &gradient)?);
                            let error = (&gradient - expected).abs();
                            // Each term and each partial sum is rounded once.
                            let allowed = size * (relative * n as f64) + 1e-7;
                            assert!(bool::try_from(error.le_tensor(&allowed).all())?);
                            assert!(!gradient.equal(expected), "it is rounded");
                        }
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn closures_communicate_buckets() {
    for is_asynchronous in [false, true] {
        all_ranks(3, |group| {
            let calls = Arc::new(Mutex::new(Vec::new()));
            let (seen, ranks) = (Arc::clone(&calls), group.clone());
            let hook = CommHook::closure(move |bucket| {
                let parts: usize = bucket.gradients().iter().map(Tensor::numel).sum();
                assert_eq!(parts, bucket.buffer().numel());
                seen.lock().expect("not poisoned").push((bucket.index(), bucket.is_last()));
                let _ = bucket.buffer().shallow_clone().f_div_scalar_(ranks.size() as i64)?;
                if is_asynchronous {
                    return ranks.all_reduce_async(bucket.buffer(), ReduceOp::Sum).map(Some);
                }
                ranks.all_reduce(bucket.buffer(), ReduceOp::Sum).map(|()| None)
            });
            check_steps(group, DdpOptions { hook, ..small_buckets() }, 1e-8)?;
            let calls = calls.lock().expect("not poisoned");
            // One bucket in the first of five steps, then three.
            assert_eq!(calls.len(), 1 + 4 * 3);
            assert_eq!(calls[0], (0, true));
            assert_eq!(calls[1..4], [(0, false), (1, false), (2, true)]);
            Ok(())
        });
    }
}

#[test]
fn statistics_are_measured() {
    all_ranks(2, |group| {
        let options = DdpOptions { find_unused_parameters: true, ..small_buckets() };
        let (_, ddp, weights) = averaged(group, 1, options)?;
        assert_eq!(ddp.statistics()?.forward.as_nanos(), 0);
        ddp.sample_every(2)?;
        for step in 0..5 {
            ddp.backward(&ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), step))))?)?;
        }
        let statistics = ddp.statistics()?;
        let times = [statistics.forward, statistics.backward, statistics.communication];
        assert!(times.iter().all(|time| time.as_nanos() > 0), "{statistics:?}");
        assert!((0.0..=1.0).contains(&statistics.overlap_share()), "{statistics:?}");
        assert!(statistics.can_be_static && !statistics.rebuilt, "{statistics:?}");
        assert!(ddp.sample_every(0).is_err());
        Ok(())
    });
}

#[test]
fn buffers_come_from_rank_0() {
    for broadcast_buffers in [true, false] {
        all_ranks(3, |group| {
            let vs = network(1);
            let rank = group.rank() as i64;
            let mean = vs.root().zeros_no_train("mean", &[2]);
            let _ = mean.shallow_clone().fill_(rank);
            let options = DdpOptions { broadcast_buffers, ..small_buckets() };
            let ddp = Ddp::new(group, &vs, options)?;
            let weights = vs.trainable_variables();
            assert_eq!(weights.len(), 2 * LAYERS, "a buffer is not trained");
            let source = if broadcast_buffers { 0 } else { rank };
            let value = || mean.double_value(&[1]);
            assert_eq!(value(), source as f64);
            for step in 0..3 {
                // As the running mean of a batch normalisation.
                let _ = mean.shallow_clone().fill_(10 * step + rank);
                let loss = ddp.forward(|| {
                    assert_eq!(value(), (10 * step + source) as f64);
                    Ok(loss(&weights, &batch(group.rank(), step)))
                })?;
                ddp.backward(&loss)?;
            }
            // As in Python, a pass that is not synchronised needs none, and none is due after it.
            let _ = mean.shallow_clone().fill_(rank);
            let _ = tch::no_grad(|| ddp.forward(|| Ok(loss(&weights, &batch(0, 0)))))?;
            assert_eq!(value(), source as f64);
            let _ = mean.shallow_clone().fill_(rank);
            let _ = ddp.no_sync(|| ddp.forward(|| Ok(loss(&weights, &batch(0, 0)))))?;
            assert_eq!(value(), rank as f64);
            Ok(())
        });
    }
}
