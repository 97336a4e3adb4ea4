//! `Ddp` on two GPUs, by NCCL, with a process for each: eager and captured steps.

use super::children::{self, Child, End};
use super::ddp_support::*;
use super::gpus_or_skip;
use std::time::Duration;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::{Autocast, GradScaler};
use tch_extension::distributed::{
    CommHook, DdpOptions, GroupOptions, OnNcclError, ProcessGroup, Store,
};
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::train::{Step, StepOptions};

/// How long the ranks wait for one another. The first NCCL call of a process takes seconds.
const PATIENCE: Duration = Duration::from_secs(30);

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
    let options = GroupOptions {
        device: Some(Device::Cuda(rank)),
        check: false,
        on_nccl_error: match scenario.starts_with("abort") {
            true => OnNcclError::Abort,
            false => OnNcclError::Exit,
        },
        ..GroupOptions::with_timeout(PATIENCE)
    };
    let group = ProcessGroup::with_store(&store, rank, 2, &options).expect("a group");
    let outcome = match scenario.as_str() {
        "eager" => eager(&group),
        _ => captured(&group, scenario),
    };
    outcome.expect(scenario);
    group.shutdown().expect("an orderly end");
}

fn batch_on(group: &ProcessGroup, step: i64) -> Tensor {
    batch(group.rank(), step).to_device(group.device())
}

fn eager(group: &ProcessGroup) -> Result<()> {
    let hooks: [fn() -> CommHook; 4] =
        [|| CommHook::None, || CommHook::Bf16, || CommHook::Fp16, || CommHook::None];
    for (case, hook) in hooks.iter().enumerate() {
        for view in [false, true] {
            let options = DdpOptions {
                hook: hook(),
                gradient_as_bucket_view: view,
                find_unused_parameters: case == 3,
                ..small_buckets()
            };
            let (vs, ddp, weights) = averaged(group, group.rank() as i64, options)?;
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
        let options = DdpOptions {
            hook: if scenario.ends_with("bf16") { CommHook::Bf16 } else { CommHook::None },
            gradient_as_bucket_view: scenario != "copies",
            static_graph: scenario.starts_with("static"),
            ..small_buckets()
        };
        let (vs, ddp, weights) = averaged(group, group.rank() as i64, options)?;
        let optimizer = ddp.guard(AdamW::default().build(&vs, 0.01)?)?;
        let accumulate = if scenario.ends_with("accumulate") { 2 } else { 1 };
        let options = StepOptions { capture, accumulate, ..Default::default() };
        let device = group.device();
        let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
            let _autocast = match scenario {
                "autocast" => Some(Autocast::new(device, Kind::BFloat16)?),
                _ => None,
            };
            ddp.forward(|| match scenario {
                "checkpoint" => Ok(checkpointed(&weights, &batch[0])?.square().mean(Kind::Float)),
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

#[test]
fn cuda_two_gpus_eager() {
    if gpus_or_skip("cuda_two_gpus_eager", 2) {
        assert_success("eager");
    }
}

#[test]
fn cuda_two_gpus_captured_steps() {
    if !gpus_or_skip("cuda_two_gpus_captured_steps", 2) {
        return;
    }
    let scenarios =
        ["plain", "copies", "bf16", "static", "accumulate", "scaler", "autocast", "checkpoint"];
    for scenario in scenarios.into_iter().chain(["static, accumulate", "abort", "abort, bf16"]) {
        assert_success(scenario);
    }
}
