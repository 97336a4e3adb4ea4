//! The loss and its gradients as two plain functions, below autograd.

use super::{
    GRADIENTS, Layer, LinearCrossEntropy, LinearCrossEntropyOptions, OP, check_arguments, times,
};
use crate::ffi::tensor::plain;
use crate::ops::loss::check::check_targets;
use crate::ops::loss::kernels::{compute_kind, is_in_range_without_scale, times_gradient};
use crate::{Result, check};
use tch::{Reduction, Tensor};

/// Whether the forward computes the gradients of this input's layer.
///
/// # Errors
/// If the input is undefined.
pub fn linear_cross_entropy_is_ahead(input: &Tensor, reduction: Reduction) -> Result<bool> {
    Ok(reduction != Reduction::None && is_in_range_without_scale(input.f_kind()?))
}

/// The tensors of a call.
#[derive(Clone, Copy)]
pub struct LinearCrossEntropyArguments<'a> {
    /// `[N, D]`
    pub input: &'a Tensor,
    /// `[V, D]`
    pub weight: &'a Tensor,
    /// `[V]`
    pub bias: Option<&'a Tensor>,
    /// `[N]`
    pub targets: &'a Tensor,
}

impl LinearCrossEntropyArguments<'_> {
    fn layer(&self) -> Result<Layer> {
        Ok(Layer {
            input: self.input.f_detach()?,
            weight: self.weight.f_detach()?,
            bias: self.bias.map(Tensor::f_detach).transpose()?,
            targets: plain(self.targets)?,
        })
    }
}

/// The loss and, if [`linear_cross_entropy_is_ahead`], those gradients of input, weight and bias that
/// are needed, for an incoming gradient of 1.
///
/// # Errors
/// As for [`f_linear_cross_entropy`](crate::ops::f_linear_cross_entropy).
pub fn linear_cross_entropy_forward(
    arguments: &LinearCrossEntropyArguments<'_>,
    options: &LinearCrossEntropyOptions,
    needs: [bool; GRADIENTS],
) -> Result<(Tensor, [Option<Tensor>; GRADIENTS])> {
    let LinearCrossEntropyArguments { input, weight, bias, targets } = *arguments;
    check_arguments(input, weight, bias, targets, options)?;
    let like = check!(OP, input);
    check!(OP, weight).like(&like)?;
    bias.map(|bias| check!(OP, bias).like(&like)).transpose()?;
    check_targets(OP, targets, weight.size2()?.0, options.ignore_index)?;
    let is_ahead = linear_cross_entropy_is_ahead(input, options.reduction)?;
    let wanted = needs.map(|needed| is_ahead && needed);
    LinearCrossEntropy { options: *options }.losses(&arguments.layer()?, wanted)
}

/// Those gradients of input, weight and bias that are needed. `saved` is what the forward computed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn linear_cross_entropy_backward(
    grad: &Tensor,
    saved: [Option<&Tensor>; GRADIENTS],
    arguments: &LinearCrossEntropyArguments<'_>,
    options: &LinearCrossEntropyOptions,
    needs: [bool; GRADIENTS],
) -> Result<[Option<Tensor>; GRADIENTS]> {
    if linear_cross_entropy_is_ahead(arguments.input, options.reduction)? {
        let own = |(saved, needed): (Option<&Tensor>, bool)| {
            saved.filter(|_| needed).map(plain).transpose()
        };
        let saved = saved.into_iter().zip(needs).map(own).collect::<Result<Vec<_>>>()?;
        return times(saved, grad, false);
    }
    let function = LinearCrossEntropy { options: *options };
    let layer = arguments.layer()?;
    let compute = compute_kind(layer.input.f_kind()?);
    let factors = match function.factor(&layer)? {
        Some(factor) => times_gradient(&factor, grad)?,
        None => plain(&grad.f_to_kind(compute)?)?,
    };
    function.chunked(&layer, None, Some(&factors), needs)
}
