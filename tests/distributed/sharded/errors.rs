//! What must be an error, and on which ranks.

use super::*;
use std::time::{Duration, Instant};
use tch_extension::amp::GradScaler;
use tch_extension::distributed::Compression;
use tch_extension::optim::Muon;
use tch_extension::train::{Step, StepOptions};

fn adamw(leaves: &[Tensor]) -> Result<FusedOptimizer> {
    AdamW::default().build_of(named(leaves), 0.02)
}

/// Both ranks must get an error with this text, whatever differs between them, and keep their
/// weights.
fn assert_refused_by_all(
    what: &str,
    make: impl Fn(&ProcessGroup) -> Result<(Vec<Tensor>, ShardedOptions)> + Sync,
    build: impl Fn(&ProcessGroup, &[Tensor]) -> Result<FusedOptimizer> + Sync,
) {
    let start = Instant::now();
    let outcomes = outcomes(3, |group| {
        let (leaves, options) = make(&group)?;
        let (before, addresses) = (copies(&leaves), addresses(&leaves));
        let optimizer = build(&group, &leaves)?;
        let error = ShardedOptimizer::new(&group, optimizer, &options).err();
        assert_eq!(bits(&leaves), bits(&before));
        assert_eq!(self::addresses(&leaves), addresses);
        // The group can still be used.
        group.barrier()?;
        Ok(error.map(|error| error.to_string()))
    });
    for outcome in outcomes {
        let text = outcome.expect("the group can still be used").expect("an error");
        assert!(text.contains(what), "{text}");
        assert!(!text.contains('\n') && text.starts_with("ShardedOptimizer::new: "), "{text}");
    }
    assert!(start.elapsed() < Duration::from_secs(8));
}

fn addresses(tensors: &[Tensor]) -> Vec<usize> {
    tensors.iter().map(|tensor| tensor.data_ptr().addr()).collect()
}

#[test]
fn different_models_are_refused_by_all_ranks() {
    let is_last = |group: &ProcessGroup| group.rank() == 2;
    let plain = |_: &ProcessGroup, leaves: &[Tensor]| adamw(leaves);
    let of = |sizes: &[&[i64]]| (model(sizes, Kind::Float, CPU), small_buckets());
    let other_size: (&[&[i64]], &[&[i64]]) = (&[&[4, 2]], &[&[2, 4]]);
    assert_refused_by_all(
        "rank 2 has another model or other settings: expected parameter \"w0\" of kind Float and \
         shape [4, 2]",
        |group| Ok(of(if is_last(group) { other_size.1 } else { other_size.0 })),
        plain,
    );
    assert_refused_by_all(
        "got nothing more",
        |group| Ok(of(if is_last(group) { &SIZES[..5] } else { &SIZES })),
        plain,
    );
    assert_refused_by_all(
        "of kind BFloat16",
        |group| {
            let kind = if is_last(group) { Kind::BFloat16 } else { Kind::Float };
            Ok((model(&SIZES, kind, CPU), small_buckets()))
        },
        plain,
    );
    assert_refused_by_all(
        "which requires no grad",
        |group| {
            let (mut leaves, options) = of(&SIZES);
            if is_last(group) {
                leaves[1] = leaves[1].detach();
            }
            Ok((leaves, options))
        },
        plain,
    );
    assert_refused_by_all(
        "compression: BFloat16",
        |group| {
            let rounds = is_last(group);
            let compression = if rounds { Compression::BFloat16 } else { Compression::None };
            Ok((model(&SIZES, Kind::Float, CPU), ShardedOptions { compression, ..small_buckets() }))
        },
        plain,
    );
}

#[test]
fn different_settings_are_refused_by_all_ranks() {
    let make = |_: &ProcessGroup| Ok((model(&SIZES, Kind::Float, CPU), small_buckets()));
    assert_refused_by_all("lr: 0.5", make, |group, leaves| {
        let mut optimizer = adamw(leaves)?;
        if group.rank() == 1 {
            optimizer.set_lr(0.5).expect("no error");
        }
        Ok(optimizer)
    });
    assert_refused_by_all("Sgd", make, |group, leaves| match group.rank() {
        1 => Sgd::default().build_of(named(leaves), 0.02),
        _ => adamw(leaves),
    });
    assert_refused_by_all("AmsGrad", make, |group, leaves| {
        AdamW::default().amsgrad(group.rank() == 1).build_of(named(leaves), 0.02)
    });
    assert_refused_by_all("norms up to", make, |group, leaves| {
        let mut optimizer = adamw(leaves)?;
        optimizer.set_clip_norm((group.rank() == 1).then_some(1.0)).expect("no error");
        Ok(optimizer)
    });
}

