//! The operators that normalise sums of a branch and a residual stream, as far as they are the same
//! for all statistics.

use super::kernels::add::AddKernels;
use super::plan::Way;
use super::rule::{check_dropout, is_half};
use super::tensors::add::{AddGradients, AddKinds, AddOperands, AddSaved, Dropout as InKernel};
use super::tensors::{Moments, Operands, Saved, Shape, compute_kind};
use crate::autograd::{GradOptions, grad};
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::{in_vectors, is_in_vectors, kind, plain};
use crate::operator::{Borrowed, Each, Meta};
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Weight and bias in a kind that the kernels take, where they have another one: the stream's; those
/// of the CPU also take `Float`. Kinds that the rule refuses are left as they are.
pub(in crate::ops) fn cast(tensors: &[Option<&Tensor>]) -> Result<Option<Vec<Option<Tensor>>>> {
    let [Some(input), Some(residual), parameters @ ..] = tensors else { return Ok(None) };
    let Some(of_input) = kind(input).filter(|&kind| is_half(kind)) else { return Ok(None) };
    let Some(first) = parameters.iter().flatten().next() else { return Ok(None) };
    let (Some(stream), Some(found)) = (kind(residual), kind(first)) else { return Ok(None) };
    let takes_float = stream == of_input && input.device() == Device::Cpu;
    let is_accepted = [stream, found].iter().all(|kind| [of_input, Kind::Float].contains(kind));
    let is_one_kind = parameters.iter().flatten().all(|parameter| kind(parameter) == Some(found));
    if found == stream || takes_float || !is_accepted || !is_one_kind {
        return Ok(None);
    }
    let cast = |tensor: &Tensor| Ok(tensor.f_to_kind(stream)?);
    let own = [input, residual].map(|tensor| Ok(Some(tensor.shallow_clone())));
    let parameters = parameters.iter().map(|parameter| parameter.map(cast).transpose());
    own.into_iter().chain(parameters).collect::<Result<Vec<_>>>().map(Some)
}

/// The input after libtorch's dropout, which takes the kernels' place while a program is traced or within
/// vmap: a trace knows it, and it does what vmap's `randomness` says.
pub(in crate::ops) fn dropped_outside(
    op: &str,
    input: &Tensor,
    dropout: f64,
    is_traced: bool,
) -> Result<Option<Tensor>> {
    if !is_traced || dropout == 0.0 {
        return Ok(None);
    }
    check_dropout(op, dropout)?;
    Ok(Some(input.f_dropout(dropout, true)?))
}

/// Where input and residual have one kind, they have one gradient, unless dropout is between them.
pub(in crate::ops) fn gradients_of_sum(
    input: &Tensor,
    residual: &Tensor,
    dropout: f64,
) -> &'static [(usize, usize)] {
    if kind(input) == kind(residual) && dropout == 0.0 { &[(0, 1)] } else { &[] }
}

/// The norm of a sum, in plain tch operations.
type Formula = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

/// A call of one of the operators.
pub(in crate::ops) struct AddNorm<'a> {
    pub kernels: &'a AddKernels,
    pub formula: Formula,
    pub normalized_shape: &'a [i64],
    pub eps: f64,
    /// The probability that a value of the input is dropped.
    pub dropout: f64,
    pub way: Way,
    /// What input and y are like.
    pub branch: &'a Meta<i64>,
    /// What residual and h are like.
    pub stream: &'a Meta<i64>,
}

/// The tensors that the forward reads.
pub(in crate::ops) struct Addends<'a> {
    pub input: &'a Tensor,
    pub residual: &'a Tensor,
    pub weight: Option<&'a Tensor>,
    pub bias: Option<&'a Tensor>,
}

/// What the forward computes.
pub(in crate::ops) struct Computed {
    pub sum: Tensor,
    pub output: Tensor,
    pub moments: Moments<Each<Option<Tensor>>>,
    /// What dropout leaves for the backward pass, if there is any: libtorch's mask of the values that were
    /// kept, or the generator's state, from which CUDA's kernels draw the same numbers again.
    pub dropped: Option<Tensor>,
}

/// What the gradients read besides the incoming ones.
pub(in crate::ops) struct Read<'a> {
    pub sum: Option<&'a Tensor>,
    pub weight: Option<&'a Tensor>,
    pub moments: Moments<Borrowed<'a>>,
    /// See [`Computed::dropped`].
    pub dropped: Option<&'a Tensor>,
}

