//! The operators that normalise sums of a branch and a residual stream, as far as they are the same
//! for all statistics.

use super::kernels::add::{
    AddGradients, AddKernels, AddKinds, AddOperands, AddSaved, Dropout as InKernel,
};
use super::kernels::{Moments, Shape, compute_kind};
use super::operator::{
    KINDS, Needs, Options, Saved, Statistic, backward, check_input, check_parameter, forward,
};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::cast_one;
use crate::ffi::tensor::plain;
use crate::ops::way::forced;
use crate::{Error, Result, check};
use std::marker::PhantomData;
use tch::{Device, Kind, Tensor};

/// What differs between the operators.
pub(in crate::ops) trait Added: Send + Sync + 'static {
    /// The operator's name.
    const OP: &'static str;
    const KERNELS: AddKernels;
    /// What is computed of the sum.
    type Norm: Statistic;
}

/// The tensors of a call.
pub(in crate::ops) struct Addends<'a> {
    pub input: &'a Tensor,
    pub residual: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// The operator: h and y.
///
/// # Errors
/// If an argument has another kind, device or shape than the operator accepts, or if libtorch or
/// CUDA fails.
pub(in crate::ops) fn f_add_norm<A: Added>(
    addends: &Addends<'_>,
    normalized_shape: &[i64],
    eps: f64,
    dropout: f64,
) -> Result<(Tensor, Tensor)> {
    let Addends { input, residual, weight, bias } = *addends;
    check_arguments(A::OP, addends, normalized_shape, dropout)?;
    let (kind, stream) = (input.f_kind()?, residual.f_kind()?);
    let [cast_weight, cast_bias] = cast_parameters(addends, kind, stream)?;
    let (weight, bias) = (cast_weight.as_ref().or(weight), cast_bias.as_ref().or(bias));
    let options = Options { normalized_shape: normalized_shape.to_vec(), eps, way: forced() };
    let norm = AddNorm::<A> { options, dropout, kind, bias_kind: None, operator: PhantomData };
    let [sum, output] =
        apply(norm, &[Some(input), Some(residual), weight, bias])?.exactly::<2>()?;
    Ok((sum, output))
}

/// Weight and bias in a kind that the kernels take, where they have another one: the stream's; those
/// of the CPU also take `Float`.
pub(super) fn cast_parameters(
    addends: &Addends<'_>,
    kind: Kind,
    stream: Kind,
) -> Result<[Option<Tensor>; 2]> {
    let takes_float = addends.input.device() == Device::Cpu && kind == stream;
    let cast = |parameter: Option<&Tensor>| -> Result<Option<Tensor>> {
        match parameter {
            Some(parameter) if parameter.f_kind()? != stream && !takes_float => {
                Ok(Some(parameter.f_to_kind(stream)?))
            }
            _ => Ok(None),
        }
    };
    Ok([cast(addends.weight)?, cast(addends.bias)?])
}

pub(super) fn check_arguments(
    op: &str,
    addends: &Addends<'_>,
    normalized_shape: &[i64],
    dropout: f64,
) -> Result<()> {
    let Addends { input, residual, weight, bias } = *addends;
    let like = check!(op, input).defined()?.supported_device()?;
    let size = input.size();
    check_input(op, input, &size, normalized_shape)?;
    let residual = check!(op, residual).defined()?.same_device_as(&like)?.kind_in(&KINDS)?;
    residual.shape("as input", &size)?;
    let (kind, stream) = (input.f_kind()?, residual.tensor().f_kind()?);
    if stream != kind && !(is_half(kind) && stream == Kind::Float) {
        let expected = match is_half(kind) {
            true => format!("kind {kind:?}, as input, or Float"),
            false => format!("kind {kind:?}, as input"),
        };
        let hint = cast_one(stream, kind, "input");
        return Err(residual.refuse(expected, format!("{stream:?}"), hint));
    }
    let parameters = [weight.map(|weight| check!(op, weight)), bias.map(|bias| check!(op, bias))];
    let with_float = [kind, Kind::Float];
    let kinds = if is_half(kind) { &with_float[..] } else { &with_float[..1] };
    let mut parameter_kind = None;
    for parameter in parameters.into_iter().flatten() {
        let parameter = parameter.defined()?;
        let found = parameter.tensor().f_kind()?;
        let kind = *parameter_kind.get_or_insert(found);
        check_parameter(&parameter, input, normalized_shape, kinds, Some(kind))?;
    }
    if !(0.0..=1.0).contains(&dropout) {
        let got = dropout.to_string();
        let hint = "use 0 for no dropout, as in evaluation";
        return Err(Error::argument(op, "dropout", "a probability from 0 to 1", got, hint));
    }
    Ok(())
}

fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

pub(super) struct AddNorm<A> {
    pub options: Options,
    /// The probability that a value of the input is dropped.
    pub dropout: f64,
    /// The input's.
    pub kind: Kind,
    /// Kept here so that the first derivative does not look at the bias itself.
    pub bias_kind: Option<Kind>,
    pub operator: PhantomData<A>,
}

/// The positions of the inputs.
pub(super) mod place {
    pub const INPUT: usize = 0;
    pub const RESIDUAL: usize = 1;
    pub const WEIGHT: usize = 2;
    pub const BIAS: usize = 3;
    pub const LEN: usize = 4;
}

/// The slots of the saved tensors.
mod slot {
    pub const SUM: usize = 0;
    pub const WEIGHT: usize = 1;
    pub const BIAS: usize = 2;
    pub const MEAN: usize = 3;
    pub const RSTD: usize = 4;
    /// See [`Dropped`](super::Dropped).
    pub const MASK: usize = 5;
    pub const STATE: usize = 6;
}

/// What dropout leaves for the backward pass, if there is any.
#[derive(Default)]
pub(super) struct Dropped {
    /// libtorch's mask of the values that were kept.
    mask: Option<Tensor>,
    /// The generator's state, from which CUDA's kernels draw the same numbers again.
    state: Option<Tensor>,
}

/// What the forward computes.
pub(super) struct Outputs {
    pub sum: Tensor,
    pub output: Tensor,
    pub moments: Option<Moments>,
    dropped: Dropped,
}

/// What the gradients from y's read.
pub(super) struct Kept {
    pub sum: Tensor,
    pub weight: Option<Tensor>,
    pub moments: Moments,
    pub dropped: Dropped,
}

/// Which gradients are needed.
type InputNeeds = [bool; place::LEN];

impl<A: Added> Function for AddNorm<A> {
    const NAME: &'static str = A::OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let addends = Addends {
            input: inputs.get(place::INPUT)?,
            residual: inputs.get(place::RESIDUAL)?,
            weight: inputs.optional(place::WEIGHT),
            bias: inputs.optional(place::BIAS),
        };
        let outputs = self.outputs(&addends, saver.needs_graph())?;
        self.bias_kind = addends.bias.map(Tensor::f_kind).transpose()?;
        let moments = outputs.moments.as_ref();
        let mean = moments.and_then(|moments| moments.mean.as_ref());
        let rstd = moments.map(|moments| &moments.rstd);
        let Dropped { mask, state } = &outputs.dropped;
        let parameters = [addends.weight, addends.bias];
        for tensor in
            [[Some(&outputs.sum), parameters[0], parameters[1]], [mean, rstd, mask.as_ref()]]
                .into_iter()
                .flatten()
                .chain([state.as_ref()])
        {
            saver.save_optional(tensor);
        }
        // h depends on no parameter.
        if !saver.needs_input_grad(place::INPUT) && !saver.needs_input_grad(place::RESIDUAL) {
            saver.mark_non_differentiable(0);
        }
        // An output without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok([outputs.sum, outputs.output].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        // Both are constants, which may be read although they have no graph.
        let dropped = {
            let _guard = tch::no_grad_guard();
            let state = ctx.saved_optional(slot::STATE)?;
            let state = state.as_ref().map(plain).transpose()?;
            Dropped { mask: ctx.saved_optional(slot::MASK)?, state }
        };
        if ctx.create_graph() {
            return self.differentiable_backward(ctx, grads, &dropped);
        }
        let needs: InputNeeds = std::array::from_fn(|place| ctx.needs_input_grad(place));
        let Some(grad_output) = grads.optional(1) else {
            let of_input = needs[place::INPUT];
            return Ok(self.gradients_of_sum_alone(grads.optional(0), &dropped, of_input)?.into());
        };
        let moments =
            Moments { mean: ctx.saved_optional(slot::MEAN)?, rstd: ctx.saved(slot::RSTD)? };
        let (sum, weight) = (ctx.saved(slot::SUM)?, ctx.saved_optional(slot::WEIGHT)?);
        let kept = Kept { sum, weight, moments, dropped };
        Ok(self.gradients(grad_output, grads.optional(0), &kept, needs)?.into())
    }
}

