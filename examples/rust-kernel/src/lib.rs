//! Operators whose kernels are written in Rust, with cuTile (`kernels/src/kernels.rs`), and compiled
//! ahead of time to cubins. `cuda::Kernel` launches them on libtorch's current stream, on the memory
//! of `tch::Tensor`s. A program with these operators needs neither cuTile nor a compiler.
//!
//! - [`silu()`]: `x / (1 + exp(-x))`. The backward pass is a kernel, too.
//! - [`matmul_add_relu()`]: `relu(x @ y + bias)`. The backward pass consists of tch's operations.
//!
//! On the CPU both compute with tch's operations, so that tests of code that calls them need no GPU.

mod images;
mod matmul_add_relu;
mod silu;
mod tensors;

pub use images::prepare;
pub use matmul_add_relu::matmul_add_relu;
pub use silu::silu;
