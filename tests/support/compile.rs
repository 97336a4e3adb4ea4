//! Compiles libraries while the tests run, against the libtorch that the tests run with.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A temporary folder of this process.
pub fn folder() -> &'static Path {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    FOLDER.get_or_init(|| tempfile::tempdir().expect("a temporary folder")).path()
}

/// The folder of the libtorch that this process has loaded.
fn libtorch() -> PathBuf {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the list of loaded files");
    let line = maps.lines().find(|line| line.ends_with("/libtorch_cpu.so")).expect("libtorch");
    let file = Path::new(&line[line.find('/').expect("a path")..]);
    file.parent().and_then(Path::parent).expect("a folder").to_path_buf()
}

/// Compiles a file to a shared library with this name in [`folder`].
pub fn compile(source: &Path, name: &str) -> PathBuf {
    compile_with(&[source], &["-shared"], name)
}

/// Compiles or links files, as the flags say.
pub fn compile_with(sources: &[&Path], flags: &[&str], name: &str) -> PathBuf {
    let (include, target) = (libtorch().join("include"), folder().join(name));
    let compiler = std::env::var_os("CXX").unwrap_or_else(|| "g++".into());
    let output = Command::new(compiler)
        .args(["-std=c++17", "-O2", "-fPIC", "-w", "-isystem"])
        .arg(&include)
        .arg("-isystem")
        .arg(include.join("torch/csrc/api/include"))
        .args(sources)
        .args(flags)
        .arg("-o")
        .arg(&target)
        .output()
        .expect("a C++ compiler");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    target
}

/// Compiles a source text to a shared library.
pub fn compile_text(text: &str, name: &str) -> PathBuf {
    let file = folder().join(format!("{name}.cpp"));
    std::fs::write(&file, text).expect("a source file");
    compile(&file, name)
}
