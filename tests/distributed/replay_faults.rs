//! Faults while two GPUs replay a captured step, of which NCCL's own watchdog knows nothing. The
//! ranks are processes.

use super::ddp_support::{averaged, batch, loss, network};
use super::gpus_or_skip;
use super::processes::{Case, End, Ranks};
use std::time::{Duration, Instant};
use tch::Tensor;
use tch_extension::amp::Optimizer;
use tch_extension::distributed::{Env, GroupOptions, ProcessGroup, ShardedOptimizer};
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::train::{Step, StepOptions};
use tch_extension::{Error, Result};

pub const CASES: &[Case] = &[
    ("replays, Ddp", || with_ddp(false)),
    ("replays, Ddp, a batch fails", || with_ddp(true)),
    ("replays, sharded", || with_sharded(false)),
    ("replays, sharded, a batch fails", || with_sharded(true)),
];

/// How long a rank waits for the other one.
const LIMIT: Duration = Duration::from_secs(8);

/// How much longer it takes to notice that, and to end.
const SLACK: Duration = Duration::from_secs(10);

fn group() -> Result<ProcessGroup> {
    let options = GroupOptions { check: false, ..GroupOptions::with_timeout(LIMIT) };
    ProcessGroup::init(&Env::from_env()?, &options)
}

fn with_ddp(fails: bool) -> Result<()> {
    let group = group()?;
    let (vs, ddp, weights) = averaged(&group, 1, Default::default())?;
    let optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
    replay(&group, optimizer, |x| ddp.forward(|| Ok(loss(&weights, x))), fails)
}

fn with_sharded(fails: bool) -> Result<()> {
    let group = group()?;
    let mut vs = network(1);
    vs.set_device(group.device());
    let weights = vs.trainable_variables();
    let optimizer = AdamW::default().build(&vs, 0.01)?;
    let optimizer = ShardedOptimizer::new(&group, optimizer, &Default::default())?;
    replay(&group, optimizer, |x| Ok(loss(&weights, x)), fails)
}

/// Replays without end. If a batch `fails`, it is the 20th of rank 1.
fn replay(
    group: &ProcessGroup,
    optimizer: impl Optimizer,
    mut forward: impl FnMut(&Tensor) -> Result<Tensor>,
    fails: bool,
) -> Result<()> {
    let rows = batch(0, 0).size()[0];
    let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
        match batch[0].size()[0] == rows {
            true => forward(&batch[0]),
            false => Err(Error::msg("a batch with too few rows")),
        }
    })?;
    loop {
        let x = batch(group.rank(), step.stats().steps as i64).to_device(group.device());
        let loss = step.step(&[&x])?;
        // The host waits, as a program does that prints its losses.
        assert!(loss.double_value(&[]).is_finite());
        if step.stats().replays == 10 {
            println!("REPLAYED");
        }
        if fails && group.rank() == 1 && step.stats().replays == 20 {
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
/// so a result cannot become an `Err`. If the peer was gone before a step began, the ranks did not
/// agree on it, which is an `Err`.
fn assert_ended(end: &End) {
    assert!(end.text.contains("REPLAYED"), "{end:#?}");
    let words = match end.code {
        None => "a replayed step did not end within 8s",
        code => {
            assert_eq!(code, Some(3), "{end:#?}");
            "ERROR all_reduce: rank 0 of 2: "
        }
    };
    assert!(end.text.contains(words), "{end:#?}");
}

fn assert_in_time(since: Instant, ends: &[End]) {
    assert!(since.elapsed() < LIMIT + SLACK, "{:?}: {ends:#?}", since.elapsed());
}

#[test]
fn cuda_a_rank_is_killed_during_replays() {
    if !gpus_or_skip("cuda_a_rank_is_killed_during_replays", 2) {
        return;
    }
    for case in ["replays, Ddp", "replays, sharded"] {
        let mut ranks = Ranks::start(case, &[0, 1], 2, &[]);
        (0..2).for_each(|rank| ranks.wait_for(rank, "REPLAYED"));
        std::thread::sleep(Duration::from_millis(200));
        ranks.kill(1);
        let killed = Instant::now();
        let ends = ranks.finish(Duration::from_secs(90));
        assert_in_time(killed, &ends);
        assert_eq!(ends[1].code, None, "{case}: {ends:#?}");
        assert_ended(&ends[0]);
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
        assert_ended(&ends[0]);
        // A sharded optimizer puts its own name between the rank and the error.
        let (_, from_rank_1) = ends[0].text.split_once("rank 1: ").expect("what rank 1 said");
        assert!(from_rank_1.contains("a batch with too few rows"), "{ends:#?}");
    }
}
