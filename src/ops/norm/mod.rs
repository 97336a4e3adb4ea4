//! What the operators that normalise rows share.

pub(super) mod kernels;
mod operator;
mod plan;

pub(super) use operator::{KINDS, Statistic, check_input, f_norm, parameter_kinds};
#[cfg(tch_extension_cuda)]
pub(super) use plan::Plan;
#[doc(hidden)]
pub use plan::Way;
