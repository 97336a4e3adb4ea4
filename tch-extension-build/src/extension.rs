//! The build script's side: what cargo says goes in, what cargo has to know comes out.

use crate::environment::{BuildScript, Environment, Process};
use crate::isolate;
use crate::paths;
use crate::toolchain::{CudaMode, Libtorch, Object, Options, Toolchain, is_cuda, text_of};
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// One static library of C++ and CUDA sources, linked into the crate whose build script makes it.
/// Paths are relative to the package's folder.
///
/// ```no_run
/// tch_extension_build::Extension::new("my_ops")
///     .sources(["csrc/my_ops.cpp", "csrc/cpu.cpp"])
///     .cuda_sources(["csrc/my_ops.cu"])
///     .include("csrc/include")
///     .define("MY_OPS_TILE", "64")
///     .flag("-ffast-math")
///     .nvcc_flag("--use_fast_math")
///     .archs("8.0;9.0a;12.0+PTX")
///     .standard("c++20")
///     .build_or_exit();
/// ```
#[must_use = "nothing is compiled before `build` or `build_or_exit`"]
pub struct Extension {
    name: String,
    sources: Vec<PathBuf>,
    folders: Vec<PathBuf>,
    includes: Vec<PathBuf>,
    cuda_libraries: Vec<String>,
    options: Options,
    archs: Option<String>,
    whole_archive: Option<bool>,
    isolated: Option<bool>,
    /// The first thing that was asked for and is not there.
    mistake: Option<String>,
}

/// What [`Extension::build`] found and made.
pub struct Built {
    /// Whether the CUDA sources are compiled in.
    pub cuda: bool,
}

