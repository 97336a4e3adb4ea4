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
mod cxx;
pub mod environment;
mod extension;
mod libtorch;
pub mod probe;
pub mod toolchain;

pub use extension::{Built, Extension, link_args};

/// The libtorch that this version of the crate is written for.
pub const LIBTORCH_VERSION: &str = "2.11.0";
