//! Layers of a few rows without a graph, as in generation, whose norms and sums take no launch of their own.

use super::Layer;
use crate::Result;
use crate::amp::Autocast;
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ops::gemm;
pub(crate) use crate::ops::gemm::InputNorm;
use crate::ops::way::forced;
use tch::{Kind, Tensor};

/// Three [`linear`](super::linear()) layers of `rms_norm(input)`. `None` unless one kernel computes it.
pub(crate) fn normed_linear_each(
    input: &Tensor,
    norm: InputNorm<'_>,
    layers: [Layer<'_>; 3],
) -> Result<Option<[Tensor; 3]>> {
    if !can_bypass(input) {
        return Ok(None);
    }
    gemm::linear_together(input, Some(norm), layers, forced())
}

/// `silu(x gateᵀ) (x upᵀ)` of x = `rms_norm(input)`. `None` unless one kernel computes it.
pub(crate) fn normed_gate(
    input: &Tensor,
    norm: InputNorm<'_>,
    [gate, up]: [&Tensor; 2],
) -> Result<Option<Tensor>> {
    if !can_bypass(input) {
        return Ok(None);
    }
    gemm::linear_gated(input, Some(norm), gate, up, forced())
}

/// `input @ weightᵀ + sum`, in one launch where a kernel computes it. `sum` has the output's size.
pub(crate) fn linear_add(input: &Tensor, weight: &Tensor, sum: &Tensor) -> Result<Tensor> {
    if can_bypass(input)
        && let Some(output) = gemm::linear_add(input, weight, sum, forced())?
    {
        return Ok(output);
    }
    Ok(super::f_linear(input, weight, None)?.f_add(sum)?)
}

/// Whether kernels may be called without autograd and autocast: no graph is recorded, and autocast would
/// cast nothing of BFloat16.
fn can_bypass(input: &Tensor) -> bool {
    !tch_extension_grad_mode()
        && Autocast::kind(input.device()).is_none_or(|kind| kind == Kind::BFloat16)
}
