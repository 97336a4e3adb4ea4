//! The functions of `kernels.rs` for a build without CUDA, where all products are left to libtorch.

use super::{Counters, Described, InputNorm, Operands, Way, WithZ};
use crate::Result;
use tch::Tensor;

/// All zeros: without CUDA there are no plans.
pub fn counters() -> Counters {
    Counters::default()
}

pub(super) fn describe(_: Operands<'_>) -> Result<Option<Described<'_>>> {
    Ok(None)
}

pub(super) fn run(_: &Described<'_>, _: Way) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(super) fn run_gelu(_: &Described<'_>, _: bool) -> Result<Option<WithZ>> {
    Ok(None)
}

pub(super) fn run_together<const N: usize>(
    _: [&Described<'_>; N],
    _: Option<InputNorm<'_>>,
    _: bool,
) -> Result<[Option<Tensor>; N]> {
    Ok([const { None }; N])
}
