//! Compiles C++ and CUDA against libtorch from a build script.
//!
//! ```no_run
//! // In `main` of the build.rs of a crate that depends on tch-extension:
//! tch_extension_build::Extension::new("my_ops").source_dir("csrc").build_or_exit();
//! tch_extension_build::link_args();
//! ```
//!
//! libtorch is the one that torch-sys links. nvcc is looked for in `NVCC`, `CUDA_HOME`, `CUDA_PATH`,
//! beside libtorch, on `PATH` and in /usr/local/cuda. With both present, `.cu` files are compiled and the
//! cfg `tch_extension_cuda` is set; `TCH_EXTENSION_CUDA=0` leaves CUDA out, `=1` makes its absence an
//! error. `TORCH_CUDA_ARCH_LIST` says for which GPUs, as in PyTorch (default: this machine's, or
//! [`arch::DEFAULT_ARCHS`] where there is none).

pub mod arch;
mod compile;
mod libtorch;
pub mod probe;

use anyhow::{Context, Result, bail};
use compile::{Job, Unit};
use libtorch::Libtorch;
use probe::Nvcc;
use std::path::{Path, PathBuf};

/// The libtorch that this version of the crate is written for.
pub const LIBTORCH_VERSION: &str = "2.11.0";

/// CPU instruction sets a `cpu.cpp` is compiled for, with PyTorch's names and flags. The program picks one
/// when it runs, as libtorch does.
const ISAS: &[(&str, &[&str])] = &[
    ("DEFAULT", &[]),
    ("AVX2", &["-mavx2", "-mfma", "-mf16c"]),
    ("AVX512", &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]),
];

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
        let libtorch = Libtorch::find()?;
        let nvcc = choose_nvcc(&libtorch)?;
        let out_dir =
            PathBuf::from(std::env::var("OUT_DIR").context("OUT_DIR is unset: not in a build script?")?);
        let jobs = self.jobs(&libtorch, nvcc.as_ref(), &out_dir)?;
        compile::run(&jobs)?;

        // Without CUDA, a crate of CUDA sources has nothing to archive.
        if !jobs.is_empty() {
            let mut archive = cc::Build::new();
            archive.cpp(true).objects(jobs.iter().map(|job| &job.object));
            archive.try_compile(&self.name).with_context(|| format!("cannot archive lib{}.a", self.name))?;
        }
        libtorch.publish(nvcc.as_ref(), &self.includes)?;
        if nvcc.is_some() {
            println!("cargo::rustc-cfg=tch_extension_cuda");
        }
        Ok(Built { cuda: nvcc.is_some() })
    }

    /// [`Extension::build`]; a failure prints one message and ends the build script.
    pub fn build_or_exit(&self) -> Built {
        self.build().unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            std::process::exit(1)
        })
    }

    fn jobs(&self, libtorch: &Libtorch, nvcc: Option<&Nvcc>, out_dir: &Path) -> Result<Vec<Job>> {
        let includes = self.all_includes();
        let archs = match nvcc {
            Some(_) => arch::choose(env_var("TORCH_CUDA_ARCH_LIST").as_deref(), &arch::visible_gpus)?,
            None => Vec::new(),
        };
        let mut jobs = Vec::new();
        for source in &self.sources {
            let unit = |folder: &str| Unit { source, includes: &includes, folder: out_dir.join(folder) };
            if source.extension().is_some_and(|extension| extension == "cu") {
                if let Some(nvcc) = nvcc {
                    jobs.push(unit("cuda").with_nvcc(nvcc, libtorch, &archs)?);
                }
            } else if source.file_name().is_some_and(|name| name == "cpu.cpp") {
                for (isa, flags) in ISAS {
                    // Their own folders: the objects' names are equal.
                    jobs.push(unit(&format!("isa/{isa}")).with_cxx(libtorch, nvcc, Some((isa, flags)))?);
                }
            } else {
                jobs.push(unit("cpp").with_cxx(libtorch, nvcc, None)?);
            }
        }
        Ok(jobs)
    }

    /// Our own folders and, for a crate that depends on tch-extension, the public headers.
    fn all_includes(&self) -> Vec<PathBuf> {
        let public = env_var("DEP_TCH_EXTENSION_INCLUDE");
        self.includes.iter().cloned().chain(public.map(PathBuf::from)).collect()
    }
}

/// Lets this package's programs, tests, benches and examples find libtorch without `LD_LIBRARY_PATH`.
/// Cargo does not pass such flags on, so each package that makes a final program calls this once.
pub fn link_args() {
    if is_doc_build() {
        return;
    }
    match Libtorch::find() {
        Ok(libtorch) => libtorch.link_args(),
        Err(error) => {
            eprintln!("error: {error:#}");
            std::process::exit(1)
        }
    }
}

fn is_doc_build() -> bool {
    std::env::var_os("DOCS_RS").is_some() || std::env::var_os("CARGO_FEATURE_DOC_ONLY").is_some()
}

/// Reads a variable and has cargo rerun the script when it changes.
fn env_var(name: &str) -> Option<String> {
    if !name.starts_with("DEP_") {
        println!("cargo::rerun-if-env-changed={name}");
    }
    std::env::var(name).ok().filter(|value| !value.is_empty())
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

/// The nvcc to use, or `None` to build without CUDA.
fn choose_nvcc(libtorch: &Libtorch) -> Result<Option<Nvcc>> {
    let wish = env_var("TCH_EXTENSION_CUDA");
    match wish.as_deref() {
        None | Some("0" | "1") => {}
        Some(other) => {
            bail!("TCH_EXTENSION_CUDA={other}: write 1 (CUDA must be there), 0 (leave it out) or unset it")
        }
    }
    if wish.as_deref() == Some("0") {
        return Ok(None);
    }
    let must = wish.is_some();
    let Some(major) = probe::libtorch_cuda_major(&libtorch.lib) else {
        if must {
            bail!(
                "TCH_EXTENSION_CUDA=1, but the libtorch in {} is a CPU build; set LIBTORCH to one with CUDA",
                libtorch.lib.display()
            );
        }
        return Ok(None);
    };
    let Some(nvcc) = probe::find_nvcc(&libtorch.lib, &env_var) else {
        if must {
            let tried: Vec<_> = probe::nvcc_candidates(&libtorch.lib, &env_var)
                .into_iter()
                .map(|(source, path)| format!("{} ({source})", path.display()))
                .collect();
            bail!("TCH_EXTENSION_CUDA=1, but there is no nvcc; set CUDA_HOME. Tried: {}", tried.join(", "));
        }
        println!(
            "cargo::warning=this libtorch has CUDA, but there is no nvcc: building without CUDA kernels (set \
             CUDA_HOME to a CUDA {major} toolkit to have them)"
        );
        return Ok(None);
    };
    if nvcc.version.major != major {
        bail!(
            "{} (from {}) is CUDA {}, but libtorch was built for CUDA {major}; point CUDA_HOME to a CUDA {major} \
             toolkit, or set TCH_EXTENSION_CUDA=0 to build without CUDA",
            nvcc.path.display(),
            nvcc.source,
            nvcc.version
        );
    }
    Ok(Some(nvcc))
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
