//! RMS normalisation.

use super::norm::kernels::{Kernels, compute_kind};
use super::norm::{KINDS, Statistic, check_input, f_norm, parameter_kinds};
use crate::{Result, check};
use tch::{Kind, Tensor};

mod kernels;

const OP: &str = "rms_norm";

/// The statistic of rms_norm.
pub(super) struct RmsNorm;

impl Statistic for RmsNorm {
    const OP: &'static str = OP;
    const KERNELS: Kernels = kernels::KERNELS;

    fn reference(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        _bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        rms_norm_reference(input, normalized_shape, weight, Some(eps))
    }
}

/// Divides by the root of the mean square over the trailing dimensions `normalized_shape`, then
/// multiplies by the weight, element by element.
///
/// ```text
/// y = x / √(Σ x² / N + eps) · w
/// ```
///
/// * `input`: x, `[*, normalized_shape]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the
///   CPU or CUDA
/// * `normalized_shape`: the trailing sizes of `input`, one or several, with N elements
/// * `weight`: w, `[normalized_shape]`; `None` for ones
/// * `eps`: added to the mean square; `None` for the distance from 1 to the next number of the kind
///   in which the operator computes, as in libtorch: 2⁻²³, and 2⁻⁵² for `Double`
///
/// Returns y, contiguous, with `input`'s shape and kind. Strides and sizes are arbitrary, and
/// tensors may be empty. The weight may have any of the four kinds, as in libtorch: the kernels take
/// one of the input's kind and, on the CPU, `Float` beside a half kind; with any other this is
/// [`rms_norm_reference`]. For the half kinds everything is computed in `Float` and rounded once.
/// Autocast changes nothing, as in libtorch. There are first and second derivatives with respect to
/// each tensor. On CUDA the operator works on libtorch's current stream and never waits for the GPU.
/// It is deterministic; the order of sums depends on sizes, and on CUDA also on whether all tensors
/// allow 16-byte loads.
///
/// An output or gradient of kind `Float`, `Half` or `BFloat16` is no further from the exact value
/// than that of libtorch's own operator, apart from two roundings. A row that contains an infinity
/// or NaN becomes NaN at these places at least.
///
/// The kernels are those of [`layer_norm`](super::layer_norm()), which says how often they read and
/// write memory; one number per row is kept in addition to the inputs.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::rms_norm;
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w) = (Tensor::randn([5, 2, 3], options), Tensor::randn([2, 3], options));
/// let mean_square = x.square().mean_dim([-2, -1].as_slice(), true, Kind::Double);
/// let y = &x * (mean_square + 1e-6).rsqrt() * &w;
///
/// assert!(rms_norm(&x, &[2, 3], Some(&w), Some(1e-6)).allclose(&y, 1e-12, 1e-12, false));
/// ```
///
/// Source: Zhang and Sennrich, Root Mean Square Layer Normalization,
/// <https://arxiv.org/abs/1910.07467>.
///
/// # Panics
/// If [`f_rms_norm`] returns an error.
pub fn rms_norm(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
) -> Tensor {
    super::unwrap(f_rms_norm(input, normalized_shape, weight, eps))
}

/// [`rms_norm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_rms_norm(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
) -> Result<Tensor> {
    check!(OP, input).defined()?.supported_device()?;
    weight.map(|weight| check!(OP, weight).defined()).transpose()?;
    if let Some(weight) = weight {
        let (kind, device) = (input.f_kind()?, input.device());
        check!(OP, weight).kind_in(&KINDS)?;
        if !parameter_kinds(kind, device).contains(&weight.f_kind()?) {
            check_input(OP, input, &input.size(), normalized_shape)?;
            let weight = check!(OP, weight).same_device_as(&check!(OP, input))?;
            weight.shape("[normalized_shape]", normalized_shape)?;
            return rms_norm_reference(input, normalized_shape, Some(weight.tensor()), eps);
        }
    }
    let eps = eps.map_or_else(|| default_eps(input), Ok)?;
    f_norm::<RmsNorm>(input, normalized_shape, weight, None, eps)
}

/// libtorch's: the machine epsilon of the kind in which the operator computes.
pub(super) fn default_eps(input: &Tensor) -> Result<f64> {
    let is_double = compute_kind(input.f_kind()?) == Kind::Double;
    Ok(if is_double { f64::EPSILON } else { f64::from(f32::EPSILON) })
}

/// [`rms_norm`] in plain tch operations, without checks of its own. Half kinds are computed in
/// `Float`.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn rms_norm_reference(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    eps: Option<f64>,
) -> Result<Tensor> {
    let kind = compute_kind(input.f_kind()?);
    let eps = eps.map_or_else(|| default_eps(input), Ok)?;
    let values = input.f_to_kind(kind)?;
    let dims: Vec<i64> = (1..=normalized_shape.len() as i64).map(|dim| -dim).collect();
    let mean_square = values.f_square()?.f_mean_dim(dims.as_slice(), true, kind)?;
    let mut output = values.f_mul(&mean_square.f_add_scalar(eps)?.f_rsqrt()?)?;
    if let Some(weight) = weight {
        output = output.f_mul(weight)?;
    }
    Ok(output.f_to_kind(input.f_kind()?)?)
}
