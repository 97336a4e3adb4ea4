//! What `Ddp` computes: the gradients of all options against the means of the ranks' own.

use super::ddp_support::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::distributed::{CommHook, Ddp, DdpOptions, ProcessGroup, run_ranks};
use tch_extension::{Error, Result};

#[test]
fn gradients_are_the_means_with_any_buckets() {
    for n in 2..=4 {
        for view in [false, true] {
            for (cap, first, buckets) in
                [(25 << 20, 1 << 20, 1), (1200, 600, 3), (2000, 2000, 2), (1, 1, 8)]
            {
                all_ranks(n, |group| {
                    let options = DdpOptions {
                        gradient_as_bucket_view: view,
                        bucket_cap_mb: mib(cap),
                        first_bucket_mb: mib(first),
                        ..Default::default()
                    };
                    // Two numbers have one sum, whatever the order is.
                    let tolerance = if n == 2 { 0.0 } else { 1e-8 };
                    let ddp = check_steps(group, options, tolerance)?;
                    let statistics = ddp.statistics()?;
                    assert_eq!(statistics.buckets.len(), buckets, "{statistics:?}");
                    assert_eq!(statistics.buckets.iter().sum::<usize>(), 4 * LAYERS * (256 + 16));
                    assert!(statistics.rebuilt);
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn views_of_buckets_stay_in_place() {
    all_ranks(2, |group| {
        for view in [false, true] {
            let options = DdpOptions { gradient_as_bucket_view: view, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 0, options)?;
            let mut places = Vec::new();
            for step in 0..4 {
                drop_gradients(&vs, false)?;
                let held: Vec<Tensor> = weights.iter().map(Tensor::grad).collect();
                let loss = ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), step))))?;
                ddp.backward(&loss)?;
                drop(held);
                places.push(weights.iter().map(|w| w.grad().data_ptr()).collect::<Vec<_>>());
            }
            // Buckets are made anew in the second pass.
            assert!(!view || places[1..].iter().all(|place| *place == places[1]), "{places:?}");
        }
        Ok(())
    });
}

#[test]
fn n_ranks_are_one_rank_with_n_times_the_batch() {
    let train = |group: &ProcessGroup, parts: usize| -> Result<Vec<Tensor>> {
        let (vs, ddp, weights) = averaged(group, 3, small_buckets())?;
        for step in 0..6 {
            let inputs: Vec<Tensor> =
                (0..parts).map(|part| batch(group.rank() * parts + part, step)).collect();
            let x = Tensor::cat(&inputs, 0);
            drop_gradients(&vs, false)?;
            let loss = ddp.forward(|| Ok(loss(&weights, &x)))?;
            ddp.backward(&loss)?;
            descend(&weights, 2.0)?;
        }
        Ok(copies(&weights))
    };
    let alone = all_ranks(1, |group| train(group, 12));
    let start = network(3).trainable_variables();
    assert!(worst(&alone[0], &start) > 1e-2, "it has moved");
    for n in [2, 3, 4] {
        for weights in all_ranks(n, |group| train(group, 12 / n)) {
            let worst = worst(&weights, &alone[0]);
            assert!(worst < 2e-6, "{n} ranks: {worst}");
        }
    }
}

#[test]
fn no_sync_is_one_large_batch() {
    for view in [false, true] {
        all_ranks(3, |group| {
            let options = DdpOptions { gradient_as_bucket_view: view, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            for round in 0..3 {
                let x = |part: i64| batch(group.rank(), 10 * round + part);
                let all = Tensor::cat(&[x(0), x(1), x(2)], 0);
                let expected = means(group, &own_gradients(&weights, &loss(&weights, &all))?)?;
                drop_gradients(&vs, round == 1)?;
                let run = |part: i64| -> Result<()> {
                    let loss = ddp.forward(|| Ok(loss(&weights, &x(part)) / 3.0))?;
                    ddp.backward(&loss)
                };
                ddp.no_sync(|| run(0).and_then(|()| run(1)))?;
                let error = ddp.check().expect_err("gradients of this rank only").to_string();
                assert!(error.contains("this rank only"), "{error}");
                assert!(!is_alike(group, &weights[0].grad())?);
                run(2)?;
                ddp.check()?;
                assert_gradients(group, &weights, &expected, 1e-7)?;
            }
            Ok(())
        });
    }
}

#[test]
fn parameters_may_be_unused_on_some_ranks_or_on_all() {
    for view in [false, true] {
        all_ranks(3, |group| {
            let options = DdpOptions {
                find_unused_parameters: true,
                gradient_as_bucket_view: view,
                ..small_buckets()
            };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            for step in 0..4 {
                // Layer 1 on rank 1 in every step; another layer on each rank in the last.
                let left_out = match (step, group.rank()) {
                    (3, rank) => vec![rank],
                    (_, 1) => vec![1],
                    _ => vec![],
                };
                let x = batch(group.rank(), step);
                check_pass(group, &vs, &ddp, 1e-8, || {
                    output(&weights, &x, &left_out).square().mean(Kind::Float)
                })?;
            }
            drop_gradients(&vs, false)?;
            let x = batch(group.rank(), 9);
            let loss = ddp.forward(|| Ok(output(&weights, &x, &[2]).square().mean(Kind::Float)))?;
            ddp.backward(&loss)?;
            assert!(!weights[4].grad().defined() && !weights[5].grad().defined(), "unused on all");
            assert!(weights[0].grad().defined());
            Ok(())
        });
    }
}

/// Its gradient is of this rank only until the synchronised pass, which does not use it.
#[test]
fn a_parameter_that_only_an_unsynchronised_pass_used_is_averaged() {
    for view in [false, true] {
        all_ranks(2, |group| {
            let options = DdpOptions {
                find_unused_parameters: true,
                gradient_as_bucket_view: view,
                ..small_buckets()
            };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            for round in 0..3 {
                let run = |part: i64, left_out: &[usize]| {
                    let x = batch(group.rank(), 10 * round + part);
                    output(&weights, &x, left_out).square().mean(Kind::Float)
                };
                let both = run(0, &[3]) + run(1, &[1]);
                let expected = means(group, &own_gradients(&weights, &both)?)?;
                drop_gradients(&vs, false)?;
                ddp.no_sync(|| ddp.backward(&ddp.forward(|| Ok(run(0, &[3])))?))?;
                ddp.backward(&ddp.forward(|| Ok(run(1, &[1])))?)?;
                ddp.check()?;
                assert_gradients(group, &weights, &expected, 1e-8)?;
            }
            Ok(())
        });
    }
}

#[test]
fn an_output_that_the_loss_ignores_counts_as_unused() {
    all_ranks(2, |group| {
        let options = DdpOptions { find_unused_parameters: true, ..small_buckets() };
        let (vs, ddp, weights) = averaged(group, 1, options)?;
        for step in 0..3 {
            let x = batch(group.rank(), step);
            let two = || (output(&weights[..4], &x, &[]), vec![output(&weights[4..], &x, &[])]);
            let reference = two().0.square().sum(Kind::Float);
            let expected = means(group, &own_gradients(&weights[..4], &reference)?)?;
            drop_gradients(&vs, false)?;
            let (first, second) = ddp.forward(|| Ok(two()))?;
            assert!(second[0].requires_grad());
            ddp.backward(&first.square().sum(Kind::Float))?;
            assert_gradients(group, &weights[..4], &expected, 0.0)?;
            // PyTorch does the same: the graph has a place for them, so they count as used.
            assert!(
                weights[4..]
                    .iter()
                    .all(|w| !w.grad().defined() || w.grad().equal(&w.grad().zeros_like()))
            );
        }
        // Both have a part again.
        let x = batch(group.rank(), 7);
        let two = || (output(&weights[..4], &x, &[]), output(&weights[4..], &x, &[]));
        let sum = |(a, b): (Tensor, Tensor)| a.square().sum(Kind::Float) + b.mean(Kind::Float);
        let expected = means(group, &own_gradients(&weights, &sum(two()))?)?;
        drop_gradients(&vs, false)?;
        ddp.backward(&sum(ddp.forward(|| Ok(two()))?))?;
        assert_gradients(group, &weights, &expected, 0.0)
    });
}

#[test]
fn outputs_after_the_sink_can_be_changed_in_place() {
    all_ranks(2, |group| {
        let options = DdpOptions { find_unused_parameters: true, ..small_buckets() };
        let (_, ddp, weights) = averaged(group, 1, options)?;
        let x = batch(group.rank(), 0);
        // A sum does not need its result, so a change in place is allowed, as without a Ddp.
        let run = || &output(&weights, &x, &[]) + 1.0;
        let loss =
            |mut y: Tensor| y.f_mul_(&Tensor::from(2.0_f32)).map(|y| y.square().sum(Kind::Float));
        let expected = means(group, &own_gradients(&weights, &loss(run())?)?)?;
        ddp.backward(&loss(ddp.forward(|| Ok(run()))?)?)?;
        assert_gradients(group, &weights, &expected, 0.0)
    });
}

#[test]
fn a_static_graph_with_parameters_used_never_and_twice() {
    for view in [false, true] {
        all_ranks(2, |group| {
            let options =
                DdpOptions { static_graph: true, gradient_as_bucket_view: view, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            for step in 0..5 {
                let x = batch(group.rank(), step);
                let two = || {
                    let h = x.linear(&weights[0], Some(&weights[1])).tanh();
                    (output(&weights, &h, &[2]), h.linear(&weights[0], None::<Tensor>))
                };
                let loss = |(a, b): (Tensor, Tensor)| (a + b).square().mean(Kind::Float);
                let expected = means(group, &own_gradients(&weights, &loss(two()))?)?;
                drop_gradients(&vs, false)?;
                ddp.backward(&loss(ddp.forward(|| Ok(two()))?))?;
                ddp.check()?;
                let used: Vec<usize> = (0..weights.len()).filter(|i| i / 2 != 2).collect();
                let pick = |all: &[Tensor]| -> Vec<Tensor> {
                    used.iter().map(|&place| all[place].shallow_clone()).collect()
                };
                assert_gradients(group, &pick(&weights), &pick(&expected), 1e-8)?;
                assert!(!weights[4].grad().defined(), "never used");
            }
            Ok(())
        });
    }
}

#[test]
fn kinds_may_be_mixed() {
    for hook in [|| CommHook::None, || CommHook::Bf16] {
        all_ranks(2, |group| {
            let cpu = Device::Cpu;
            let kinds = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half, Kind::Float];
            let weights: Vec<Tensor> = kinds
                .iter()
                .map(|kind| Tensor::ones([3, 2], (*kind, cpu)).set_requires_grad(true))
                .collect();
            let names: Vec<String> = (0..kinds.len()).map(|place| format!("w{place}")).collect();
            let named: Vec<(&str, &Tensor)> =
                names.iter().map(String::as_str).zip(&weights).collect();
            let options = DdpOptions { hook: hook(), ..small_buckets() };
            let ddp = Ddp::of_tensors(group, &named, &[], options)?;
            assert!(ddp.names().eq(names.iter().map(String::as_str)));
            for step in 1..4 {
                let rank = group.rank() as f64;
                let loss = ddp.forward(|| {
                    let terms = weights.iter().map(|w| w.to_kind(Kind::Double) * (rank + 1.0));
                    Ok(terms.fold(Tensor::from(0.0), |sum, term| sum + term.sum(Kind::Double)))
                })?;
                ddp.backward(&loss)?;
                for (weight, kind) in weights.iter().zip(kinds) {
                    assert_eq!(weight.grad().kind(), kind);
                    let expected = Tensor::full([3, 2], 1.5 * f64::from(step), (kind, cpu));
                    assert_eq!(weight.grad(), expected, "{kind:?} in step {step}");
                }
            }
            assert_eq!(ddp.statistics()?.buckets.len(), 4);
            Ok(())
        });
    }
}

#[test]
fn frozen_parameters_are_handed_over_and_get_no_gradient() {
    all_ranks(2, |group| {
        let vs = network(group.rank() as i64);
        let weights = vs.trainable_variables();
        for weight in &weights[..4] {
            let _ = weight.set_requires_grad(false);
        }
        let ddp = Ddp::new(group, &vs, small_buckets())?;
        assert_eq!(worst(&weights, &network(0).trainable_variables()), 0.0);
        assert_eq!(ddp.names().collect::<Vec<_>>()[0], "layer2.weight");
        let x = batch(group.rank(), 0);
        let expected = means(group, &own_gradients(&weights[4..], &loss(&weights, &x))?)?;
        ddp.backward(&ddp.forward(|| Ok(loss(&weights, &x)))?)?;
        assert!(!weights[0].grad().defined());
        assert_gradients(group, &weights[4..], &expected, 0.0)
    });
}

#[test]
fn weights_in_other_layouts() {
    all_ranks(2, |group| {
        // Transposed, and a view with gaps.
        let transposed = numbers(&[5, 3], group.rank() as i64).tr().set_requires_grad(true);
        let gaps = numbers(&[6, 4], 7).slice(1, 0, 4, 2).detach().set_requires_grad(true);
        let named = [("transposed", &transposed), ("gaps", &gaps)];
        let ddp = Ddp::of_tensors(group, &named, &[], small_buckets())?;
        assert!(is_alike(group, &transposed)?);
        let weights = [transposed.shallow_clone(), gaps.shallow_clone()];
        for step in 0..3 {
            let (a, b) =
                (numbers(&[3, 5], step + 10 * group.rank() as i64), numbers(&[6, 2], step));
            let loss =
                || (&transposed * &a).square().sum(Kind::Float) + (&gaps * &b).sum(Kind::Float);
            let expected = means(group, &own_gradients(&weights, &loss())?)?;
            for weight in &weights {
                if weight.grad().defined() {
                    let _ = weight.grad().zero_();
                }
            }
            ddp.backward(&ddp.forward(|| Ok(loss()))?)?;
            assert_gradients(group, &weights, &expected, 0.0)?;
        }
        Ok(())
    });
}

#[test]
fn two_forward_passes_with_one_backward_pass() {
    all_ranks(2, |group| {
        let (_, ddp, weights) = averaged(group, 1, small_buckets())?;
        let x = |step: i64| batch(group.rank(), step);
        let both = loss(&weights, &x(0)) + loss(&weights, &x(1));
        let expected = means(group, &own_gradients(&weights, &both)?)?;
        let first = ddp.forward(|| Ok(loss(&weights, &x(0))))?;
        let second = ddp.forward(|| Ok(loss(&weights, &x(1))))?;
        ddp.backward(&(first + second))?;
        ddp.check()?;
        assert_gradients(group, &weights, &expected, 1e-8)
    });
}

#[test]
fn the_backward_pass_may_run_in_another_thread_or_after_the_ddp_is_dropped() {
    all_ranks(2, |group| {
        let vs = network(1);
        let weights = vs.trainable_variables();
        for options in [small_buckets(), DdpOptions { static_graph: true, ..small_buckets() }] {
            let ddp = Ddp::new(group, &vs, options)?;
            let x = batch(group.rank(), 0);
            let expected = means(group, &own_gradients(&weights, &loss(&weights, &x))?)?;
            let out = ddp.forward(|| Ok(loss(&weights, &x)))?;
            drop_gradients(&vs, false)?;
            let ddp_of_thread = ddp.clone();
            std::thread::spawn(move || ddp_of_thread.backward(&out)).join().expect("no panic")?;
            assert_gradients(group, &weights, &expected, 0.0)?;
            drop_gradients(&vs, false)?;
            let out = ddp.forward(|| Ok(loss(&weights, &x)))?;
            drop(ddp);
            out.backward();
            assert_gradients(group, &weights, &expected, 0.0)?;
            drop(out);
            drop_gradients(&vs, false)?;
            loss(&weights, &x).backward();
            assert!(!is_alike(group, &weights[0].grad())?, "its hooks are gone");
            drop_gradients(&vs, false)?;
        }
        Ok(())
    });
}

#[test]
fn without_grad_mode_nothing_is_prepared() {
    all_ranks(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, small_buckets())?;
        for step in 0..3 {
            let evaluated = tch::no_grad(|| ddp.forward(|| Ok(loss(&weights, &batch(0, step)))))?;
            assert!(!evaluated.requires_grad());
            let x = batch(group.rank(), step);
            check_pass(group, &vs, &ddp, 0.0, || loss(&weights, &x))?;
        }
        Ok(())
    });
}

