//! Compiles and loads C++ and CUDA sources while the program runs, as
//! `torch.utils.cpp_extension.load` and `load_inline` do in Python.
//!
//! ```
//! use tch::Tensor;
//! use tch_extension::{args, jit};
//!
//! let shift = jit::Extension::new("shift")
//!     .cpp("torch::Tensor up(torch::Tensor x, double by) { return x + by; }")
//!     .functions(["up"])
//!     .load()?;
//! let y: Tensor = shift.operator("up")?.call(args![&Tensor::from_slice(&[1.0, 2.0]), 0.5])?;
//! assert_eq!(y, Tensor::from_slice(&[1.5, 2.5]));
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! It needs a C++ compiler, nvcc for CUDA sources, and libtorch's headers next to the libtorch that
//! the program uses (or in `LIBTORCH_INCLUDE` or `LIBTORCH`).
//! [tch-extension-build](https://docs.rs/tch-extension-build) finds and runs the compilers, as it
//! does in a build script: `CXX`, `CXXFLAGS`, `NVCC`, `CUDA_HOME` and `TORCH_CUDA_ARCH_LIST` have
//! the same meaning. Sources can include libtorch's headers and `tch_extension/...`. Python's
//! headers are replaced by headers that make operators from what `PYBIND11_MODULE` defines, so that
//! extensions written for Python compile unchanged.
//!
//! A first build takes as long as the compiler needs for libtorch's headers. With
//! `torch/extension.h`, a CUDA text takes two to four times as long as a C++ text. Without these
//! headers, a build takes seconds. The larger part of `torch/extension.h`, namely modules,
//! optimizers, data loaders and serialization, is left out at first. If a source does not compile
//! without it, the source is compiled again with all of the header, and the error message is the
//! second attempt's.
//!
//! # The cache
//! Libraries are kept in `TCH_EXTENSION_CACHE`, otherwise in `$XDG_CACHE_HOME/tch_extension`,
//! otherwise in `~/.cache/tch_extension`. A later load, in this process or another, finds its
//! library there and runs no compiler, unless something has changed: a source, a header that it
//! includes, a flag, a compiler, libtorch, the GPUs, or an environment variable. If several
//! processes ask at once, one builds and the others wait. If the builder is killed, another one
//! builds. Delete the folder to free its space.
//!
//! The folder holds code that runs in your program. So it must belong to you or to root, and nobody
//! else may be able to write to it; so must the folders in it. It may be a link of yours. A folder
//! that you made with a umask of 002 is refused, and the error says how to mend that.
//!
//! # Names
//! The extension's name is `TORCH_EXTENSION_NAME`, and so the namespace of the operators in a
//! `PYBIND11_MODULE`. A name cannot be registered twice, and libraries stay loaded. If changed
//! sources are loaded under the same name in the same process, the name therefore gets a suffix
//! `_v1`, `_v2`, ..., as in Python. [`Module::name`] returns the full name. A `TORCH_LIBRARY` with
//! a fixed name cannot be renamed in this way: loading changed sources of it is an error.

mod cache;
mod compile;
mod extension;
mod facts;
mod headers;
mod module;
mod sources;

pub use extension::{Extension, load, load_inline};
use facts::Facts;
pub use module::{Module, Symbol};
use sources::Sources;
