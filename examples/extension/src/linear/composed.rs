//! Level 1: tch operations, which libtorch differentiates.

use tch::Tensor;
use tch_extension::Result;

/// Computes `x Wᵀ + b`.
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    Ok(x.f_matmul(&w.f_transpose(0, 1)?)?.f_add(b)?)
}
