//! The build script's side: what cargo says goes in, what cargo has to know comes out.

use crate::environment::{BuildScript, Environment, Process};
use crate::toolchain::{CudaMode, Libtorch, Options, Toolchain};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// One static library of C++ and CUDA sources, linked into the crate whose build script makes it.
pub struct Extension {
    name: String,
    sources: Vec<PathBuf>,
    includes: Vec<PathBuf>,
    /// Folders in which there was nothing to compile.
    empty: Vec<PathBuf>,
}

/// What [`Extension::build`] found and made.
pub struct Built {
    /// Whether the CUDA sources are compiled in.
    pub cuda: bool,
}

impl Extension {
    /// A library called `lib<name>.a`.
    pub fn new(name: &str) -> Self {
        Extension { name: name.to_string(), sources: Vec::new(), includes: Vec::new(), empty: Vec::new() }
    }

    /// Adds one source. `*.cu` is compiled by nvcc, `cpu.cpp` once for each CPU instruction set (with
    /// `CPU_CAPABILITY` defined as in PyTorch), any other `*.cpp` once.
    pub fn source(mut self, path: impl Into<PathBuf>) -> Self {
        self.sources.push(path.into());
        self
    }

    /// Adds every `.cpp` and `.cu` below a folder, and its `include` folder to the search path. A folder without any
    /// is an error of [`Extension::build`].
    pub fn source_dir(mut self, folder: impl AsRef<Path>) -> Self {
        let folder = folder.as_ref();
        // Cargo then reruns the script when a file is added or removed, too.
        println!("cargo::rerun-if-changed={}", folder.display());
        let before = self.sources.len();
        collect_sources(folder, &mut self.sources);
        self.sources.sort();
        if self.sources.len() == before {
            self.empty.push(folder.to_path_buf());
        }
        self.include(folder.join("include"))
    }

    /// Adds a folder in which `#include` looks.
    pub fn include(mut self, folder: impl Into<PathBuf>) -> Self {
        self.includes.push(folder.into());
        self
    }

    /// Compiles, archives and tells cargo what to link.
    pub fn build(&self) -> Result<Built> {
        println!("cargo::rustc-check-cfg=cfg(tch_extension_cuda)");
        if is_doc_build() {
            return Ok(Built { cuda: false });
        }
        if let Some(folder) = self.empty.first() {
            bail!(
                "source_dir: there is no .cpp and no .cu in {} (relative to the package's folder)",
                folder.display()
            );
        }
        let toolchain = Toolchain::find(find_libtorch()?, CudaMode::IfPresent, None, &BuildScript)?;
        let options = Options { includes: self.all_includes(), ..Options::default() };
        let out_dir = Process.var("OUT_DIR").context("OUT_DIR is unset: not in a build script?")?;
        // Cargo's own choice, `--jobs`.
        let workers = Process.var("NUM_JOBS").and_then(|count| count.parse().ok()).unwrap_or(1);
        let objects =
            toolchain.compile(&self.sources, &options, Path::new(&out_dir), workers, &BuildScript)?;

        // Without CUDA, a crate of CUDA sources has nothing to archive.
        if !objects.is_empty() {
            let mut archive = cc::Build::new();
            archive.cpp(true).objects(objects.iter().map(|object| &object.path));
            archive.try_compile(&self.name).with_context(|| format!("cannot archive lib{}.a", self.name))?;
        }
        let cuda = toolchain.cuda.is_some();
        publish(&toolchain.libtorch, cuda, &self.includes)?;
        if cuda {
            println!("cargo::rustc-cfg=tch_extension_cuda");
        }
        Ok(Built { cuda })
    }

    /// [`Extension::build`]; a failure prints one message and ends the build script.
    pub fn build_or_exit(&self) -> Built {
        self.build().unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            std::process::exit(1)
        })
    }

    /// Our own folders and, for a crate that depends on tch-extension, the public headers.
    fn all_includes(&self) -> Vec<PathBuf> {
        let public = Process.var("DEP_TCH_EXTENSION_INCLUDE");
        self.includes.iter().cloned().chain(public.map(PathBuf::from)).collect()
    }
}

/// Lets this package's programs, tests, benches and examples find libtorch without `LD_LIBRARY_PATH`.
/// Cargo does not pass such flags on, so each package that makes a final program calls this once.
pub fn link_args() {
    if is_doc_build() {
        return;
    }
    match find_libtorch() {
        Ok(libtorch) => print_rpaths(&libtorch),
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::exit(1)
        }
    }
}

/// The one that torch-sys links: its folder reaches direct dependents of torch-sys, and through us those
/// of tch-extension.
fn find_libtorch() -> Result<Libtorch> {
    let var = |name: &str| Process.var(name);
    if var("CARGO_CFG_TARGET_OS").as_deref() != Some("linux")
        || var("CARGO_CFG_TARGET_ARCH").as_deref() != Some("x86_64")
    {
        bail!("tch-extension supports Linux on x86-64 only");
    }
    let lib = var("DEP_TCH_LIBTORCH_LIB").or_else(|| var("DEP_TCH_EXTENSION_LIBTORCH_LIB"));
    let lib = lib.context(
        "cargo did not say where libtorch is; add tch-extension (or torch-sys) to [dependencies]: cargo tells direct \
         dependents only",
    )?;
    Libtorch::at(lib, &BuildScript)
}

/// Link lines and metadata. `includes` are the crate's own public headers.
fn publish(libtorch: &Libtorch, cuda: bool, includes: &[PathBuf]) -> Result<()> {
    println!("cargo::rustc-link-search=native={}", libtorch.lib.display());
    println!("cargo::metadata=libtorch_lib={}", libtorch.lib.display());
    if let Some(include) = includes.first() {
        let include = include.canonicalize().unwrap_or_else(|_| include.clone());
        println!("cargo::metadata=include={}", include.display());
    }
    if cuda {
        let runtime = libtorch.cuda_runtime()?;
        let folder = runtime.parent().unwrap_or(&libtorch.lib);
        let name = runtime.file_name().unwrap_or_default().to_string_lossy().into_owned();
        println!("cargo::rustc-link-search=native={}", folder.display());
        // By its full name: wheels hold `libcudart.so.13` and no `libcudart.so`.
        println!("cargo::rustc-link-lib=dylib:+verbatim={name}");
        println!("cargo::rustc-link-lib=dylib=c10_cuda");
    }
    Ok(())
}

/// See [`link_args`].
fn print_rpaths(libtorch: &Libtorch) {
    println!("cargo::rustc-link-arg=-Wl,-rpath,{}", libtorch.lib.display());
    if let Ok(runtime) = libtorch.cuda_runtime()
        && let Some(folder) = runtime.parent()
    {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
    }
}

fn is_doc_build() -> bool {
    std::env::var_os("DOCS_RS").is_some() || std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some()
}

fn collect_sources(folder: &Path, sources: &mut Vec<PathBuf>) {
    let Ok(entries) = std::fs::read_dir(folder) else { return };
    for path in entries.flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            collect_sources(&path, sources);
        } else if path.extension().is_some_and(|extension| extension == "cpp" || extension == "cu") {
            sources.push(path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_folder_is_an_error() {
        let error =
            Extension::new("x").source_dir("no/such/folder").build().err().expect("an error").to_string();
        assert!(error.contains("no .cpp and no .cu in no/such/folder"), "{error}");
    }
}
