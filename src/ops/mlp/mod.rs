//! What `gelu_mlp` and `swiglu_mlp` share: the kernels between the products, and the products.

pub(super) mod kernels;
pub(super) mod plan;

use super::count_rows;
use super::gemm::{self, Way as ProductWay};
use crate::Result;
use crate::check::Check;
use crate::ffi::tensor::plain;
use tch::{Kind, Tensor};

pub use kernels::Activation;
#[doc(hidden)]
pub use plan::Way;

/// The kinds that the operators take.
pub(super) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// The arguments as autocast casts them; `cast` is what [`autocast_inputs`] made of them.
///
/// [`autocast_inputs`]: crate::amp::autocast_inputs
pub(super) fn cast_or_own<'a, const N: usize>(
    cast: Option<&'a [Option<Tensor>]>,
    own: [Option<&'a Tensor>; N],
) -> [Option<&'a Tensor>; N] {
    match cast {
        Some(cast) => std::array::from_fn(|place| cast.get(place)?.as_ref()),
        None => own,
    }
}

/// `input weightᵀ + bias` of matrices, contiguous.
pub(super) fn layer(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    way: ProductWay,
) -> Result<Tensor> {
    plain(&super::linear::forward(input, weight, bias, way)?)
}

/// A saved tensor as the kernels read it. A hook of libtorch's on saved tensors may have changed its
/// strides.
pub(super) fn plain_if_any(saved: Option<Tensor>) -> Result<Option<Tensor>> {
    saved.as_ref().map(plain).transpose()
}

/// `lhs rhs` of matrices, contiguous.
pub(super) fn product(lhs: &Tensor, rhs: &Tensor, way: ProductWay) -> Result<Tensor> {
    match gemm::product(lhs, rhs, way)? {
        Some(product) => Ok(product),
        None => Ok(lhs.f_mm(rhs)?),
    }
}

/// `lhsᵀ rhs`: the gradient of a weight, of the gradient of its layer's outputs and its inputs.
pub(super) fn weight_gradient(grad: &Tensor, input: &Tensor, way: ProductWay) -> Result<Tensor> {
    product(&grad.f_transpose(0, 1)?, input, way)
}

/// `sum + lhs rhs` in the place of `sum`, which belongs to the caller alone.
pub(super) fn add_product(mut sum: Tensor, lhs: &Tensor, rhs: &Tensor) -> Result<Tensor> {
    let _ = sum.f_addmm_(lhs, rhs)?;
    Ok(sum)
}

/// Checks that the input has rows, and returns their length.
pub(super) fn check_input(input: &Check<'_>) -> Result<i64> {
    let size = input.tensor().size();
    let Some(&features) = size.last() else {
        return Err(input.refuse("shape [..., D]", "a single number, []", "view it as [1]"));
    };
    if count_rows(&size).is_none() {
        let got = format!("{size:?}");
        return Err(input.refuse("leading sizes whose product fits 64 bits", got, ""));
    }
    Ok(features)
}
