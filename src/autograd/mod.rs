//! Operators with a backward of their own, written in Rust, in libtorch's own graph.
//!
//! [`Function`] is `torch.autograd.Function`, [`apply()`] its `apply`, [`grad()`] is
//! `torch.autograd.grad`, [`backward`] `torch.autograd.backward`, [`register_hook`]
//! `Tensor.register_hook`, [`checkpoint()`] `torch.utils.checkpoint`, [`detect_anomaly`] and
//! [`saved_tensors_hooks`] are what Python calls so.

mod anomaly;
mod apply;
mod checkpoint;
mod double_backward;
mod function;
mod grad;
mod hook;
mod pointers;
mod saved_hooks;
mod tensors;

pub use anomaly::{DetectAnomaly, detect_anomaly};
pub use apply::{apply, apply_with};
pub use checkpoint::checkpoint;
pub use double_backward::differentiate_reference;
pub use function::{Context, Function, Saver};
pub use grad::{BackwardOptions, GradOptions, backward, grad, grad_fn, retain_grad};
pub use hook::{Hook, register_hook, register_post_accumulate_grad_hook};
pub use saved_hooks::{SavedTensorsHooks, save_on_cpu, saved_tensors_hooks};
pub use tensors::{Inputs, Tensors};

/// How many nodes made by [`apply`] exist at the moment, in all threads: for tests that look for
/// leaks.
pub fn live_nodes() -> i64 {
    crate::ffi::autograd::tch_extension_live_nodes()
}
