//! The functions of `kernels.rs` for a build without CUDA, where all products are left to libtorch.

use super::{Counters, Way, WithExtra};
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
) -> Result<Option<WithExtra>> {
    Ok(None)
}

pub(crate) fn product_gelu_grad(
    _: &Tensor,
    _: &Tensor,
    _: &Tensor,
    _: bool,
) -> Result<Option<WithExtra>> {
    Ok(None)
}

pub(crate) fn product_and_sums(_: &Tensor, _: &Tensor) -> Result<Option<WithExtra>> {
    Ok(None)
}
