//! Runs one build with the compilers of tch-extension-build, in a folder of the cache.

use super::cache::{Built, Entry, Locked};
use super::{Facts, Sources};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use tch_extension_build::environment::{Environment, write_message};
use tch_extension_build::toolchain::{
    CudaMode, Libtorch, Object, Options, PRECOMPILED, Reuse, Toolchain, is_cuda, takes_precompiled,
};

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

/// The macro that is the name of the extension.
const NAME: &str = "TORCH_EXTENSION_NAME";

/// What one build works with.
#[derive(Clone, Copy)]
pub(super) struct Build<'a> {
    pub sources: &'a Sources,
    pub facts: &'a Facts,
    /// The folders of our headers.
    pub includes: &'a [PathBuf],
    pub name: &'a str,
    /// The folder of the cache.
    pub root: &'a Path,
}

impl Build<'_> {
    /// Compiles and links in `scratch`. Writes inline sources to `folder`, where they stay for
    /// debuggers.
    pub fn library(&self, folder: &Path, scratch: &Path) -> Result<Built> {
        self.timed(folder, |watcher| {
            let files = self.sources.write(folder).map_err(words)?;
            let toolchain = self.find(&files, watcher)?;
            let workers = std::thread::available_parallelism().map_or(1, usize::from);
            let precompiled = self.precompiled(&files);
            let mut options = self.options(workers);
            options.precompiled = precompiled.as_ref().map(|found| found.library.clone());
            let objects =
                toolchain.compile(&files, &options, scratch, workers, watcher).map_err(words)?;
            let library = scratch.join("library.so");
            toolchain
                .link_shared(&objects, &self.sources.link_flags, &library, watcher)
                .map_err(words)?;
            let mut built = self.built(library, &objects, &toolchain, folder, watcher);
            if let Some(found) = precompiled {
                // The compiler lists no file that went into them.
                built.files.retain(|path| *path != found.text());
                built.files.extend(found.files);
            }
            Ok(built)
        })
    }

    /// The precompiled headers, if one of the sources takes them. The first build with these flags
    /// makes them. Where that fails, the build goes on without.
    fn precompiled(&self, files: &[PathBuf]) -> Option<Precompiled> {
        if !self.sources.use_pch || !files.iter().any(|file| takes_precompiled(file)) {
            return None;
        }
        let sources = self.sources.of_headers();
        let name = "precompiled";
        let request = format!("{}{:?}\n{}", self.facts.text(), self.includes, sources.text());
        let build = Build { sources: &sources, name, ..*self };
        let entry = Entry::new(self.root, name, request);
        let make = || entry.library(|folder, scratch| build.headers(folder, scratch)).ok();
        // Whoever makes them holds the lock alone, and others should be able to use them, too.
        drop(make()?);
        Precompiled::of(&entry, make()?)
    }

    /// Precompiles headers in `scratch`. Where that is not possible (with clang, or a flag such as
    /// `-fsyntax-only`, or because they do not compile by themselves), an empty file says so.
    pub fn headers(&self, folder: &Path, scratch: &Path) -> Result<Built> {
        self.timed(folder, |watcher| {
            let toolchain = self.find(&[], watcher)?;
            let mut options = self.options(1);
            // Each extension has another name, and no header may depend on it.
            options.defines.retain(|(name, _)| name != NAME);
            let made = toolchain.precompile(&options, scratch, watcher).ok().flatten();
            let made = made.filter(|object| object.path.exists());
            let header = scratch.join("extension.gch");
            match &made {
                Some(object) => std::fs::rename(&object.path, &header),
                None => std::fs::write(&header, ""),
            }
            .map_err(words)?;
            Ok(self.built(header, made.as_slice(), &toolchain, folder, watcher))
        })
    }

    fn timed(
        &self,
        folder: &Path,
        run: impl FnOnce(&Watcher) -> std::result::Result<Built, String>,
    ) -> Result<Built> {
        let watcher = Watcher {
            verbose: self.sources.verbose,
            include_root: self.facts.include_root(),
            variables: Mutex::default(),
            folder: folder.to_path_buf(),
        };
        let name = self.name;
        let started = Instant::now();
        let built =
            run(&watcher).map_err(|message| Error::Jit { name: name.to_string(), message })?;
        watcher.say(&format!("{name}: built in {:.1} s", started.elapsed().as_secs_f64()));
        Ok(built)
    }

    fn built(
        &self,
        library: PathBuf,
        objects: &[Object],
        toolchain: &Toolchain,
        folder: &Path,
        watcher: &Watcher,
    ) -> Built {
        let mut files: Vec<PathBuf> =
            objects.iter().flat_map(|object| object.dependencies()).collect();
        files.sort();
        files.dedup();
        // Inline sources were written by this build, and are already part of the request.
        files.retain(|path| !path.starts_with(folder));
        let nvcc = toolchain.cuda.iter().map(|cuda| &cuda.nvcc.path);
        let programs = std::iter::once(&toolchain.cxx.path).chain(nvcc);
        let variables = watcher.variables.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        Built {
            library,
            files,
            programs: programs.map(|path| path.display().to_string()).collect(),
            variables: variables.clone(),
        }
    }

    fn find(&self, files: &[PathBuf], watcher: &Watcher) -> std::result::Result<Toolchain, String> {
        let archs = self.sources.archs.as_deref();
        let libtorch = Libtorch::at(&self.facts.libtorch, watcher).map_err(words)?;
        if files.iter().any(|file| is_cuda(file)) {
            return Toolchain::find(libtorch, CudaMode::Required, archs, watcher).map_err(words);
        }
        // C++ sources may use CUDA's headers, but they need no nvcc.
        Toolchain::find(libtorch.clone(), CudaMode::IfPresent, archs, watcher)
            .or_else(|_| Toolchain::find(libtorch, CudaMode::Off, None, watcher))
            .map_err(words)
    }

    fn options(&self, workers: usize) -> Options {
        let sources = self.sources;
        let ours = [
            (NAME, Some(self.name.to_string())),
            // torch.utils.cpp_extension defines this, too.
            ("TORCH_API_INCLUDE_EXTENSION_H", None),
            ("TCH_EXTENSION_ASKS_FOR_LOAD_ERROR", None),
        ];
        let ours = ours.map(|(name, value)| (name.to_string(), value));
        Options {
            // Our headers come first, because a folder with Python's headers would bring the real
            // pybind11.
            includes: self.includes.iter().chain(&sources.includes).cloned().collect(),
            includes_for: Vec::new(),
            defines: ours.into_iter().chain(sources.defines.iter().cloned()).collect(),
            cxx_flags: sources.flags.clone(),
            nvcc_flags: nvcc_flags(&sources.nvcc_flags, workers),
            for_hopper: Vec::new(),
            standard: sources.standard.clone(),
            warnings: true,
            export_symbols: true,
            fewer_headers: true,
            precompiled: None,
            // Whole libraries are kept.
            reuse: Reuse::Never,
        }
    }
}

/// Precompiled headers that stay in the cache as long as this is held.
struct Precompiled {
    library: PathBuf,
    /// The headers in it that are neither libtorch's nor the system's.
    files: Vec<PathBuf>,
    _locked: Locked,
}

impl Precompiled {
    /// `None` if they could not be made.
    fn of(entry: &Entry, locked: Locked) -> Option<Self> {
        let library = locked.library.clone();
        if library.metadata().ok()?.len() == 0 {
            return None;
        }
        let found = Precompiled { library, files: entry.files()?, _locked: locked };
        let text = found.text();
        // What a compiler reads if it does not take the file. Several processes may write the same.
        if !text.exists() {
            std::fs::write(text, PRECOMPILED).ok()?;
        }
        Some(found)
    }

    /// The file beside them with the text that was compiled.
    fn text(&self) -> PathBuf {
        self.library.with_extension("")
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
