//! `Ddp` with scalers, optimizers, captured steps' code on the CPU, and fused operators.

use super::ddp_support::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::nn::{self, VarStore};
use tch::{Kind, Tensor};
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::distributed::{CommHook, Ddp, DdpOptions, ProcessGroup, ReduceOp};
use tch_extension::optim::Optimizer;
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::train::{Step, StepOptions};
use tch_extension::{Error, Result};

fn adamw(vs: &VarStore) -> Result<tch_extension::optim::FusedOptimizer> {
    AdamW::default().build(vs, 0.01)
}

fn sgd(vs: &VarStore) -> nn::Optimizer {
    use nn::OptimizerConfig;
    nn::Sgd::default().build(vs, 0.1).expect("an optimizer")
}

/// Rank 1 has an infinite gradient in step 2. All ranks must skip it.
fn check_scaler(
    group: &ProcessGroup,
    vs: &VarStore,
    ddp: &Ddp,
    mut optimizer: impl Optimizer,
) -> Result<()> {
    let weights = vs.trainable_variables();
    let mut scaler = GradScaler::new(GradScalerOptions { init_scale: 8.0, ..Default::default() })?;
    for step in 0..5 {
        drop_gradients(vs, false)?;
        let factor = if step == 2 && group.rank() == 1 { f64::INFINITY } else { 1.0 };
        let loss = ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), step)) * factor))?;
        ddp.backward(&scaler.scale(&loss)?)?;
        let before = copies(&weights);
        let stepped = scaler.step(&mut optimizer)?;
        scaler.update()?;
        assert_eq!(stepped, step != 2, "rank {}", group.rank());
        assert_eq!(worst(&before, &weights) > 0.0, step != 2);
        assert_eq!(scaler.scale_factor()?, if step < 2 { 8.0 } else { 4.0 });
        for weight in &weights {
            assert!(is_alike(group, weight)? && weight.isfinite().all().int64_value(&[]) == 1);
        }
    }
    Ok(())
}

#[test]
fn an_infinite_gradient_of_one_rank_skips_the_step_on_all() {
    for hook in [|| CommHook::None, || CommHook::Bf16, || CommHook::Fp16] {
        all_ranks(3, |group| {
            let options = || DdpOptions { hook: hook(), ..Default::default() };
            let (vs, ddp, _) = averaged(group, 1, options())?;
            check_scaler(group, &vs, &ddp, ddp.guard(adamw(&vs)?)?)?;
            let (vs, ddp, _) = averaged(group, 1, options())?;
            check_scaler(group, &vs, &ddp, ddp.guard(sgd(&vs))?)
        });
    }
}

#[test]
fn gradients_too_large_for_half_are_found_infinite() {
    all_ranks(2, |group| {
        let options = DdpOptions { hook: CommHook::Fp16, ..Default::default() };
        let (vs, ddp, weights) = averaged(group, 1, options)?;
        let mut optimizer = ddp.guard(adamw(&vs)?)?;
        let mut scaler =
            GradScaler::new(GradScalerOptions { init_scale: 1e9, ..Default::default() })?;
        let before = copies(&weights);
        let loss = ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), 0))))?;
        ddp.backward(&scaler.scale(&loss)?)?;
        assert!(!scaler.step(&mut optimizer)?);
        assert_eq!(worst(&before, &weights), 0.0);
        Ok(())
    });
}

