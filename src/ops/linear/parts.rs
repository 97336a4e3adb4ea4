//! The gradients as a plain function, below autograd.

use super::{Factors, Way, backward};
use crate::Result;
use crate::ops::way::forced;
use tch::Tensor;

/// The gradients of input, weight and bias that are needed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn linear_backward(
    grad: &Tensor,
    input: &Tensor,
    weight: &Tensor,
    [of_input, of_weight, of_bias]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let factors = Factors {
        input: of_weight.then(|| input.shallow_clone()),
        weight: of_input.then(|| weight.shallow_clone()),
    };
    backward(grad, &factors, &input.size(), of_bias, forced::<Way>())
}
