//! Faults while two GPUs replay a captured step, of which NCCL's own watchdog knows nothing. The
//! ranks are processes.

use super::children::kill_this;
use super::ddp_support::{averaged, batch, loss, network};
use super::gpus_or_skip;
use super::processes::{Case, End, Ranks};
use std::time::{Duration, Instant};
use tch::{Device, Tensor};
use tch_extension::distributed::{Env, GroupOptions, ProcessGroup, ShardedOptimizer};
use tch_extension::optim::Optimizer;
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::train::{Step, StepOptions};
use tch_extension::{Error, Result};

pub const CASES: &[Case] = &[
    ("replays, Ddp, killed before the ranks agree", || with_ddp(Fault::KilledBefore)),
    ("replays, Ddp, killed when they have", || with_ddp(Fault::KilledAfter)),
    ("replays, Ddp, a batch fails", || with_ddp(Fault::Batch)),
    ("replays, sharded, killed before the ranks agree", || with_sharded(Fault::KilledBefore)),
    ("replays, sharded, killed when they have", || with_sharded(Fault::KilledAfter)),
    ("replays, sharded, a batch fails", || with_sharded(Fault::Batch)),
];

/// What happens to rank 1 in its 20th batch that is replayed, or would be.
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    /// It is killed before it agrees with rank 0 on the step.
    KilledBefore,
    /// It is killed when the ranks have agreed, so that rank 0 replays.
    KilledAfter,
    /// The closure fails.
    Batch,
}

/// How long a rank waits for the other one.
const LIMIT: Duration = Duration::from_secs(8);

/// How much longer it takes to notice that, and to end.
const SLACK: Duration = Duration::from_secs(10);

fn group() -> Result<ProcessGroup> {
    let options = GroupOptions { check: false, ..GroupOptions::with_timeout(LIMIT) };
    ProcessGroup::init(&Env::from_env()?, &options)
}

fn with_ddp(fault: Fault) -> Result<()> {
    let group = group()?;
    let (vs, ddp, weights) = averaged(&group, 1, Default::default())?;
    let optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
    replay(&group, optimizer, |x| ddp.forward(|| Ok(loss(&weights, x))), fault)
}

fn with_sharded(fault: Fault) -> Result<()> {
    let group = group()?;
    let mut vs = network(1);
    vs.set_device(group.device());
    let weights = vs.trainable_variables();
    let optimizer = AdamW::default().build(&vs, 0.01)?;
    let optimizer = ShardedOptimizer::new(&group, optimizer, &Default::default())?;
    replay(&group, optimizer, |x| Ok(loss(&weights, x)), fault)
}

/// An optimizer whose rank ends without a warning.
struct Killed<O> {
    optimizer: O,
    fault: Fault,
    /// How many batches are left until then, if it is this rank.
    left: Option<usize>,
}

impl<O: Optimizer> Optimizer for Killed<O> {
    fn parameters(&self) -> Vec<Tensor> {
        self.optimizer.parameters()
    }

    fn step(&mut self) -> Result<()> {
        self.optimizer.step()
    }

    fn capturable(&self) -> bool {
        self.optimizer.capturable()
    }

    fn revision(&self) -> u64 {
        self.optimizer.revision()
    }

    fn begin_batch(&mut self, is_first: bool, is_last: bool) -> Result<()> {
        self.left = self.left.map(|left| left - 1);
        let is_end = self.left == Some(0);
        if is_end && self.fault == Fault::KilledBefore {
            kill_this();
        }
        self.optimizer.begin_batch(is_first, is_last)?;
        if is_end && self.fault == Fault::KilledAfter {
            kill_this();
        }
        Ok(())
    }

    fn end_batch(&mut self) {
        self.optimizer.end_batch();
    }

    fn batch_failed(&mut self, error: Error) -> Error {
        self.optimizer.batch_failed(error)
    }

    fn replayed(&mut self, device: Device) -> Result<()> {
        self.optimizer.replayed(device)
    }
}

