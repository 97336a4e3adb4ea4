//! Starts a program on several processes, on one machine or on several, as torchrun does.
//! ```text
//! tch-run -n 2 target/debug/train --epochs 3
//! tch-run -n gpu --max-restarts 3 target/debug/train
//! tch-run -n 8 --nnodes 2 --node-rank 0 --master 10.0.0.1:29500 target/debug/train
//! ```
//!
//! `options` is the command line. `launch` runs attempts: it starts the ranks of this node
//! (`ranks`, `environment`, `output`), waits for one to fail or for all to end, finds out which one
//! failed first (`reports`), and asks `nodes` what comes next. `nodes` decides that for one node by itself, and for several by a small protocol
//! over TCP.

mod environment;
mod launch;
mod nodes;
mod options;
mod output;
mod port;
mod ranks;
mod reports;

use std::process::ExitCode;

fn main() -> ExitCode {
    match launch::run(&options::Options::from_arguments(std::env::args_os())) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            output::note(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}
