//! `Ddp` on two GPUs, by NCCL, with a process for each: eager steps, captured steps, and a rank that
//! is killed while a graph is replayed.

use super::children::{self, Child, End};
use super::ddp_support::*;
use std::io::Write;
use std::time::Duration;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};
use tch_extension::amp::{Autocast, GradScaler};
use tch_extension::autograd::checkpoint;
use tch_extension::distributed::{
    CommHook, Ddp, DdpOptions, GroupOptions, ProcessGroup, Store, nccl_missing,
};
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::testing::cuda_or_skip;
use tch_extension::train::{Step, StepOptions};
use tch_extension::{Error, Result};

/// How long the ranks wait for one another. The first NCCL call of a process takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Skips visibly with fewer than two GPUs, or without NCCL.
fn two_gpus_or_skip(test: &str) -> bool {
    if cuda_or_skip(test).is_none() {
        return false;
    }
    let reason = match nccl_missing() {
        Some(reason) => reason,
        None if tch_extension::cuda::device_count() < 2 => "it needs two GPUs".to_string(),
        None => return true,
    };
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {reason}\n").as_bytes());
    false
}

/// Runs a scenario on two ranks.
fn run(scenario: &str) -> Vec<End> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("store").to_string_lossy().into_owned();
    let start = |rank: usize| {
        let arguments = [rank.to_string(), scenario.to_string(), path.clone()];
        Child::start("ddp_cuda::child_with_a_gpu", &arguments)
    };
    let children: Vec<Child> = (0..2).map(start).collect();
    children.into_iter().map(|child| child.wait(Duration::from_secs(100))).collect()
}

fn assert_success(scenario: &str) {
    for (rank, end) in run(scenario).iter().enumerate() {
        assert!(end.success, "{scenario}, rank {rank}: {}", end.output);
    }
}

#[test]
fn child_with_a_gpu() {
    let Some(child) = children::this_child("child_with_a_gpu") else { return };
    let [rank, scenario, path] = child.arguments() else { panic!("three arguments") };
    let rank: usize = rank.parse().expect("a rank");
    let store = Store::file(path, 2, PATIENCE).expect("a store");
    let timeout = if scenario == "killed" { Duration::from_secs(5) } else { PATIENCE };
    let options = GroupOptions {
        device: Some(Device::Cuda(rank)),
        check: false,
        ..GroupOptions::with_timeout(timeout)
    };
    let group = ProcessGroup::with_store(&store, rank, 2, &options).expect("a group");
    let outcome = match scenario.as_str() {
        "eager" => eager(&group),
        "killed" => killed(&group),
        _ => captured(&group, scenario),
    };
    outcome.expect(scenario);
    group.shutdown().expect("an orderly end");
}

fn network_on(group: &ProcessGroup) -> VarStore {
    let mut vs = network(group.rank() as i64);
    vs.set_device(group.device());
    vs
}

fn batch_on(group: &ProcessGroup, step: i64) -> Tensor {
    batch(group.rank(), step).to_device(group.device())
}

fn eager(group: &ProcessGroup) -> Result<()> {
    let hooks: [fn() -> CommHook; 4] =
        [|| CommHook::None, || CommHook::Bf16, || CommHook::Fp16, || CommHook::None];
    for (case, hook) in hooks.iter().enumerate() {
        for view in [false, true] {
            let vs = network_on(group);
            let options = DdpOptions {
                hook: hook(),
                gradient_as_bucket_view: view,
                bucket_cap_mb: 1200.0 / 1_048_576.0,
                first_bucket_mb: 600.0 / 1_048_576.0,
                find_unused_parameters: case == 3,
                ..Default::default()
            };
            let ddp = Ddp::new(group, &vs, options)?;
            let weights = vs.trainable_variables();
            for step in 0..14 {
                let x = batch_on(group, step);
                let left_out: &[usize] =
                    if case == 3 && group.rank() == 1 && step % 2 == 1 { &[1] } else { &[] };
                let loss = || output(&weights, &x, left_out).square().mean(Kind::Float);
                let expected = means(group, &own_gradients(&weights, &loss())?)?;
                drop_gradients(&vs, step % 3 == 1)?;
                ddp.backward(&ddp.forward(|| Ok(loss()))?)?;
                ddp.check()?;
                let tolerance = if matches!(case, 1 | 2) { 1e-3 } else { 1e-7 };
                assert_gradients(group, &weights, &expected, tolerance)?;
                descend(&weights, 0.5)?;
            }
            let statistics = ddp.statistics()?;
            assert!(statistics.communication.as_nanos() > 0, "{statistics:?}");
        }
    }
    Ok(())
}

