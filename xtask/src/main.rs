//! The daily commands of this repository: `cargo xtask help` lists them.
//!
//! Each command first makes sure that libtorch and nvcc are there, so that a fresh clone needs no
//! other step. Nothing here depends on torch-sys, which cannot be built before that.

#[cfg(not(unix))]
compile_error!("tch-extension supports Linux on x86-64 only; on Windows, use WSL 2");

mod ahead;
mod bundle;
mod cache;
mod cargo;
mod ci;
mod commands;
mod compiler;
// How contents are told apart, as a file for the same reason as `probe`.
#[allow(dead_code)]
#[path = "../../tch-extension-build/src/content.rs"]
mod content;
mod crossing;
mod cuda;
mod doctor;
mod glibc;
mod headers;
mod libtorch;
mod misuse;
mod old_systems;
mod outside;
mod page;
mod pip;
// Where builds keep what they have compiled, and the checks of such folders, as a file for the same
// reason as `probe`.
#[allow(dead_code)]
#[path = "../../tch-extension-build/src/place.rs"]
mod place;
mod plot;
// The code with which build scripts look for libtorch and nvcc: both must find the same ones. It is
// included as a file because a dependency would bring a C++ build library into every `cargo xtask`.
#[allow(dead_code)]
#[path = "../../tch-extension-build/src/probe.rs"]
mod probe;
mod programs;
#[cfg(test)]
mod readme;
mod repo;
mod report;
mod runner;
mod setup;
#[allow(dead_code)]
#[path = "../../tch-extension-build/src/trusted.rs"]
mod trusted;
mod versions;
mod weak_symbols;
mod wheel;
mod wheels;

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let name = args.next();
    let args: Vec<String> = args.collect();
    match commands::run(name.as_deref(), &args) {
        Ok(code) => code,
        Err(error) => {
            // Display, not Debug: with RUST_BACKTRACE set, Debug would hide the message above a
            // backtrace.
            report::say(format_args!("error: {error:#}"));
            ExitCode::from(if error.is::<commands::Usage>() { 2 } else { 1 })
        }
    }
}
