//! Runs `check.py`, which checks the operators from Python. A test skips where python3 has no torch of
//! the version that the library was built with, unless `TCH_EXTENSION_REQUIRE_PYTHON` is set.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use tch_extension::library::libtorch_version;

/// What the Python package says of the torch that it is for: the one of Cargo.lock's tch.
const TORCH: &str = "_TORCH = \"2.11.\"";

/// How the version of the torch begins that the library was built with.
fn torch() -> String {
    let version = libtorch_version();
    let (start, _) = version.rsplit_once('.').expect("three numbers");
    format!("{start}.")
}

/// The crate's folder, also where the test runs on another machine.
fn folder() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// A library that cargo built together with this test, and put next to it.
fn library(name: &str) -> Option<PathBuf> {
    let program = std::env::current_exe().expect("this program's path");
    let file = program.parent()?.join(name);
    file.exists().then_some(file)
}

/// What `pip install` would make: the Python package, for the torch that the library was built with.
fn install(library: &Path, place: &Path) -> std::io::Result<()> {
    let package = place.join("python_ops");
    std::fs::create_dir(&package)?;
    for entry in std::fs::read_dir(folder().join("python/python_ops"))? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            let text = std::fs::read_to_string(entry.path())?;
            let text = text.replace(TORCH, &format!("_TORCH = \"{}\"", torch()));
            std::fs::write(package.join(entry.file_name()), text)?;
        }
    }
    std::fs::copy(library, package.join("libpython_ops.so")).map(drop)
}

/// python3 with torch and these packages, and nothing that it leaves behind in this repository.
fn python3(packages: &[PathBuf], scratch: &Path) -> Command {
    // Not `..`, which would leave a folder of links to this repository, where another torch is.
    let venv = folder().ancestors().nth(2).expect("the repository").join(".venv");
    let own = ["python", "site"].map(|name| venv.join(name));
    let inherited = std::env::var_os("PYTHONPATH");
    let inherited = inherited.iter().flat_map(std::env::split_paths);
    let path = std::env::join_paths(packages.iter().cloned().chain(own).chain(inherited));
    let mut command = Command::new("python3");
    command
        .args(["-W", "ignore"])
        .env("PYTHONPATH", path.expect("no colon in a path"))
        // Otherwise torch.compile starts processes that import torch, for one or two kernels.
        .env("TORCHINDUCTOR_COMPILE_THREADS", "1")
        .env("TORCHINDUCTOR_CACHE_DIR", scratch.join("inductor"))
        // Here libtorch is the one that torch brings.
        .env_remove("LD_LIBRARY_PATH");
    if venv.exists() {
        // Set-up installs no compiled modules. Without them, each start of torch takes twice as long.
        let cache = venv.join("pycache");
        command.env("PYTHONPYCACHEPREFIX", cache).env_remove("PYTHONDONTWRITEBYTECODE");
    } else {
        command.env("PYTHONDONTWRITEBYTECODE", "1");
    }
    command
}

/// Why this machine cannot run the checks. It is found out once, because torch takes seconds to start.
fn unable() -> &'static Option<String> {
    static UNABLE: OnceLock<Option<String>> = OnceLock::new();
    UNABLE.get_or_init(find_unable)
}

fn find_unable() -> Option<String> {
    // What torch.compile needs is asked for, too.
    let script = "import torch, sympy, numpy; print(torch.__version__)";
    let scratch = std::env::temp_dir();
    let output = match python3(&[], &scratch).args(["-c", script]).output() {
        Ok(output) => output,
        Err(error) => return Some(format!("no python3: {error}")),
    };
    let version = String::from_utf8_lossy(&output.stdout);
    let wanted = torch();
    if !version.starts_with(&wanted) {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.lines().last().unwrap_or_default();
        return Some(format!("no python3 with torch {wanted}*: {}{said}", version.trim()));
    }
    None
}

/// Prints a line also where libtest would hide it.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The parts that one Python runs, because torch takes seconds to start. Each of the others has a
/// Python of its own: `process` forks, and `on_cuda` uses the GPU.
const TOGETHER: [&str; 4] = ["operators", "autograd", "compiled", "exported"];

/// Runs one part of the checks.
fn run(part: &str) {
    static SHARED: OnceLock<Result<String, String>> = OnceLock::new();
    let own;
    let outcome = if TOGETHER.contains(&part) {
        SHARED.get_or_init(|| check(&TOGETHER))
    } else {
        own = check(&[part]);
        &own
    };
    let lines = match outcome {
        Ok(lines) => lines,
        Err(why) => return say(&format!("SKIPPED {part}: {why}")),
    };
    println!("{lines}");
    lines.lines().filter(|line| line.contains("SKIPPED")).for_each(say);
    let passed = format!("part {part}: passed");
    assert!(lines.lines().any(|line| line == passed), "check.py {part} failed");
}

/// What a Python prints that checks these parts, or why this machine cannot check them.
fn check(parts: &[&str]) -> Result<String, String> {
    let scratch = tempfile::tempdir().expect("a folder");
    let libraries = ["libpython_ops.so", "libpython_faults.so"].map(library);
    let [Some(operators), Some(faults)] = libraries else {
        panic!("the libraries are not next to this program: build it with cargo")
    };
    if let Some(why) = unable() {
        let required = std::env::var_os("TCH_EXTENSION_REQUIRE_PYTHON").is_some();
        assert!(!required, "{why}");
        return Err(why.clone());
    }
    install(&operators, scratch.path()).expect("the package is written");
    let output = python3(&[scratch.path().to_path_buf()], scratch.path())
        .arg(folder().join("check.py"))
        .args(parts)
        .env("PYTHON_FAULTS", faults)
        .current_dir(scratch.path())
        .output()
        .expect("python3 was there a moment ago");
    let [lines, errors] =
        [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    Ok(format!("{lines}\n{errors}\ncheck.py: {}", output.status))
}

#[test]
fn operators() {
    run("operators");
}

#[test]
fn autograd() {
    run("autograd");
}

#[test]
fn compiled() {
    run("compiled");
}

#[test]
fn exported() {
    run("exported");
}

#[test]
fn process() {
    run("process");
}

#[test]
fn on_cuda() {
    run("on_cuda");
}

#[test]
fn every_part_is_a_test() {
    let files = std::fs::read_dir(folder().join("checks")).expect("the checks");
    let this = std::fs::read_to_string(folder().join("tests/python.rs")).expect("this file");
    for file in files {
        let path = file.expect("a file").path();
        let part = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let is_part = path.extension().is_some_and(|end| end == "py")
            && !["harness", "samples"].contains(&&*part);
        assert!(!is_part || this.contains(&format!("run({part:?})")), "no test runs {part}");
    }
}