impl<A: Added> AddNorm<A> {
    fn shape(&self, size: &[i64]) -> Result<Shape> {
        self.options.shape(A::OP, size)
    }

    /// Computes h and y, with the moments and what dropout leaves if a backward pass needs them.
    pub fn outputs(&self, addends: &Addends<'_>, needs_graph: bool) -> Result<Outputs> {
        let (size, device) = (addends.input.size(), addends.input.device());
        let shape = self.shape(&size)?;
        let kinds = AddKinds { branch: self.kind, stream: addends.residual.f_kind()? };
        let mut dropped = Dropped::default();
        let is_one_kernel = kinds.are_one_kernel(shape, device, needs_graph)?;
        let is_outside = self.dropout > 0.0 && (device == Device::Cpu || !is_one_kernel);
        let after_dropout = if is_outside {
            let (input, mask) = addends.input.f_native_dropout(self.dropout, true)?;
            dropped.mask = needs_graph.then_some(mask);
            Some(input)
        } else {
            None
        };
        let addends =
            Addends { input: after_dropout.as_ref().unwrap_or(addends.input), ..*addends };
        if !is_one_kernel {
            let (sum, output, moments) = self.composed(&addends, needs_graph)?;
            return Ok(Outputs { sum, output, moments, dropped });
        }
        let input = in_vectors(addends.input)?;
        let residual = in_vectors(addends.residual)?;
        let weight = addends.weight.map(in_vectors).transpose()?;
        let bias = addends.bias.map(in_vectors).transpose()?;
        let mut sum = Tensor::f_empty(&size, (kinds.stream, device))?;
        let mut output = Tensor::f_empty(&size, (kinds.branch, device))?;
        let moments = || A::KERNELS.norm.moments(shape.rows, kinds.branch, device);
        let mut moments = needs_graph.then(moments).transpose()?;
        let in_kernel = self.dropout > 0.0 && !is_outside;
        if in_kernel && needs_graph {
            dropped.state = Some(Tensor::f_empty([2], (Kind::Int64, device))?);
        }
        let kept = dropped.state.as_ref();
        let dropout = match in_kernel {
            true => InKernel::Draw { probability: self.dropout, kept },
            false => InKernel::None,
        };
        let operands = AddOperands {
            input: &input,
            residual: &residual,
            weight: weight.as_ref(),
            bias: bias.as_ref(),
        };
        let options = (self.options.eps, dropout);
        let results = [&mut sum, &mut output];
        A::KERNELS.forward(shape, &operands, options, results, moments.as_mut())?;
        Ok(Outputs { sum, output, moments, dropped })
    }

    /// The sum by libtorch, and its norm by the kernels of rows that are no sums.
    fn composed(
        &self,
        addends: &Addends<'_>,
        needs_graph: bool,
    ) -> Result<(Tensor, Tensor, Option<Moments>)> {
        let Addends { input, residual, weight, bias } = *addends;
        let sum = plain(&input.f_add(residual)?)?;
        let (output, moments) = forward::<A::Norm>(&sum, weight, bias, &self.options, needs_graph)?;
        Ok((sum, output.f_to_kind(self.kind)?, moments))
    }

    /// The gradients that are needed, from h's alone.
    fn gradients_of_sum_alone(
        &self,
        grad_sum: Option<&Tensor>,
        dropped: &Dropped,
        of_input: bool,
    ) -> Result<[Option<Tensor>; place::LEN]> {
        let Some(grad_sum) = grad_sum else { return Ok([const { None }; place::LEN]) };
        let grad_sum = plain(grad_sum)?;
        let input = of_input.then(|| self.through_dropout(&grad_sum, dropped)).transpose()?;
        Ok([input, Some(grad_sum), None, None])
    }

