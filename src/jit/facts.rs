//! What a build depends on, as far as it can be known without running anything.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Variables that steer compilers; more are found when a build asks for them.
const VARIABLES: &[&str] = &[
    "CXX",
    "CXXFLAGS",
    "NVCC",
    "NVCC_CCBIN",
    "NVCC_PREPEND_FLAGS",
    "NVCC_APPEND_FLAGS",
    "CUDA_HOME",
    "CUDA_PATH",
    "TORCH_CUDA_ARCH_LIST",
    "TCH_EXTENSION_CUDA",
    "LIBTORCH",
    "LIBTORCH_INCLUDE",
    "LIBTORCH_CXX11_ABI",
    // The compilers' own.
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
];

/// This process: which libtorch it runs on, which GPUs there are.
pub(super) struct Facts {
    /// The folder of the libtorch that is loaded.
    pub libtorch: PathBuf,
    /// The models of the GPUs.
    gpus: Vec<String>,
}

impl Facts {
    pub fn gather() -> crate::Result<Self> {
        let libtorch = loaded_libtorch().ok_or_else(|| {
            crate::Error::msg(
                "jit: libtorch_cpu.so is not among this process's libraries: a libtorch that is linked statically has \
                 nothing to compile against; link the shared one",
            )
        })?;
        Ok(Facts { libtorch, gpus: gpus() })
    }

    pub fn variable(name: &str) -> Option<String> {
        std::env::var(name).ok().filter(|value| !value.is_empty())
    }

    /// One line a fact.
    pub fn text(&self) -> String {
        let library = self.libtorch.join("libtorch_cpu.so");
        let size = library.metadata().map_or(0, |file| file.len());
        let mut text = format!("tch-extension {}\n", env!("CARGO_PKG_VERSION"));
        text += &format!("libtorch in {}, {size} bytes\n", self.libtorch.display());
        // They choose the architectures where no list does.
        text += &format!("GPUs {:?}\n", self.gpus);
        for name in VARIABLES {
            text += &format!("{name}={:?}\n", Self::variable(name));
        }
        text
    }

    /// Where libtorch's headers are, if not beside its libraries: what `LIBTORCH_INCLUDE` should
    /// say.
    pub fn include_root(&self) -> Option<PathBuf> {
        let has_headers = |root: &Path| root.join("include/torch/headeronly/version.h").is_file();
        let beside = self.libtorch.parent()?;
        if has_headers(beside) {
            return None;
        }
        Self::variable("LIBTORCH").map(PathBuf::from).filter(|root| has_headers(root))
    }
}

/// The folder of the `libtorch_cpu.so` that this process has mapped: a second libtorch would be a
/// second world.
fn loaded_libtorch() -> Option<PathBuf> {
    // Of other libraries and files, whose paths need be no text, too.
    let maps = std::fs::read("/proc/self/maps").ok()?;
    maps.split(|byte| *byte == b'\n').find_map(|line| {
        // Five fields and the path, which may contain spaces.
        let path = &line[line.iter().position(|byte| *byte == b'/')?..];
        let path = Path::new(OsStr::from_bytes(path));
        (path.file_name()? == "libtorch_cpu.so").then(|| path.parent().map(Path::to_path_buf))?
    })
}

/// From the driver, which asks no program; none where there is no driver.
fn gpus() -> Vec<String> {
    let folders = std::fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut models: Vec<String> = folders
        .filter_map(|folder| std::fs::read_to_string(folder.path().join("information")).ok())
        .filter_map(|text| Some(text.lines().find(|line| line.starts_with("Model"))?.to_string()))
        .collect();
    models.sort();
    models.dedup();
    models
}
