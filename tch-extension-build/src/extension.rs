//! The build script's interface: what it says is to be compiled. `build.rs` does it.

use crate::toolchain::{Options, is_cuda};
use std::path::{Path, PathBuf};

mod build;

pub use build::{link_args, python_link_args};

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
///
/// A source that includes a header of `torch/` is first compiled without libtorch's C++ frontend
/// (`torch::nn`, `optim`, `data`, `serialize`), which halves the time, unless its text names something
/// of it. The macro `TCH_EXTENSION_FEWER_HEADERS` is defined then. If that fails, it is compiled with
/// all of libtorch's headers.
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
    /// The functions that the CUDA sources define for others, if they can be a library of their own.
    kernels: Option<PathBuf>,
    /// Whether the CUDA sources are those of such a library and stay in the archive.
    has_static_kernels: bool,
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
            kernels: None,
            has_static_kernels: false,
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
        self.check_selects("include_for", &path);
        self.options.includes_for.push((path, folder));
        self
    }

    /// Lets some sources include a header of a CUDA library that is no part of the toolkit, such as
    /// `nccl.h`, if CUDA is compiled in and the header is found: in the `include` folder of
    /// `NCCL_HOME` (named as the header), next to libtorch, where wheels have it, or where the system
    /// has headers. `path` is a source, or a folder of sources. They must ask by
    /// `__has_include(<nccl.h>)` whether it is there.
    pub fn cuda_header(mut self, path: impl Into<PathBuf>, header: &str) -> Self {
        let path = path.into();
        self.check_selects("cuda_header", &path);
        self.cuda_headers.push((path, header.to_string()));
        self
    }

    /// Declares in C++ what a Rust file shares with the kernels: its `#[repr(C)]` structs and
    /// `#[repr(i32)]` enums, with their comments, and the kernels that `kernels!` names, so that the
    /// compiler refuses a kernel that takes another struct. Those for the CPU are `noexcept`, as
    /// `TCH_EXTENSION_CPU_KERNEL` makes them, and their structs must be in the same file. Each is
    /// typed once, in Rust. Needs the feature `headers` of this crate.
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

    /// Lets the CUDA sources become a shared library if `TCH_EXTENSION_KERNELS` asks for one. `exports`
    /// is the linker script with their functions. For tch-extension itself.
    #[doc(hidden)]
    pub fn kernel_library(mut self, exports: impl Into<PathBuf>) -> Self {
        self.kernels = Some(exports.into());
        self
    }

    /// Keeps the CUDA sources in the archive, whatever `TCH_EXTENSION_KERNELS` says, with the objects that
    /// the kernel library is made from. For tch-extension itself.
    #[doc(hidden)]
    pub fn static_kernels(mut self) -> Self {
        self.has_static_kernels = true;
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

    /// Notes a mistake unless the path is that of a source, or of a folder of sources.
    fn check_selects(&mut self, function: &str, path: &Path) {
        if !self.sources.iter().any(|source| source.starts_with(path)) {
            self.mistake(|| {
                format!(
                    "{function}: no source that was added before begins with {} (relative to the package's folder)",
                    path.display()
                )
            });
        }
    }

    fn mistake(&mut self, message: impl FnOnce() -> String) {
        if self.mistake.is_none() {
            self.mistake = Some(message());
        }
    }
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
