//! What the operators that normalise rows share.

mod add;
pub(crate) mod kernels;
pub(crate) mod plan;
mod rule;
pub(super) mod tensors;

pub(super) use add::{AddNorm, Addends, Read, cast, dropped_outside, gradients_of_sum};
#[cfg(tch_extension_cuda)]
pub(super) use plan::Plan;
#[doc(hidden)]
pub use plan::Way;
#[cfg(test)]
pub(super) use plan::ways_on_h200;
pub(super) use rule::{KINDS, add_rule, moment, parameter_kinds, rule};
