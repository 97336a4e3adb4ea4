//! What `gelu_mlp` and `swiglu_mlp` share: the kernels between the products, and the products.

pub(super) mod kernels;
pub(super) mod plan;

use super::gemm::{self, Way as ProductWay};
use crate::Result;
use crate::ffi::tensor::plain;
use crate::operator::text_option;
use tch::{Kind, Tensor};

pub use kernels::Activation;
#[doc(hidden)]
pub use plan::Way;

text_option! {
    Activation {
        "gelu_tanh" = Activation::GeluTanh,
        "gelu" = Activation::Gelu,
        "relu_squared" = Activation::ReluSquared,
        "silu" = Activation::Silu,
    }
}

/// The kinds that the operators take.
pub(super) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// `input weightᵀ + bias` of matrices, contiguous.
pub(super) fn layer(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    way: ProductWay,
) -> Result<Tensor> {
    let planned = gemm::linear(input, weight, bias, way)?;
    plain(&planned.map_or_else(|| input.f_linear(weight, bias), Ok)?)
}

/// `lhs rhs` of matrices, contiguous.
pub(super) use gemm::mm as product;

/// `lhsᵀ rhs`: the gradient of a weight, of the gradient of its layer's outputs and its inputs.
pub(super) fn weight_gradient(grad: &Tensor, input: &Tensor, way: ProductWay) -> Result<Tensor> {
    product(&grad.f_transpose(0, 1)?, input, way)
}

/// `sum + lhs rhs` in the place of `sum`, which belongs to the caller alone.
pub(super) fn add_product(mut sum: Tensor, lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let _ = sum.f_addmm_(lhs, rhs)?;
    Ok(sum)
}
