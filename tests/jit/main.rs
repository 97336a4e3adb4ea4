//! Tests of C++ and CUDA code that is compiled while the tests run.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use support::root;
use tch::{Device, Kind, Tensor};
use tch_extension::jit::{Extension, Module};
use tch_extension::{Result, args};

mod cache;
mod conversions;
mod cuda;
mod inline;
mod messages;
mod processes;
mod python_sources;

fn scratch() -> tempfile::TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// The cache for tests that do not test the cache: the user's, or a temporary one of this process.
fn shared_cache() -> PathBuf {
    static FOLDER: OnceLock<tempfile::TempDir> = OnceLock::new();
    match std::env::var_os("TCH_EXTENSION_CACHE") {
        Some(folder) => folder.into(),
        None => FOLDER.get_or_init(scratch).path().to_path_buf(),
    }
}

/// The path of a source in tests/python_sources.
fn python_source(file: &str) -> PathBuf {
    root().join("tests/python_sources").join(file)
}

/// An extension whose headers are compiled once for all tests. A first attempt that the precompiled
/// headers do not fit fails.
fn extension(name: &str) -> Extension {
    let extension = Extension::new(name).cache(shared_cache()).use_pch(true);
    extension.flag("-O0").flag("-Winvalid-pch").flag("-Werror=invalid-pch")
}

/// A source without libtorch's headers, which compiles quickly.
const ANSWER: &str = "extern \"C\" int answer() { return 42; }";

/// Calls a function that has no arguments.
fn number(module: &Module, name: &str) -> Result<i32> {
    // SAFETY: the sources of these tests define every function with this type that is called here.
    Ok(unsafe { module.symbol::<extern "C" fn() -> i32>(name) }?())
}

fn message<T>(result: Result<T>) -> String {
    result.err().expect("an error").to_string()
}

fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// The number of builds in a cache; each build adds a line to its entry's log.
fn builds(cache: &Path) -> usize {
    let entries = std::fs::read_dir(cache).expect("a cache").flatten();
    entries
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("log")).ok())
        .map(|log| log.lines().count())
        .sum()
}
