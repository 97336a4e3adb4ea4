//! Operators with a backward of their own, written in Rust, in libtorch's own graph.
//!
//! [`Function`] is `torch.autograd.Function`, [`apply`] its `apply`, [`grad()`] is `torch.autograd.grad`,
//! [`register_hook`] `Tensor.register_hook`, [`checkpoint()`] `torch.utils.checkpoint`.

mod checkpoint;
mod double_backward;
mod function;
mod grad;
mod hook;
mod pointers;
mod tensors;

pub use checkpoint::checkpoint;
pub use double_backward::differentiate_reference;
pub use function::{Context, Function, Saver, apply};
pub use grad::{GradOptions, grad};
pub use hook::{Hook, register_hook};
pub use tensors::{Inputs, Tensors};

/// How many nodes made by [`apply`] exist at the moment, in all threads: for tests that look for leaks.
pub fn live_nodes() -> i64 {
    crate::ffi::autograd::tch_extension_live_nodes()
}