/// The mask and the state, of which one is there if there is dropout.
fn mask_and_state(dropped: Option<&Tensor>) -> [Option<&Tensor>; 2] {
    match dropped {
        Some(state) if kind(state) == Some(Kind::Int64) => [None, Some(state)],
        mask => [mask, None],
    }
}

impl AddNorm<'_> {
    fn shape(&self) -> Shape {
        Shape::new(self.branch.sizes(), self.normalized_shape.len(), self.way)
    }

    fn kinds(&self) -> AddKinds {
        AddKinds { branch: self.branch.kind(), stream: self.stream.kind() }
    }

    /// Computes h and y and, if a backward pass needs them, the moments and what dropout leaves.
    pub fn forward(
        &self,
        addends: &Addends<'_>,
        moments: Moments<Each<Option<Meta<i64>>>>,
    ) -> Result<Computed> {
        let (shape, device) = (self.shape(), self.branch.device());
        let needs_graph = moments.rstd.is_some();
        let allocate = |moment: Option<Meta<i64>>| moment.as_ref().map(Meta::allocate).transpose();
        // An addition reads any address, and costs less than a copy. Dropout's numbers do not depend on it.
        let is_read = || [addends.input, addends.residual].into_iter().all(is_in_vectors);
        let is_one_kernel = self.kinds().are_one_kernel(shape, device, needs_graph)?
            && (self.dropout > 0.0 || is_read());
        let is_outside = self.dropout > 0.0 && (device == Device::Cpu || !is_one_kernel);
        let (mut dropped, mut after_dropout) = (None, None);
        if is_outside {
            let (input, mask) = addends.input.f_native_dropout(self.dropout, true)?;
            dropped = needs_graph.then_some(mask);
            after_dropout = Some(input);
        }
        let input = after_dropout.as_ref().unwrap_or(addends.input);
        if !is_one_kernel {
            // The sum by libtorch, and its norm by the kernels of rows that are no sums.
            let sum = plain(&input.f_add(addends.residual)?)?;
            let mut output = self.stream.allocate()?;
            let moments = Moments { mean: allocate(moments.mean)?, rstd: allocate(moments.rstd)? };
            let operands = Operands { input: &sum, weight: addends.weight, bias: addends.bias };
            let borrowed = moments.borrowed();
            self.kernels.norm.forward(shape, &operands, self.eps, &mut output, &borrowed)?;
            let output = output.f_to_kind(self.branch.kind())?;
            return Ok(Computed { sum, output, moments, dropped });
        }
        let (input, residual) = (in_vectors(input)?, in_vectors(addends.residual)?);
        let weight = addends.weight.map(in_vectors).transpose()?;
        let bias = addends.bias.map(in_vectors).transpose()?;
        let (mut sum, mut output) = (self.stream.allocate()?, self.branch.allocate()?);
        let moments = Moments { mean: allocate(moments.mean)?, rstd: allocate(moments.rstd)? };
        let in_kernel = self.dropout > 0.0 && !is_outside;
        if in_kernel && needs_graph {
            dropped = Some(empty_of(&[2], (Kind::Int64, device))?);
        }
        let dropout = match in_kernel {
            true => InKernel::Draw { probability: self.dropout, kept: dropped.as_ref() },
            false => InKernel::None,
        };
        let operands = AddOperands {
            input: &input,
            residual: &residual,
            weight: weight.as_ref(),
            bias: bias.as_ref(),
        };
        let results = [&mut sum, &mut output];
        let options = (self.eps, dropout);
        self.kernels.forward(shape, &operands, options, results, &moments.borrowed())?;
        Ok(Computed { sum, output, moments, dropped })
    }

    /// The gradients of input, residual, weight and bias that are wanted, each described by its argument,
    /// from those of h and y. Where input and residual have one kind, theirs may be one tensor.
    pub fn backward(
        &self,
        [grad_sum, grad_output]: [Option<&Tensor>; 2],
        read: &Read<'_>,
        wanted: [Option<&Meta<i64>>; 4],
        is_recorded: bool,
    ) -> Result<[Option<Tensor>; 4]> {
        match (grad_output, read.sum) {
            (None, _) => {
                // The gradients are those of h alone.
                let Some(grad_sum) = grad_sum else { return Ok([const { None }; 4]) };
                let of_sum = if is_recorded { grad_sum.shallow_clone() } else { plain(grad_sum)? };
                let input = wanted[0].map(|_| self.through_dropout(&of_sum, read.dropped));
                Ok([input.transpose()?, wanted[1].map(|_| of_sum), None, None])
            }
            (Some(grad_output), Some(sum)) if is_recorded => {
                self.differentiable(grad_output, grad_sum, sum, read, wanted)
            }
            (Some(grad_output), Some(sum)) => {
                self.gradients(grad_output, grad_sum, sum, read, wanted)
            }
            (Some(_), None) => {
                Err(Error::msg("internal error: the sum that was normalised is absent"))
            }
        }
    }

    fn gradients(
        &self,
        grad_output: &Tensor,
        grad_sum: Option<&Tensor>,
        sum: &Tensor,
        read: &Read<'_>,
        [of_input, of_residual, of_weight, of_bias]: [Option<&Meta<i64>>; 4],
    ) -> Result<[Option<Tensor>; 4]> {
        let (shape, device, kinds) = (self.shape(), self.branch.device(), self.kinds());
        let (weight, Moments { mean, rstd }) = (read.weight, read.moments.clone());
        if !kinds.are_one_kernel(shape, device, true)? {
            // By the kernels of rows that are no sums.
            let grad_output = grad_output.f_to_kind(kinds.stream)?;
            let of_sum = of_input.or(of_residual).map(|_| self.stream);
            let moments = Moments { mean, rstd };
            let saved = Saved { input: Some(sum), weight, moments };
            let wanted = [of_sum, of_weight, of_bias];
            let [of_norm, weight, bias] =
                self.kernels.norm.backward(shape, &grad_output, &saved, wanted)?;
            let of_sum = match (of_norm, grad_sum) {
                (Some(of_norm), Some(grad_sum)) => Some(of_norm.f_add(grad_sum)?),
                (of_norm, _) => of_norm,
            };
            let input = of_sum.as_ref().filter(|_| of_input.is_some());
            let input = input.map(|of_sum| self.through_dropout(of_sum, read.dropped));
            return Ok([
                input.transpose()?,
                of_sum.filter(|_| of_residual.is_some()),
                weight,
                bias,
            ]);
        }
        let [mask, state] = mask_and_state(read.dropped);
        // Without dropout the two are one tensor, as those of libtorch's addition are.
        let is_own = kinds.branch != kinds.stream || state.is_some();
        let has_input = of_input.is_some() && is_own && mask.is_none();
        let has_sum = of_residual.is_some() || of_input.is_some() && !has_input;
        let allocate = |like: Option<&Meta<i64>>| like.map(Meta::allocate).transpose();
        let mut gradients = AddGradients {
            input: allocate(has_input.then_some(self.branch))?,
            residual: allocate(has_sum.then_some(self.stream))?,
            weight: allocate(of_weight)?,
            bias: allocate(of_bias)?,
        };
        let sum = in_vectors(sum)?;
        let weight = weight.map(in_vectors).transpose()?;
        let grad_output = in_vectors(grad_output)?;
        let grad_sum = grad_sum.map(in_vectors).transpose()?;
        let dropout = match state {
            Some(state) => InKernel::Again { probability: self.dropout, state },
            None => InKernel::None,
        };
        let moments = Moments { mean, rstd };
        let saved = AddSaved { sum: &sum, weight: weight.as_ref(), moments };
        let incoming = (&grad_output, grad_sum.as_ref());
        self.kernels.backward(shape, &saved, incoming, dropout, &mut gradients)?;
        let AddGradients { input, residual, weight, bias } = gradients;
        let input = match (&input, &residual) {
            (None, Some(of_sum)) if of_input.is_some() => {
                Some(self.through_dropout(of_sum, read.dropped)?)
            }
            _ => input,
        };
        Ok([input, residual.filter(|_| of_residual.is_some()), weight, bias])
    }

    /// The input's gradient, from that of the sum.
    fn through_dropout(&self, of_sum: &Tensor, dropped: Option<&Tensor>) -> Result<Tensor> {
        let branch = self.branch.kind();
        let [mask, state] = mask_and_state(dropped);
        if let Some(mask) = mask {
            let scale = 1.0 / (1.0 - self.dropout);
            // All values are dropped at a probability of 1, and infinity times 0 is NaN.
            let scale = if scale.is_finite() { scale } else { 0.0 };
            return Ok(of_sum.f_mul(mask)?.f_mul_scalar(scale)?.f_to_kind(branch)?);
        }
        if let Some(state) = state {
            let multipliers = {
                let _guard = tch::no_grad_guard();
                self.multipliers(of_sum, state)?
            };
            return Ok(of_sum.f_mul(&multipliers)?.f_to_kind(branch)?);
        }
        match of_sum.f_kind()? == branch {
            true => Ok(of_sum.shallow_clone()),
            false => Ok(of_sum.f_to_kind(branch)?),
        }
    }

    /// By what dropout multiplied each value: the sum of zeros and of ones that go through it.
    fn multipliers(&self, like: &Tensor, state: &Tensor) -> Result<Tensor> {
        let (kind, device) = (compute_kind(self.branch.kind()), like.device());
        let empty = || empty_of(&like.size(), (kind, device));
        let (mut sum, mut output) = (empty()?, empty()?);
        let (ones, zeros) = (output.f_ones_like()?, output.f_zeros_like()?);
        let operands = AddOperands { input: &ones, residual: &zeros, weight: None, bias: None };
        let dropout = InKernel::Again { probability: self.dropout, state };
        let results = [&mut sum, &mut output];
        let none = Moments { mean: None, rstd: None };
        self.kernels.forward(self.shape(), &operands, (self.eps, dropout), results, &none)?;
        Ok(sum)
    }

    /// The gradients, as differentiable operations on saved and incoming tensors. The norm is
    /// differentiated at h, whose history leads to input and residual.
    fn differentiable(
        &self,
        grad_output: &Tensor,
        grad_sum: Option<&Tensor>,
        sum: &Tensor,
        read: &Read<'_>,
        [of_input, of_residual, of_weight, of_bias]: [Option<&Meta<i64>>; 4],
    ) -> Result<[Option<Tensor>; 4]> {
        // Fresh aliases: the weight may depend on h. The gradients do not depend on the bias.
        let sum = sum.f_view_as(sum)?;
        let weight = read.weight.map(|weight| weight.f_view_as(weight)).transpose()?;
        let zeros = |like: &Meta<i64>| {
            Tensor::f_zeros(like.sizes(), (like.kind(), like.device()))?.f_set_requires_grad(true)
        };
        let bias = of_bias.map(zeros).transpose()?;
        let output =
            (self.formula)(&sum, self.normalized_shape, weight.as_ref(), bias.as_ref(), self.eps)?;
        let of_sum = of_input.or(of_residual).map(|_| &sum);
        let variables = [of_sum, weight.as_ref().filter(|_| of_weight.is_some()), bias.as_ref()];
        let options = GradOptions {
            grad_outputs: &[Some(grad_output)],
            create_graph: true,
            allow_unused: true,
            ..Default::default()
        };
        let inputs: Vec<&Tensor> = variables.iter().copied().flatten().collect();
        let found = grad(&[&output.f_to_kind(self.branch.kind())?], &inputs, &options)?;
        let mut found = found.into_vec().into_iter();
        let [of_norm, weight, bias] =
            variables.map(|variable| variable.and_then(|_| found.next().flatten()));
        let of_sum = match (of_norm, grad_sum) {
            (Some(of_norm), Some(grad_sum)) => Some(of_norm.f_add(grad_sum)?),
            (one, other) => one.or(other.map(Tensor::shallow_clone)),
        };
        let input = of_sum.as_ref().filter(|_| of_input.is_some());
        let input = input.map(|of_sum| self.through_dropout(of_sum, read.dropped)).transpose()?;
        // The bias' gradient depends on y's alone. If only h's has a graph, the sum of none of its
        // values gives it one, so that it does not look like a gradient whose graph was lost.
        let bias = match (bias, grad_sum) {
            (Some(bias), Some(grad_sum)) if !bias.requires_grad() && grad_sum.requires_grad() => {
                let none = grad_sum.f_reshape([-1])?.f_narrow(0, 0, 0)?;
                Some(bias.f_add(&none.f_sum(bias.f_kind()?)?)?)
            }
            (bias, _) => bias,
        };
        Ok([input, of_sum.filter(|_| of_residual.is_some()), weight, bias])
    }
}