#[test]
fn checkpoints_inside() {
    for static_graph in [false, true] {
        all_ranks(2, |group| {
            let options = DdpOptions { static_graph, ..small_buckets() };
            let (vs, ddp, weights) = averaged(group, 1, options)?;
            // Each layer twice.
            let plain = |x: &Tensor| loss(&weights, &output(&weights, x, &[]));
            let saving = |x: &Tensor| -> Result<Tensor> {
                let h = checkpointed(&weights, &checkpointed(&weights, x)?)?;
                Ok(h.square().mean(Kind::Float))
            };
            for step in 0..3 {
                let x = batch(group.rank(), step);
                let expected = means(group, &own_gradients(&weights, &plain(&x))?)?;
                drop_gradients(&vs, false)?;
                ddp.backward(&ddp.forward(|| saving(&x))?)?;
                ddp.check()?;
                assert_gradients(group, &weights, &expected, 1e-8)?;
            }
            Ok(())
        });
    }
}

#[test]
fn a_group_of_one_computes_as_without_a_ddp() {
    let group = ProcessGroup::single().expect("a group");
    let calls = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&calls);
    let hook = CommHook::closure(move |_| {
        seen.fetch_add(1, Ordering::Relaxed);
        Ok(None)
    });
    let vs = network(1);
    let ddp = Ddp::new(&group, &vs, DdpOptions { hook, ..small_buckets() }).expect("a Ddp");
    let weights = vs.trainable_variables();
    let expected = own_gradients(&weights, &loss(&weights, &batch(0, 0))).expect("gradients");
    let mut optimizer = ddp.guard(sgd(&vs)).expect("its parameters");
    let out = ddp.forward(|| Ok(loss(&weights, &batch(0, 0)))).expect("a loss");
    ddp.backward(&out).expect("gradients");
    ddp.check().expect("nothing to say");
    let gradients: Vec<Tensor> = weights.iter().map(Tensor::grad).collect();
    assert_eq!(worst(&gradients, &expected), 0.0);
    optimizer.step().expect("a step");
    assert!(worst(&weights, &network(1).trainable_variables()) > 0.0);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    // An error of the closure leaves the group as it is.
    let failed: Result<Tensor> = ddp.forward(|| Err(Error::msg("no batch")));
    assert_eq!(failed.expect_err("its error").to_string(), "no batch");
    let _ = ddp.forward(|| Ok(loss(&weights, &batch(0, 1)))).expect("it goes on");
}

fn sgd(vs: &VarStore) -> tch::nn::Optimizer {
    use tch::nn::OptimizerConfig;
    tch::nn::Sgd::default().build(vs, 0.1).expect("an optimizer")
}

#[test]
fn works_with_run_ranks() {
    let sums = run_ranks(2, |group| {
        check_steps(&group, DdpOptions::default(), 0.0)?;
        Ok(group.rank())
    });
    assert_eq!(sums.expect("all ranks"), [0, 1]);
}
