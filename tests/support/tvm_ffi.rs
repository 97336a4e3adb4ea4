//! The Python package apache-tvm-ffi, which `cargo xtask test` installs with torchvision.

use super::root;
use std::io::Write;
use std::path::PathBuf;

/// The folder of the package.
pub fn package() -> PathBuf {
    let installed = root().join(".venv/vision/tvm_ffi");
    std::env::var_os("TCH_EXTENSION_TEST_TVM_FFI").map_or(installed, PathBuf::from)
}

pub fn libtvm_ffi() -> PathBuf {
    package().join("lib/libtvm_ffi.so")
}

/// Whether the package is there. If it is missing, this prints a line on stderr, unless
/// `TCH_EXTENSION_REQUIRE_TORCHVISION=1`, which is installed with it, makes that a failure.
pub fn installed_or_skip(test: &str) -> bool {
    if libtvm_ffi().exists() {
        return true;
    }
    let required =
        std::env::var_os("TCH_EXTENSION_REQUIRE_TORCHVISION").is_some_and(|it| it == "1");
    assert!(!required, "{} is missing", libtvm_ffi().display());
    // A single write directly to stderr, because the test harness discards the output of a test
    // that passes.
    let line = format!("SKIPPED {test}: there is no libtvm_ffi; `cargo xtask test` installs it\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    false
}
