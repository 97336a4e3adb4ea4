//! Runs one build with the compilers of tch-extension-build, in a folder of the cache.

use super::cache::Built;
use super::{Facts, Sources};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use tch_extension_build::environment::{Environment, write_message};
use tch_extension_build::toolchain::{CudaMode, Libtorch, Options, Reuse, Toolchain, is_cuda};

/// Reads environment variables of the process and records which. Prints the commands if the user
/// wants that.
struct Watcher {
    verbose: bool,
    include_root: Option<PathBuf>,
    variables: Mutex<BTreeMap<String, Option<String>>>,
    /// Where a message that is too long for an error is kept.
    folder: PathBuf,
}

impl Environment for Watcher {
    fn var(&self, name: &str) -> Option<String> {
        let value = Facts::variable(name);
        // For PATH, only the programs found in it matter, and they are recorded separately.
        if name != "PATH" {
            let mut variables =
                self.variables.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            variables.insert(name.to_string(), value.clone());
        }
        let found = || self.include_root.as_ref().filter(|_| name == "LIBTORCH_INCLUDE");
        value.or_else(|| found().map(|root| root.display().to_string()))
    }

    fn runs(&self, command: &str) {
        self.say(command);
    }

    fn warns(&self, line: &str) {
        self.say(line);
    }

    fn keeps(&self, message: &str) -> Option<PathBuf> {
        write_message(&self.folder, message)
    }
}

impl Watcher {
    fn say(&self, line: &str) {
        if self.verbose {
            // Each line is one write, so that lines of several compilers do not mix. A closed
            // stderr is no reason to fail.
            let _ = std::io::stderr().write_all(format!("jit: {line}\n").as_bytes());
        }
    }
}

/// The text of an error with its causes.
fn words(error: impl std::fmt::Display) -> String {
    format!("{error:#}")
}

/// Compiles and links in `scratch`. Writes inline sources to `folder`, where they stay for
/// debuggers.
pub(super) fn build(
    sources: &Sources,
    facts: &Facts,
    includes: &[PathBuf],
    name: &str,
    folder: &Path,
    scratch: &Path,
) -> Result<Built> {
    let watcher = Watcher {
        verbose: sources.verbose,
        include_root: facts.include_root(),
        variables: Mutex::default(),
        folder: folder.to_path_buf(),
    };
    let started = Instant::now();
    let built = run(sources, facts, includes, name, folder, scratch, &watcher)
        .map_err(|error| Error::Jit { name: name.to_string(), message: error })?;
    watcher.say(&format!("{name}: built in {:.1} s", started.elapsed().as_secs_f64()));
    Ok(built)
}

fn run(
    sources: &Sources,
    facts: &Facts,
    includes: &[PathBuf],
    name: &str,
    folder: &Path,
    scratch: &Path,
    watcher: &Watcher,
) -> std::result::Result<Built, String> {
    let files = sources.write(folder).map_err(words)?;
    let toolchain = find(&files, sources.archs.as_deref(), facts, watcher)?;
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let options = options(sources, includes, name, workers);
    let objects = toolchain.compile(&files, &options, scratch, workers, watcher).map_err(words)?;
    let library = scratch.join("library.so");
    toolchain.link_shared(&objects, &sources.link_flags, &library, watcher).map_err(words)?;

    let mut inputs: Vec<PathBuf> =
        objects.iter().flat_map(|object| object.dependencies()).collect();
    inputs.sort();
    inputs.dedup();
    // Inline sources were written by this build, and are already part of the request.
    inputs.retain(|path| !path.starts_with(folder));
    let nvcc = toolchain.cuda.iter().map(|cuda| &cuda.nvcc.path);
    let programs = std::iter::once(&toolchain.cxx.path).chain(nvcc);
    let variables = watcher.variables.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    Ok(Built {
        library,
        files: inputs,
        programs: programs.map(|path| path.display().to_string()).collect(),
        variables: variables.clone(),
    })
}

fn find(
    files: &[PathBuf],
    archs: Option<&str>,
    facts: &Facts,
    watcher: &Watcher,
) -> std::result::Result<Toolchain, String> {
    let libtorch = Libtorch::at(&facts.libtorch, watcher).map_err(words)?;
    if files.iter().any(|file| is_cuda(file)) {
        return Toolchain::find(libtorch, CudaMode::Required, archs, watcher).map_err(words);
    }
    // C++ sources may use CUDA's headers, but they need no nvcc.
    Toolchain::find(libtorch.clone(), CudaMode::IfPresent, archs, watcher)
        .or_else(|_| Toolchain::find(libtorch, CudaMode::Off, None, watcher))
        .map_err(words)
}

fn options(sources: &Sources, includes: &[PathBuf], name: &str, workers: usize) -> Options {
    let ours = [
        ("TORCH_EXTENSION_NAME", Some(name.to_string())),
        // torch.utils.cpp_extension defines this, too.
        ("TORCH_API_INCLUDE_EXTENSION_H", None),
        ("TCH_EXTENSION_ASKS_FOR_LOAD_ERROR", None),
    ];
    let ours = ours.map(|(name, value)| (name.to_string(), value));
    Options {
        // Our headers come first, because a folder with Python's headers would bring the real
        // pybind11.
        includes: includes.iter().chain(&sources.includes).cloned().collect(),
        includes_for: Vec::new(),
        defines: ours.into_iter().chain(sources.defines.iter().cloned()).collect(),
        cxx_flags: sources.flags.clone(),
        nvcc_flags: nvcc_flags(&sources.nvcc_flags, workers),
        for_hopper: Vec::new(),
        standard: sources.standard.clone(),
        warnings: true,
        export_symbols: true,
        fewer_headers: true,
        // Whole libraries are kept.
        reuse: Reuse::Never,
    }
}

/// Lets nvcc compile for several architectures in parallel, unless a flag says otherwise.
fn nvcc_flags(flags: &[String], workers: usize) -> Vec<String> {
    let is_said = flags
        .iter()
        .any(|flag| flag == "-t" || flag.starts_with("-t=") || flag.starts_with("--threads"));
    let ours = (!is_said).then(|| format!("--threads={workers}"));
    ours.into_iter().chain(flags.iter().cloned()).collect()
}