    /// The gradients that are needed, from y's and, if there is one, h's.
    pub fn gradients(
        &self,
        grad_output: &Tensor,
        grad_sum: Option<&Tensor>,
        kept: &Kept,
        input_needs: InputNeeds,
    ) -> Result<[Option<Tensor>; place::LEN]> {
        let (sum, weight, dropped) = (plain(&kept.sum)?, kept.weight.as_ref(), &kept.dropped);
        let mean = kept.moments.mean.as_ref().map(plain).transpose()?;
        let moments = Moments { mean, rstd: plain(&kept.moments.rstd)? };
        let [of_input, of_residual, of_weight, of_bias] = input_needs;
        let needs = Needs {
            input: of_input || of_residual,
            weight: of_weight,
            bias: self.bias_kind.filter(|_| of_bias),
        };
        let shape = self.shape(&sum.size())?;
        let kinds = AddKinds { branch: self.kind, stream: sum.f_kind()? };
        if !kinds.are_one_kernel(shape, sum.device(), true)? {
            let weight = weight.map(Tensor::shallow_clone);
            let saved = (&Saved { input: sum, weight, moments }, dropped);
            let of_addends = (of_input, of_residual);
            return self.composed_gradients(grad_output, grad_sum, saved, needs, of_addends);
        }
        // Without dropout the two are one tensor, as those of libtorch's addition are.
        let is_shared = kinds.branch == kinds.stream && dropped.state.is_none();
        let is_after_mask = dropped.mask.is_some();
        let empty = |kind: Kind| Tensor::f_empty(sum.size(), (kind, sum.device()));
        let parameter =
            |kind: Kind| Tensor::f_empty(&self.options.normalized_shape, (kind, sum.device()));
        let weight_kind = weight.map(Tensor::f_kind).transpose()?;
        let has_residual = of_residual || of_input && (is_shared || is_after_mask);
        let has_input = of_input && !is_shared && !is_after_mask;
        let mut gradients = AddGradients {
            input: has_input.then(|| empty(kinds.branch)).transpose()?,
            residual: has_residual.then(|| empty(kinds.stream)).transpose()?,
            weight: weight_kind.filter(|_| needs.weight).map(parameter).transpose()?,
            bias: needs.bias.map(parameter).transpose()?,
        };
        let sum = in_vectors(&sum)?;
        let weight = weight.map(in_vectors).transpose()?;
        let grad_output = in_vectors(grad_output)?;
        let grad_sum = grad_sum.map(in_vectors).transpose()?;
        let dropout = match &dropped.state {
            Some(state) => InKernel::Again { probability: self.dropout, state },
            None => InKernel::None,
        };
        let saved = AddSaved { sum: &sum, weight: weight.as_ref(), moments: &moments };
        let incoming = (&grad_output, grad_sum.as_ref());
        A::KERNELS.backward(shape, &saved, incoming, dropout, &mut gradients)?;
        let AddGradients { input, residual, weight, bias } = gradients;
        let input = match (&input, &residual) {
            (None, Some(of_sum)) if of_input => Some(self.through_dropout(of_sum, dropped)?),
            _ => input,
        };
        Ok([input, residual.filter(|_| of_residual), weight, bias])
    }

    /// The same by the kernels of rows that are no sums.
    fn composed_gradients(
        &self,
        grad_output: &Tensor,
        grad_sum: Option<&Tensor>,
        (saved, dropped): (&Saved, &Dropped),
        needs: Needs,
        (of_input, of_residual): (bool, bool),
    ) -> Result<[Option<Tensor>; place::LEN]> {
        let grad_output = grad_output.f_to_kind(saved.input.f_kind()?)?;
        let [of_norm, weight, bias] =
            backward::<A::Norm>(&grad_output, Some(saved), &self.options, needs)?;
        let of_sum = match (of_norm, grad_sum) {
            (Some(of_norm), Some(grad_sum)) => Some(of_norm.f_add(grad_sum)?),
            (of_norm, _) => of_norm,
        };
        let input = of_sum.as_ref().filter(|_| of_input);
        let input = input.map(|of_sum| self.through_dropout(of_sum, dropped)).transpose()?;
        Ok([input, of_sum.filter(|_| of_residual), weight, bias])
    }

    /// The input's gradient, from that of the sum.
    fn through_dropout(&self, of_sum: &Tensor, dropped: &Dropped) -> Result<Tensor> {
        if let Some(mask) = &dropped.mask {
            let scale = 1.0 / (1.0 - self.dropout);
            // All values are dropped at a probability of 1, and infinity times 0 is NaN.
            let scale = if scale.is_finite() { scale } else { 0.0 };
            return Ok(of_sum.f_mul(mask)?.f_mul_scalar(scale)?.f_to_kind(self.kind)?);
        }
        if let Some(state) = &dropped.state {
            let multipliers = {
                let _guard = tch::no_grad_guard();
                self.multipliers(of_sum, state)?
            };
            return Ok(of_sum.f_mul(&multipliers)?.f_to_kind(self.kind)?);
        }
        match of_sum.f_kind()? == self.kind {
            true => Ok(of_sum.shallow_clone()),
            false => Ok(of_sum.f_to_kind(self.kind)?),
        }
    }

