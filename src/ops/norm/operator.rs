//! The operators that normalise rows, as far as they are the same for all statistics.

use super::Way;
use super::kernels::{Gradients, Kernels, Moments, Operands, Shape};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::{Check, cast_one};
use crate::ffi::tensor::plain;
use crate::ops::way::forced;
use crate::{Error, Result, check};
use std::marker::PhantomData;
use tch::{Device, Kind, Tensor};

/// What differs between the operators.
pub(in crate::ops) trait Statistic: Send + Sync + 'static {
    /// The operator's name.
    const OP: &'static str;
    const KERNELS: Kernels;

    /// The formula in plain tch operations.
    fn reference(
        input: &Tensor,
        normalized_shape: &[i64],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor>;
}

pub(in crate::ops) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// The operator. All tensors are defined, and the input's device is supported.
///
/// # Errors
/// If an argument has another kind, device or shape than the operator accepts, or if libtorch or
/// CUDA fails.
pub(in crate::ops) fn f_norm<S: Statistic>(
    input: &Tensor,
    normalized_shape: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let options = Options { normalized_shape: normalized_shape.to_vec(), eps, way: forced() };
    let norm = Norm::<S> { options, bias_kind: None, statistic: PhantomData };
    apply(norm, &[Some(input), weight, bias])?.single()
}

/// Checks the input and the shape, in whatever kinds the parameters are.
///
/// # Errors
/// If the input has another kind or shape than the operator accepts.
pub(in crate::ops) fn check_input(
    op: &str,
    input: &Tensor,
    size: &[i64],
    normalized_shape: &[i64],
) -> Result<()> {
    let input_check = check!(op, input).kind_in(&KINDS)?;
    if normalized_shape.is_empty() {
        return Err(Error::argument(
            op,
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
    Ok(())
}

fn check_arguments<S: Statistic>(
    input: &Tensor,
    size: &[i64],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    normalized_shape: &[i64],
) -> Result<()> {
    check_input(S::OP, input, size, normalized_shape)?;
    let parameter_kind = weight.or(bias).map(Tensor::f_kind).transpose()?;
    let kinds = parameter_kinds(input.f_kind()?, input.device());
    let check = |parameter: Check<'_>| {
        check_parameter(&parameter, input, normalized_shape, kinds, parameter_kind)
    };
    weight.map(|weight| check(check!(S::OP, weight))).transpose()?;
    bias.map(|bias| check(check!(S::OP, bias))).transpose()?;
    Ok(())
}

/// Checks a weight or bias. `kinds` are those that it may have, and `parameter_kind` is that of the
/// first of the two.
pub(super) fn check_parameter(
    parameter: &Check<'_>,
    input: &Tensor,
    normalized_shape: &[i64],
    kinds: &[Kind],
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
    if !kinds.contains(&found) {
        let hint = cast_one(found, kind, "input");
        let or_float = if kinds == [kind, Kind::Float] { ", or Float" } else { "" };
        return Err(parameter.refuse(
            format!("kind {kind:?}, as input{or_float}"),
            format!("{found:?}"),
            hint,
        ));
    }
    if let Some(other) = parameter_kind.filter(|&other| other != found) {
        let hint = cast_one(found, other, "weight");
        return Err(parameter.refuse(
            format!("kind {other:?}, as weight"),
            format!("{found:?}"),
            hint,
        ));
    }
    parameter.shape("[normalized_shape]", normalized_shape).map(|_| ())
}

/// The table of mixed kinds: the kinds that weight and bias may have, both the same one, for an
/// input of this kind. The result always has the input's kind. libtorch's own layer_norm accepts the
/// same kinds, which a test checks.
pub(in crate::ops) fn parameter_kinds(input: Kind, device: Device) -> &'static [Kind] {
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
pub(super) struct Options {
    pub normalized_shape: Vec<i64>,
    pub eps: f64,
    pub way: Way,
}

impl Options {
    /// The shape of an input of this size, which ends with `normalized_shape`.
    pub fn shape(&self, op: &str, size: &[i64]) -> Result<Shape> {
        let columns = &self.normalized_shape[..];
        let product = |sizes: &[i64]| {
            sizes.iter().try_fold(1, |product: i64, &size| product.checked_mul(size))
        };
        match (size.strip_suffix(columns).and_then(product), product(columns)) {
            (Some(rows), Some(columns)) => Ok(Shape { rows, columns, way: self.way }),
            _ => Err(Error::argument(
                op,
                "input",
                "sizes whose products fit 64 bits",
                format!("{size:?}"),
                "",
            )),
        }
    }
}

struct Norm<S> {
    options: Options,
    /// Kept here so that the first derivative does not look at the bias itself: a bias that was
    /// changed in place since the forward then causes no version error.
    bias_kind: Option<Kind>,
    statistic: PhantomData<S>,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const WEIGHT: usize = 1;
    pub const BIAS: usize = 2;
    pub const LEN: usize = 3;
}

/// Saved after the inputs: the moments of each row.
const MEAN: usize = place::LEN;
const RSTD: usize = place::LEN + 1;

impl<S: Statistic> Function for Norm<S> {
    const NAME: &'static str = S::OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let input = inputs.get(place::INPUT)?;
        let (weight, bias) = (inputs.optional(place::WEIGHT), inputs.optional(place::BIAS));
        let needs_moments =
            saver.needs_input_grad(place::INPUT) || saver.needs_input_grad(place::WEIGHT);
        let (output, moments) = forward::<S>(input, weight, bias, &self.options, needs_moments)?;
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
            let moments = Moments { mean: ctx.saved_optional(MEAN)?, rstd: ctx.saved(RSTD)? };
            let weight = ctx.saved_optional(place::WEIGHT)?;
            Some(Saved { input: ctx.saved(place::INPUT)?, weight, moments })
        } else {
            None
        };
        Ok(backward::<S>(grads.get(0)?, saved.as_ref(), &self.options, needs)?.into())
    }
}

