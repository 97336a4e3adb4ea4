//! The gradients as a plain function, below autograd.

use super::{Saved, Shapes, Way, backward, result_kind};
use crate::Result;
use crate::ops::way::forced;
use tch::{Kind, Tensor};

/// The gradients of lhs, rhs and bias that are needed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn matmul_add_relu_backward(
    grad: &Tensor,
    out: &Tensor,
    lhs: &Tensor,
    rhs: &Tensor,
    bias: &Tensor,
    [of_lhs, of_rhs, of_bias]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let shapes = Shapes {
        lhs: lhs.size(),
        rhs: rhs.size(),
        kind: lhs.f_kind()?,
        bias: bias.size(),
        bias_kind: bias.f_kind()?,
    };
    let saved = Saved {
        lhs: of_rhs.then(|| lhs.shallow_clone()),
        rhs: of_lhs.then(|| rhs.shallow_clone()),
        out: out.shallow_clone(),
    };
    backward(grad, &saved, &shapes, of_bias, forced::<Way>())
}

/// The kind of the output, from the kind of the product and of the bias, and whether they have dimensions.
pub fn matmul_add_relu_kind(product: (Kind, bool), bias: (Kind, bool)) -> Kind {
    result_kind(product, bias)
}
