//! The functions of `kernels.rs` for a build without CUDA, where all products are left to libtorch.

use super::{Counters, Way, WithZ};
use crate::Result;
use tch::Tensor;

/// All zeros: without CUDA there are no plans.
pub fn counters() -> Counters {
    Counters::default()
}

pub(crate) fn matmul_add_relu(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: Way,
) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn linear(_: &Tensor, _: &Tensor, _: Option<&Tensor>, _: Way) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn product(_: &Tensor, _: &Tensor, _: Way) -> Result<Option<Tensor>> {
    Ok(None)
}

pub(crate) fn linear_gelu(
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
    _: bool,
) -> Result<Option<WithZ>> {
    Ok(None)
}