/// Each parameter would get memory of its own, and would no longer be tied.
#[test]
fn parameters_that_are_tied_after_build_are_refused_by_all() {
    let all = outcomes(2, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let optimizer = adamw(&leaves)?;
        if group.rank() == 1 {
            let part = leaves[7].detach().view([-1]).narrow(0, 0, 1000);
            leaves[6].shallow_clone().set_data(&part);
        }
        ShardedOptimizer::new(&group, optimizer, &small_buckets()).map(drop)
    });
    for error in errors(all) {
        assert!(error.contains("w7: expected memory of its own"), "{error}");
    }
}

#[test]
fn muon_which_needs_whole_matrices_is_refused() {
    let make = |_: &ProcessGroup| Ok((model(&SIZES, Kind::Float, CPU), small_buckets()));
    let expected = "optimizer: expected AdamW or Sgd, got Muon; a rank would have parts of matrices; use \
                    Ddp, whose ranks have them whole";
    assert_refused_by_all(expected, make, |_, leaves| {
        Muon::default().build_of(named(leaves), 0.02)
    });
}

/// What only one rank can see is an error on all.
#[test]
fn an_optimizer_that_one_rank_cannot_take_is_refused_by_all() {
    let make = |_: &ProcessGroup| Ok((model(&SIZES, Kind::Float, CPU), small_buckets()));
    assert_refused_by_all("an optimizer without steps", make, |group, leaves| {
        let mut optimizer = adamw(leaves)?;
        if group.rank() == 1 {
            let other = adamw(&model(&SIZES, Kind::Float, CPU))?;
            drop(other);
            let zeros: Vec<Tensor> = leaves.iter().map(Tensor::zeros_like).collect();
            optimizer.set_lr(0.0).expect("no error");
            optimizer.step_with(&zeros.iter().map(Some).collect::<Vec<_>>())?;
        }
        Ok(optimizer)
    });
    assert_refused_by_all(
        "bucket_mb",
        |group| {
            let bucket_mb = if group.rank() == 2 { f64::NAN } else { 1.0 };
            let options = ShardedOptions { bucket_mb, ..Default::default() };
            Ok((model(&SIZES, Kind::Float, CPU), options))
        },
        |_, leaves| adamw(leaves),
    );
    assert_refused_by_all(
        "a parameter that requires grad, got none",
        |_| Ok((vec![values(&[3], 0.0, Kind::Float, CPU)], small_buckets())),
        |_, leaves| adamw(leaves),
    );
}

/// The others must not wait for a rank that gave up.
fn assert_all_fail(
    what: &str,
    run: impl Fn(&ProcessGroup, Vec<Tensor>, ShardedOptimizer) -> Result<()> + Sync,
) {
    let start = Instant::now();
    let texts = errors(outcomes(3, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let optimizer = ShardedOptimizer::new(&group, adamw(&leaves)?, &small_buckets())?;
        run(&group, leaves, optimizer)
    }));
    for text in &texts {
        assert!(text.contains(what), "{texts:#?}");
    }
    assert!(start.elapsed() < Duration::from_secs(7), "nobody waits until the timeout");
}

#[test]
fn a_second_backward_pass_is_an_error_of_all_ranks() {
    assert_all_fail("got another backward pass; use no_sync", |group, leaves, mut optimizer| {
        loss(&leaves, group.rank(), 0).f_backward()?;
        if group.rank() == 1 {
            loss(&leaves, group.rank(), 1).f_backward()?;
        }
        optimizer.step()
    });
}

