//! On a GPU: a group of one, whose steps must be those of an ordinary optimizer, also in graphs.

use super::*;
use crate::gpus_or_skip;
use std::time::Duration;
use support::gpu::caching_or_skip;
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::distributed::Compression;
use tch_extension::testing::cuda_or_skip;
use tch_extension::train::{Step, StepOptions, StepOutput};

#[test]
fn cuda_steps_of_one_rank_are_those_of_an_ordinary_optimizer() {
    let Some(device) = cuda_or_skip("cuda_steps_of_one_rank_are_those_of_an_ordinary_optimizer")
    else {
        return;
    };
    for kind in [Kind::Float, Kind::BFloat16] {
        let expected = model(&SIZES, kind, device);
        let mut whole = AdamW::default().build_of(named(&expected), 0.02).expect("one");
        whole.set_clip_norm(Some(0.5)).expect("no error");
        reference(&expected, &mut whole, 1, 0..3);
        let leaves = model(&SIZES, kind, device);
        let mut optimizer = AdamW::default().build_of(named(&leaves), 0.02).expect("one");
        optimizer.set_clip_norm(Some(0.5)).expect("no error");
        let group = ProcessGroup::single().expect("a group");
        let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets());
        let mut optimizer = optimizer.expect("an optimizer");
        train(&leaves, &mut optimizer, 0..3).expect("steps");
        // The order in which squares are added depends on addresses.
        assert!(worst(&leaves, &expected) < 1e-2, "{kind:?}");
        let state = optimizer.gather_state_dict().expect("a state").expect("rank 0");
        assert_eq!(state["step.w0"].int64_value(&[]), 3);
    }
}

/// A captured step with a scaler, of one batch and of several.
#[test]
fn cuda_graphs_of_a_step() {
    let Some(device) = caching_or_skip("cuda_graphs_of_a_step") else { return };
    for accumulate in [1, 3] {
        let run = |capture: bool| {
            let sizes: [&[i64]; 3] = [&[10, 20], &[20], &[20, 1]];
            let leaves = model(&sizes, Kind::Float, device);
            let config = AdamW::default().amsgrad(accumulate == 3).maximize(accumulate == 3);
            let mut optimizer = config.build_of(named(&leaves), 0.02).expect("one");
            optimizer.set_clip_norm(Some(0.5)).expect("no error");
            let group = ProcessGroup::single().expect("a group");
            let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets());
            let copied: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
            let options = StepOptions { accumulate, capture, ..Default::default() };
            let scaling = GradScalerOptions { init_scale: 1024.0, ..Default::default() };
            let mut step =
                Step::new(options, optimizer.expect("one"), move |batch: &[Tensor]| {
                    let hidden = (batch[0].matmul(&copied[0]) + &copied[1]).tanh();
                    Ok(StepOutput::from(hidden.matmul(&copied[2]).square().mean(Kind::Float)))
                })
                .expect("a step")
                .with_scaler(GradScaler::new(scaling).expect("a scaler"));
            for batch in 0..8 * accumulate {
                let scale = if batch == 6 * accumulate { f64::INFINITY } else { 1.0 };
                let x = values(&[6, 10], batch as f64, Kind::Float, device) * scale;
                let _ = step.step(&[&x]).expect("a step");
                if batch == 5 * accumulate {
                    step.optimizer_mut().set_lr(0.01).expect("a rate");
                }
            }
            assert_eq!(step.stats().captured, capture);
            (copies(&leaves), step.scaler().expect("a scaler").scale_factor().expect("a scale"))
        };
        let (eager, captured) = (run(false), run(true));
        assert_eq!(eager.1, 512.0);
        assert_eq!(captured.1, 512.0);
        assert!(worst(&eager.0, &captured.0) < 1e-5, "{accumulate}");
    }
}

/// Ranks as threads, each with a GPU of its own, over NCCL.
fn on_two_gpus<T: Send>(
    test: &str,
    run: impl Fn(ProcessGroup, Device) -> Result<T> + Sync,
) -> Option<Vec<T>> {
    if !gpus_or_skip(test, 2) {
        return None;
    }
    let timeout = Duration::from_secs(30);
    let store = Store::hash(timeout).expect("a store");
    let outcomes: Vec<Result<T>> = std::thread::scope(|scope| {
        let one = |rank: usize| {
            let (store, run) = (&store, &run);
            scope.spawn(move || {
                let device = Device::Cuda(rank);
                let mut options = GroupOptions::with_timeout(timeout);
                options.device = Some(device);
                let group = ProcessGroup::with_store(store, rank, 2, &options)?;
                run(group.clone(), device).inspect_err(|error| group.poison(&error.to_string()))
            })
        };
        let threads = [one(0), one(1)];
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    });
    Some(outcomes.into_iter().map(|outcome| outcome.expect("a rank")).collect())
}

#[test]
fn cuda_two_gpus_are_one_with_the_mean_of_gradients() {
    let test = "cuda_two_gpus_are_one_with_the_mean_of_gradients";
    for (kind, compression, tolerance) in [
        (Kind::Float, Compression::None, 1e-4),
        (Kind::Float, Compression::BFloat16, 2e-2),
        (Kind::BFloat16, Compression::None, 2e-2),
    ] {
        let all = on_two_gpus(test, |group, device| {
            let leaves = model(&SIZES, kind, device);
            let mut optimizer = Sgd::default().build_of(named(&leaves), 0.1)?;
            optimizer.set_clip_norm(Some(5.0))?;
            let options = ShardedOptions { compression, ..small_buckets() };
            let mut optimizer = ShardedOptimizer::new(&group, optimizer, &options)?;
            let mut scaler = GradScaler::new(Default::default())?;
            for step in 0..3 {
                scaler.scale(&loss(&leaves, group.rank(), step))?.f_backward()?;
                scaler.step(&mut optimizer)?;
                scaler.update()?;
            }
            let state = optimizer.gather_state_dict()?;
            assert_eq!(state.is_some(), group.rank() == 0);
            let norm = optimizer.grad_norm()?.expect("a norm").double_value(&[]);
            group.barrier()?;
            Ok((leaves.iter().map(|leaf| leaf.detach().to_device(CPU)).collect::<Vec<_>>(), norm))
        });
        let Some(all) = all else { return };
        let expected = model(&SIZES, kind, Device::Cuda(0));
        let mut whole = Sgd::default().build_of(named(&expected), 0.1).expect("one");
        whole.set_clip_norm(Some(5.0)).expect("no error");
        reference(&expected, &mut whole, 2, 0..3);
        let expected: Vec<Tensor> =
            expected.iter().map(|leaf| leaf.detach().to_device(CPU)).collect();
        assert_eq!((bits(&all[0].0), all[0].1.to_bits()), (bits(&all[1].0), all[1].1.to_bits()));
        let worst = worst(&all[0].0, &expected);
        assert!(worst < tolerance, "{kind:?} {compression:?}: {worst}");
    }
}