impl<S: Statistic> Norm<S> {
    fn reference(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
        let inputs = Inputs::new(&inputs);
        let (weight, bias) = (inputs.optional(place::WEIGHT), inputs.optional(place::BIAS));
        let Options { normalized_shape, eps, .. } = &self.options;
        let input = inputs.get(place::INPUT)?;
        Ok(S::reference(input, normalized_shape, weight, bias, *eps)?.into())
    }
}

/// The output and, if they are needed, the moments of the rows. The sizes and kinds of the
/// arguments are checked here.
pub(super) fn forward<S: Statistic>(
    input: &Tensor,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    options: &Options,
    needs_moments: bool,
) -> Result<(Tensor, Option<Moments>)> {
    let size = input.size();
    check_arguments::<S>(input, &size, weight, bias, &options.normalized_shape)?;
    let shape = options.shape(S::OP, &size)?;
    let values = plain(input)?;
    let parameters = [weight.map(plain).transpose()?, bias.map(plain).transpose()?];
    let (kind, device) = (values.f_kind()?, values.device());
    let mut output = Tensor::f_empty(&size, (kind, device))?;
    let moments = || S::KERNELS.moments(shape.rows, kind, device);
    let mut moments = needs_moments.then(moments).transpose()?;
    let [weight, bias] = [parameters[0].as_ref(), parameters[1].as_ref()];
    let operands = Operands { input: &values, weight, bias };
    S::KERNELS.forward(shape, &operands, options.eps, &mut output, moments.as_mut())?;
    Ok((output, moments))
}

/// What the gradients of input and weight read.
pub(super) struct Saved {
    pub input: Tensor,
    pub weight: Option<Tensor>,
    pub moments: Moments,
}

/// Which gradients are needed.
#[derive(Clone, Copy)]
pub(super) struct Needs {
    pub input: bool,
    pub weight: bool,
    /// The kind of the bias.
    pub bias: Option<Kind>,
}

/// The gradients of input, weight and bias that are needed. `saved` may be `None` if only the bias'
/// gradient is.
pub(super) fn backward<S: Statistic>(
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
    S::KERNELS.backward(
        options.shape(S::OP, &size)?,
        &operands,
        &grad_output,
        moments,
        &mut gradients,
    )?;
    Ok([gradients.input, gradients.weight, gradients.bias])
}