/// Replays until the fault.
fn replay(
    group: &ProcessGroup,
    optimizer: impl Optimizer,
    mut forward: impl FnMut(&Tensor) -> Result<Tensor>,
    fault: Fault,
) -> Result<()> {
    let rows = batch(0, 0).size()[0];
    let options = StepOptions::default();
    let is_killed = group.rank() == 1 && fault != Fault::Batch;
    let left = is_killed.then_some(options.warm_up + 20);
    let optimizer = Killed { optimizer, fault, left };
    let mut step =
        Step::new(options, optimizer, |batch: &[Tensor]| match batch[0].size()[0] == rows {
            true => forward(&batch[0]),
            false => Err(Error::msg("a batch with too few rows")),
        })?;
    loop {
        let x = batch(group.rank(), step.stats().steps as i64).to_device(group.device());
        let loss = step.step(&[&x])?;
        // The host waits, as a program does that prints its losses.
        assert!(loss.double_value(&[]).is_finite());
        if step.stats().replays == 10 {
            println!("REPLAYED");
        }
        if fault == Fault::Batch && group.rank() == 1 && step.stats().replays == 20 {
            // Another shape has no graph, so the closure runs.
            let error = step.step(&[&x.narrow(0, 0, rows - 1)]).expect_err("too few rows");
            println!("FAILED");
            let next = step.step(&[&x]).expect_err("the group was given up").to_string();
            assert!(next.contains("too few rows"), "{next}");
            return Err(error);
        }
    }
}

/// The watch of the replays has ended a rank, whose peer is gone, by SIGABRT: the GPU waits forever,
/// so a result cannot become an `Err`.
fn assert_ended_by_its_watch(end: &End) {
    assert!(end.text.contains("REPLAYED"), "{end:#?}");
    assert_eq!(end.code, None, "{end:#?}");
    assert!(end.text.contains("a replayed step did not end within 8s"), "{end:#?}");
}

fn assert_in_time(since: Instant, ends: &[End]) {
    assert!(since.elapsed() < LIMIT + SLACK, "{:?}: {ends:#?}", since.elapsed());
}

#[test]
fn cuda_a_rank_is_killed_during_replays() {
    if !gpus_or_skip("cuda_a_rank_is_killed_during_replays", 2) {
        return;
    }
    for optimizer in ["Ddp", "sharded"] {
        for when in ["killed before the ranks agree", "killed when they have"] {
            let case = format!("replays, {optimizer}, {when}");
            let ranks = Ranks::start(&case, &[0, 1], 2, &[]);
            (0..2).for_each(|rank| ranks.wait_for(rank, "REPLAYED"));
            let replayed = Instant::now();
            let ends = ranks.finish(Duration::from_secs(90));
            assert_in_time(replayed, &ends);
            assert_eq!(ends[1].code, None, "{case}: {ends:#?}");
            if when == "killed when they have" {
                assert_ended_by_its_watch(&ends[0]);
            } else {
                // No graph is launched on whose result the ranks did not agree.
                assert_eq!(ends[0].code, Some(3), "{case}: {ends:#?}");
                assert!(ends[0].text.contains("ERROR all_reduce: rank 0 of 2: "), "{ends:#?}");
            }
        }
    }
}

#[test]
fn cuda_a_batch_fails_after_replays() {
    if !gpus_or_skip("cuda_a_batch_fails_after_replays", 2) {
        return;
    }
    for case in ["replays, Ddp, a batch fails", "replays, sharded, a batch fails"] {
        let ranks = Ranks::start(case, &[0, 1], 2, &[]);
        ranks.wait_for(1, "FAILED");
        let failed = Instant::now();
        let ends = ranks.finish(Duration::from_secs(90));
        assert_in_time(failed, &ends);
        // The rank itself ends in an orderly way, with the error of its batch.
        assert_eq!(ends[1].code, Some(3), "{case}: {ends:#?}");
        assert!(ends[1].text.contains("ERROR a batch with too few rows"), "{ends:#?}");
        assert_ended_by_its_watch(&ends[0]);
        // A sharded optimizer puts its own name between the rank and the error.
        let (_, from_rank_1) = ends[0].text.split_once("rank 1: ").expect("what rank 1 said");
        assert!(from_rank_1.contains("a batch with too few rows"), "{ends:#?}");
    }
}
