//! How to write an operator at each of four levels: with tch operations, as an `autograd::Function`
//! in Rust, in C++ on ATen, and as kernels for the CPU and CUDA. All levels compute the same and
//! are equally differentiable.
//!
//! - [`linear`]: `y = x Wᵀ + b`.
//! - [`lltm`]: one step of the LLTM cell of PyTorch's extension tutorial.
//! - [`muladd`]: operators that C++ registers with libtorch's dispatcher, called by name.

pub mod linear;
pub mod lltm;
pub mod muladd;