impl Extension {
    /// A library called `lib<name>.a`; no two in one program may have the same name.
    pub fn new(name: &str) -> Self {
        let mistake = (name.is_empty()
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)))
        .then(|| format!("Extension::new({name:?}): a name has letters, digits, _ and - only"));
        Extension {
            name: name.to_string(),
            sources: Vec::new(),
            folders: Vec::new(),
            includes: Vec::new(),
            cuda_libraries: Vec::new(),
            options: Options::default(),
            archs: None,
            whole_archive: None,
            isolated: None,
            mistake,
        }
    }

    /// Adds one source. `*.cu` is compiled by nvcc, and left out where there is no CUDA. A C++
    /// source with a `TCH_EXTENSION_CPU_KERNEL` (see `tch_extension/cpu.h`) is compiled once for
    /// each CPU instruction set, with `CPU_CAPABILITY` defined as in PyTorch; any other once.
    pub fn source(mut self, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        if !path.is_file() {
            self.mistake(|| missing_source(&path));
        } else if path
            .extension()
            .is_some_and(|ending| HEADERS.iter().any(|header| ending == *header))
        {
            // g++ would make a precompiled header of it, and call that an object.
            self.mistake(|| {
                format!(
                    "source: {} is a header; sources include it, `include` names its folder",
                    path.display()
                )
            });
        }
        self.sources.push(path);
        self
    }

    /// Adds sources, each as [`Extension::source`] does.
    pub fn sources(self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        paths.into_iter().fold(self, |extension, path| extension.source(path))
    }

    /// Adds sources for nvcc, `*.cu`.
    pub fn cuda_sources(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        for path in paths.into_iter().map(Into::into) {
            if !is_cuda(&path) {
                self.mistake(|| format!("cuda_sources: {} does not end in .cu", path.display()));
            }
            self = self.source(path);
        }
        self
    }

    /// Adds every `.cpp` and `.cu` below a folder, and its `include` folder to the search path. A
    /// folder without any is an error of [`Extension::build`].
    pub fn source_dir(mut self, folder: impl AsRef<Path>) -> Self {
        let folder = folder.as_ref();
        let before = self.sources.len();
        collect_sources(folder, &mut self.sources);
        self.sources[before..].sort();
        if self.sources.len() == before {
            self.mistake(|| {
                format!(
                    "source_dir: there is no .cpp and no .cu in {} (relative to the package's folder)",
                    folder.display()
                )
            });
        }
        // Cargo then reruns the script when a file is added or removed, too.
        self.folders.push(folder.to_path_buf());
        self.includes.push(folder.join("include"));
        self
    }

    /// Adds a folder in which `#include` looks.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        if !folder.is_dir() {
            self.mistake(|| {
                format!(
                    "include: there is no folder {} (relative to the package's)",
                    folder.display()
                )
            });
        }
        self.includes.push(folder);
        self
    }

    /// Links a library of the CUDA toolkit where CUDA is compiled in: `.cuda_library("cublasLt")`.
    /// The one that libtorch itself loads, if its major version is CUDA's own (`cublas`, `cublasLt`
    /// and `nvrtc`, but not `curand`); the runtime is always linked.
    pub fn cuda_library(mut self, name: &str) -> Self {
        self.cuda_libraries.push(name.to_string());
        self
    }

    /// Defines a macro for both compilers: `.define("TILE", "64")`, or `.define("FAST", None)`.
    pub fn define<'a>(mut self, name: &str, value: impl Into<Option<&'a str>>) -> Self {
        self.options.defines.push((name.to_string(), value.into().map(str::to_string)));
        self
    }

    /// Adds a flag for the C++ compiler, after all others. `NDEBUG` is defined, as in libtorch
    /// itself; `-UNDEBUG` brings `assert` back, and the assertions in libtorch's headers.
    pub fn flag(mut self, flag: &str) -> Self {
        self.options.cxx_flags.push(flag.to_string());
        self
    }

    /// Adds a flag for nvcc, after all others. One that names an architecture (`-gencode=…`)
    /// replaces the list.
    pub fn nvcc_flag(mut self, flag: &str) -> Self {
        self.options.nvcc_flags.push(flag.to_string());
        self
    }

    /// Compiles CUDA for these architectures, whatever `TORCH_CUDA_ARCH_LIST` says: for kernels
    /// that need one. The grammar is that variable's ([`crate::arch`]).
    pub fn archs(mut self, list: &str) -> Self {
        self.archs = Some(list.to_string());
        self
    }

    /// Compiles this source for what its kernels need beyond the list of architectures: wherever
    /// the list has 9.0, for `9.0a`, too, whose instructions are Hopper's alone. `source` is the
    /// end of the path of a `.cu`. An [`Extension::nvcc_flag`] that names an architecture overrules
    /// this as it does the list.
    pub fn for_hopper(mut self, source: impl Into<PathBuf>) -> Self {
        self.options.for_hopper.push(source.into());
        self
    }

    /// The standard of C++ and CUDA sources: `c++17` (the default), `c++20` or `c++23`.
    pub fn standard(mut self, standard: &str) -> Self {
        if !["c++17", "c++20", "c++23"].contains(&standard) {
            self.mistake(|| {
                format!("standard({standard:?}): write c++17, c++20 or c++23; libtorch's headers need c++17 at least")
            });
        }
        self.options.standard = standard.to_string();
        self
    }

    /// Whether every object reaches the final program, or (`false`) only those that something
    /// refers to, which nobody does to an operator that registers itself. By default decided by the
    /// sources: they need it when one of them has a `TORCH_LIBRARY` (or `TORCH_LIBRARY_IMPL`,
    /// `TORCH_LIBRARY_FRAGMENT`) or a `PYBIND11_MODULE`.
    pub fn whole_archive(mut self, whole: bool) -> Self {
        self.whole_archive = Some(whole);
        self
    }

    /// Whether names are the extension's own, as if it were a shared library: functions, classes,
    /// kernels and variables that another extension has, too, are then different ones. By default
    /// decided by the sources: those that are a module for Python (`PYBIND11_MODULE`, `PyInit_…`),
    /// as all of them are called `_C` and were never meant for one program.
    ///
    /// Rust and other libraries still see functions and constants that are `extern "C"`, and
    /// whatever has `__attribute__((visibility("default")))`.
    pub fn isolated(mut self, isolated: bool) -> Self {
        self.isolated = Some(isolated);
        self
    }

    /// Whether the compilers' warnings are asked for (`-Wall -Wextra`) and shown; on by default.
    pub fn warnings(mut self, warnings: bool) -> Self {
        self.options.warnings = warnings;
        self
    }

    fn mistake(&mut self, message: impl FnOnce() -> String) {
        if self.mistake.is_none() {
            self.mistake = Some(message());
        }
    }

    /// Compiles, archives and tells cargo what to link. On docs.rs, and with a feature `doc-only`,
    /// it does nothing.
    ///
    /// # Errors
    /// One message with the way out: for a source that is missing, has a path that is not UTF-8 or
    /// does not compile, an unknown architecture, a libtorch or a compiler that is missing or does
    /// not fit.
    pub fn build(&self) -> Result<Built> {
        println!("cargo::rustc-check-cfg=cfg(tch_extension_cuda)");
        if is_doc_build() {
            return Ok(Built { cuda: false });
        }
        let script = BuildScript::default();
        let (built, lines) = self.build_in(&script)?;
        script.print();
        // rustc takes a library with modifiers once. Where several extensions of a crate need it,
        // the first line and that of tch-extension, which the linker reads after them all, are
        // enough.
        static ONCE: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
        let mut once = ONCE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        for line in lines {
            if line.starts_with("rustc-link-lib=static")
                && !once.insert(format!("lib{}.a", self.name))
            {
                bail!(
                    "two extensions of this build script are called {:?}; the second takes the first's place",
                    self.name
                );
            }
            if !line.contains(":+verbatim=") || once.insert(line.clone()) {
                println!("cargo::{line}");
            }
        }
        Ok(built)
    }

    /// [`Extension::build`]; a failure prints one message and ends the build script.
    pub fn build_or_exit(&self) -> Built {
        self.build().unwrap_or_else(|error| exit(&error))
    }

    /// Also gives what cargo has to know.
    fn build_in(&self, env: &dyn Environment) -> Result<(Built, Vec<String>)> {
        if let Some(mistake) = &self.mistake {
            bail!("{mistake}");
        }
        if self.sources.is_empty() {
            bail!(
                "Extension::new({:?}) has no source; add some with source_dir or source",
                self.name
            );
        }
        let is_no_source = |end: &&PathBuf| {
            !self.sources.iter().any(|source| is_cuda(source) && source.ends_with(end))
        };
        if let Some(end) = self.options.for_hopper.iter().find(is_no_source) {
            bail!(
                "for_hopper({:?}): no CUDA source's path ends so; name one that was added, such as csrc/my_op.cu",
                end
            );
        }
        for folder in &self.folders {
            paths::check("the source folder", folder)?;
            env.reads(folder);
        }
        let libtorch = find_libtorch(env)?;
        let has_cuda_sources = self.sources.iter().any(|source| is_cuda(source));
        let toolchain = Toolchain::find(libtorch, CudaMode::IfPresent, self.archs.as_deref(), env)?;
        if toolchain.cuda.is_none() && has_cuda_sources {
            toolchain.warn_of_missing_nvcc(env);
        }
        let mut options = self.options_for(env);
        if env.var("PROFILE").as_deref() == Some("debug") {
            // The headers then check indices.
            options.defines.push(("TCH_EXTENSION_DEBUG".to_string(), None));
        }
        let out_dir = env.var("OUT_DIR").context("OUT_DIR is unset: not in a build script?")?;
        let out_dir = Path::new(&out_dir);
        // Cargo's own choice, `--jobs`.
        let workers = env.var("NUM_JOBS").and_then(|count| count.parse().ok()).unwrap_or(1);
        let shared = env.var("TCH_EXTENSION_OBJECTS").map(|folder| {
            let package = env.var("CARGO_PKG_NAME").unwrap_or_default();
            Path::new(&folder).join(package).join(&self.name)
        });
        let folder = shared.as_deref().unwrap_or(out_dir);
        let objects = toolchain.compile(&self.sources, &options, folder, workers, env)?;

        let mut lines = Vec::new();
        // Without CUDA, a crate of CUDA sources has nothing to archive.
        if !objects.is_empty() {
            let (target, host) = env.triples();
            let mut archive = cc::Build::new();
            archive.cpp(true).opt_level(3).target(&target).host(&host).out_dir(out_dir);
            archive.cargo_metadata(false).cargo_warnings(false);
            if self.is_isolated(&objects)? {
                archive.object(isolate::isolate(
                    &objects,
                    &self.name,
                    out_dir,
                    &toolchain.cxx,
                    env,
                )?);
            } else {
                archive.objects(objects.iter().map(|object| &object.path));
            }
            archive
                .try_compile(&self.name)
                .with_context(|| format!("cannot archive lib{}.a", self.name))?;
            lines.push(format!("rustc-link-search=native={}", out_dir.display()));
            let whole = if self.is_whole()? { ":+whole-archive" } else { "" };
            lines.push(format!("rustc-link-lib=static{whole}={}", self.name));
            lines.push("rustc-link-lib=stdc++".to_string());
        }
        let cuda = toolchain.cuda.is_some();
        lines.extend(self.link_lines(&toolchain.libtorch, cuda)?);
        Ok((Built { cuda }, lines))
    }

    fn options_for(&self, env: &dyn Environment) -> Options {
        let Some(public) = env.var("DEP_TCH_EXTENSION_INCLUDE").map(PathBuf::from) else {
            return Options { includes: self.includes.clone(), ..self.options.clone() };
        };
        // What stands for Python's headers has to come before any that are Python's; the crate's
        // own folders come before the public headers of tch-extension.
        let python = public.join("tch_extension/python");
        let includes =
            std::iter::once(python).chain(self.includes.iter().cloned()).chain([public]).collect();
        let mut options = Options { includes, ..self.options.clone() };
        let name = "TORCH_EXTENSION_NAME";
        if options.defines.iter().all(|(defined, _)| defined != name) {
            options.defines.push((name.to_string(), Some(self.name.replace('-', "_"))));
        }
        options
    }

    fn is_whole(&self) -> Result<bool> {
        self.whole_archive.map_or_else(|| self.mention(&["TORCH_LIBRARY", "PYBIND11_MODULE"]), Ok)
    }

    fn is_isolated(&self, objects: &[Object]) -> Result<bool> {
        match self.isolated {
            Some(isolated) => Ok(isolated),
            None if self.mention(&["PYBIND11_MODULE", "PyInit_", "PyMODINIT_FUNC"])? => {
                isolate::is_module(objects)
            }
            None => Ok(false),
        }
    }

    /// Whether one of the sources has one of these words.
    fn mention(&self, words: &[&str]) -> Result<bool> {
        for source in &self.sources {
            let text = text_of(source)?;
            if words.iter().any(|word| text.contains(word)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// libtorch for the linker, and what dependents' build scripts ask for.
    fn link_lines(&self, libtorch: &Libtorch, cuda: bool) -> Result<Vec<String>> {
        let mut lines = vec![
            format!("rustc-link-search=native={}", libtorch.lib.display()),
            format!("metadata=libtorch_lib={}", libtorch.lib.display()),
        ];
        if let Some(include) = self.includes.first() {
            let include = include.canonicalize().unwrap_or_else(|_| include.clone());
            lines.push(format!("metadata=include={}", include.display()));
        }
        if cuda {
            for library in
                std::iter::once("cudart").chain(self.cuda_libraries.iter().map(String::as_str))
            {
                let library = libtorch.cuda_library(library)?;
                let folder = library.parent().unwrap_or(&libtorch.lib);
                let name = library.file_name().unwrap_or_default().to_string_lossy();
                lines.push(format!("rustc-link-search=native={}", folder.display()));
                // By its full name: wheels hold `libcudart.so.13` and no `libcudart.so`.
                lines.push(format!("rustc-link-lib=dylib:+verbatim={name}"));
            }
            lines.push("rustc-link-lib=dylib=c10_cuda".to_string());
            lines.push("rustc-cfg=tch_extension_cuda".to_string());
        }
        Ok(lines)
    }
}

/// Lets this package's programs, tests, benches and examples find libtorch without
/// `LD_LIBRARY_PATH`. Cargo does not pass such flags on, so each package that makes a final program
/// calls this once.
pub fn link_args() {
    if is_doc_build() {
        return;
    }
    let script = BuildScript::default();
    let libtorch = find_libtorch(&script).unwrap_or_else(|error| exit(&error));
    script.print();
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libtorch.lib.display());
    if let Ok(runtime) = libtorch.cuda_runtime()
        && let Some(folder) = runtime.parent()
    {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}

fn exit(error: &anyhow::Error) -> ! {
    eprintln!("error: {error:#}");
    std::process::exit(1)
}

/// The one that torch-sys links: its folder reaches direct dependents of torch-sys, and through us
/// those of tch-extension.
fn find_libtorch(env: &dyn Environment) -> Result<Libtorch> {
    if env.var("CARGO_CFG_TARGET_OS").as_deref() != Some("linux")
        || env.var("CARGO_CFG_TARGET_ARCH").as_deref() != Some("x86_64")
    {
        bail!("tch-extension supports Linux on x86-64 only");
    }
    let lib = env.var("DEP_TCH_LIBTORCH_LIB").or_else(|| env.var("DEP_TCH_EXTENSION_LIBTORCH_LIB"));
    let lib = lib.context(
        "cargo did not say where libtorch is; add tch-extension (or torch-sys) to [dependencies]: cargo tells direct \
         dependents only",
    )?;
    Libtorch::at(lib, env)
}

fn is_doc_build() -> bool {
    Process.var("DOCS_RS").is_some() || Process.var("CARGO_FEATURE_DOC_ONLY").is_some()
}

fn collect_sources(folder: &Path, sources: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            collect_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "cpp" || extension == "cu")
        {
            sources.push(path);
        }
    }
}

/// Endings of what is no source.
const HEADERS: [&str; 6] = ["h", "hh", "hpp", "hxx", "cuh", "inc"];

/// With what lies there instead.
fn missing_source(path: &Path) -> String {
    let folder = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut sources: Vec<PathBuf> = Vec::new();
    collect_sources(folder, &mut sources);
    sources.sort();
    let found: Vec<_> = sources.iter().take(8).map(|source| source.display().to_string()).collect();
    let found = if found.is_empty() { "no source there".to_string() } else { found.join(", ") };
    let here = std::env::current_dir().unwrap_or_default();
    format!(
        "there is no source {} in the package's folder {}; found: {found}",
        path.display(),
        here.display()
    )
}

#[cfg(test)]
mod tests;
