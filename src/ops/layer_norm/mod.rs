//! Layer normalisation.

use super::norm::tensors::{Moments, Operands, Saved, Shape, compute_kind};
use super::norm::{Way, moment, rule};
use super::way::forced;
use crate::Result;
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Signature, Slots, call,
};
use tch::Tensor;

mod kernels;

pub(crate) use kernels::KERNELS;

/// Normalises over the trailing dimensions `normalized_shape`, then multiplies by the weight and
/// adds the bias, element by element.
///
/// ```text
/// mean = Σ x / N      var = Σ (x - mean)² / N
/// y = (x - mean) / √(var + eps) · w + b
/// ```
///
/// * `input`: x, `[*, normalized_shape]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the
///   CPU or CUDA
/// * `normalized_shape`: the trailing sizes of `input`, one or several, with N elements
/// * `weight`: w, `[normalized_shape]`; `None` for ones
/// * `bias`: b, `[normalized_shape]`; `None` for zeros
/// * `eps`: added to the variance
///
/// Returns y, contiguous, with `input`'s shape and kind. Weight and bias have the input's kind; on
/// the CPU they may both be `Float` if the input has a half kind, as in libtorch. Strides and sizes
/// are arbitrary, and tensors may be empty: without columns there is nothing to compute, and
/// without rows the gradients of weight and bias are zeros (in that case libtorch on CUDA accepts
/// any kinds; this operator does not). For the half kinds everything is computed in `Float` and
/// rounded once. Under autocast on CUDA every tensor that is not `Double` is cast to `Float`, as in
/// libtorch; autocast on the CPU changes nothing. There are first and second derivatives with
/// respect to each tensor. On CUDA the operator works on libtorch's current stream and never waits
/// for the GPU. It is deterministic; the order of sums depends on sizes, and on CUDA also on
/// whether all tensors allow loads of 16 bytes or of 8.
///
/// The variance comes from a second pass over the centred row, and is corrected for the rounding of
/// the mean. Tests enforce these error bounds: an output or gradient of kind `Float`, `Half` or
/// `BFloat16` is no further from the exact value than that of libtorch's own operator, apart from
/// two roundings; an output of kind `Float` is within 2·10⁻⁶ of the exact value, relative to the
/// largest one, even at a mean of 10⁵ standard deviations. (For a gradient the mean is rounded
/// once, as in libtorch.) A row that contains an infinity or NaN becomes NaN throughout. A row of
/// which only the variance overflows becomes zeros plus the bias.
///
/// On CUDA the forward reads the input once and writes the output once. That holds for rows of up
/// to 64 KiB, wherever they begin, and on compute capability 9.0 up to 256 KiB (512 KiB for aligned
/// rows of `Float`). The backward reads the input and the incoming gradient once; it reads them
/// twice if there are few rows (512 at most), and more often if the rows are too long for the chip.
/// It keeps two numbers per row in addition to the inputs.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::layer_norm;
/// # let options = (Kind::Double, Device::Cpu);
/// # let x = Tensor::randn([5, 2, 3], options);
/// # let (w, b) = (Tensor::randn([2, 3], options), Tensor::randn([2, 3], options));
/// let centred = &x - x.mean_dim([-2, -1].as_slice(), true, Kind::Double);
/// let variance = centred.square().mean_dim([-2, -1].as_slice(), true, Kind::Double);
/// let y = centred * (variance + 1e-5).rsqrt() * &w + &b;
///
/// assert!(layer_norm(&x, &[2, 3], Some(&w), Some(&b), 1e-5).allclose(&y, 1e-12, 1e-12, false));
/// ```
///
/// Source: Ba, Kiros and Hinton, Layer Normalization, <https://arxiv.org/abs/1607.06450>.
///
/// # Panics
/// If [`f_layer_norm`] returns an error.
pub fn layer_norm(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Tensor {
    super::unwrap(f_layer_norm(input, normalized_shape, weight, bias, eps))
}

/// [`layer_norm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_layer_norm(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let norm = LayerNorm { normalized_shape: normalized_shape.to_vec(), eps };
    Ok(call(norm, &LayerNormIn { input, weight, bias })?.output)
}

