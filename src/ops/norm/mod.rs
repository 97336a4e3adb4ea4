//! What the operators that normalise rows share.

pub(super) mod kernels;
mod plan;

#[cfg(tch_extension_cuda)]
pub(super) use plan::Plan;
#[doc(hidden)]
pub use plan::Way;
