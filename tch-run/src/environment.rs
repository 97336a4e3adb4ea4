//! The environment variables of a rank: those of torchrun.

use crate::nodes::Plan;
use crate::options::cores;
use std::path::PathBuf;
use std::process::Command;

/// One of the processes of this node.
#[derive(Clone, Debug)]
pub struct Place {
    /// Its number on this node.
    pub local_rank: usize,
    /// The processes of this node.
    pub local_world_size: usize,
    /// Where it says why it failed, if there is such a file: `reports` explains it.
    pub error_file: Option<PathBuf>,
}

/// Sets the variables of a rank. Rank 0 serves the store at MASTER_ADDR and MASTER_PORT, so torchrun's
/// variable that says otherwise is removed, if it is inherited.
pub fn set(command: &mut Command, plan: &Plan, place: &Place) {
    let rank = plan.first_rank + place.local_rank;
    let numbers = [
        ("RANK", rank),
        ("LOCAL_RANK", place.local_rank),
        ("WORLD_SIZE", plan.world_size),
        ("LOCAL_WORLD_SIZE", place.local_world_size),
        ("GROUP_RANK", plan.node_rank),
        ("GROUP_WORLD_SIZE", plan.nnodes),
        ("ROLE_RANK", rank),
        ("ROLE_WORLD_SIZE", plan.world_size),
        ("MASTER_PORT", usize::from(plan.port)),
        ("TORCHELASTIC_RESTART_COUNT", plan.attempt as usize),
        ("TORCHELASTIC_MAX_RESTARTS", plan.max_restarts as usize),
    ];
    for (name, number) in numbers {
        command.env(name, number.to_string());
    }
    command.env("MASTER_ADDR", &plan.master);
    command.env("ROLE_NAME", "default");
    command.env("TORCHELASTIC_RUN_ID", &plan.run_id);
    command.env_remove("TORCHELASTIC_USE_AGENT_STORE");
    command.env_remove("TORCHELASTIC_ERROR_FILE");
    match &place.error_file {
        Some(file) => command.env("TCH_RUN_ERROR_FILE", file),
        None => command.env_remove("TCH_RUN_ERROR_FILE"),
    };
    // A rank whose peer is gone ends itself, so that it can be started again.
    set_default(command, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
    // Each rank has a pool of threads of its own, and all of them share the cores.
    let threads = (cores() / place.local_world_size).max(1);
    set_default(command, "OMP_NUM_THREADS", &threads.to_string());
}

fn set_default(command: &mut Command, name: &str, value: &str) {
    if std::env::var_os(name).is_none() {
        command.env(name, value);
    }
}
