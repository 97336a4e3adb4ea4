//! The loss and its gradient as two plain functions, below autograd.

use super::{CrossEntropy, CrossEntropyOptions, OP, check_arguments, is_in_range_without_scale};
use crate::ops::loss::check::check_targets;
use crate::ops::loss::kernels::scaled;
use crate::{Result, check};
use tch::{Reduction, Tensor};

/// Whether the forward computes the gradient of these logits.
///
/// # Errors
/// If the logits are undefined.
pub fn cross_entropy_is_ahead(logits: &Tensor, reduction: Reduction) -> Result<bool> {
    Ok(reduction != Reduction::None && is_in_range_without_scale(logits.f_kind()?))
}

fn function(options: &CrossEntropyOptions<'_>) -> CrossEntropy {
    let CrossEntropyOptions { reduction, ignore_index, label_smoothing, .. } = *options;
    CrossEntropy { reduction, ignore_index, label_smoothing, reuse_logits: false }
}

/// The loss and, if it is needed and [`cross_entropy_is_ahead`], the logits' gradient for an incoming
/// gradient of 1. The logits are left as they are.
///
/// # Errors
/// As for [`f_cross_entropy`](crate::ops::f_cross_entropy).
pub fn cross_entropy_forward(
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
    needs_gradient: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    check_arguments(logits, targets, options)?;
    if let Some(weight) = options.weight {
        check!(OP, weight).kind_as(logits.f_kind()?, "logits")?;
    }
    check_targets(OP, targets, logits.size2()?.1, options.ignore_index)?;
    let keep = needs_gradient && cross_entropy_is_ahead(logits, options.reduction)?;
    function(options).forward_of(logits, targets, options.weight, keep)
}

/// The logits' gradient. `gradient` is what the forward computed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn cross_entropy_backward(
    grad: &Tensor,
    gradient: Option<&Tensor>,
    logits: &Tensor,
    targets: &Tensor,
    options: &CrossEntropyOptions<'_>,
) -> Result<Tensor> {
    if let Some(gradient) = gradient {
        return scaled(&crate::ffi::tensor::plain(gradient)?, grad);
    }
    let own = |tensor: &Tensor| Some(tensor.shallow_clone());
    let inputs = [own(logits), own(targets), options.weight.and_then(own)];
    function(options).gradient_of_rows(&inputs, grad, false)
}
