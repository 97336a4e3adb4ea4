//! Starting cargo in the root of the repository.

use crate::repo::Repo;
use crate::setup::Changes;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// A cargo command with the environment that set-up found.
pub fn command(repo: &Repo, changes: &Changes, args: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(&repo.root);
    // `cargo run` describes xtask's own package to us; that is nobody else's business.
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_") {
            command.env_remove(&*name);
        }
    }
    for (name, value) in changes {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
}

/// Becomes the command, so that signals and the exit status are its own. Returns only on failure.
pub fn become_command(mut command: Command) -> anyhow::Error {
    anyhow::Error::new(command.exec()).context("cannot run cargo; is it in PATH?")
}

/// Runs the command and demands success.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().context("cannot run cargo; is it in PATH?")?;
    if !status.success() {
        bail!("`{}` failed ({status})", describe(command));
    }
    Ok(())
}

/// Runs a cargo build with its messages as JSON on stdout; diagnostics still reach the terminal.
pub fn messages(command: &mut Command) -> Result<Vec<Value>> {
    command.arg("--message-format=json-render-diagnostics").stdout(Stdio::piped());
    let child = command.spawn().context("cannot run cargo; is it in PATH?")?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("`{}` failed ({})", describe(command), output.status);
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

/// Cargo's messages; other programs may print between them.
fn parse(text: &str) -> Vec<Value> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(Value::is_object).collect()
}

fn describe(command: &Command) -> String {
    let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    format!("cargo {}", args.join(" "))
}
