//! Operators with their own backward pass, written in Rust and recorded in libtorch's own graph.
//!
//! Each item here has a counterpart in Python:
//! - [`Function`] is `torch.autograd.Function`, and [`apply()`] is its `apply`.
//! - [`grad()`] and [`backward`] are `torch.autograd.grad` and `torch.autograd.backward`.
//! - [`register_hook`] is `Tensor.register_hook`.
//! - [`checkpoint()`] is `torch.utils.checkpoint.checkpoint`.
//! - [`detect_anomaly`] and [`saved_tensors_hooks`] have the same names in Python.

mod anomaly;
mod apply;
mod checkpoint;
mod context;
mod double_backward;
mod function;
mod grad;
mod hook;
mod saved_hooks;
mod saver;
mod tensors;

pub use anomaly::{DetectAnomaly, detect_anomaly};
pub(crate) use apply::apply_registered;
pub use apply::{apply, apply_with};
pub use checkpoint::checkpoint;
pub use context::Context;
pub use double_backward::differentiate_reference;
pub use function::Function;
pub use grad::{BackwardOptions, GradOptions, backward, grad, grad_fn, retain_grad};
pub use hook::{Hook, register_hook, register_post_accumulate_grad_hook};
pub use saved_hooks::{SavedTensorsHooks, save_on_cpu, saved_tensors_hooks};
pub use saver::Saver;
pub(crate) use saver::check_in_place;
pub use tensors::{Inputs, Tensors};

/// The number of graph nodes made by [`apply`] that are alive now, in all threads. Tests use it to
/// find leaks.
pub fn live_nodes() -> i64 {
    crate::ffi::autograd::tch_extension_live_nodes()
}
