//! The norms as two plain functions each, below autograd: what [`parts`](crate::ops::parts) has of
//! them.

use super::add::{AddNorm, Added, Addends, Dropped, Kept, cast_parameters, check_arguments, place};
use super::kernels::Moments;
use super::operator::{Needs, Options, Saved, Statistic, backward, forward};
use crate::ffi::tensor::plain;
use crate::ops::add_layer_norm::AddLayerNorm;
use crate::ops::add_rms_norm::AddRmsNorm;
use crate::ops::layer_norm::LayerNorm;
use crate::ops::rms_norm::RmsNorm;
use crate::ops::way::forced;
use crate::{Error, Result, check};
use std::marker::PhantomData;
use tch::{Kind, Tensor};

fn options(normalized_shape: &[i64], eps: f64) -> Options {
    Options { normalized_shape: normalized_shape.to_vec(), eps, way: forced() }
}

fn absent() -> Error {
    Error::msg("internal error: the moments of the rows are absent")
}

/// y, the mean of each row and the inverse of its standard deviation; the last two are `[rows]`, of the
/// kind in which the norm is computed.
///
/// # Errors
/// As for [`f_layer_norm`](crate::ops::f_layer_norm).
pub fn layer_norm_forward(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (output, moments) = norm_forward::<LayerNorm>(input, normalized_shape, weight, bias, eps)?;
    Ok((output, moments.mean.ok_or_else(absent)?, moments.rstd))
}

/// The gradients of input, weight and bias that are needed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn layer_norm_backward(
    grad: &Tensor,
    (mean, rstd): (&Tensor, &Tensor),
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let moments = Moments { mean: Some(plain(mean)?), rstd: plain(rstd)? };
    norm_backward::<LayerNorm>(grad, moments, (input, normalized_shape, weight, bias), needs)
}

/// y and the inverse of each row's root mean square, `[rows]`. The weight's kind is the input's or, on
/// the CPU, `Float`.
///
/// # Errors
/// As for [`f_rms_norm`](crate::ops::f_rms_norm).
pub fn rms_norm_forward(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let (output, moments) = norm_forward::<RmsNorm>(input, normalized_shape, weight, None, eps)?;
    Ok((output, moments.rstd))
}

/// The gradients of input and weight that are needed.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn rms_norm_backward(
    grad: &Tensor,
    rstd: &Tensor,
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    [of_input, of_weight]: [bool; 2],
) -> Result<[Option<Tensor>; 2]> {
    let moments = Moments { mean: None, rstd: plain(rstd)? };
    let arguments = (input, normalized_shape, weight, None);
    let needs = [of_input, of_weight, false];
    let [input, weight, _] = norm_backward::<RmsNorm>(grad, moments, arguments, needs)?;
    Ok([input, weight])
}

fn norm_forward<S: Statistic>(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Moments)> {
    check!(S::OP, input).defined()?.supported_device()?;
    let options = options(normalized_shape, eps);
    let (output, moments) = forward::<S>(input, weight, bias, &options, true)?;
    Ok((output, moments.ok_or_else(absent)?))
}

type Arguments<'a> = (&'a Tensor, &'a [i64], Option<&'a Tensor>, Option<&'a Tensor>);

fn norm_backward<S: Statistic>(
    grad: &Tensor,
    moments: Moments,
    (input, normalized_shape, weight, bias): Arguments<'_>,
    needs: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let [of_input, of_weight, of_bias] = needs;
    let bias = bias.filter(|_| of_bias).map(Tensor::f_kind).transpose()?;
    let needs = Needs { input: of_input, weight: of_weight, bias };
    if !of_input && !of_weight && bias.is_none() {
        return Ok([const { None }; 3]);
    }
    let weight = weight.map(Tensor::shallow_clone);
    let saved = Saved { input: input.shallow_clone(), weight, moments };
    // The number that was added to the variance is in the moments.
    backward::<S>(grad, Some(&saved), &options(normalized_shape, 0.0), needs)
}

/// h, y, and the mean and the inverse of the standard deviation of each row of h, without dropout.
///
/// # Errors
/// As for [`f_add_layer_norm`](crate::ops::f_add_layer_norm).
pub fn add_layer_norm_forward(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor, Tensor)> {
    let addends = Addends { input, residual, weight, bias };
    let (sum, output, moments) = add_forward::<AddLayerNorm>(&addends, normalized_shape, eps)?;
    Ok((sum, output, moments.mean.ok_or_else(absent)?, moments.rstd))
}

