//! RMS normalisation.

use super::norm::tensors::{Moments, Operands, Saved, Shape, compute_kind};
use super::norm::{KINDS, Way, moment, parameter_kinds, rule};
use super::way::forced;
use crate::Result;
use crate::ffi::tensor::kind;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Signature, Slots, call, metas_of,
};
use tch::{Kind, Tensor};

mod kernels;

pub(crate) use kernels::KERNELS;

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
/// allow loads of 16 bytes or of 8.
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
    let norm = RmsNorm { normalized_shape: normalized_shape.to_vec(), eps };
    Ok(call(norm, &RmsNormIn { input, weight })?.output)
}

/// libtorch's `eps` for an input of this kind: the machine epsilon of the kind in which the operator
/// computes.
pub(crate) fn default_eps(kind: Kind) -> f64 {
    if compute_kind(kind) == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) }
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
    let eps = eps.unwrap_or(default_eps(kind));
    let values = input.f_to_kind(kind)?;
    let dims: Vec<i64> = (1..=normalized_shape.len() as i64).map(|dim| -dim).collect();
    let mean_square = values.f_square()?.f_mean_dim(dims.as_slice(), true, kind)?;
    let mut output = values.f_mul(&mean_square.f_add_scalar(eps)?.f_rsqrt()?)?;
    if let Some(weight) = weight {
        output = output.f_mul(weight)?;
    }
    Ok(output.f_to_kind(input.f_kind()?)?)
}

crate::signature! {
    /// `x / sqrt(mean(x²) + eps) * weight` over the last dimensions, as torch.nn.functional.rms_norm.
    ///
    /// Without eps it is the smallest step from 1 in the kind that is computed in.
    pub RmsNorm: RmsNormIn -> RmsNormOut =
        "rms_norm"(input, normalized_shape: Vec<i64>, weight?, eps: Option<f64> = None) -> (output)
}

crate::slots! {
    /// The inverse of the root mean square of each row.
    pub struct InverseRms { rstd? }
}

impl Operator for RmsNorm {
    type Kept = InverseRms;
    type Plan = Way;

    /// [`rms_norm_reference`] for a weight of a kind that the kernels do not take.
    fn composed(&self, of: &Args<'_, Self>, is_traced: bool) -> Result<Option<Outputs<Self>>> {
        let Some(weight) = of.weight else { return Ok(None) };
        let (Some(kind), Some(found)) = (kind(of.input), kind(weight)) else { return Ok(None) };
        let is_taken = || parameter_kinds(kind, of.input.device()).contains(&found);
        if found == kind || !KINDS.contains(&found) || is_taken() {
            return Ok(None);
        }
        if !is_traced {
            // Only the kind is another one.
            let RmsNormIn { input, weight } = metas_of::<Self>(&[Some(of.input), Some(weight)])?;
            let weight = weight.map(|weight| weight.of_kind(input.kind()));
            self.rule(&RmsNormIn { input, weight }, &RmsNormIn::each(|_| false))?;
        }
        self.reference(of).map(Some)
    }

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let (input, parameters) = (&of.input, [of.weight.as_ref(), None]);
        let rows = rule(Self::NAME, input, parameters, &self.normalized_shape)?;
        let rstd = (needs.input || needs.weight).then(|| moment(input, &rows));
        Ok(Made { outputs: RmsNormOut { output: input.clone() }, kept: InverseRms { rstd } })
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let RmsNormIn { input, weight } = call.of;
        let made = call.check()?;
        let output = &made.outputs.output;
        let shape = Shape::new(output.sizes(), self.normalized_shape.len(), call.plan);
        let eps = self.eps.unwrap_or(default_eps(output.kind()));
        let mut made = made.allocate()?;
        let operands = Operands { input, weight, bias: None };
        let moments = Moments { mean: None, rstd: made.kept.rstd.as_ref() };
        KERNELS.forward(shape, &operands, eps, &mut made.outputs.output, &moments)?;
        Ok(made)
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Some(grad) = &grads.output else { return Ok(RmsNormIn::none()) };
        let (metas, needs) = (again.metas()?, &again.needs);
        let shape = Shape::new(metas.input.sizes(), self.normalized_shape.len(), again.plan);
        let saved = Saved {
            input: again.of.input.as_ref(),
            weight: again.of.weight.as_ref(),
            moments: Moments { mean: None, rstd: again.kept.rstd.as_ref() },
        };
        let wanted = [
            needs.input.then_some(&metas.input),
            metas.weight.as_ref().filter(|_| needs.weight),
            None,
        ];
        let [input, weight, _] = KERNELS.backward(shape, grad, &saved, wanted)?;
        Ok(RmsNormIn { input, weight })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let output = rms_norm_reference(of.input, &self.normalized_shape, of.weight, self.eps)?;
        Ok(RmsNormOut { output })
    }
}
