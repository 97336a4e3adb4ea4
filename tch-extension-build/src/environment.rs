//! The interface between the compilers' rules and the program that they run in, a build script or
//! any other: what the rules read from it and report to it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Provides variables and receives reports. No other code that build scripts and `jit` share reads
/// cargo's variables or prints lines for cargo.
pub trait Environment: Sync {
    /// The value of a variable; an empty one counts as unset. Cargo runs a build script again when
    /// a variable that it read has changed.
    fn var(&self, name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// Reports that a file or folder was read. When it changes, everything that was made from it is
    /// out of date.
    fn reads(&self, _path: &Path) {}

    /// Reports a command that is about to run, in one line.
    fn runs(&self, _command: &str) {}

    /// Reports one line that the user should see, such as a compiler's warning.
    fn warns(&self, _line: &str) {}

    /// Keeps the whole message of a compiler that failed, of which the error shows only a part.
    /// Returns the file, or `None` if there is no place for it.
    fn keeps(&self, _message: &str) -> Option<PathBuf> {
        None
    }

    /// The folder of temporary files.
    fn temporary(&self) -> PathBuf {
        std::env::temp_dir()
    }

    /// The target triples: the one to compile for, and the one to compile on.
    fn triples(&self) -> (String, String) {
        (TRIPLE.to_string(), TRIPLE.to_string())
    }
}

/// The only system that both libtorch's CUDA wheels and this crate support.
const TRIPLE: &str = "x86_64-unknown-linux-gnu";

/// The environment of a program that compiles while it runs. It uses the program's own variables
/// and ignores reports.
pub struct Process;

impl Environment for Process {}

/// The environment of a build script. Reports become lines on standard output, where cargo reads
/// them. The lines are kept until [`BuildScript::print`], because cargo shows the output of a
/// script that failed before the script's message, and runs such a script again anyway.
#[derive(Default)]
pub struct BuildScript {
    lines: Mutex<BTreeSet<String>>,
}

impl BuildScript {
    fn keep(&self, line: String) {
        self.lines.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).insert(line);
    }

    /// Prints the kept lines, each once.
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
        // Cargo tracks changes of its own variables without being told.
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

    fn keeps(&self, message: &str) -> Option<PathBuf> {
        write_message(Path::new(&Process.var("OUT_DIR")?), message)
    }

    fn triples(&self) -> (String, String) {
        let triple = |name: &str| Process.var(name).unwrap_or_else(|| TRIPLE.to_string());
        (triple("TARGET"), triple("HOST"))
    }
}

/// Writes a compiler's message to the folder's `compiler.log`. Of several compilers that fail at
/// the same time, the last one's stays.
pub fn write_message(folder: &Path, message: &str) -> Option<PathBuf> {
    let file = folder.join("compiler.log");
    std::fs::write(&file, message).ok()?;
    Some(file)
}

const CARGOS_OWN: &[&str] = &[
    "OUT_DIR",
    "NUM_JOBS",
    "PROFILE",
    "CARGO_PKG_NAME",
    "CARGO_PKG_VERSION",
    "CARGO_CFG_TARGET_OS",
    "CARGO_CFG_TARGET_ARCH",
];