/// Trains with and without graphs, which must give the same bits.
fn captured(group: &ProcessGroup, scenario: &str) -> Result<()> {
    let train = |capture: bool| -> Result<(Vec<Tensor>, usize)> {
        let vs = network_on(group);
        let options = DdpOptions {
            hook: if scenario == "bf16" { CommHook::Bf16 } else { CommHook::None },
            gradient_as_bucket_view: scenario != "copies",
            static_graph: scenario == "static",
            bucket_cap_mb: 1200.0 / 1_048_576.0,
            first_bucket_mb: 600.0 / 1_048_576.0,
            ..Default::default()
        };
        let ddp = Ddp::new(group, &vs, options)?;
        let weights = vs.trainable_variables();
        let optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
        let accumulate = if scenario == "accumulate" { 2 } else { 1 };
        let options = StepOptions { capture, accumulate, ..Default::default() };
        let device = group.device();
        let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
            let _autocast = match scenario {
                "autocast" => Some(Autocast::new(device, Kind::BFloat16)?),
                _ => None,
            };
            ddp.forward(|| match scenario {
                "checkpoint" => saving(&weights, &batch[0]),
                _ => Ok(loss(&weights, &batch[0])),
            })
        })?;
        if scenario == "scaler" {
            step = step.with_scaler(GradScaler::new(Default::default())?);
        }
        for call in 0..24 {
            // Two shapes, each with a graph of its own.
            let x = batch_on(group, call);
            let x = if call % 5 == 4 { x.slice(0, 0, 2, 1) } else { x };
            let loss = step.step(&[&x])?;
            assert!(loss.isfinite().int64_value(&[]) == 1);
        }
        let stats = step.stats();
        assert_eq!(capture, stats.replays > 0, "{stats:?}");
        for weight in &weights {
            assert!(is_alike(group, weight)?, "the ranks differ");
        }
        Ok((copies(&weights), stats.graphs))
    };
    let (eager, _) = train(false)?;
    let (captured, graphs) = train(true)?;
    assert!(graphs >= 1);
    assert_eq!(worst(&eager, &captured), 0.0, "{scenario}");
    Ok(())
}

fn saving(weights: &[Tensor], x: &Tensor) -> Result<Tensor> {
    let mut h = x.shallow_clone();
    for pair in weights.chunks(2) {
        let layer = |inputs: &[Option<Tensor>]| match inputs {
            [Some(x), Some(weight), Some(bias)] => Ok(x.linear(weight, Some(bias)).tanh().into()),
            _ => Err(Error::msg("three inputs")),
        };
        h = checkpoint(layer, &[Some(&h), Some(&pair[0]), Some(&pair[1])])?.single()?;
    }
    Ok(h.square().mean(Kind::Float))
}

/// Rank 1 goes while graphs are replayed. Rank 0 must not wait for it forever.
fn killed(group: &ProcessGroup) -> Result<()> {
    let vs = network_on(group);
    let ddp = Ddp::new(group, &vs, DdpOptions::default())?;
    let weights = vs.trainable_variables();
    let optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
    let mut step = Step::new(StepOptions::default(), optimizer, |batch: &[Tensor]| {
        ddp.forward(|| Ok(loss(&weights, &batch[0])))
    })?;
    for call in 0..1000 {
        if call == 10 && group.rank() == 1 {
            children::kill_this();
        }
        let loss = step.step(&[&batch_on(group, call)])?;
        let _ = loss.double_value(&[]);
    }
    Ok(())
}

#[test]
fn cuda_two_gpus_eager() {
    if two_gpus_or_skip("cuda_two_gpus_eager") {
        assert_success("eager");
    }
}

#[test]
fn cuda_two_gpus_captured_steps() {
    if !two_gpus_or_skip("cuda_two_gpus_captured_steps") {
        return;
    }
    let scenarios =
        ["plain", "copies", "bf16", "static", "accumulate", "scaler", "autocast", "checkpoint"];
    for scenario in scenarios {
        assert_success(scenario);
    }
}

#[test]
fn cuda_two_gpus_a_rank_is_killed_during_replays() {
    if !two_gpus_or_skip("cuda_two_gpus_a_rank_is_killed_during_replays") {
        return;
    }
    let ends = run("killed");
    assert_eq!(ends[1].signal, Some(9), "{}", ends[1].output);
    assert_eq!(ends[0].signal, Some(6), "{}", ends[0].output);
    assert!(ends[0].output.contains("a replayed step did not end"), "{}", ends[0].output);
}