/// It would change what is being sent.
#[test]
fn a_backward_pass_after_the_last_one_is_an_error_of_all_ranks() {
    let what = "got another backward pass; use no_sync";
    assert_all_fail(what, |group, leaves, mut optimizer| {
        loss(&leaves, group.rank(), 0).f_backward()?;
        if group.rank() == 1 {
            optimizer.no_sync(|| loss(&leaves, group.rank(), 1).f_backward())?;
        }
        optimizer.step()
    });
}

#[test]
fn a_missing_gradient_is_an_error_of_all_ranks() {
    assert_all_fail(
        "w3: expected a gradient, got none, as for 1 of 8",
        |group, leaves, mut optimizer| {
            let mut used: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
            if group.rank() == 2 {
                let _ = used.remove(3);
            }
            loss(&used, group.rank(), 0).f_backward()?;
            optimizer.step()
        },
    );
}

#[test]
fn an_error_of_one_rank_ends_all() {
    assert_all_fail("this rank has no data", |group, leaves, mut optimizer| {
        for step in 0..4 {
            if step == 2 && group.rank() == 0 {
                return Err(Error::msg("this rank has no data"));
            }
            train(&leaves, &mut optimizer, step..step + 1)?;
        }
        Ok(())
    });
}

/// A rank that failed a step cannot go on with another one.
#[test]
fn a_failed_step_is_not_forgotten() {
    let texts = errors(outcomes(2, |group| {
        let mut leaves = model(&SIZES, Kind::Float, CPU);
        let mut optimizer = ShardedOptimizer::new(&group, adamw(&leaves)?, &small_buckets())?;
        train(&leaves, &mut optimizer, 0..1)?;
        if group.rank() == 1 {
            let other = leaves[0].detach().copy();
            tch::no_grad(|| leaves[0].f_set_data(&other))?;
            let error = train(&leaves, &mut optimizer, 1..2).expect_err("it has other memory");
            assert!(error.to_string().contains("w0: expected the memory"), "{error}");
        }
        train(&leaves, &mut optimizer, 1..3)
    }));
    assert!(texts[0].contains("w0: expected the memory"), "{texts:?}");
    assert!(texts[1].contains("an earlier call failed"), "{texts:?}");
}

#[test]
fn a_backward_pass_that_fails_ends_all() {
    assert_all_fail("does not require grad", |group, leaves, mut optimizer| {
        let mut loss = loss(&leaves, group.rank(), 0);
        if group.rank() == 1 {
            loss = loss.detach();
        }
        optimizer.backward_step(&loss)
    });
}

#[test]
fn gradients_that_were_sent_cannot_be_forgotten() {
    assert_all_fail(
        "the gradients of a backward pass are being reduced",
        |group, leaves, mut optimizer| {
            loss(&leaves, group.rank(), 0).f_backward()?;
            if group.rank() == 1 {
                optimizer.zero_grad()?;
            }
            optimizer.step()?;
            train(&leaves, &mut optimizer, 1..2)
        },
    );
}

#[test]
fn parameters_that_come_later_are_an_error() {
    let group = ProcessGroup::single().expect("a group");
    let vs = tch::nn::VarStore::new(CPU);
    let first = vs.root().ones("first", &[3]);
    let frozen = vs.root().ones("frozen", &[3]).set_requires_grad(false);
    let optimizer = AdamW::default().build(&vs, 0.1).expect("one");
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    assert_eq!(optimizer.names().collect::<Vec<_>>(), ["first"]);
    optimizer.backward_step(&first.sum(Kind::Float)).expect("a step");
    let second = vs.root().ones("second", &[3]);
    let error = optimizer.backward_step(&(&first + second).sum(Kind::Float));
    let error = error.expect_err("a variable joined").to_string();
    assert!(error.contains("1 variables that were added to the store"), "{error}");

    let vs = tch::nn::VarStore::new(CPU);
    let first = vs.root().ones("first", &[3]);
    let mut late = vs.root().ones("late", &[3]).set_requires_grad(false);
    let optimizer = AdamW::default().build(&vs, 0.1).expect("one");
    let group = ProcessGroup::single().expect("a group");
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    let _ = late.requires_grad_(true);
    let error = optimizer.backward_step(&(&first + &late).sum(Kind::Float));
    let error = error.expect_err("it requires grad now").to_string();
    assert!(error.contains("late: expected the parameters of before"), "{error}");
    drop(frozen);
}

