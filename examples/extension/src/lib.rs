//! How to write an operator, at each of four levels: from tch operations; as an
//! `autograd::Function` in Rust; in C++ on ATen; as kernels for the CPU and CUDA. Each level does
//! the same and is as differentiable as the others.
//!
//! - [`linear`]: `y = x Wᵀ + b`.
//! - [`lltm`]: one step of the LLTM cell of PyTorch's extension tutorial.
//! - [`muladd`]: operators that C++ registers with libtorch's dispatcher, called by name.

pub mod linear;
pub mod lltm;
pub mod muladd;
