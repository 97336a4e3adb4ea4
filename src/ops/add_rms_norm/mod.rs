//! RMS normalisation of a residual sum.

use super::norm::kernels::add::AddKernels;
use super::norm::{Added, Addends, f_add_norm};
use super::rms_norm::default_eps;
use super::rms_norm::{RmsNorm, rms_norm_reference};
use crate::{Result, check};
use tch::Tensor;

mod kernels;

const OP: &str = "add_rms_norm";

/// The statistic is that of rms_norm.
pub(super) struct AddRmsNorm;

impl Added for AddRmsNorm {
    const OP: &'static str = OP;
    const KERNELS: AddKernels = kernels::KERNELS;
    type Norm = RmsNorm;
}

/// Adds a branch to a residual stream, and normalises the sum: what stands between two blocks of a
/// transformer.
///
/// ```text
/// h = drop(x) + residual
/// y = rms_norm(h)
/// ```
///
/// * `input`: x, the branch, `[*, normalized_shape]`, of kind `Float`, `Double`, `Half` or
///   `BFloat16`, on the CPU or CUDA
/// * `residual`: the stream, of the input's shape, and of its kind or, with an input of a half kind,
///   `Float`
/// * `normalized_shape`: the trailing sizes of `input`, one or several
/// * `weight`: w, `[normalized_shape]`; `None` for ones
/// * `eps`: added to the mean square; `None` as for [`rms_norm`](super::rms_norm()), of the kind of h
/// * `dropout`: the probability that a value of x becomes zero, from 0 to 1; the others are divided by
///   1 less that probability. Pass 0 in evaluation.
///
/// Returns (h, y), contiguous, both of the input's shape; h has the kind of `residual` and y that
/// of `input`. h is rounded to its kind before it is normalised, as
/// [`rms_norm`](super::rms_norm()) of the stored sum would be, and y is rounded once. The weight
/// has the input's kind or, with an input of a half kind, `Float`. On CUDA it is rounded to the
/// kind of `residual`. Strides and sizes are arbitrary, and tensors may be empty. Autocast
/// changes nothing, because y already has the kind in which the next product reads it. There are
/// first and second derivatives with respect to each tensor. As those of libtorch's addition, the
/// gradients of `input` and `residual` may be one tensor and, if only h has one, that incoming
/// gradient itself.
///
/// On CUDA the operator works on libtorch's current stream and never waits for the GPU. If rows begin
/// at multiples of 16 bytes and have up to 8192 values (`Double` 4096), the forward pass reads x and
/// residual once and writes h and y once, and the backward pass reads h and both gradients once and
/// writes one gradient once (two with dropout or two kinds). Other rows, and those of which a block of
/// an older GPU cannot hold two in shared memory, are added by libtorch and normalised by
/// [`rms_norm`](super::rms_norm())'s kernels. The kernel draws dropout's random numbers from libtorch's
/// generator, so that a captured graph draws new ones in each replay; the probability is rounded to a
/// multiple of 2⁻¹⁶. It draws other numbers than libtorch's `dropout`, which other rows and the CPU use.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{add_rms_norm, rms_norm};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, residual) = (Tensor::randn([5, 6], options), Tensor::randn([5, 6], options));
/// # let w = Tensor::randn([6], options);
/// let sum = x.dropout(0.0, true) + &residual;
/// let output = rms_norm(&sum, &[6], Some(&w), Some(1e-5));
///
/// let (h, y) = add_rms_norm(&x, &residual, &[6], Some(&w), Some(1e-5), 0.0);
/// assert!(h == sum && y.allclose(&output, 1e-12, 1e-12, false));
/// ```
///
/// Source: Zhang and Sennrich, Root Mean Square Layer Normalization,
/// <https://arxiv.org/abs/1910.07467>.
///
/// # Panics
/// If [`f_add_rms_norm`] returns an error.
pub fn add_rms_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
    dropout: f64,
) -> (Tensor, Tensor) {
    super::unwrap(f_add_rms_norm(input, residual, normalized_shape, weight, eps, dropout))
}

/// [`add_rms_norm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device, shape or value than stated (the error names the argument),
/// or if libtorch or CUDA fails.
pub fn f_add_rms_norm(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
    dropout: f64,
) -> Result<(Tensor, Tensor)> {
    check!(OP, residual).defined()?;
    let eps = eps.map_or_else(|| default_eps(residual), Ok)?;
    let addends = Addends { input, residual, weight, bias: None };
    f_add_norm::<AddRmsNorm>(&addends, normalized_shape, eps, dropout)
}

/// [`add_rms_norm`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn add_rms_norm_reference(
    input: &Tensor,
    residual: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
    dropout: f64,
) -> Result<(Tensor, Tensor)> {
    let sum = input.f_dropout(dropout, true)?.f_add(residual)?;
    let output = rms_norm_reference(&sum, normalized_shape, weight, eps)?;
    Ok((sum, output.f_to_kind(input.f_kind()?)?))
}
