//! What `Ddp::guard` compares before each step: optimizers, their states and the weights.

use super::ddp_support::*;
use tch::nn::VarStore;
use tch::{Kind, Tensor};
use tch_extension::distributed::{Ddp, DdpOptimizer, DdpOptions};
use tch_extension::{Error, Result};

/// Rank 1 does something before a step that the other ranks do not do.
#[test]
fn optimizers_that_differ_are_an_error_on_every_rank() {
    use tch_extension::optim::{AdamW, FusedOptimizer, OptimizerConfig};
    type Guarded = DdpOptimizer<FusedOptimizer>;
    type Misuse = fn(&VarStore, &Ddp, &mut Guarded) -> Result<()>;
    fn adamw(vs: &VarStore) -> Result<FusedOptimizer> {
        AdamW::default().build(vs, 0.01)
    }
    let cases: [(&str, i64, Misuse); 9] = [
        ("got group 0: Hyper { lr: 0.02,", 2, |_, _, optimizer| optimizer.get_mut().set_lr(0.02)),
        ("weight_decay: 0.5", 0, |_, _, optimizer| optimizer.get_mut().set_weight_decay(0.5)),
        ("got group 0, exempt from weight decay", 1, |_, _, optimizer| {
            optimizer.get_mut().no_weight_decay(|name, _| name.ends_with("bias"));
            Ok(())
        }),
        ("norms up to Some(1.0)", 2, |_, _, optimizer| {
            optimizer.get_mut().set_clip_norm(Some(1.0))
        }),
        ("expected states loaded: 0, as rank 0 has, got states loaded: 1", 2, |_, _, optimizer| {
            let state = optimizer.get_ref().state_dict()?;
            optimizer.get_mut().load_state_dict(&state)
        }),
        ("got 0 of 8 parameters have a state", 2, |vs, ddp, optimizer| {
            *optimizer = ddp.guard(adamw(vs)?)?;
            Ok(())
        }),
        // Steps without the other ranks.
        ("got 8 of 8 parameters have a state", 0, |vs, _, optimizer| {
            let zeros = vs.trainable_variables().iter().map(Tensor::zeros_like).collect::<Vec<_>>();
            optimizer.get_mut().step_with(&zeros.iter().map(Some).collect::<Vec<_>>())
        }),
        ("expected \"layer0.weight\" checksum ", 0, |vs, _, _| {
            let _no_grad = tch::no_grad_guard();
            vs.trainable_variables()[0].get(3).f_fill_(0.25).map(drop).map_err(Error::from)
        }),
        ("got 8 of 8 parameters have a state", 0, |vs, _, optimizer| {
            optimizer.get_mut().load_state_dict(&adamw(vs)?.state_dict()?)
        }),
    ];
    for (words, at, misuse) in cases {
        for by_step in [false, true] {
            let errors = all_fail(3, |group| {
                let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
                let mut optimizer = ddp.guard(adamw(&vs)?)?;
                for number in 0..5 {
                    if number == at && group.rank() == 1 {
                        misuse(&vs, &ddp, &mut optimizer)?;
                    }
                    drop_gradients(&vs, false)?;
                    let before = copies(&weights);
                    let x = batch(group.rank(), number);
                    let outcome = if by_step {
                        optimizer = {
                            let mut step = tch_extension::train::Step::new(
                                Default::default(),
                                optimizer,
                                |batch: &[Tensor]| ddp.forward(|| Ok(loss(&weights, &batch[0]))),
                            )?;
                            let outcome = step.step(&[&x]);
                            assert!(outcome.is_ok() || worst(&before, &weights) == 0.0);
                            let _ = outcome?;
                            step.into_optimizer()
                        };
                        Ok(())
                    } else {
                        ddp.backward(&ddp.forward(|| Ok(loss(&weights, &x)))?)?;
                        optimizer.step()
                    };
                    assert_eq!(outcome.is_err(), number == at, "{words}: step {number}");
                    assert!(
                        outcome.is_ok() || worst(&before, &weights) == 0.0,
                        "nothing was applied"
                    );
                    outcome?;
                }
                Ok(())
            });
            for error in &errors {
                assert!(error.contains(words), "{words}: {errors:#?}");
            }
        }
    }
}