/// Trains by a `Step`, and returns the weights and the losses of all ranks together.
fn train_by_step(
    group: &ProcessGroup,
    parts: usize,
    accumulate: usize,
    scaled: bool,
    view: bool,
) -> Result<(Vec<Tensor>, Vec<f64>, usize)> {
    let (calls, ranks) = (Arc::new(AtomicUsize::new(0)), group.clone());
    let counted = Arc::clone(&calls);
    let hook = CommHook::closure(move |bucket| {
        counted.fetch_add(1, Ordering::Relaxed);
        let _ = bucket.buffer().shallow_clone().f_div_scalar_(ranks.size() as i64)?;
        ranks.all_reduce_async(bucket.buffer(), ReduceOp::Sum).map(Some)
    });
    let options = DdpOptions { hook, gradient_as_bucket_view: view, ..Default::default() };
    let (vs, ddp, weights) = averaged(group, 1, options)?;
    let optimizer = ddp.guard(adamw(&vs)?)?;
    let options = StepOptions { accumulate, ..Default::default() };
    let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
        ddp.forward(|| Ok(loss(&weights, &batch[0])))
    })?;
    if scaled {
        step = step.with_scaler(GradScaler::new(Default::default())?);
    }
    let mut losses = Vec::new();
    for call in 0..4 * accumulate as i64 {
        let inputs: Vec<Tensor> =
            (0..parts).map(|part| batch(group.rank() * parts + part, call)).collect();
        let loss = step.step(&[&Tensor::cat(&inputs, 0)])?;
        let mean = loss / group.size() as f64;
        group.all_reduce(&mean, ReduceOp::Sum)?;
        losses.push(mean.double_value(&[]));
    }
    assert_eq!(step.stats().steps, 4);
    Ok((copies(&vs.trainable_variables()), losses, calls.load(Ordering::Relaxed)))
}

#[test]
fn steps_accumulate_without_communication() {
    for accumulate in [1, 3] {
        for scaled in [false, true] {
            for view in [false, true] {
                let alone = all_ranks(1, |group| train_by_step(group, 6, accumulate, scaled, view));
                for n in [2, 3] {
                    let run = |group: &ProcessGroup| {
                        train_by_step(group, 6 / n, accumulate, scaled, view)
                    };
                    for (weights, losses, calls) in all_ranks(n, run) {
                        assert!(worst(&weights, &alone[0].0) < 2e-5);
                        for (loss, expected) in losses.iter().zip(&alone[0].1) {
                            assert!((loss - expected).abs() < 1e-6, "{loss} {expected}");
                        }
                        assert_eq!(calls, 4, "one bucket for each step");
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_whose_closure_fails_on_one_rank_fails_on_all() {
    let errors = all_fail(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
        let optimizer = ddp.guard(adamw(&vs)?)?;
        let rank = group.rank();
        let mut calls = 0;
        let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
            calls += 1;
            let fails = rank == 1 && calls == 3;
            ddp.forward(|| {
                if fails { Err(Error::msg("out of data")) } else { Ok(loss(&weights, &batch[0])) }
            })
        })?;
        (0..5).try_for_each(|call| step.step(&[&batch(rank, call)]).map(drop))
    });
    assert!(errors[1].contains("out of data") && errors[0].contains("rank 1: "), "{errors:?}");
}

/// A step that does not go through the Ddp at all.
#[test]
fn a_step_without_forward_is_an_error() {
    all_fail(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
        let optimizer = ddp.guard(adamw(&vs)?)?;
        let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
            Ok(loss(&weights, &batch[0]))
        })?;
        step.step(&[&batch(group.rank(), 0)])
    })
    .iter()
    .for_each(|error| assert!(error.contains("did not begin in Ddp::forward"), "{error}"));
}

#[test]
fn recurrent_layers_of_libtorch() {
    use nn::RNN;
    all_ranks(2, |group| {
        let vs = VarStore::new(tch::Device::Cpu);
        let lstm = nn::lstm(vs.root(), 6, 8, Default::default());
        for (place, mut weight) in vs.trainable_variables().into_iter().enumerate() {
            let values = numbers(&weight.size(), place as i64);
            tch::no_grad(|| weight.copy_(&values));
        }
        let ddp = Ddp::new(group, &vs, DdpOptions::default())?;
        for step in 0..3 {
            let x = numbers(&[2, 5, 6], 10 * step + group.rank() as i64);
            check_pass(group, &vs, &ddp, 1e-8, || lstm.seq(&x).0.square().mean(Kind::Float))?;
        }
        Ok(())
    });
}

