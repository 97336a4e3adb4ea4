//! C++ and CUDA compiled and loaded while the program runs: what `torch.utils.cpp_extension.load`
//! and `load_inline` are in Python.
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
//! It needs a C++ compiler, for CUDA an nvcc, and libtorch's headers beside the libtorch that the
//! program runs on (or in `LIBTORCH_INCLUDE` or `LIBTORCH`), which
//! [tch-extension-build](https://docs.rs/tch-extension-build) finds and calls as it does in a build
//! script: `CXX`, `CXXFLAGS`, `NVCC`, `CUDA_HOME`, `TORCH_CUDA_ARCH_LIST` mean the same. Sources
//! see libtorch's headers, `tch_extension/...`, and, instead of Python's, headers that make
//! operators of what `PYBIND11_MODULE` defines: extensions written for Python compile unchanged.
//!
//! A first build takes as long as the compiler takes for libtorch's headers: two to four times as
//! long with `torch/extension.h` in a CUDA text as in a C++ text, and seconds where there are none.
//! Modules, optimizers, data loaders and serialization, the larger part of that header, are left
//! out at first; a source that does not compile so is compiled again with all of it, and the
//! message is that of the second attempt.
//!
//! # The cache
//! Libraries are kept in `TCH_EXTENSION_CACHE`, else `$XDG_CACHE_HOME/tch_extension`, else
//! `~/.cache/tch_extension`. A later load, in this process or another, finds its library there and
//! runs no compiler, unless something has changed: a source, a header it includes, a flag, a
//! compiler, libtorch, the GPUs, a variable. Many processes may ask at once: one builds, the others
//! wait. When it is killed, the next one builds. To make room, delete the folder.
//!
//! # Names
//! `TORCH_EXTENSION_NAME`, and so the operators' namespace in a `PYBIND11_MODULE`, is the
//! extension's name. A name cannot be registered twice, and libraries stay loaded: changed sources
//! that are loaded under the same name in the same process get the name with `_v1`, `_v2`, ..., as
//! in Python. [`Module::name`] says which. Operators of a `TORCH_LIBRARY` with a name of its own
//! have no such way out: loading changed sources is an error then.

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
