//! Python with this version of torch, for tests that compare with PyTorch itself.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The repository's folder, also where the tests run on another machine.
fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// python3, which also finds the packages that set-up fetched.
fn python3(root: &Path) -> Command {
    let mut command = Command::new("python3");
    let folders = [".venv/python", ".venv/site"].map(|folder| root.join(folder));
    let present = folders.into_iter().filter(|folder| folder.exists());
    if let Ok(path) = std::env::join_paths(present)
        && !path.is_empty()
    {
        command.env("PYTHONPATH", path);
    }
    command
}

/// The command of a script of this repository with these arguments, or why it cannot run: there is
/// no python3 with torch 2.11.0.
pub fn command(script: &str, arguments: &[impl AsRef<OsStr>]) -> Result<Command, &'static str> {
    let root = root();
    let script = root.join(script);
    if !script.exists() {
        return Err("no script here");
    }
    let version = python3(&root).args(["-c", "import torch; print(torch.__version__)"]).output();
    if !version.is_ok_and(|output| output.stdout.starts_with(b"2.11.0")) {
        return Err("no python3 with torch 2.11.0");
    }
    let mut command = python3(&root);
    command.args(["-W", "ignore"]).arg(script).args(arguments);
    Ok(command)
}

/// The output of such a script. Panics if it fails.
pub fn run(script: &str, arguments: &[&OsStr]) -> Result<Output, &'static str> {
    let output = command(script, arguments)?.output().expect("python3 was there a moment ago");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}