    /// By what dropout multiplied each value: the sum of zeros and of ones that go through it.
    fn multipliers(&self, like: &Tensor, state: &Tensor) -> Result<Tensor> {
        let (kind, device) = (compute_kind(self.kind), like.device());
        let shape = self.shape(&like.size())?;
        let empty = || Tensor::f_empty(like.size(), (kind, device));
        let (mut sum, mut output) = (empty()?, empty()?);
        let (ones, zeros) = (output.f_ones_like()?, output.f_zeros_like()?);
        let operands = AddOperands { input: &ones, residual: &zeros, weight: None, bias: None };
        let dropout = InKernel::Again { probability: self.dropout, state };
        let results = [&mut sum, &mut output];
        A::KERNELS.forward(shape, &operands, (self.options.eps, dropout), results, None)?;
        Ok(sum)
    }

    /// The gradients, as differentiable operations on saved and incoming tensors. The norm is
    /// differentiated at h, whose history leads to input and residual.
    fn differentiable_backward(
        &self,
        ctx: &Context<'_>,
        grads: &Tensors,
        dropped: &Dropped,
    ) -> Result<Tensors> {
        let sum = ctx.saved(slot::SUM)?;
        let (of_input, of_residual) =
            (ctx.needs_input_grad(place::INPUT), ctx.needs_input_grad(place::RESIDUAL));
        // h stands for whichever of the two needs a gradient.
        let stands_for = if of_input { place::INPUT } else { place::RESIDUAL };
        let inputs = [
            Some(sum.shallow_clone()),
            Some(sum.shallow_clone()),
            ctx.saved_optional(slot::WEIGHT)?,
            ctx.saved_optional(slot::BIAS)?,
        ];
        let of_output = [grads.optional(1).map(Tensor::shallow_clone), None].into();
        let found = differentiate_reference(ctx, &inputs, &of_output, |inputs| {
            let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
            let inputs = Inputs::new(&inputs);
            let (weight, bias) = (inputs.optional(place::WEIGHT), inputs.optional(place::BIAS));
            let Options { normalized_shape, eps, .. } = &self.options;
            let sum = inputs.get(stands_for)?;
            let output =
                <A::Norm as Statistic>::reference(sum, normalized_shape, weight, bias, *eps)?;
            Ok([Some(output.f_to_kind(self.kind)?), None].into())
        })?;
        let of_norm = found.optional(stands_for);
        let of_sum = match (of_norm, grads.optional(0)) {
            (Some(of_norm), Some(grad_sum)) => Some(of_norm.f_add(grad_sum)?),
            (one, other) => one.or(other).map(Tensor::shallow_clone),
        };
        let input = of_sum.as_ref().filter(|_| of_input);
        let input = input.map(|of_sum| self.through_dropout(of_sum, dropped)).transpose()?;
        let parameter = |place: usize| found.optional(place).map(Tensor::shallow_clone);
        let (weight, bias) = (parameter(place::WEIGHT), parameter(place::BIAS));
        // The bias' gradient depends on y's alone. If only h's has a graph, the sum of none of its
        // values gives it one, so that it does not look like a gradient whose graph was lost.
        let bias = match (bias, grads.optional(0)) {
            (Some(bias), Some(grad_sum)) if !bias.requires_grad() && grad_sum.requires_grad() => {
                let none = grad_sum.f_reshape([-1])?.f_narrow(0, 0, 0)?;
                Some(bias.f_add(&none.f_sum(bias.f_kind()?)?)?)
            }
            (bias, _) => bias,
        };
        Ok([input, of_sum.filter(|_| of_residual), weight, bias].into())
    }
}

/// The tensor in memory that the kernels can read: contiguous and, on CUDA, from a multiple of 16
/// bytes on.
fn in_vectors(tensor: &Tensor) -> Result<Tensor> {
    let tensor = plain(tensor)?;
    let is_odd = tensor.device().is_cuda() && tensor.data_ptr().addr() % 16 != 0;
    if !is_odd {
        return Ok(tensor);
    }
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(&tensor)?;
    Ok(copy)
}
