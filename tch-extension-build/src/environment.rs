//! What the compilers' rules need to know of the program they run in, and tell it: a build script
//! or any other.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Mutex;

/// Where variables come from and reports go. Nothing else in the shared parts reads a variable of
/// cargo's or prints a line for it.
pub trait Environment: Sync {
    /// A variable's value; an empty one is none. A build script is run again when it changes.
    fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// A file or folder that was read: when it changes, what was made of it is out of date.
    fn reads(&self, _path: &Path) {}

    /// A command that is about to run, in one line.
    fn runs(&self, _command: &str) {}

    /// One line for the user's eyes, such as a compiler's warning.
    fn warns(&self, _line: &str) {}

    /// The target triples to compile for and on.
    fn triples(&self) -> (String, String) {
        (TRIPLE.to_string(), TRIPLE.to_string())
    }
}

/// The one system that libtorch's wheels with CUDA and this crate have in common.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// A program that compiles while it runs: its own variables, and nobody to tell.
pub struct Process;

impl Environment for Process {}

/// A build script: reports become lines on its standard output, where cargo reads them. They are
/// kept until [`BuildScript::print`], because cargo shows them before the message of a script that
/// failed, which runs again anyhow.
#[derive(Default)]
pub struct BuildScript {
    lines: Mutex<BTreeSet<String>>,
}

impl BuildScript {
    fn keep(&self, line: String) {
        self.lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(line);
    }

    /// Prints what was kept, each line once.
    pub fn print(&self) {
        let lines = std::mem::take(
            &mut *self.lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
        for line in lines {
            println!("{line}");
        }
    }
}

impl Environment for BuildScript {
    fn var(&self, name: &str) -> Option<String> {
        // Cargo's own need no telling.
        if !name.starts_with("DEP_") && !CARGOS_OWN.contains(&name) {
            self.keep(format!("cargo::rerun-if-env-changed={name}"));
        }
        Process.var(name)
    }

    fn reads(&self, path: &Path) {
        self.keep(format!("cargo::rerun-if-changed={}", path.display()));
    }

    fn warns(&self, line: &str) {
        println!("cargo::warning={line}");
    }

    fn triples(&self) -> (String, String) {
        let triple = |name: &str| Process.var(name).unwrap_or_else(|| TRIPLE.to_string());
        (triple("TARGET"), triple("HOST"))
    }
}

const CARGOS_OWN: &[&str] = &[
    "OUT_DIR",
    "NUM_JOBS",
    "PROFILE",
    "CARGO_PKG_NAME",
    "CARGO_CFG_TARGET_OS",
    "CARGO_CFG_TARGET_ARCH",
];
