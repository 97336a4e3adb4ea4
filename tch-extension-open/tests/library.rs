//! The library as others see it: what it needs and exports, and what it says without a GPU.
#![cfg(tch_extension_cuda)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The library that cargo built beside this test.
fn library() -> PathBuf {
    let test = std::env::current_exe().expect("this program's path");
    test.with_file_name("libtch_extension_open.so")
}

fn text(output: std::io::Result<Output>, program: &str) -> String {
    let output = output.unwrap_or_else(|error| panic!("{program}: {error}"));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

fn of_binutils(program: &str, arguments: &[&str]) -> String {
    text(Command::new(program).args(arguments).arg(library()).output(), program)
}

#[test]
fn it_needs_the_cuda_runtime_and_nothing_of_libtorch() {
    let listing = of_binutils("readelf", &["--dynamic", "--wide"]);
    let between = |line: &str| Some(line.split_once('[')?.1.split_once(']')?.0.to_string());
    let needed = listing.lines().filter(|line| line.contains("(NEEDED)"));
    let needed: Vec<String> = needed.filter_map(between).collect();
    let is_known = |name: &String| {
        let system = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"];
        system.contains(&&name[..])
            || name.starts_with("ld-linux")
            || name.starts_with("libcudart.so.")
    };
    assert!(needed.iter().all(is_known), "{needed:?}");
    assert!(needed.iter().any(|name| name.starts_with("libcudart.so.")), "{needed:?}");
    assert!(!listing.contains("RUNPATH") && !listing.contains("RPATH"), "{listing}");
}

#[test]
fn it_exports_functions_of_tvm_ffi_only() {
    let listing = of_binutils("nm", &["--dynamic", "--defined-only"]);
    let names: Vec<&str> = listing.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    assert!(names.contains(&"__tvm_ffi_rms_norm"), "{names:?}");
    assert!(names.iter().all(|name| name.starts_with("__tvm_ffi_")), "{names:?}");
}

#[test]
fn it_loads_without_torch_and_refuses_what_it_cannot_do() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let venv = package.parent().expect("a package in a workspace").join(".venv");
    let path = std::env::join_paths(["python", "vision"].map(|folder| venv.join(folder)));
    let path = path.expect("paths without colons");
    let python = || {
        let mut python = Command::new("python3");
        python.env("PYTHONPATH", &path).env("PYTHONPYCACHEPREFIX", venv.join("pycache"));
        python
    };
    let imports = python().args(["-c", "import numpy, tvm_ffi"]).output();
    if !imports.is_ok_and(|output| output.status.success()) {
        let is_required = std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON");
        assert!(is_required.is_none_or(|value| value == "0"), "python3 cannot import tvm_ffi");
        println!("skipped: python3 cannot import tvm_ffi, which `cargo xtask test` installs");
        return;
    }
    let mut python = python();
    python.arg(package.join("tests/without_gpu.py")).arg(library()).arg(venv.join("cuda/lib"));
    text(python.output(), "python3");
}
