//! Which libtorch, what to tell the linker about it, and what to tell the crates that depend on this one.

use crate::probe::{self, Nvcc};
use crate::{LIBTORCH_VERSION, env_var};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// An installed libtorch.
pub struct Libtorch {
    /// Holds `libtorch.so`.
    pub lib: PathBuf,
    /// Hold `torch/torch.h` and `ATen/ATen.h`.
    pub includes: Vec<PathBuf>,
    /// The C++ ABI flag that it was built with.
    pub cxx11_abi: String,
}

impl Libtorch {
    /// The one that torch-sys links: its folder reaches direct dependents of torch-sys, and through us those
    /// of tch-extension.
    pub fn find() -> Result<Self> {
        if env_var("CARGO_CFG_TARGET_OS").as_deref() != Some("linux")
            || env_var("CARGO_CFG_TARGET_ARCH").as_deref() != Some("x86_64")
        {
            bail!("tch-extension supports Linux on x86-64 only");
        }
        let lib = env_var("DEP_TCH_LIBTORCH_LIB").or_else(|| env_var("DEP_TCH_EXTENSION_LIBTORCH_LIB"));
        let lib = PathBuf::from(lib.context(
            "cargo did not say where libtorch is; add tch-extension (or torch-sys) to [dependencies]: cargo tells \
             direct dependents only",
        )?);
        let include = match env_var("LIBTORCH_INCLUDE") {
            Some(root) => Path::new(&root).join("include"),
            None => lib.parent().unwrap_or(&lib).join("include"),
        };
        check_version(&include)?;
        println!("cargo::rerun-if-changed={}", include.join("torch/headeronly/version.h").display());
        Ok(Libtorch {
            lib,
            includes: vec![include.clone(), include.join("torch/csrc/api/include")],
            cxx11_abi: env_var("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".to_string()),
        })
    }

    /// What an object was compiled for: where libtorch really lies (a link may lead elsewhere tomorrow), its version
    /// and CUDA's.
    pub fn identity(&self, nvcc: Option<&Nvcc>) -> String {
        let place = self.lib.canonicalize().unwrap_or_else(|_| self.lib.clone());
        let version = self.includes.first().and_then(|include| probe::libtorch_version(include));
        let cuda = nvcc.map(|nvcc| nvcc.version.to_string());
        format!("libtorch {} in {}, CUDA {cuda:?}", version.unwrap_or_default(), place.display())
    }

    /// Link lines and metadata. `includes` are the crate's own public headers.
    pub fn publish(&self, nvcc: Option<&Nvcc>, includes: &[PathBuf]) -> Result<()> {
        println!("cargo::rustc-link-search=native={}", self.lib.display());
        println!("cargo::metadata=libtorch_lib={}", self.lib.display());
        if let Some(include) = includes.first() {
            let include = include.canonicalize().unwrap_or_else(|_| include.clone());
            println!("cargo::metadata=include={}", include.display());
        }
        if nvcc.is_some() {
            let runtime = self.cuda_runtime()?;
            let folder = runtime.parent().unwrap_or(&self.lib);
            let name = runtime.file_name().unwrap_or_default().to_string_lossy().into_owned();
            println!("cargo::rustc-link-search=native={}", folder.display());
            // By its full name: wheels hold `libcudart.so.13` and no `libcudart.so`.
            println!("cargo::rustc-link-lib=dylib:+verbatim={name}");
            println!("cargo::rustc-link-lib=dylib=c10_cuda");
        }
        Ok(())
    }

    /// See [`crate::link_args`].
    pub fn link_args(&self) {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{}", self.lib.display());
        if let Ok(runtime) = self.cuda_runtime()
            && let Some(folder) = runtime.parent()
        {
            println!("cargo::rustc-link-arg=-Wl,-rpath,{}", folder.display());
        }
    }

    /// The very CUDA runtime that libtorch loads; a second copy would have its own idea of the current device.
    fn cuda_runtime(&self) -> Result<PathBuf> {
        let major = probe::libtorch_cuda_major(&self.lib).context("this libtorch has no CUDA")?;
        let suffix = format!(".so.{major}");
        let site = self.lib.join("../../nvidia");
        let wheels =
            std::fs::read_dir(site).into_iter().flatten().flatten().map(|entry| entry.path().join("lib"));
        let mut folders = vec![self.lib.clone()];
        folders.extend(wheels);
        folders.extend(["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
        folders
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
            .map(|entry| entry.path())
            .find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with("libcudart") && name.ends_with(&suffix)
            })
            .with_context(|| format!("libtorch wants libcudart{suffix}, which is not in {}", list(&folders)))
    }
}

fn list(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn check_version(include: &Path) -> Result<()> {
    // torch-sys' own switch.
    if env_var("LIBTORCH_BYPASS_VERSION_CHECK").is_some() {
        return Ok(());
    }
    let version = probe::libtorch_version(include)
        .with_context(|| format!("no libtorch headers in {}; is LIBTORCH right?", include.display()))?;
    if version != LIBTORCH_VERSION {
        bail!(
            "libtorch {version} in {}, but this version of tch-extension needs {LIBTORCH_VERSION}; set LIBTORCH to a \
             libtorch {LIBTORCH_VERSION}, or LIBTORCH_BYPASS_VERSION_CHECK=1 to try anyway",
            include.display()
        );
    }
    Ok(())
}
