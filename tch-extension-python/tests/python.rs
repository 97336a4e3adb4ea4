//! Runs `check.py`, every operator as Python sees it, and `open.py`, the functions of TVM FFI.

use std::path::{Path, PathBuf};
use std::process::Command;

#[macro_use]
#[path = "../../src/ops/list.rs"]
mod list;

macro_rules! names {
    ($($name:ident of $family:literal {
        operator: [$operator:ident, $tensors:ident],
        functions: [$($function:ident),*],
        way: [$($way:ident)?],
        files: [$($file:literal),* $(,)?],
    })*) => {
        &[$(stringify!($name)),*]
    };
}

/// The library's operators.
const OPERATORS: &[&str] = operators!(names);

/// What Python runs.
fn checks() -> PathBuf {
    script("check.py")
}

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// The workspace. Not `..`, which would leave a folder of links to this repository, where another
/// torch is.
fn root() -> PathBuf {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.parent().expect("a package in a workspace").to_path_buf()
}

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this program's path");
    test.with_file_name("libtch_extension_python.so")
}

/// A Python with the torch that set-up installed, and with what is in one more folder of `.venv`; `None` if
/// there is none.
fn python(more: Option<&str>) -> Option<Command> {
    let folders = ["python", "site"].into_iter().chain(more);
    let folders = folders.map(|folder| root().join(".venv").join(folder));
    let path = std::env::join_paths(folders).expect("paths without colons");
    let python = || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", &path).env("TORCHINDUCTOR_COMPILE_THREADS", "1");
        // Set-up installs no compiled modules. Without them, each start of torch takes twice as long.
        python.env("PYTHONPYCACHEPREFIX", root().join(".venv/pycache"));
        python.env_remove("PYTHONDONTWRITEBYTECODE");
        python
    };
    let imports = python().args(["-W", "ignore", "-c", "import torch"]).output();
    let reason = match imports {
        Ok(output) if output.status.success() => return Some(python()),
        Ok(output) => String::from_utf8_lossy(&output.stderr).trim().to_string(),
        Err(error) => error.to_string(),
    };
    let reason = reason.lines().last().unwrap_or_default().to_string();
    assert!(
        std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON").is_none_or(|value| value == "0"),
        "python3 cannot import torch: {reason}"
    );
    println!("skipped: python3 cannot import torch: {reason}");
    None
}

#[test]
fn python_calls_every_operator() {
    let Some(mut python) = python(None) else { return };
    let status = python.args(["-W", "ignore"]).arg(checks()).arg(library()).status();
    assert!(status.expect("python3 runs").success(), "see above");
}

/// Whether Python can import tvm_ffi, which is installed with torchvision.
#[cfg(feature = "open")]
fn has_tvm_ffi() -> bool {
    let is_there = root().join(".venv/vision/tvm_ffi/lib/libtvm_ffi.so").exists();
    let is_required = std::env::var_os("TCH_EXTENSION_REQUIRE_TORCHVISION");
    assert!(
        is_there || is_required.is_none_or(|value| value == "0"),
        ".venv/vision has no tvm_ffi"
    );
    if !is_there {
        println!("skipped: there is no tvm_ffi; `cargo xtask test` installs it");
    }
    is_there
}

#[test]
#[cfg(feature = "open")]
fn numpy_calls_the_open_functions() {
    let Some(mut python) = python(Some("vision")).filter(|_| has_tvm_ffi()) else { return };
    let status = python.args(["-W", "ignore"]).arg(script("open.py")).arg(library()).status();
    assert!(status.expect("python3 runs").success(), "see above");
}

#[test]
fn every_operator_of_the_library_is_registered() {
    let checks = std::fs::read_to_string(checks()).expect("check.py");
    assert!(!OPERATORS.is_empty());
    for name in OPERATORS {
        assert!(checks.contains(&format!("(\"{name}\", ")), "check.py has no case of {name}");
    }
}
