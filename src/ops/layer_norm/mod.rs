//! Layer normalisation.

use super::way::forced;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::Check;
use crate::ffi::tensor::plain;
use crate::{Error, Result, check};
use tch::{Device, Kind, Tensor};

mod kernels;

use super::norm::Way;
use super::norm::kernels::{Gradients, Moments, Operands, Shape, compute_kind};
use kernels::KERNELS;

const OP: &str = "layer_norm";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

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
/// whether all tensors allow 16-byte loads.
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
    check!(OP, input).defined()?.supported_device()?;
    weight.map(|weight| check!(OP, weight).defined()).transpose()?;
    bias.map(|bias| check!(OP, bias).defined()).transpose()?;
    let cast = match input.device() {
        Device::Cuda(_) => autocast_inputs(CastPolicy::Float, &[Some(input), weight, bias])?,
        _ => None,
    };
    let (input, weight, bias) = match cast.as_deref() {
        Some([Some(input), weight, bias]) => (input, weight.as_ref(), bias.as_ref()),
        _ => (input, weight, bias),
    };
    let options = Options { normalized_shape: normalized_shape.to_vec(), eps, way: forced() };
    apply(LayerNorm { options, bias_kind: None }, &[Some(input), weight, bias])?.single()
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

fn check_arguments(
    input: &Tensor,
    size: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    normalized_shape: &[i64],
) -> Result<()> {
    let input_check = check!(OP, input).kind_in(&KINDS)?;
    if normalized_shape.is_empty() {
        return Err(Error::argument(
            OP,
            "normalized_shape",
            "at least one dimension",
            "[]",
            "pass the trailing sizes of the input, such as &[features]",
        ));
    }
    if !size.ends_with(normalized_shape) {
        let sizes: Vec<String> = normalized_shape.iter().map(i64::to_string).collect();
        let expected = format!("shape [*, {}], as normalized_shape has it", sizes.join(", "));
        return Err(input_check.refuse(expected, format!("{size:?}"), ""));
    }
    let parameter_kind = weight.or(bias).map(Tensor::f_kind).transpose()?;
    if let Some(weight) = weight {
        check_parameter(&check!(OP, weight), input, normalized_shape, parameter_kind)?;
    }
    if let Some(bias) = bias {
        check_parameter(&check!(OP, bias), input, normalized_shape, parameter_kind)?;
    }
    Ok(())
}

fn check_parameter(
    parameter: &Check<'_>,
    input: &Tensor,
    normalized_shape: &[i64],
    parameter_kind: Option<Kind>,
) -> Result<()> {
    let tensor = parameter.tensor();
    let (kind, device) = (input.f_kind()?, input.device());
    if tensor.device() != device {
        let hint = format!("move it with to_device(Device::{device:?})");
        return Err(parameter.refuse(
            format!("device {device:?}, as input"),
            format!("{:?}", tensor.device()),
            hint,
        ));
    }
    let found = parameter.kind_in(&KINDS)?.tensor().f_kind()?;
    if !parameter_kinds(kind, device).contains(&found) {
        let hint = format!("cast it with to_kind(Kind::{kind:?})");
        return Err(parameter.refuse(
            format!("kind {kind:?}, as input"),
            format!("{found:?}"),
            hint,
        ));
    }
    if let Some(other) = parameter_kind.filter(|&other| other != found) {
        let hint = format!("cast it with to_kind(Kind::{other:?})");
        return Err(parameter.refuse(
            format!("kind {other:?}, as weight"),
            format!("{found:?}"),
            hint,
        ));
    }
    parameter.shape("[normalized_shape]", normalized_shape).map(|_| ())
}

/// The table of mixed kinds: the kinds that weight and bias may have, both the same one, for an
/// input of this kind. The result always has the input's kind. libtorch's own operator accepts the
/// same kinds, which a test checks.
fn parameter_kinds(input: Kind, device: Device) -> &'static [Kind] {
    match (input, device) {
        (Kind::Half, Device::Cpu) => &[Kind::Half, Kind::Float],
        (Kind::BFloat16, Device::Cpu) => &[Kind::BFloat16, Kind::Float],
        (Kind::Half, _) => &[Kind::Half],
        (Kind::BFloat16, _) => &[Kind::BFloat16],
        (Kind::Double, _) => &[Kind::Double],
        _ => &[Kind::Float],
    }
}

/// The arguments that are no tensors.
struct Options {
    normalized_shape: Vec<i64>,
    eps: f64,
    way: Way,
}

impl Options {
    /// The shape of an input of this size, which ends with `normalized_shape`.
    fn shape(&self, size: &[i64]) -> Result<Shape> {
        let columns = &self.normalized_shape[..];
        let product = |sizes: &[i64]| {
            sizes.iter().try_fold(1, |product: i64, &size| product.checked_mul(size))
        };
        match (size.strip_suffix(columns).and_then(product), product(columns)) {
            (Some(rows), Some(columns)) => Ok(Shape { rows, columns, way: self.way }),
            _ => Err(Error::argument(
                OP,
                "input",
                "sizes whose products fit 64 bits",
                format!("{size:?}"),
                "",
            )),
        }
    }
}

