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

/// The folder that a package's build script wrote to, from the messages of a build.
pub fn build_script_out_dir(messages: &[Value], package: &str) -> Option<String> {
    let message = messages.iter().find(|message| {
        message["reason"] == "build-script-executed"
            && message["package_id"].as_str().is_some_and(|id| is_package(id, package))
    })?;
    message["out_dir"].as_str().map(str::to_string)
}

/// Whether a package id such as `path+file:///home/me/tch-extension#0.1.0` or `…/main#tch-extension@0.1.0` is
/// that of the package: cargo leaves the name out when the folder has the same.
fn is_package(id: &str, package: &str) -> bool {
    let Some((place, version)) = id.rsplit_once('#') else { return false };
    match version.split_once('@') {
        Some((name, _)) => name == package,
        None => place.ends_with(&format!("/{package}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_build_scripts_folder() {
        let text = "running\n\
            {\"reason\":\"build-script-executed\",\"package_id\":\"registry+x#torch-sys@0.24.0\",\"out_dir\":\"/t/a\"}\n\
            {\"reason\":\"build-script-executed\",\"package_id\":\"path+file:///main#tch-extension@0.1.0\",\"out_dir\":\"/t/b\"}\n";
        assert_eq!(build_script_out_dir(&parse(text), "tch-extension").as_deref(), Some("/t/b"));
        assert_eq!(build_script_out_dir(&parse(text), "other"), None);
    }

    #[test]
    fn a_package_is_known_with_and_without_its_name() {
        assert!(is_package("path+file:///w/tch-extension#0.1.0", "tch-extension"));
        assert!(is_package("path+file:///w/main#tch-extension@0.1.0", "tch-extension"));
        assert!(!is_package("path+file:///w/main/tch-extension-build#0.1.0", "tch-extension"));
    }
}
