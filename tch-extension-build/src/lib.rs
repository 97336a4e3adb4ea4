//! Compiles C++ and CUDA against libtorch from a build script: for Rust what
//! `torch.utils.cpp_extension` is for Python.
//!
//! # Set-up
//! A C++17 compiler (g++ 9 or newer), and libtorch and nvcc in one place, from PyPI:
//!
//! ```text
//! python3 -m pip install --target ~/libtorch-2.11 torch==2.11.0 nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85
//! export LIBTORCH=~/libtorch-2.11/torch
//! ```
//!
//! Nothing else: the nvcc beside libtorch is found. A CUDA toolkit of your own serves as well
//! (`CUDA_HOME`), if its major version is libtorch's, and so does a Python environment that has
//! torch (`LIBTORCH_USE_PYTORCH=1`). Without any nvcc, everything but `.cu` is compiled.
//!
//! # A crate with kernels
//! ```toml
//! [dependencies]
//! tch = { version = "0.24", default-features = false }
//! tch-extension = "0.1"
//!
//! [build-dependencies]
//! tch-extension-build = "0.1"
//! ```
//!
//! ```no_run
//! // In `main` of build.rs:
//! tch_extension_build::Extension::new("my_ops").source_dir("csrc").build_or_exit();
//! tch_extension_build::link_args();
//! ```
//!
//! [`Extension`] takes sources, include folders, macros, flags for each compiler, libraries of the
//! CUDA toolkit, architectures and the C++ standard. Several compilers run at a time, and only for
//! what changed, headers included. Its library reaches the final program through any number of
//! crates, and whole if it registers operators with `TORCH_LIBRARY`. [`link_args`] is for each
//! package that makes a program or has tests: without it they need `LD_LIBRARY_PATH`.
//!
//! Where CUDA is compiled in, the cfg `tch_extension_cuda` is set for the crate and the macro
//! `TCH_EXTENSION_CUDA` for its C++:
//!
//! ```
//! #[cfg(tch_extension_cuda)]
//! unsafe extern "C" {
//!     fn my_ops_scale_cuda(params: *const std::ffi::c_void, stream: *mut std::ffi::c_void);
//! }
//! ```
//!
//! # Variables
//! | | |
//! |---|---|
//! | `LIBTORCH`, `LIBTORCH_USE_PYTORCH`, … | torch-sys' own: which libtorch |
//! | `CXX`, `CXXFLAGS`, `AR` | the C++ compiler, as for every crate that uses cc |
//! | `NVCC`, `CUDA_HOME`, `CUDA_PATH` | nvcc or its toolkit; then beside libtorch, `PATH`, /usr/local/cuda |
//! | `NVCC_CCBIN` | the C++ compiler that nvcc uses |
//! | `TORCH_CUDA_ARCH_LIST` | for which GPUs, as in PyTorch: `8.0;9.0a+PTX`, `Hopper`, `native` ([`arch`]). Default: this machine's GPUs, or [`arch::DEFAULT_ARCHS`] where there is none |
//! | `TCH_EXTENSION_CUDA` | `0` leaves CUDA out, `1` makes its absence an error |
//! | `TCH_EXTENSION_OBJECTS` | a folder in which objects are kept, by an absolute path, instead of one of each build's: cargo builds a crate again for clippy and for each workspace that depends on it, and with this compiles its C++ and CUDA once. For one build at a time |
//!
//! # Headers
//! What kernels of one's own include, as `tch_extension/….h`; the comment at the top of each shows
//! its use.
//!
//! | | gives | needs |
//! |---|---|---|
//! | `scalar_math.h` | sigmoid, tanh, relu, elu, silu, softplus, gelu (both) and their gradients, for float and double, host and device | |
//! | `accessor.h` | `Accessor<T, N>`: the elements of a strided tensor; `Strided<N>`, `StridedMut<N>`, as they come from Rust (`tch_extension::strided`) | |
//! | `tensor.h` | `Accessor` of an `at::Tensor`, checked | torch |
//! | `kind.h` | libtorch's numbers of kinds, and from a number to a type | |
//! | `launch.h` | `LaunchStatus` for `tch_extension::cuda::launch`, `for_kind` and `Compute` types, sizes of grids, `is_aligned` | CUDA |
//! | `cuda_vector.h` | vector loads and stores, and their tails | CUDA |
//! | `column_sums.h`, `cuda_column_sums.h` | sums of columns (a bias' gradient), the same bits every time | CUDA |
//! | `cpu.h` | loops over `at::vec` on libtorch's threads, one unit for each instruction set | torch |
//! | `cpu_column_sums.h` | the same sums on the CPU | torch |
//! | `c_abi.h` | `guard`: a C++ exception becomes a message instead of reaching Rust | torch |
//! | `host_device.h` | `TCH_EXTENSION_HOST_DEVICE`, for functions of both sides | |
//!
//! Kernels of CUDA need no torch header; without, nvcc is done in seconds.
//!
//! # At run time
//! [`toolchain`] is the same for programs that compile while they run; `tch_extension::jit` is
//! built on it.

pub mod arch;
mod compile;
mod cxx;
pub mod environment;
mod extension;
mod fewer;
mod isolate;
mod libtorch;
mod paths;
pub mod probe;
pub mod toolchain;

pub use extension::{Built, Extension, link_args};

#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;

/// The libtorch versions that this crate is written for, and the tch (and torch-sys) that each
/// belongs to.
pub const LIBTORCH_VERSIONS: [(&str, &str); 2] = [("2.11.0", "0.24"), ("2.13.0", "0.26")];
