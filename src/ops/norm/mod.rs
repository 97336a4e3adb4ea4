//! What the operators that normalise rows share.

mod add;
pub(super) mod kernels;
mod operator;
pub(super) mod parts;
mod plan;

pub(super) use add::{Added, Addends, f_add_norm};
pub(super) use operator::{KINDS, Statistic, check_input, f_norm, parameter_kinds};
#[cfg(tch_extension_cuda)]
pub(super) use plan::Plan;
#[doc(hidden)]
pub use plan::Way;
