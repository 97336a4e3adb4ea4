//! Where gradients come from: several backward passes, none, or too many.

use super::*;
use std::sync::atomic::{AtomicUsize, Ordering};
use tch_extension::amp::GradScaler;
use tch_extension::distributed::run_ranks;
use tch_extension::train::{Step, StepOptions, StepOutput};

/// Three batches of each rank as one.
#[test]
fn backward_passes_without_communication_add_up() {
    let expected = model(&SIZES, Kind::Double, CPU);
    let mut whole = AdamW::default().build_of(named(&expected), 0.02).expect("one");
    for step in 0..3 {
        whole.zero_grad().expect("no error");
        for rank in 0..2 {
            for batch in 0..3 {
                (loss(&expected, rank, 10 * step + batch) / 6.0).backward();
            }
        }
        whole.step().expect("no error");
    }
    let all = run_ranks(2, |group| {
        let leaves = model(&SIZES, Kind::Double, CPU);
        let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        for step in 0..3 {
            for batch in 0..3 {
                let loss = loss(&leaves, group.rank(), 10 * step + batch) / 3.0;
                match batch {
                    2 => loss.f_backward()?,
                    _ => optimizer.no_sync(|| loss.f_backward())?,
                }
            }
            optimizer.step()?;
        }
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0]), bits(&all[1]));
    assert!(worst(&all[0], &expected) < 1e-12);
}

/// Runs `train::Step` on two ranks and an ordinary optimizer in it on one, with the batches of both.
fn compare_steps(accumulate: usize, scale: Option<f64>) {
    use tch_extension::amp::GradScalerOptions;
    let options = StepOptions { accumulate, capture: false, ..Default::default() };
    let scaler = || {
        let options = GradScalerOptions { init_scale: scale.unwrap_or(1.0), ..Default::default() };
        scale.map(|_| GradScaler::new(options)).transpose()
    };
    let data =
        |rank: usize, batch: usize| values(&[6, 10], (31 * rank + batch) as f64, Kind::Double, CPU);
    let sizes: [&[i64]; 3] = [&[10, 20], &[20], &[20, 1]];
    let output = |leaves: &[Tensor], x: &Tensor| {
        (x.matmul(&leaves[0]) + &leaves[1]).tanh().matmul(&leaves[2]).square().mean(Kind::Double)
    };
    let expected = model(&sizes, Kind::Double, CPU);
    let whole = AdamW::default().build_of(named(&expected), 0.02).expect("one");
    let copied: Vec<Tensor> = expected.iter().map(Tensor::shallow_clone).collect();
    let mut step = Step::new(options, whole, move |batch: &[Tensor]| {
        Ok(StepOutput::from(output(&copied, &batch[0])))
    })
    .expect("a step");
    if let Some(scaler) = scaler().expect("a scaler") {
        step = step.with_scaler(scaler);
    }
    for batch in 0..2 * accumulate {
        let both = Tensor::cat(&[data(0, batch), data(1, batch)], 0);
        let _ = step.step(&[&both]).expect("a step");
    }
    let all = run_ranks(2, |group| {
        let leaves = model(&sizes, Kind::Double, CPU);
        let optimizer = AdamW::default().build_of(named(&leaves), 0.02)?;
        let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        let copied: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
        let mut step = Step::new(options, optimizer, move |batch: &[Tensor]| {
            Ok(StepOutput::from(output(&copied, &batch[0])))
        })?;
        if let Some(scaler) = scaler()? {
            step = step.with_scaler(scaler);
        }
        for batch in 0..2 * accumulate {
            let _ = step.step(&[&data(group.rank(), batch)])?;
        }
        step.optimizer_mut().set_lr(0.0)?;
        Ok(copies(&leaves))
    })
    .expect("all ranks");
    assert_eq!(bits(&all[0]), bits(&all[1]));
    let worst = worst(&all[0], &expected);
    assert!(worst < 1e-10, "{worst}");
}

#[test]
fn a_step_of_train_takes_it() {
    compare_steps(1, None);
    compare_steps(1, Some(1024.0));
}

#[test]
fn a_step_of_train_says_which_backward_pass_is_the_last() {
    compare_steps(3, None);
    compare_steps(2, Some(1024.0));
}

/// After an error of the closure, the next step begins anew, as in an ordinary `Step`.
#[test]
fn a_step_of_one_rank_goes_on_after_an_error() {
    let group = ProcessGroup::single().expect("a group");
    let leaves = model(&SIZES, Kind::Float, CPU);
    let optimizer = Sgd::default().build_of(named(&leaves), 0.1).expect("one");
    let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    let copied: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
    let calls = AtomicUsize::new(0);
    let options = StepOptions { accumulate: 2, capture: false, ..Default::default() };
    let mut step = Step::new(options, optimizer, move |_: &[Tensor]| {
        if calls.fetch_add(1, Ordering::Relaxed) == 1 {
            return Err(Error::msg("no batch"));
        }
        Ok(StepOutput::from(loss(&copied, 0, 0)))
    })
    .expect("a step");
    let before = copies(&leaves);
    let _ = step.step(&[]).expect("the first batch");
    let error = step.step(&[]).expect_err("the closure's error").to_string();
    assert!(error.contains("no batch"), "{error}");
    assert_eq!(bits(&leaves), bits(&before));
    let _ = step.step(&[]).expect("the first batch");
    let _ = step.step(&[]).expect("a step");
    let expected = model(&SIZES, Kind::Float, CPU);
    let mut whole = Sgd::default().build_of(named(&expected), 0.1).expect("one");
    reference(&expected, &mut whole, 1, 0..1);
    assert_eq!(bits(&leaves), bits(&expected));
}

