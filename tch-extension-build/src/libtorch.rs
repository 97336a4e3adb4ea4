//! An installed libtorch: its headers, its libraries and the CUDA runtime next to it.

use crate::LIBTORCH_VERSIONS;
use crate::environment::Environment;
use crate::{paths, probe};
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// An installed libtorch.
#[derive(Clone, Debug)]
pub struct Libtorch {
    /// The folder that holds `libtorch.so`.
    pub lib: PathBuf,
    /// The folders that hold `torch/torch.h` and `ATen/ATen.h`.
    pub includes: Vec<PathBuf>,
    /// The C++ ABI flag that it was built with.
    pub cxx11_abi: String,
}

impl Libtorch {
    /// The libtorch whose libraries are in `lib`. Its headers are next to that folder or in
    /// `LIBTORCH_INCLUDE`.
    pub fn at(lib: impl Into<PathBuf>, env: &dyn Environment) -> Result<Self> {
        let lib = lib.into();
        paths::check("libtorch's folder", &lib)?;
        let include = match env.var("LIBTORCH_INCLUDE") {
            Some(root) => Path::new(&root).join("include"),
            None => lib.parent().unwrap_or(&lib).join("include"),
        };
        check_version(&include, env)?;
        env.reads(&include.join("torch/headeronly/version.h"));
        let cxx11_abi = cxx11_abi(&lib, env)?;
        Ok(Libtorch {
            lib,
            includes: vec![include.clone(), include.join("torch/csrc/api/include")],
            cxx11_abi,
        })
    }

    /// The version, and the folder with links resolved, because a link may point elsewhere
    /// tomorrow.
    pub fn identity(&self) -> String {
        let place = self.lib.canonicalize().unwrap_or_else(|_| self.lib.clone());
        let version = self.includes.first().and_then(|include| probe::libtorch_version(include));
        format!("libtorch {} in {}", version.unwrap_or_default(), place.display())
    }

    /// The CUDA runtime that libtorch itself loads. A second copy would have its own current
    /// device.
    pub fn cuda_runtime(&self) -> Result<PathBuf> {
        self.cuda_library("cudart")
    }

    /// The path of the CUDA toolkit's library, such as `cublasLt`, that libtorch loads.
    pub fn cuda_library(&self, name: &str) -> Result<PathBuf> {
        let major = probe::libtorch_cuda_major(&self.lib).context("this libtorch has no CUDA")?;
        let (prefix, suffix) = (format!("lib{name}"), format!(".so.{major}"));
        let site = self.lib.join("../../nvidia");
        let wheels = std::fs::read_dir(site)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path().join("lib"));
        let mut folders = vec![self.lib.clone()];
        folders.extend(wheels);
        folders.extend(["/usr/local/cuda/lib64", "/usr/lib/x86_64-linux-gnu"].map(PathBuf::from));
        folders
            .iter()
            .flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten())
            .map(|entry| entry.path())
            .find(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                // libtorch's own archives have a checksum between the prefix and the suffix. The
                // check must also tell `cublas` from `cublasLt`.
                let between =
                    name.strip_prefix(&prefix).and_then(|name| name.strip_suffix(&suffix));
                between.is_some_and(|between| between.is_empty() || between.starts_with('-'))
            })
            .with_context(|| {
                format!("libtorch wants {prefix}{suffix}, which is not in {}", list(&folders))
            })
    }
}

fn list(folders: &[PathBuf]) -> String {
    folders.iter().map(|folder| folder.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The C++ ABI flag, from torch-sys' variable and from the library itself, in which the mangled
/// names of functions that take a `std::string` show the ABI. An error if the two differ.
fn cxx11_abi(lib: &Path, env: &dyn Environment) -> Result<String> {
    let bytes = std::fs::read(lib.join("libc10.so")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let built_with = if text.contains("NSt7__cxx1112basic_string") {
        Some("1")
    } else {
        text.contains("_ZN3c105Error").then_some("0")
    };
    match (env.var("LIBTORCH_CXX11_ABI"), built_with) {
        (Some(named), Some(built_with)) if named != built_with => {
            bail!(
                "LIBTORCH_CXX11_ABI={named}, but the libtorch in {} was built with {built_with}; unset it",
                lib.display()
            )
        }
        (named, built_with) => {
            Ok(named.or(built_with.map(str::to_string)).unwrap_or_else(|| "1".to_string()))
        }
    }
}

fn check_version(include: &Path, env: &dyn Environment) -> Result<()> {
    // This is torch-sys' own variable for skipping the check.
    if env.var("LIBTORCH_BYPASS_VERSION_CHECK").is_some() {
        return Ok(());
    }
    let version = probe::libtorch_version(include).with_context(|| {
        format!("no libtorch headers in {}; is LIBTORCH right?", include.display())
    })?;
    if LIBTORCH_VERSIONS.iter().all(|(known, _)| version != *known) {
        let known = LIBTORCH_VERSIONS
            .map(|(libtorch, tch)| format!("{libtorch} (with tch {tch})"))
            .join(" or ");
        bail!(
            "libtorch {version} in {}, but this version of tch-extension needs {known}; set LIBTORCH to one of them, or \
             LIBTORCH_BYPASS_VERSION_CHECK=1 to try anyway",
            include.display()
        );
    }
    Ok(())
}
