//! Compiles C++ and CUDA against libtorch from a build script. It is for Rust what
//! `torch.utils.cpp_extension` is for Python.
//!
//! # Set-up
//! You need a C++17 compiler (g++ 9 or newer), and libtorch and nvcc in one place, from PyPI:
//!
//! ```text
//! python3 -m pip install --target ~/libtorch-2.11 torch==2.11.0 nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85
//! export LIBTORCH=~/libtorch-2.11/torch
//! ```
//!
//! Nothing else has to be set: the nvcc next to libtorch is found. A CUDA toolkit of your own
//! (`CUDA_HOME`) works as well if its major version is that of libtorch's CUDA, and so does a
//! Python environment that has torch (`LIBTORCH_USE_PYTORCH=1`). Without any nvcc, everything but
//! `.cu` files is compiled.
//!
//! # A crate with kernels
//! It lies next to a clone of tch-extension's repository. tch 0.24 belongs to libtorch 2.11.0, and
//! 0.26 to 2.13.0 ([`LIBTORCH_VERSIONS`]); its default features would fetch another libtorch.
//!
//! ```toml
//! [dependencies]
//! tch = { version = "0.24", default-features = false }
//! tch-extension = { path = "../tch-extension" }
//!
//! [build-dependencies]
//! tch-extension-build = { path = "../tch-extension/tch-extension-build" }
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
//! sources that changed or whose headers did. The library reaches the final program through any
//! number of crates, and as a whole if it registers operators with `TORCH_LIBRARY`. Call
//! [`link_args`] in each package that makes a program or has tests: without it, they need
//! `LD_LIBRARY_PATH`. A library that Python loads calls [`python_link_args`] instead.
//!
//! If CUDA is compiled in, the cfg `tch_extension_cuda` is set for the crate and the macro
//! `TCH_EXTENSION_CUDA` for its C++ code:
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
//! | `LIBTORCH`, `LIBTORCH_USE_PYTORCH`, … | torch-sys' own variables, which choose the libtorch |
//! | `CXX`, `CXXFLAGS`, `AR` | the C++ compiler, its flags and the archiver, as for every crate that uses cc |
//! | `NVCC`, `CUDA_HOME`, `CUDA_PATH` | nvcc or its toolkit. Without them, nvcc is looked for next to libtorch, in `PATH` and in /usr/local/cuda |
//! | `NVCC_CCBIN` | the C++ compiler that nvcc uses |
//! | `TORCH_CUDA_ARCH_LIST` | the architectures to compile for, as in PyTorch: `8.0;9.0a+PTX`, `Hopper`, `native` ([`arch`]). Default: those of this machine's GPUs, or [`arch::DEFAULT_ARCHS`] if it has none |
//! | `TCH_EXTENSION_CUDA` | `0` leaves CUDA out, `1` makes it an error if CUDA cannot be compiled |
//! | `TCH_EXTENSION_KERNELS` | how programs get the CUDA kernels of tch-extension itself: `static` (the default), `shared` or a path (see below) |
//! | `TCH_EXTENSION_CHECK` | `1` compiles no C++ and no CUDA and needs no libtorch: for `cargo clippy`, `cargo check` and editors, which link nothing (see below) |
//! | `TCH_EXTENSION_ISAS` | `native` compiles CPU kernels only for the best instruction set of this machine's CPU, instead of three. The program then refuses to start on a CPU without it |
//! | `TCH_EXTENSION_CACHE` | the folder of the cache (below). Default: `tch_extension` in `XDG_CACHE_HOME` or `~/.cache` |
//! | `TCH_EXTENSION_COMPILE_CACHE` | `0` compiles without the cache |
//!
//! # The compile cache
//! An object that this user has compiled before is not compiled again, in whichever target folder,
//! checkout or crate: it is in the folder `objects` of the cache. It is found by what it is made
//! from, which is the command, the compiler and the contents of the source and of all headers,
//! those of libtorch, CUDA and the system, too. So it is the one that the compiler would make. What
//! this cannot tell is compiled each time: a source with `__TIME__`, for example, or with a flag such
//! as `-fplugin`. The C++ objects do not depend on nvcc and the architectures, nor the CUDA objects
//! on libtorch, unless they include its headers.
//!
//! Several builds may use the cache at a time. It takes 2 GB at most, and what was used longest ago
//! is removed first. `rm -r ~/.cache/tch_extension/objects` empties it at any time. It must belong to
//! you or to root, and nobody else may be able to write to it. If it cannot be used, everything is
//! compiled, with one warning. Its file `log` has a line for each build, which says how many objects
//! were up to date (`current`), were in the cache (`found`) and were `compiled`.
//!
//! # The kernels of tch-extension
//! By default, they are in a static library, and each program contains them. A program that is shipped
//! wants this. `TCH_EXTENSION_KERNELS` has other ways:
//!
//! - `shared`: one shared library for all programs. It is in the folder `kernels` of the cache and in
//!   the target folder, where programs find it while one of the two exists. The cache keeps the newest
//!   16 libraries, and all that were built in the last 90 days.
//! - The absolute path of such a library, which the wheel has: `python3 -m tch_extension kernels`
//!   prints it. Then no kernel is compiled and no nvcc is needed, but CUDA's headers, next to libtorch
//!   or in `CUDA_HOME`. Programs find it where it is now.
//!
//! A library must have the version, the parameters, the families and the architectures that are wanted
//! (`TORCH_CUDA_ARCH_LIST`, or this machine's GPUs), and be for libtorch's CUDA. Otherwise the build
//! says what is different. A program that finds another library in its place does not start.
//!
//! Cargo tells only direct dependents where the library is. So with both of these ways, a package that
//! makes a program must depend on tch-extension itself, and not on torch-sys alone, and call
//! [`link_args`].
//!
//! # Lints and editors
//! Cargo does not tell a build script that nothing will be linked, so say it:
//!
//! ```text
//! TCH_EXTENSION_CHECK=1 cargo clippy --all-targets --features tch-extension/doc-only
//! ```
//!
//! The feature lets torch-sys do the same. CUDA's items are checked unless `TCH_EXTENSION_CUDA=0` is
//! set, whether there is an nvcc or not. An editor needs a target folder of its own, because a build
//! script that has only checked runs again before the next program is linked. For rust-analyzer:
//!
//! ```json
//! {
//!   "rust-analyzer.cargo.features": ["tch-extension/doc-only"],
//!   "rust-analyzer.cargo.extraEnv": { "TCH_EXTENSION_CHECK": "1" },
//!   "rust-analyzer.cargo.targetDir": true
//! }
//! ```
//!
//! # Headers
//! Your kernels can include these headers as `tch_extension/….h`. The comment at the top of each
//! shows how it is used.
//!
//! | | contains | needs |
//! |---|---|---|
//! | `scalar_math.h` | sigmoid, tanh, relu, elu, silu, softplus, both kinds of gelu, and their gradients, for float and double, on host and device | |
//! | `accessor.h` | `Accessor<T, N>`: the elements of a strided tensor; `Strided<N>` and `StridedMut<N>`: strided tensors that come from Rust (`tch_extension::strided`) | |
//! | `tensor.h` | an `Accessor` for an `at::Tensor`, checked | torch |
//! | `kind.h` | libtorch's numbers for kinds, and the type for each number | |
//! | `launch.h` | `LaunchStatus` for `tch_extension::cuda::launch`, `for_kind` and `Compute` types, grid sizes, `is_aligned` | CUDA |
//! | `cuda_vector.h` | vector loads and stores, and the elements that are left over | CUDA |
//! | `cuda_reduce.h` | reductions over a warp or a block, for kernels in which one of them computes a row | CUDA |
//! | `column_sums.h`, `cuda_column_sums.h` | sums of columns (a bias' gradient), bitwise equal every time | CUDA |
//! | `cpu.h` | loops over `at::vec` on libtorch's threads, compiled once for each instruction set | torch |
//! | `cpu_column_sums.h` | the same sums on the CPU | torch |
//! | `c_abi.h` | `guard`: a C++ exception becomes a message instead of reaching Rust | torch |
//! | `host_device.h` | `TCH_EXTENSION_HOST_DEVICE`, for functions that run on host and device | |
//!
//! CUDA kernels need no torch header; without torch headers, nvcc takes only seconds.
//!
//! # At run time
//! [`toolchain`] does the same for programs that compile while they run; `tch_extension::jit` is
//! built on it.

pub mod arch;
mod command;
mod compile;
#[doc(hidden)]
pub mod content;
mod cxx;
pub mod environment;
mod extension;
mod fewer;
#[cfg(feature = "headers")]
pub mod headers;
mod identity;
mod isa;
mod isolate;
mod kernels;
mod libtorch;
mod objects;
mod paths;
#[doc(hidden)]
pub mod place;
pub mod probe;
mod search;
pub mod toolchain;
#[doc(hidden)]
pub mod trusted;

pub use extension::{Built, Extension, link_args, python_link_args};

/// Compiles the example of README.md as a test.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;

/// The libtorch versions that this crate supports, each with the version of tch (and torch-sys)
/// that it belongs to.
pub const LIBTORCH_VERSIONS: [(&str, &str); 2] = [("2.11.0", "0.24"), ("2.13.0", "0.26")];
