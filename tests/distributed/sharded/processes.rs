//! Ranks as processes: some are killed, and some have GPUs.

use super::*;
use crate::gpus_or_skip;
use crate::processes::{Case, End, Ranks};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::distributed::Env;
use tch_extension::train::{Step, StepOptions, StepOutput};

pub const CASES: &[Case] = &[
    ("sharded train", train_until_killed),
    ("sharded save", save_until_killed),
    ("sharded graphs", graphs),
];

/// The variable with the folder of a child.
const FOLDER: &str = "TCH_EXTENSION_TEST_FOLDER";

fn group() -> Result<ProcessGroup> {
    let mut options = GroupOptions::with_timeout(Duration::from_secs(8));
    options.check = false;
    ProcessGroup::init(&Env::from_env()?, &options)
}

fn sharded(group: &ProcessGroup, leaves: &[Tensor]) -> Result<ShardedOptimizer> {
    let optimizer = AdamW::default().build_of(named(leaves), 1e-3)?;
    ShardedOptimizer::new(group, optimizer, &small_buckets())
}

fn train_until_killed() -> Result<()> {
    let group = group()?;
    let leaves = model(&SIZES, Kind::Float, CPU);
    let mut optimizer = sharded(&group, &leaves)?;
    train(&leaves, &mut optimizer, 0..1)?;
    println!("READY");
    loop {
        train(&leaves, &mut optimizer, 1..2)?;
    }
}

fn save_until_killed() -> Result<()> {
    let group = group()?;
    let leaves = model(&SIZES, Kind::Float, CPU);
    let mut optimizer = sharded(&group, &leaves)?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    loop {
        train(&leaves, &mut optimizer, 0..1)?;
        optimizer.save_sharded(&folder)?;
        println!("SAVED");
    }
}

/// The others fail at once, with an error.
fn assert_others_failed(ends: &[End], killed: usize, at: Instant) {
    assert!(at.elapsed() < Duration::from_secs(5), "{ends:#?}");
    for (rank, end) in ends.iter().enumerate() {
        match rank == killed {
            true => assert_eq!(end.code, None),
            false => assert!(end.code == Some(3) && end.text.contains("ERROR "), "{end:#?}"),
        }
    }
}

#[test]
fn a_rank_is_killed_in_a_step() {
    for (round, killed) in [2, 1, 0].into_iter().enumerate() {
        let mut ranks = Ranks::start("sharded train", &[0, 1, 2], 3, &[]);
        (0..3).for_each(|rank| ranks.wait_for(rank, "READY"));
        std::thread::sleep(Duration::from_millis(30 + 11 * round as u64));
        ranks.kill(killed);
        let at = Instant::now();
        assert_others_failed(&ranks.finish(Duration::from_secs(25)), killed, at);
    }
}

#[test]
fn a_rank_is_killed_while_states_are_saved() {
    for round in 0..4 {
        let folder =
            std::env::temp_dir().join(format!("sharded-killed-{round}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder);
        let path = folder.to_string_lossy().into_owned();
        let mut ranks = Ranks::start("sharded save", &[0, 1], 2, &[(FOLDER, &path)]);
        (0..2).for_each(|rank| ranks.wait_for(rank, "SAVED"));
        std::thread::sleep(Duration::from_millis(13 * round));
        let killed = round as usize % 2;
        ranks.kill(killed);
        let at = Instant::now();
        assert_others_failed(&ranks.finish(Duration::from_secs(25)), killed, at);
        // There is a complete state, whose files another number of ranks can load.
        let group = ProcessGroup::single().expect("a group");
        let mut optimizer = sharded(&group, &model(&SIZES, Kind::Float, CPU)).expect("one");
        optimizer.load_sharded(&folder).expect("a complete state");
        let state = optimizer.gather_state_dict().expect("a state").expect("rank 0");
        assert!(state["step.w0"].int64_value(&[]) >= 1);
        std::fs::remove_dir_all(&folder).expect("an end");
    }
}

/// Captured steps with NCCL inside, of one batch and of several, are those without a graph.
fn graphs() -> Result<()> {
    let env = Env::from_env()?;
    let (group, device) = (group()?, Device::Cuda(env.local_rank));
    for accumulate in [1, 3] {
        let run = |capture: bool| -> Result<Vec<Tensor>> {
            let sizes: [&[i64]; 3] = [&[100, 200], &[200], &[200, 1]];
            let leaves = model(&sizes, Kind::Float, device);
            let mut optimizer = AdamW::default().build_of(named(&leaves), 1e-3)?;
            optimizer.set_clip_norm(Some(0.5))?;
            let optimizer = ShardedOptimizer::new(&group, optimizer, &small_buckets())?;
            let copied: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
            let options = StepOptions { accumulate, capture, ..Default::default() };
            let scaling = GradScalerOptions { init_scale: 1024.0, ..Default::default() };
            let mut step = Step::new(options, optimizer, move |batch: &[Tensor]| {
                let hidden = (batch[0].matmul(&copied[0]) + &copied[1]).tanh();
                Ok(StepOutput::from(hidden.matmul(&copied[2]).square().mean(Kind::Float)))
            })?
            .with_scaler(GradScaler::new(scaling)?);
            for batch in 0..20 * accumulate {
                let seed = (2 * batch + env.rank) as f64;
                let _ = step.step(&[&values(&[64, 100], seed, Kind::Float, device)])?;
            }
            assert_eq!(step.stats().captured, capture);
            Ok(leaves.iter().map(|leaf| leaf.detach().to_device(CPU)).collect())
        };
        let (eager, captured) = (run(false)?, run(true)?);
        let worst = worst(&eager, &captured);
        assert!(worst < 1e-5, "accumulate {accumulate}: {worst}");
        println!("SAME {accumulate} {:?}", captured[0].sum(Kind::Double).double_value(&[]));
    }
    group.barrier()
}

#[test]
fn cuda_graphs_on_two_gpus() {
    if !gpus_or_skip("cuda_graphs_on_two_gpus", 2) {
        return;
    }
    // Each process has a GPU of its own.
    let ranks = Ranks::start("sharded graphs", &[0, 1], 2, &[]);
    let ends = ranks.finish(Duration::from_secs(120));
    let same = |end: &End| {
        // The harness begins the first line.
        let lines = end.text.lines().filter_map(|line| line.find("SAME").map(|at| &line[at..]));
        lines.map(str::to_string).collect::<Vec<_>>()
    };
    assert!(ends.iter().all(|end| end.code == Some(0)), "{ends:#?}");
    assert_eq!(same(&ends[0]), same(&ends[1]), "ranks have the same weights");
    assert_eq!(same(&ends[0]).len(), 2);
}
