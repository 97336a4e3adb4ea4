//! The build script's interface: it reads cargo's variables, compiles, and prints cargo's link
//! lines.

use crate::environment::{BuildScript, Environment, Process};
use crate::isolate;
use crate::paths;
use crate::probe;
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
    /// The sources that [`Extension::without`] left out.
    left_out: Vec<PathBuf>,
    folders: Vec<PathBuf>,
    includes: Vec<PathBuf>,
    #[cfg(feature = "headers")]
    params: Vec<PathBuf>,
    cuda_libraries: Vec<String>,
    /// Headers of CUDA libraries, and the sources that include them.
    cuda_headers: Vec<(PathBuf, String)>,
    options: Options,
    archs: Option<String>,
    whole_archive: Option<bool>,
    isolated: Option<bool>,
    /// The first wrong argument, for [`Extension::build`] to report.
    mistake: Option<String>,
}

/// The result of [`Extension::build`].
pub struct Built {
    /// Whether the CUDA sources are compiled in.
    pub cuda: bool,
}

impl Extension {
    /// A library called `lib<name>.a`. No two libraries in one program may have the same name.
    pub fn new(name: &str) -> Self {
        let mistake = (name.is_empty()
            || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)))
        .then(|| format!("Extension::new({name:?}): a name has letters, digits, _ and - only"));
        Extension {
            name: name.to_string(),
            sources: Vec::new(),
            left_out: Vec::new(),
            folders: Vec::new(),
            includes: Vec::new(),
            #[cfg(feature = "headers")]
            params: Vec::new(),
            cuda_libraries: Vec::new(),
            cuda_headers: Vec::new(),
            options: Options::default(),
            archs: None,
            whole_archive: None,
            isolated: None,
            mistake,
        }
    }

    /// Adds one source. A `.cu` file is compiled by nvcc, or left out without CUDA. One with the
    /// word `hopper` in its name, such as `hopper.cu`, `hopper_forward.cu` or `forward_hopper.cu`,
    /// is compiled for `9.0a`, too (see [`Extension::for_hopper`]). A C++ source with a
    /// `TCH_EXTENSION_CPU_KERNEL` (see `tch_extension/cpu.h`) is compiled once for each CPU
    /// instruction set, with `CPU_CAPABILITY` defined as in PyTorch. Any other C++ source is
    /// compiled once.
    pub fn source(mut self, path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        if !path.is_file() {
            self.mistake(|| missing_source(&path));
        } else if path
            .extension()
            .is_some_and(|ending| HEADERS.iter().any(|header| ending == *header))
        {
            // g++ would make a precompiled header from it and call that an object.
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

    /// Adds sources, each in the same way as [`Extension::source`].
    pub fn sources(self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        paths.into_iter().fold(self, |extension, path| extension.source(path))
    }

    /// Adds CUDA sources (`*.cu`), which nvcc compiles.
    pub fn cuda_sources(mut self, paths: impl IntoIterator<Item = impl Into<PathBuf>>) -> Self {
        for path in paths.into_iter().map(Into::into) {
            if !is_cuda(&path) {
                self.mistake(|| format!("cuda_sources: {} does not end in .cu", path.display()));
            }
            self = self.source(path);
        }
        self
    }

    /// Adds every `.cpp` and `.cu` file below a folder, and adds the folder's `include` to the
    /// search path. A folder without any source is an error of [`Extension::build`].
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
        // With the folder in the list, cargo runs the script again also when a file is added or
        // removed.
        self.folders.push(folder.to_path_buf());
        self.includes.push(folder.join("include"));
        self
    }

    /// Leaves out a source, or the sources below a folder, for example those of a cargo feature that
    /// is off. They must have been added before, by [`Extension::source_dir`], and the path must
    /// begin as that folder's: if it names no source, that is an error of [`Extension::build`].
    pub fn without(mut self, path: impl AsRef<Path>) -> Self {
        let path = path.as_ref();
        self.left_out.extend(self.sources.extract_if(.., |source| source.starts_with(path)));
        if !self.left_out.iter().any(|source| source.starts_with(path)) {
            self.mistake(|| {
                format!(
                    "without: no source that was added before begins with {} (relative to the package's folder)",
                    path.display()
                )
            });
        }
        self
    }

    /// Adds a folder that `#include` searches.
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

    /// Adds a folder that `#include` searches first in some sources only: in the source `path`, or in
    /// those below the folder `path`. The others are then not compiled again when it changes.
    pub fn include_for(mut self, path: impl Into<PathBuf>, folder: impl Into<PathBuf>) -> Self {
        let (path, folder) = (path.into(), folder.into());
        if !folder.is_dir() {
            self.mistake(|| {
                format!(
                    "include_for: there is no folder {} (relative to the package's)",
                    folder.display()
                )
            });
        }
        if !self.sources.iter().any(|source| source.starts_with(&path)) {
            self.mistake(|| {
                format!(
                    "include_for: no source that was added before begins with {} (relative to the package's folder)",
                    path.display()
                )
            });
        }
        self.options.includes_for.push((path, folder));
        self
    }

    /// Lets some sources include a header of a CUDA library that is no part of the toolkit, such as
    /// `nccl.h`, if CUDA is compiled in and the header is found: in the `include` folder of
    /// `NCCL_HOME` (named as the header), next to libtorch, where wheels have it, or where the system
    /// has headers. `path` is a source, or a folder of sources. They must ask by
    /// `__has_include(<nccl.h>)` whether it is there.
    pub fn cuda_header(mut self, path: impl Into<PathBuf>, header: &str) -> Self {
        self.cuda_headers.push((path.into(), header.to_string()));
        self
    }

    /// Declares in C++ what a Rust file shares with the kernels: its `#[repr(C)]` structs and
    /// `#[repr(i32)]` enums, with their comments. Each is typed once, in Rust. Needs the feature
    /// `headers` of this crate.
    ///
    /// `.params("src/softcap/kernels.rs")` generates `src/softcap/kernels.rs.h`, which the sources
    /// include by that name. Names begin with the folder's name, or with the file's if the folder
    /// is `src`: `Forward` becomes `SoftcapForward`. A field may be a number, a pointer, an array,
    /// another such struct or enum, or a `Strided` or `StridedMut` of `tch_extension::strided`.
    #[cfg(feature = "headers")]
    pub fn params(mut self, source: impl Into<PathBuf>) -> Self {
        let source = source.into();
        if !source.is_file() {
            self.mistake(|| {
                format!("params: there is no file {} (relative to the package's)", source.display())
            });
        }
        self.params.push(source);
        self
    }

    /// Links a library of the CUDA toolkit if CUDA is compiled in: `.cuda_library("cublasLt")`. It
    /// is the library that libtorch itself loads, provided that its major version is CUDA's own
    /// (`cublas`, `cublasLt` and `nvrtc`, but not `curand`). The CUDA runtime is always linked.
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
    /// itself; `-UNDEBUG` enables `assert` and the assertions in libtorch's headers again.
    pub fn flag(mut self, flag: &str) -> Self {
        self.options.cxx_flags.push(flag.to_string());
        self
    }

    /// Adds a flag for nvcc, after all others. A flag that names an architecture (`-gencode=…`)
    /// replaces the list of architectures.
    pub fn nvcc_flag(mut self, flag: &str) -> Self {
        self.options.nvcc_flags.push(flag.to_string());
        self
    }

    /// Compiles CUDA sources for these architectures, whatever `TORCH_CUDA_ARCH_LIST` says. This is
    /// for kernels that need a certain architecture. The list has that variable's grammar
    /// ([`crate::arch`]).
    pub fn archs(mut self, list: &str) -> Self {
        self.archs = Some(list.to_string());
        self
    }

    /// Compiles this source additionally for `9.0a` if the list of architectures contains 9.0.
    /// `9.0a` has the instructions that only Hopper has. `source` is the end of the path of a `.cu`
    /// file. It need not be named here if one of the words of its own name, which underscores
    /// separate, is `hopper`. An [`Extension::nvcc_flag`] that names an architecture overrules this
    /// as it overrules the list.
    pub fn for_hopper(mut self, source: impl Into<PathBuf>) -> Self {
        self.options.for_hopper.push(source.into());
        self
    }

    /// Sets the standard of C++ and CUDA sources: `c++17` (the default), `c++20` or `c++23`.
    pub fn standard(mut self, standard: &str) -> Self {
        if !["c++17", "c++20", "c++23"].contains(&standard) {
            self.mistake(|| {
                format!("standard({standard:?}): write c++17, c++20 or c++23; libtorch's headers need c++17 at least")
            });
        }
        self.options.standard = standard.to_string();
        self
    }

    /// Decides whether every object becomes part of the final program, or (`false`) only the
    /// objects that something refers to. Nothing refers to an operator that registers itself. By
    /// default, the sources decide: all objects are linked if one of the sources contains a
    /// `TORCH_LIBRARY` (or `TORCH_LIBRARY_IMPL`, `TORCH_LIBRARY_FRAGMENT`) or a `PYBIND11_MODULE`.
    pub fn whole_archive(mut self, whole: bool) -> Self {
        self.whole_archive = Some(whole);
        self
    }

    /// Decides whether names belong to this extension alone, as in a shared library. Functions,
    /// classes, kernels and variables that have the same name in another extension are then
    /// different ones. By default, this is so for a module for Python (`PYBIND11_MODULE`,
    /// `PyInit_…`), because all such modules are called `_C` and were never meant to share a
    /// program.
    ///
    /// Rust and other libraries still see functions and constants that are `extern "C"`, and
    /// everything with `__attribute__((visibility("default")))`.
    pub fn isolated(mut self, isolated: bool) -> Self {
        self.isolated = Some(isolated);
        self
    }

    /// Decides whether the compilers' warnings are requested (`-Wall -Wextra`) and shown. On by
    /// default.
    pub fn warnings(mut self, warnings: bool) -> Self {
        self.options.warnings = warnings;
        self
    }

    fn mistake(&mut self, message: impl FnOnce() -> String) {
        if self.mistake.is_none() {
            self.mistake = Some(message());
        }
    }

    /// Compiles the sources, makes an archive, and tells cargo what to link. It does nothing on
    /// docs.rs or with a feature `doc-only`.
    ///
    /// # Errors
    /// For a source that is missing, whose path is not UTF-8 or that does not compile, for an
    /// unknown architecture, and for a libtorch or a compiler that is missing or does not fit. The
    /// error is one message that also names the solution.
    pub fn build(&self) -> Result<Built> {
        println!("cargo::rustc-check-cfg=cfg(tch_extension_cuda)");
        if is_doc_build() {
            return Ok(Built { cuda: false });
        }
        let script = BuildScript::default();
        let (built, lines) = self.build_in(&script)?;
        script.print();
        // rustc accepts a library with modifiers only once. When several extensions of a crate need
        // it, two lines are enough: the first one, and the one of tch-extension, which the linker
        // reads after all of them.
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

    /// Calls [`Extension::build`]. A failure prints one message and ends the build script.
    pub fn build_or_exit(&self) -> Built {
        self.build().unwrap_or_else(|error| exit(&error))
    }

    /// Builds, and also returns the lines that cargo must be told.
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
        if toolchain.cuda.is_some() {
            options.includes_for.extend(self.folders_of_headers(&toolchain.libtorch, env));
        }
        if env.var("PROFILE").as_deref() == Some("debug") {
            // With this macro, the headers check indices.
            options.defines.push(("TCH_EXTENSION_DEBUG".to_string(), None));
        }
        let out_dir = env.var("OUT_DIR").context("OUT_DIR is unset: not in a build script?")?;
        let out_dir = Path::new(&out_dir);
        // The number of jobs that cargo was started with (`--jobs`).
        let workers = env.var("NUM_JOBS").and_then(|count| count.parse().ok()).unwrap_or(1);
        let shared = env.var("TCH_EXTENSION_OBJECTS").map(|folder| {
            let package = env.var("CARGO_PKG_NAME").unwrap_or_default();
            Path::new(&folder).join(package).join(&self.name)
        });
        let folder = shared.as_deref().unwrap_or(out_dir);
        #[cfg(feature = "headers")]
        self.write_params(folder, &mut options, env)?;
        let objects = toolchain.compile(&self.sources, &options, folder, workers, env)?;

        let mut lines = Vec::new();
        // Without CUDA, a crate that has only CUDA sources has nothing to archive.
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

    /// Writes the headers of [`Extension::params`] and lets the sources find them. A header whose
    /// text stays the same is not touched, so that nothing is compiled again.
    #[cfg(feature = "headers")]
    fn write_params(
        &self,
        folder: &Path,
        options: &mut Options,
        env: &dyn Environment,
    ) -> Result<()> {
        let include = folder.join("params");
        for source in &self.params {
            paths::check("the source of parameters", source)?;
            env.reads(source);
            let header =
                crate::headers::Header::new([source.clone()], crate::headers::prefix_of(source));
            let text = header.generate()?.with_context(|| {
                format!(
                    "params: {} has no #[repr(C)] struct and no #[repr(i32)] enum",
                    source.display()
                )
            })?;
            let path = include.join(format!("{}.h", source.display()));
            if std::fs::read_to_string(&path).is_ok_and(|before| before == text) {
                continue;
            }
            let parent = path.parent().unwrap_or(&include);
            std::fs::create_dir_all(parent)
                .and_then(|()| std::fs::write(&path, text))
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        if !self.params.is_empty() {
            options.includes.push(include);
        }
        Ok(())
    }

    /// The folders of the headers of [`Extension::cuda_header`] that are found.
    fn folders_of_headers(
        &self,
        libtorch: &Libtorch,
        env: &dyn Environment,
    ) -> Vec<(PathBuf, PathBuf)> {
        let found = self.cuda_headers.iter().filter_map(|(path, header)| {
            let folder = probe::cuda_header(&libtorch.lib, header, &|name| env.var(name))?;
            env.reads(&folder.join(header));
            let is_system = probe::SYSTEM_INCLUDES.iter().any(|system| folder == Path::new(system));
            (!is_system).then(|| (path.clone(), folder))
        });
        found.collect()
    }

    fn options_for(&self, env: &dyn Environment) -> Options {
        let Some(public) = env.var("DEP_TCH_EXTENSION_INCLUDE").map(PathBuf::from) else {
            return Options { includes: self.includes.clone(), ..self.options.clone() };
        };
        // The headers that replace Python's must be found before Python's own. The crate's own
        // folders come before the public headers of tch-extension.
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

    /// Whether one of the sources contains one of these words.
    fn mention(&self, words: &[&str]) -> Result<bool> {
        for source in &self.sources {
            let text = text_of(source)?;
            if words.iter().any(|word| text.contains(word)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The lines that link libtorch, and the metadata that dependents' build scripts ask for.
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
                // The full file name, because wheels contain `libcudart.so.13` and no
                // `libcudart.so`.
                lines.push(format!("rustc-link-lib=dylib:+verbatim={name}"));
            }
            lines.push("rustc-link-lib=dylib=c10_cuda".to_string());
            lines.push("rustc-cfg=tch_extension_cuda".to_string());
        }
        Ok(lines)
    }
}

/// Lets this package's programs, tests, benches and examples find libtorch without
/// `LD_LIBRARY_PATH`. Cargo does not pass such flags on to dependents, so the build script of each
/// package that makes a final program calls this once.
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

/// The libtorch that torch-sys links. Cargo tells its folder to direct dependents of torch-sys;
/// this crate's own `links` key passes it on to those of tch-extension.
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

// Ten lines in place of a dependency of every build script.
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

/// The file name extensions of headers, which cannot be sources.
const HEADERS: [&str; 6] = ["h", "hh", "hpp", "hxx", "cuh", "inc"];

/// The message for a missing source. It lists the sources that exist in that folder.
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
