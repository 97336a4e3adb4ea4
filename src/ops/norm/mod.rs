//! What the operators that normalise rows share.

pub(super) mod kernels;
mod plan;

pub(super) use plan::Plan;
#[doc(hidden)]
pub use plan::Way;
