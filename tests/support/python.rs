//! Python with this version of torch, for tests that compare with PyTorch itself.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The repository's folder, which has the script, also where the tests run on another machine. The
/// package of a test may be in a folder below.
fn root(script: &str) -> Option<PathBuf> {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    package.ancestors().find(|folder| folder.join(script).exists()).map(Path::to_path_buf)
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
/// no python3 with torch 2.11.0. Panics where `TCH_EXTENSION_REQUIRE_PYTHON` says that there is one.
pub fn command(script: &str, arguments: &[impl AsRef<OsStr>]) -> Result<Command, &'static str> {
    let found = find(script, arguments);
    let required = std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON").is_some_and(|it| it != "0");
    assert!(found.is_ok() || !required, "{script}: {:?}", found.err());
    found
}

fn find(script: &str, arguments: &[impl AsRef<OsStr>]) -> Result<Command, &'static str> {
    let root = root(script).ok_or("no script here")?;
    let script = root.join(script);
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
