//! One rank in Rust and one in Python, whose `DistributedDataParallel` has the same Reducer.

use super::children::Child;
use super::ddp_support::*;
use super::processes::free_port;
use std::io::Write;
use std::time::Duration;
use support::python;
use tch::nn::VarStore;
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::distributed::{
    CommHook, Ddp, DdpOptions, GroupOptions, ProcessGroup, Store, TcpStoreOptions,
};

/// How long ranks wait for each other. On a busy machine, Python takes long to import torch.
const PATIENCE: Duration = Duration::from_secs(120);

/// What the script does, on one rank.
fn train(group: &ProcessGroup, way: &str, with_python: bool) -> Result<Tensor> {
    let rank = group.rank();
    let vs: VarStore = network(rank as i64);
    let weights = vs.trainable_variables();
    let offset = vs.root().zeros_no_train("offset", &[16]);
    let _ = offset.shallow_clone().fill_(rank as f64);
    let mib = 1200.0 / 1_048_576.0;
    let options = DdpOptions {
        bucket_cap_mb: mib,
        first_bucket_mb: mib,
        find_unused_parameters: way == "unused",
        static_graph: way == "static",
        hook: if way == "bf16" { CommHook::Bf16 } else { CommHook::None },
        with_python,
        ..Default::default()
    };
    let ddp = Ddp::new(group, &vs, options)?;
    for step in 0..4 {
        drop_gradients(&vs, false)?;
        let left_out: &[usize] = if way == "static" { &[2] } else { &[] };
        // The rank in Python leaves out a layer.
        let leaves_out = way == "unused" && step == 1 && !with_python && rank == OF_PYTHON.get();
        let left_out = if leaves_out { &[2] } else { left_out };
        let x = batch(rank, step);
        let loss = ddp.forward(|| {
            Ok(output(&weights, &(&x + &offset), left_out).square().mean(Kind::Float))
        })?;
        ddp.backward(&loss)?;
        ddp.check()?;
        let _no_grad = tch::no_grad_guard();
        for weight in weights.iter().filter(|weight| weight.grad().defined()) {
            let _ = weight.shallow_clone().f_sub_(&(weight.grad() * 0.5))?;
        }
    }
    let flat: Vec<Tensor> = weights.iter().map(|weight| weight.detach().flatten(0, -1)).collect();
    Ok(Tensor::cat(&flat, 0))
}

#[test]
fn a_rank_in_rust_and_a_rank_in_python_end_with_the_same_bits() {
    for way in ["plain", "unused", "static", "bf16"] {
        for rank in [0, 1] {
            let port = free_port();
            let arguments = [(1 - rank).to_string(), port.to_string(), way.to_string()];
            let command = python::command("tests/distributed/ddp_python.py", &arguments);
            let command = match command {
                Ok(command) => command,
                Err(reason) => {
                    let line = format!("SKIPPED a rank in Python: {reason}\n");
                    let _ = std::io::stderr().write_all(line.as_bytes());
                    return;
                }
            };
            let child = Child::spawn(command);
            let run = || -> Result<Tensor> {
                let tcp = TcpStoreOptions {
                    server: rank == 0,
                    workers: Some(2),
                    timeout: PATIENCE,
                    ..Default::default()
                };
                let store = Store::tcp("127.0.0.1", port, &tcp)?.prefix("default_pg")?;
                let options = GroupOptions { check: false, ..GroupOptions::with_timeout(PATIENCE) };
                let group = ProcessGroup::with_store(&store, rank, 2, &options)?;
                let flat = train(&group, way, true)?;
                let both = group.all_gather(&flat)?;
                assert!(both[0].equal(&both[1]), "{way}, rank {rank}: the ranks differ");
                group.barrier()?;
                Ok(flat)
            };
            let mixed = run();
            let end = child.wait(PATIENCE);
            let mixed = mixed.unwrap_or_else(|error| panic!("{way}: {error}\n{}", end.output));
            assert!(end.success && end.output.starts_with("equal"), "{way}: {}", end.output);
            // And two ranks in Rust do the same.
            let rust = all_ranks(2, |group| {
                OF_PYTHON.set(1 - rank);
                train(group, way, false)
            });
            assert!(rust.iter().all(|flat| flat.equal(&mixed)), "{way}, rank {rank}");
        }
    }
}

thread_local! {
    /// The rank that was in Python.
    static OF_PYTHON: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}