struct LayerNorm {
    options: Options,
    /// Kept here so that the first derivative does not look at the bias itself: a bias that was
    /// changed in place since the forward then causes no version error.
    bias_kind: Option<Kind>,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const WEIGHT: usize = 1;
    pub const BIAS: usize = 2;
    pub const LEN: usize = 3;
}

/// Saved after the inputs: mean and 1/√(var + eps) of each row.
const MEAN: usize = place::LEN;
const RSTD: usize = place::LEN + 1;

impl Function for LayerNorm {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let input = inputs.get(place::INPUT)?;
        let (weight, bias) = (inputs.optional(place::WEIGHT), inputs.optional(place::BIAS));
        let needs_moments =
            saver.needs_input_grad(place::INPUT) || saver.needs_input_grad(place::WEIGHT);
        let (output, moments) = forward(input, weight, bias, &self.options, needs_moments)?;
        self.bias_kind = bias.map(Tensor::f_kind).transpose()?;
        let mean = moments.as_ref().and_then(|moments| moments.mean.as_ref());
        let rstd = moments.as_ref().map(|moments| &moments.rstd);
        for tensor in [Some(input), weight, bias, mean, rstd] {
            saver.save_optional(tensor);
        }
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, |inputs| self.reference(inputs));
        }
        let needs = Needs {
            input: ctx.needs_input_grad(place::INPUT),
            weight: ctx.needs_input_grad(place::WEIGHT),
            bias: self.bias_kind.filter(|_| ctx.needs_input_grad(place::BIAS)),
        };
        let saved = if needs.input || needs.weight {
            let moments = Moments { mean: Some(ctx.saved(MEAN)?), rstd: ctx.saved(RSTD)? };
            let weight = ctx.saved_optional(place::WEIGHT)?;
            Some(Saved { input: ctx.saved(place::INPUT)?, weight, moments })
        } else {
            None
        };
        Ok(backward(grads.get(0)?, saved.as_ref(), &self.options, needs)?.into())
    }
}

impl LayerNorm {
    fn reference(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let (weight, bias) = (inputs.optional(place::WEIGHT), inputs.optional(place::BIAS));
        let Options { normalized_shape, eps, .. } = &self.options;
        let input = inputs.get(place::INPUT)?;
        Ok(layer_norm_reference(input, normalized_shape, weight, bias, *eps)?.into())
    }
}

/// The output and, if they are needed, the moments of the rows. The sizes and kinds of the
/// arguments are checked here.
fn forward(
    input: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &Options,
    needs_moments: bool,
) -> Result<(Tensor, Option<Moments>)> {
    let size = input.size();
    check_arguments(input, &size, weight, bias, &options.normalized_shape)?;
    let shape = options.shape(&size)?;
    let values = plain(input)?;
    let parameters = [weight.map(plain).transpose()?, bias.map(plain).transpose()?];
    let (kind, device) = (values.f_kind()?, values.device());
    let mut output = Tensor::f_empty(&size, (kind, device))?;
    let moments = || KERNELS.moments(shape.rows, kind, device);
    let mut moments = needs_moments.then(moments).transpose()?;
    let [weight, bias] = [parameters[0].as_ref(), parameters[1].as_ref()];
    let operands = Operands { input: &values, weight, bias };
    KERNELS.forward(shape, &operands, options.eps, &mut output, moments.as_mut())?;
    Ok((output, moments))
}

/// What the gradients of input and weight read.
struct Saved {
    input: Tensor,
    weight: Option<Tensor>,
    moments: Moments,
}

/// Which gradients are needed.
#[derive(Clone, Copy)]
struct Needs {
    input: bool,
    weight: bool,
    /// The kind of the bias.
    bias: Option<Kind>,
}

/// The gradients of input, weight and bias that are needed. `saved` may be `None` if only the bias'
/// gradient is.
fn backward(
    grad_output: &Tensor,
    saved: Option<&Saved>,
    options: &Options,
    needs: Needs,
) -> Result<[Option<Tensor>; 3]> {
    let size = grad_output.size();
    let grad_output = plain(grad_output)?;
    // The bias' gradient is a sum of `grad_output` alone.
    let input = saved.map_or(Ok(grad_output.shallow_clone()), |saved| plain(&saved.input))?;
    let weight = saved.and_then(|saved| saved.weight.as_ref()).map(plain).transpose()?;
    let (kind, device) = (input.f_kind()?, input.device());
    let parameter = |kind| Tensor::f_empty(&options.normalized_shape, (kind, device));
    let weight_kind = weight.as_ref().map(Tensor::f_kind).transpose()?;
    let mut gradients = Gradients {
        input: needs.input.then(|| Tensor::f_empty(&size, (kind, device))).transpose()?,
        weight: weight_kind.filter(|_| needs.weight).map(parameter).transpose()?,
        bias: needs.bias.map(parameter).transpose()?,
    };
    let operands = Operands { input: &input, weight: weight.as_ref(), bias: None };
    let moments = saved.map(|saved| &saved.moments);
    KERNELS.backward(options.shape(&size)?, &operands, &grad_output, moments, &mut gradients)?;
    Ok([gradients.input, gradients.weight, gradients.bias])
}