/// The gradients that `unscale` would need are not there.
#[test]
fn a_scaler_that_unscales_is_refused() {
    let group = ProcessGroup::single().expect("a group");
    let leaves = model(&SIZES, Kind::Float, CPU);
    let optimizer = adamw(&leaves).expect("one");
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    let mut scaler = GradScaler::new(Default::default()).expect("a scaler");
    let before = copies(&leaves);
    scaler.scale(&loss(&leaves, 0, 0)).expect("a loss").backward();
    scaler.unscale(&optimizer).expect("there is nothing to unscale");
    let error = scaler.step(&mut optimizer).expect_err("no gradient").to_string();
    assert!(error.contains("expected a parameter with a gradient"), "{error}");
    assert_eq!(bits(&leaves), bits(&before));
}

#[test]
fn sparse_gradients_are_refused() {
    let group = ProcessGroup::single().expect("a group");
    let leaves = vec![values(&[20, 4], 0.0, Kind::Float, CPU).set_requires_grad(true)];
    let optimizer = adamw(&leaves).expect("one");
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    let rows = Tensor::from_slice(&[1_i64, 2, 1]);
    let loss = Tensor::embedding(&leaves[0], &rows, -1, false, true).sum(Kind::Float);
    let error = optimizer.backward_step(&loss).expect_err("it is sparse").to_string();
    assert!(error.contains("w0: expected a dense gradient"), "{error}");
}

#[test]
fn a_number_or_weights_of_one_rank_are_an_error_of_all_ranks() {
    assert_all_fail("got group 1: Hyper { lr: 0.5,", |group, leaves, mut optimizer| {
        train(&leaves, &mut optimizer, 0..2)?;
        if group.rank() == 1 {
            optimizer.set_lr_group(1, 0.5)?;
        }
        let before = copies(&leaves);
        let outcome = train(&leaves, &mut optimizer, 2..3);
        assert_eq!(bits(&before), bits(&leaves));
        outcome
    });
    assert_all_fail("expected \"w1\" checksum ", |group, leaves, mut optimizer| {
        if group.rank() == 1 {
            let _ = tch::no_grad(|| leaves[1].get(3).f_fill_(7.0))?;
        }
        train(&leaves, &mut optimizer, 0..1)
    });
    assert_all_fail("expected \"w1\" checksum ", |group, leaves, mut optimizer| {
        train(&leaves, &mut optimizer, 0..2)?;
        // They are compared again after each load.
        let mut other = adamw(&model(&SIZES, Kind::Float, CPU))?;
        let gradients: Vec<Tensor> = leaves.iter().map(|leaf| leaf.detach().ones_like()).collect();
        other.step_with(&gradients.iter().map(Some).collect::<Vec<_>>())?;
        optimizer.load_state_dict(&other.state_dict()?)?;
        if group.rank() == 1 {
            let _ = tch::no_grad(|| leaves[1].get(3).f_fill_(7.0))?;
        }
        train(&leaves, &mut optimizer, 2..3)
    });
    assert_all_fail("norms up to Some(0.5)", |group, leaves, optimizer| {
        let rank = group.rank();
        let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
            Ok(loss(&leaves, rank, batch[0].int64_value(&[]) as usize))
        })?;
        let _ = step.step(&[&Tensor::from(0_i64)])?;
        if rank == 2 {
            step.optimizer_mut().set_clip_norm(Some(0.5))?;
        }
        step.step(&[&Tensor::from(1_i64)]).map(drop)
    });
}

#[test]
fn another_state_of_one_rank_is_an_error_of_all_ranks() {
    assert_all_fail(
        "rank 2 has another state: expected \"exp_avg",
        |group, leaves, mut optimizer| {
            let mut other = adamw(&model(&SIZES, Kind::Float, CPU))?;
            let factor = if group.rank() == 2 { 2.0 } else { 1.0 };
            let gradients: Vec<Tensor> =
                leaves.iter().map(|leaf| leaf.detach().ones_like() * factor).collect();
            other.step_with(&gradients.iter().map(Some).collect::<Vec<_>>())?;
            optimizer.load_state_dict(&other.state_dict()?)
        },
    );
}