#[test]
fn sequences_of_fused_operators() {
    use tch_extension::ops::f_lltm;
    all_ranks(2, |group| {
        let weight = (numbers(&[24, 14], 1) * 0.3).set_requires_grad(true);
        let bias = numbers(&[24], 2).set_requires_grad(true);
        let named = [("weight", &weight), ("bias", &bias)];
        let ddp = Ddp::of_tensors(group, &named, &[], DdpOptions::default())?;
        let weights = [weight.shallow_clone(), bias.shallow_clone()];
        for step in 0..3 {
            let x = numbers(&[5, 2, 6], 10 * step + group.rank() as i64);
            let zeros = Tensor::zeros([2, 8], (Kind::Float, tch::Device::Cpu));
            let run = || -> Result<Tensor> {
                let (y, _) = f_lltm(&x, &weight, Some(&bias), (&zeros, &zeros))?;
                Ok(y.square().mean(Kind::Float))
            };
            let expected = means(group, &own_gradients(&weights, &run()?)?)?;
            for weight in &weights {
                if weight.grad().defined() {
                    let _ = weight.grad().zero_();
                }
            }
            ddp.backward(&ddp.forward(run)?)?;
            assert_gradients(group, &weights, &expected, 1e-8)?;
        }
        Ok(())
    });
}

/// Passes that are not synchronised before the first one that is, and before later ones.
#[test]
fn a_static_graph_accumulates() {
    for (unsynchronised, view) in [(1, false), (1, true), (2, true), (3, false)] {
        all_ranks(2, |group| {
            let options =
                DdpOptions { static_graph: true, gradient_as_bucket_view: view, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            for update in 0..4 {
                let run = |part: i64| {
                    let x = batch(group.rank(), 10 * update + part);
                    output(&weights, &x, &[2]).square().mean(Kind::Float)
                };
                let all = (0..=unsynchronised).map(run).reduce(|sum, loss| sum + loss);
                let all = own_gradients(&weights, &all.expect("a sum"))?;
                let expected = means(group, &all)?;
                drop_gradients(&vs, update % 2 == 1)?;
                let pass = |part: i64| ddp.backward(&ddp.forward(|| Ok(run(part)))?);
                ddp.no_sync(|| (0..unsynchronised).try_for_each(pass))?;
                pass(unsynchronised)?;
                ddp.check()?;
                assert!(!weights[4].grad().defined(), "never used");
                assert_gradients(group, &weights[..4], &expected[..4], 1e-7)?;
                assert_gradients(group, &weights[6..], &expected[6..], 1e-7)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_static_graph_accumulates_in_a_step() {
    for accumulate in [2, 3, 4] {
        let train = |group: &ProcessGroup, static_graph: bool| -> Result<Vec<Tensor>> {
            let options = DdpOptions { static_graph, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            let optimizer = ddp.guard(adamw(&vs)?)?;
            let options = StepOptions { accumulate, ..Default::default() };
            let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
                ddp.forward(|| Ok(loss(&weights, &batch[0])))
            })?;
            for call in 0..4 * accumulate as i64 {
                let _ = step.step(&[&batch(group.rank(), call)])?;
            }
            Ok(copies(&weights))
        };
        all_ranks(2, |group| {
            assert!(worst(&train(group, true)?, &train(group, false)?) < 1e-6, "{accumulate}");
            Ok(())
        });
    }
}

/// The rest of the program must not stay without averages.
#[test]
fn a_step_that_ends_within_an_accumulation_synchronises_again() {
    for drops in [true, false] {
        all_ranks(2, |group| {
            let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
            let optimizer = ddp.guard(adamw(&vs)?)?;
            let options = StepOptions { accumulate: 2, ..Default::default() };
            let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
                ddp.forward(|| Ok(loss(&weights, &batch[0])))
            })?;
            let _ = step.step(&[&batch(group.rank(), 0)])?;
            let optimizer = if drops {
                drop(step);
                None
            } else {
                Some(step.into_optimizer())
            };
            let x = batch(group.rank(), 1);
            check_pass(group, &vs, &ddp, 0.0, || loss(&weights, &x))?;
            optimizer.map_or(Ok(()), |mut optimizer| optimizer.step())
        });
    }
}