#[test]
fn gradients_may_be_zero_where_that_is_allowed() {
    let options = ShardedOptions { allow_unused: true, ..small_buckets() };
    let all = run_ranks(2, |group| {
        let leaves = model(&[&[70], &[80], &[90]], Kind::Float, CPU);
        let before = copies(&leaves);
        let optimizer = Sgd::default().build_of(named(&leaves), 0.5)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &options)?;
        for _ in 0..2 {
            // The first is used on both ranks, the second on one, the third nowhere.
            let mut loss = leaves[0].sum(Kind::Float);
            if group.rank() == 1 {
                loss += leaves[1].sum(Kind::Float);
            }
            loss.f_backward()?;
            optimizer.step()?;
        }
        Ok((before, copies(&leaves)))
    })
    .expect("all ranks");
    for (before, after) in &all {
        assert!(worst(&[&before[0] - 1.0], &after[..1]) < 1e-6);
        assert!(worst(&[&before[1] - 0.5], &after[1..2]) < 1e-6);
        assert_eq!(after[2], before[2]);
    }
}

#[test]
fn gradients_are_taken_away() {
    let group = ProcessGroup::single().expect("a group");
    let leaves = model(&SIZES, Kind::Float, CPU);
    let optimizer = Sgd::default().build_of(named(&leaves), 0.1).expect("one");
    let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    loss(&leaves, 0, 0).backward();
    assert!(leaves.iter().all(|leaf| !leaf.grad().defined()));
    // A step that nobody wants any more; `zero_grad` forgets it.
    optimizer.zero_grad().expect("nothing is on its way");
    train(&leaves, &mut optimizer, 0..1).expect("a step");
    let expected = model(&SIZES, Kind::Float, CPU);
    let mut whole = Sgd::default().build_of(named(&expected), 0.1).expect("one");
    reference(&expected, &mut whole, 1, 0..1);
    assert_eq!(bits(&leaves), bits(&expected));
    // When it is dropped, gradients are the parameters' again.
    drop(optimizer);
    loss(&leaves, 0, 1).backward();
    assert!(leaves.iter().all(|leaf| leaf.grad().defined()));
}

#[test]
fn weights_that_are_used_twice_get_the_sum() {
    let all = run_ranks(2, |group| {
        let leaves = model(&[&[8, 8]], Kind::Double, CPU);
        let optimizer = Sgd::default().build_of(named(&leaves), 1.0)?;
        let mut optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        let before = copies(&leaves);
        let x = values(&[8, 8], group.rank() as f64, Kind::Double, CPU);
        let tied = x.matmul(&leaves[0]).matmul(&leaves[0].tr()).sum(Kind::Double);
        optimizer.backward_step(&tied)?;
        Ok((before, copies(&leaves)))
    })
    .expect("all ranks");
    let (before, after) = &all[0];
    let w = before[0].copy().set_requires_grad(true);
    for rank in 0..2 {
        let x = values(&[8, 8], rank as f64, Kind::Double, CPU);
        (x.matmul(&w).matmul(&w.tr()).sum(Kind::Double) / 2.0).backward();
    }
    assert!(worst(&[&before[0] - w.grad()], after) < 1e-12);
    assert_eq!(bits(after), bits(&all[1].1));
}

/// Graphs of several batches zero all gradients and add to them, but one that no batch brings is
/// still missing.
#[test]
fn a_gradient_that_no_accumulated_batch_brings_is_missing() {
    let group = ProcessGroup::single().expect("a group");
    let leaves = model(&[&[70], &[80]], Kind::Float, CPU);
    let optimizer = Sgd::default().build_of(named(&leaves), 0.1).expect("one");
    let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets()).expect("one");
    let used = leaves[0].shallow_clone();
    let options = StepOptions { accumulate: 2, capture: false, ..Default::default() };
    let mut step = Step::new(options, optimizer, move |_: &[Tensor]| {
        Ok(StepOutput::from(used.sum(Kind::Float)))
    })
    .expect("a step");
    let before = copies(&leaves);
    let _ = step.step(&[]).expect("the first batch");
    let error = step.step(&[]).expect_err("a missing gradient").to_string();
    assert!(error.contains("w1: expected a gradient, got none"), "{error}");
    assert_eq!(bits(&leaves), bits(&before));
}

/// A closure that fails on one rank must not let the others wait for their timeout.
#[test]
fn a_batch_that_fails_on_one_rank_fails_on_all() {
    let start = std::time::Instant::now();
    let outcomes = outcomes(2, |group| {
        let leaves = model(&SIZES, Kind::Float, CPU);
        let optimizer = Sgd::default().build_of(named(&leaves), 0.1)?;
        let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
        let (rank, copied) = (group.rank(), leaves.iter().map(Tensor::shallow_clone).collect());
        let copied: Vec<Tensor> = copied;
        let calls = AtomicUsize::new(0);
        let options = StepOptions { accumulate: 2, capture: false, ..Default::default() };
        let mut step = Step::new(options, optimizer, move |_: &[Tensor]| {
            if rank == 1 && calls.fetch_add(1, Ordering::Relaxed) == 1 {
                return Err(Error::msg("no batch"));
            }
            Ok(StepOutput::from(loss(&copied, rank, 0)))
        })?;
        let _ = step.step(&[])?;
        let error = step.step(&[]).expect_err("rank 1 has no batch").to_string();
        assert!(group.failure().is_some(), "{error}");
        // The next step does not begin with what is left of this one.
        let _ = step.step(&[]).expect_err("the group was given up");
        Ok(error)
    });
    for outcome in outcomes {
        let error = outcome.expect("an error");
        assert!(error.contains("no batch"), "{error}");
    }
    assert!(start.elapsed() < std::time::Duration::from_secs(6), "{:?}", start.elapsed());
}
