//! The libraries of the tests.

use super::*;
use std::sync::OnceLock;
pub use support::compile::{compile, compile_text, compile_with, folder};

pub fn source(file: &str) -> PathBuf {
    root().join("tests/library").join(file)
}

pub fn compile_file(file: &str, name: &str) -> PathBuf {
    compile(&source(file), name)
}

/// The library made of operators.cpp, loaded.
pub fn library() -> &'static Library {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    // A failure is stored, too, because compiling it again for every test would take minutes.
    let library =
        LIBRARY.get_or_init(|| Library::load(compile_file("operators.cpp", "operators.so")));
    library.as_ref().expect("a library")
}

/// Loads the library made of exceptions.cpp and levels.cpp, which is slow to compile and compiled
/// once.
pub fn callers() {
    static LIBRARY: OnceLock<Result<Library>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let parts = ["exceptions.cpp", "levels.cpp"].map(source);
        let text = parts.map(|part| format!("#include {part:?}\n")).concat();
        Library::load(compile_text(&text, "callers.so"))
    });
    library.as_ref().expect("a library");
}

pub fn operator(name: &str) -> Operator {
    library();
    Operator::find(&format!("tch_test::{name}")).expect(name)
}