/// What all ranks do is right: rates of a schedule, a state from a file, another optimizer.
#[test]
fn optimizers_that_change_alike_go_on() {
    use tch_extension::optim::{AdamW, OptimizerConfig, Sgd};
    all_ranks(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
        let mut optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
        let train = |number: i64| -> Result<()> {
            drop_gradients(&vs, false)?;
            ddp.backward(&ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), number))))?)
        };
        for number in 0..4 {
            optimizer.get_mut().set_lr(0.01 / (number + 1) as f64)?;
            if number == 2 {
                let state = optimizer.get_ref().state_dict()?;
                optimizer.get_mut().load_state_dict(&state)?;
            }
            train(number)?;
            optimizer.step()?;
        }
        let mut other = Sgd::default().build(&vs, 0.1)?;
        for number in 4..7 {
            train(number)?;
            ddp.step(&mut other)?;
        }
        assert!(is_alike(group, &weights[0])?);
        Ok(())
    });
}

/// Loaded moments that differ are found, although the counts are the same.
#[test]
fn states_that_differ_are_an_error_on_every_rank() {
    use tch_extension::optim::{AdamW, OptimizerConfig};
    let errors = all_fail(2, |group| {
        let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
        let mut optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
        for number in 0..3 {
            if number == 1 {
                let state = optimizer.get_ref().state_dict()?;
                if group.rank() == 1 {
                    let _ = state["exp_avg.layer2.bias"].get(0).f_add_scalar_(1e-3)?;
                }
                optimizer.get_mut().load_state_dict(&state)?;
            }
            drop_gradients(&vs, false)?;
            ddp.backward(&ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), number))))?)?;
            let outcome = optimizer.step();
            assert_eq!(outcome.is_err(), number == 1);
            outcome?;
        }
        Ok(())
    });
    for error in errors {
        assert!(error.contains("\"exp_avg.layer2.bias\" checksum"), "{error}");
    }
}

/// Weights can be loaded in any step, and on all ranks, too.
#[test]
fn other_weights_after_a_load_are_an_error_on_every_rank() {
    use tch_extension::optim::{AdamW, OptimizerConfig};
    for is_guarded in [true, false] {
        let errors = all_fail(2, |group| {
            let (vs, ddp, weights) = averaged(group, 1, DdpOptions::default())?;
            let mut guarded = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
            for number in 0..5 {
                if number == 3 {
                    let state = guarded.get_ref().state_dict()?;
                    guarded.get_mut().load_state_dict(&state)?;
                    if group.rank() == 1 {
                        let _ = tch::no_grad(|| weights[2].get(3).f_fill_(0.25))?;
                    }
                }
                drop_gradients(&vs, false)?;
                ddp.backward(&ddp.forward(|| Ok(loss(&weights, &batch(group.rank(), number))))?)?;
                let before = copies(&weights);
                let outcome = if is_guarded { guarded.step() } else { ddp.step(guarded.get_mut()) };
                assert_eq!(outcome.is_err(), number == 3, "step {number}");
                assert!(outcome.is_ok() || worst(&before, &weights) == 0.0, "nothing was applied");
                outcome?;
            }
            Ok(())
        });
        for error in errors {
            assert!(error.contains("expected \"layer1.weight\" checksum "), "{error}");
        }
    }
}

/// The memory of a rank's tensors, and moments that were not loaded just now.
#[test]
fn what_may_differ_between_ranks_is_no_error() {
    use tch_extension::optim::Optimizer as _;
    use tch_extension::optim::{AdamW, OptimizerConfig};
    all_ranks(2, |group| {
        let mut vs = network(1);
        vs.half();
        let ddp = Ddp::new(group, &vs, DdpOptions::default())?;
        let weights = vs.trainable_variables();
        let mut master = weights[0].detach().to_kind(Kind::Float);
        let mut optimizer = AdamW::default().build(&vs, 0.01)?;
        optimizer.set_masters(&[("layer0.weight", &master)])?;
        for number in 0..6 {
            match number {
                1 => {
                    let state = optimizer.state_dict()?;
                    optimizer.load_state_dict(&state)?;
                }
                2 if group.rank() == 1 => {
                    let copy = master.copy();
                    master.set_data(&copy);
                }
                4 => {
                    optimizer.set_clip_norm(Some(10.0))?;
                    if group.rank() == 1 {
                        let state = optimizer.state()?;
                        let moment = state.iter().find(|(name, _)| name == "exp_avg.layer2.bias");
                        let _ = moment.expect("a moment").1.get(0).f_add_scalar_(1e-6)?;
                    }
                }
                _ => {}
            }
            drop_gradients(&vs, false)?;
            let x = batch(group.rank(), number).to_kind(Kind::Half);
            ddp.backward(&ddp.forward(|| Ok(loss(&weights, &x)))?)?;
            ddp.step(&mut optimizer)?;
        }
        Ok(())
    });
}