/// The gradients of input, residual, weight and bias that are needed, from h's, if there is one, and
/// y's. Where input and residual have one kind, theirs may be one tensor.
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn add_layer_norm_backward(
    grads: (Option<&Tensor>, &Tensor),
    (sum, mean, rstd): (&Tensor, &Tensor, &Tensor),
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    needs: [bool; 4],
) -> Result<[Option<Tensor>; 4]> {
    let moments = Moments { mean: Some(plain(mean)?), rstd: plain(rstd)? };
    let arguments = (input, normalized_shape, weight, bias);
    add_backward::<AddLayerNorm>(grads, sum, moments, arguments, needs)
}

/// h, y and the inverse of the root mean square of each row of h, without dropout.
///
/// # Errors
/// As for [`f_add_rms_norm`](crate::ops::f_add_rms_norm).
pub fn add_rms_norm_forward(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: f64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let addends = Addends { input, residual, weight, bias: None };
    let (sum, output, moments) = add_forward::<AddRmsNorm>(&addends, normalized_shape, eps)?;
    Ok((sum, output, moments.rstd))
}

/// The gradients of input, residual and weight that are needed; see [`add_layer_norm_backward`].
///
/// # Errors
/// If libtorch or CUDA fails.
pub fn add_rms_norm_backward(
    grads: (Option<&Tensor>, &Tensor),
    (sum, rstd): (&Tensor, &Tensor),
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    [of_input, of_residual, of_weight]: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    let moments = Moments { mean: None, rstd: plain(rstd)? };
    let arguments = (input, normalized_shape, weight, None);
    let needs = [of_input, of_residual, of_weight, false];
    let [input, residual, weight, _] =
        add_backward::<AddRmsNorm>(grads, sum, moments, arguments, needs)?;
    Ok([input, residual, weight])
}

fn add_norm<A: Added>(
    input: &Tensor,
    normalized_shape: &[i64],
    eps: f64,
    bias: Option<&Tensor>,
) -> Result<AddNorm<A>> {
    let (kind, bias_kind) = (input.f_kind()?, bias.map(Tensor::f_kind).transpose()?);
    let options = options(normalized_shape, eps);
    Ok(AddNorm { options, dropout: 0.0, kind, bias_kind, operator: PhantomData })
}

fn add_forward<A: Added>(
    addends: &Addends<'_>,
    normalized_shape: &[i64],
    eps: f64,
) -> Result<(Tensor, Tensor, Moments)> {
    let Addends { input, residual, weight, bias } = *addends;
    check_arguments(A::OP, addends, normalized_shape, 0.0)?;
    let [own_weight, own_bias] = cast_parameters(addends, input.f_kind()?, residual.f_kind()?)?;
    let (weight, bias) = (own_weight.as_ref().or(weight), own_bias.as_ref().or(bias));
    let addends = Addends { input, residual, weight, bias };
    let made = add_norm::<A>(input, normalized_shape, eps, bias)?.outputs(&addends, true)?;
    Ok((made.sum, made.output, made.moments.ok_or_else(absent)?))
}

fn add_backward<A: Added>(
    (grad_sum, grad_output): (Option<&Tensor>, &Tensor),
    sum: &Tensor,
    moments: Moments,
    (input, normalized_shape, weight, bias): Arguments<'_>,
    needs: [bool; place::LEN],
) -> Result<[Option<Tensor>; place::LEN]> {
    let addends = Addends { input, residual: sum, weight, bias };
    let [own_weight, own_bias] = cast_parameters(&addends, input.f_kind()?, sum.f_kind()?)?;
    let (used_weight, used_bias) = (own_weight.as_ref().or(weight), own_bias.as_ref().or(bias));
    let weight_kind = weight.map(Tensor::f_kind).transpose()?;
    let bias_kind = bias.map(Tensor::f_kind).transpose()?;
    let kept = Kept {
        sum: sum.shallow_clone(),
        weight: used_weight.map(Tensor::shallow_clone),
        moments,
        dropped: Dropped::default(),
    };
    // The number that was added to the variance is in the moments.
    let norm = add_norm::<A>(input, normalized_shape, 0.0, used_bias)?;
    let [of_input, of_residual, of_weight, of_bias] =
        norm.gradients(grad_output, grad_sum, &kept, needs)?;
    let cast = |gradient: Option<Tensor>, kind: Option<Kind>| -> Result<Option<Tensor>> {
        Ok(gradient.zip(kind).map(|(gradient, kind)| gradient.f_to_kind(kind)).transpose()?)
    };
    Ok([of_input, of_residual, cast(of_weight, weight_kind)?, cast(of_bias, bias_kind)?])
}