/// [`layer_norm`] in plain tch operations, without checks of its own. Half kinds are computed in
/// `Float`.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn layer_norm_reference(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let kind = compute_kind(input.f_kind()?);
    let values = input.f_to_kind(kind)?;
    let dims: Vec<i64> = (1..=normalized_shape.len() as i64).map(|dim| -dim).collect();
    let centred = values.f_sub(&values.f_mean_dim(dims.as_slice(), true, kind)?)?;
    let variance = centred.f_square()?.f_mean_dim(dims.as_slice(), true, kind)?;
    let mut output = centred.f_mul(&variance.f_add_scalar(eps)?.f_rsqrt()?)?;
    if let Some(weight) = weight {
        output = output.f_mul(&weight.f_to_kind(kind)?)?;
    }
    if let Some(bias) = bias {
        output = output.f_add(&bias.f_to_kind(kind)?)?;
    }
    Ok(output.f_to_kind(input.f_kind()?)?)
}

crate::signature! {
    /// `(x - mean) / sqrt(var + eps) * weight + bias` over the last dimensions, as
    /// torch.nn.functional.layer_norm.
    ///
    /// weight and bias have the shape normalized_shape, which is the end of the input's.
    pub LayerNorm: LayerNormIn -> LayerNormOut =
        "layer_norm"(input, normalized_shape: Vec<i64>, weight?, bias?, eps: f64 = 1e-5) -> (output)
}

impl Operator for LayerNorm {
    type Kept = Moments;
    type Plan = Way;

    const AUTOCAST: [Option<CastPolicy>; 2] = [None, Some(CastPolicy::Float)];

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<Way> {
        Ok(forced())
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let (input, parameters) = (&of.input, [of.weight.as_ref(), of.bias.as_ref()]);
        let rows = rule(Self::NAME, input, parameters, &self.normalized_shape)?;
        let moment = || (needs.input || needs.weight).then(|| moment(input, &rows));
        Ok(Made {
            outputs: LayerNormOut { output: input.clone() },
            kept: Moments { mean: moment(), rstd: moment() },
        })
    }

    /// The bias' gradient is a sum of the incoming one alone.
    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        let is_read = needs.input || needs.weight;
        LayerNormIn { input: is_read, weight: is_read, bias: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let LayerNormIn { input, weight, bias } = call.of;
        let made = call.check()?;
        let sizes = made.outputs.output.sizes();
        let shape = Shape::new(sizes, self.normalized_shape.len(), call.plan);
        let mut made = made.allocate()?;
        let operands = Operands { input, weight, bias };
        let moments = made.kept.borrowed();
        KERNELS.forward(shape, &operands, self.eps, &mut made.outputs.output, &moments)?;
        Ok(made)
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Some(grad) = &grads.output else { return Ok(LayerNormIn::none()) };
        let (metas, needs) = (again.metas()?, &again.needs);
        let shape = Shape::new(metas.input.sizes(), self.normalized_shape.len(), again.plan);
        let saved = Saved {
            input: again.of.input.as_ref(),
            weight: again.of.weight.as_ref(),
            moments: again.kept.borrowed(),
        };
        let wanted = [
            needs.input.then_some(&metas.input),
            metas.weight.as_ref().filter(|_| needs.weight),
            metas.bias.as_ref().filter(|_| needs.bias),
        ];
        let [input, weight, bias] = KERNELS.backward(shape, grad, &saved, wanted)?;
        Ok(LayerNormIn { input, weight, bias })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let (shape, eps) = (&self.normalized_shape, self.eps);
        let output = layer_norm_reference(of.input, shape, of.weight, of.bias, eps)?;
        Ok(LayerNormOut { output })
    }
}
