//! Tests of functions that other projects export by TVM FFI. Most are called in a module that is
//! compiled here, from functions.cpp, with the headers of the wheel apache-tvm-ffi.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use support::compile::{compile_with, folder};
use support::root;
use support::tvm_ffi::{installed_or_skip, libtvm_ffi, package};
use tch::{Device, Kind, Tensor};
use tch_extension::library::{Args, Library, LoadOptions};
use tch_extension::tvm_ffi::{self, Function, Module, out};
use tch_extension::{Result, args};

mod autograd;
mod cuda;
mod loading;
mod memory;
mod others;
mod speed;
mod values;

/// Compiles a source to a shared library with this name in [`folder`].
fn compile(source: &Path, name: &str, flags: &[&str]) -> PathBuf {
    let headers = format!("-isystem{}", package().join("include").display());
    compile_with(&[source], &[&["-shared", "-O1", &headers], flags].concat(), name)
}

fn compile_text(text: &str, name: &str, flags: &[&str]) -> PathBuf {
    let source = folder().join(format!("{name}.cpp"));
    std::fs::write(&source, text).expect("a source file");
    compile(&source, name, flags)
}

/// The path of the module made of functions.cpp.
fn functions() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| compile(&root().join("tests/tvm_ffi/functions.cpp"), "functions.so", &[]))
}

/// The module made of functions.cpp, or `None` if the test is skipped.
fn module(test: &str) -> Option<&'static Module> {
    static MODULE: OnceLock<Module> = OnceLock::new();
    installed_or_skip(test).then(|| {
        MODULE.get_or_init(|| {
            // As in a process that has libtvm_ffi already.
            let options = LoadOptions { global: true, ..Default::default() };
            Library::load_with(libtvm_ffi(), options).expect("libtvm_ffi");
            Module::load(functions()).expect("a module")
        })
    })
}

/// Fails or skips the test of this name, as [`module`] does.
macro_rules! function {
    ($test:expr, $name:literal) => {
        match $crate::module($test) {
            Some(module) => module.function($name).expect($name),
            None => return,
        }
    };
}
use function;

fn floats(values: &[f32]) -> Tensor {
    Tensor::from_slice(values)
}

fn leaf(values: &[f32]) -> Tensor {
    floats(values).set_requires_grad(true)
}

/// The one line of an error that names the function.
fn refused(outcome: Result<()>, function: &Function, expected: &[&str]) {
    let text = outcome.expect_err("an error").to_string();
    assert!(text.starts_with(&format!("{}: ", function.name())), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    for expected in expected {
        assert!(text.contains(expected), "{text} lacks {expected}");
    }
}

fn call(function: &Function, args: Args<'_>) -> Result<()> {
    function.call(args)
}
