//! The facts that a build depends on, as far as they can be known without running anything.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Environment variables that affect compilers. A build records further ones when it reads them.
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
    // Variables that the compilers themselves read.
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "LIBRARY_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
];

/// Facts about this process: which libtorch it uses, and which GPUs there are.
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

    /// The facts as text, one per line.
    pub fn text(&self) -> String {
        let library = self.libtorch.join("libtorch_cpu.so");
        let size = library.metadata().map_or(0, |file| file.len());
        let mut text = format!("tch-extension {}\n", env!("CARGO_PKG_VERSION"));
        text += &format!("libtorch in {}, {size} bytes\n", self.libtorch.display());
        // The GPUs determine the architectures if no list is given.
        text += &format!("GPUs {:?}\n", self.gpus);
        for name in VARIABLES {
            text += &format!("{name}={:?}\n", Self::variable(name));
        }
        text
    }

    /// The root folder of libtorch's headers, if they are not next to its libraries. It is the
    /// value that `LIBTORCH_INCLUDE` should have.
    pub fn include_root(&self) -> Option<PathBuf> {
        let has_headers = |root: &Path| root.join("include/torch/headeronly/version.h").is_file();
        let next_to_it = self.libtorch.parent()?;
        if has_headers(next_to_it) {
            return None;
        }
        Self::variable("LIBTORCH").map(PathBuf::from).filter(|root| has_headers(root))
    }
}

/// The folder of the `libtorch_cpu.so` that is mapped into this process. An extension must use this
/// one, because a second libtorch would share nothing with it.
fn loaded_libtorch() -> Option<PathBuf> {
    // Read as bytes, because the paths of other files in the list need not be UTF-8.
    let maps = std::fs::read("/proc/self/maps").ok()?;
    maps.split(|byte| *byte == b'\n').find_map(|line| {
        // A line has five fields and then the path, which may contain spaces.
        let path = &line[line.iter().position(|byte| *byte == b'/')?..];
        let path = Path::new(OsStr::from_bytes(path));
        (path.file_name()? == "libtorch_cpu.so").then(|| path.parent().map(Path::to_path_buf))?
    })
}

/// The models of the GPUs, read from the driver's files without running a program. Empty if there
/// is no driver.
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
