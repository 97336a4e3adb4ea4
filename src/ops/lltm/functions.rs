//! The sequence's outputs and gradients as functions of tensors and plain values, below autograd.

use super::super::lltm_cell::{bias_gradient, functions as cell, of_one_step, place};
use super::super::recurrent::product;
use super::plan::{Chip, Direction, Plan, Sizes, Way};
use super::{kernels, weight};
use crate::cuda::matmul_allow_tf32;
use crate::ffi::facts::{Facts, facts};
use crate::ffi::tensor::plain;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The arguments; the input is `[T, B, F]`.
pub(super) use super::super::lltm_cell::Operands;

/// What [`forward`] computes. No two tensors share memory, nor does one with an argument.
pub(super) struct Outputs {
    /// h of all steps.
    pub output: Tensor,
    /// h and c after the last step.
    pub last_h: Tensor,
    pub last_c: Tensor,
    /// c of all steps, if it was asked for. It is absent if there is nothing to compute, and if the
    /// kernels of the cell computed one step, of which `last_c` is all.
    pub c: Option<Tensor>,
    /// σ(i), σ(o), g, if they were asked for and there is anything to compute.
    pub activations: Option<Tensor>,
}

/// What [`backward`] needs to know of the arguments besides their values. The first derivative does
/// not ask the tensors for it: a bias that was changed in place since the forward then causes no
/// version error.
pub(super) enum Shapes {
    /// One step, by the kernels of the cell.
    OneStep(cell::Shapes),
    Steps {
        bias: Option<Vec<i64>>,
        /// The kind of the products' operands.
        product: Kind,
        /// The kind of c and of the outputs.
        state: Kind,
    },
}

/// Computes all steps. If `keep` is set, it keeps what [`backward`] reads. `known` are the facts of
/// the arguments, of which those of the input describe one step, if there is only one and they have
/// been queried already.
pub(super) fn forward(
    operands: &Operands<'_>,
    known: Option<[Facts; place::LEN]>,
    way: Way,
    keep: bool,
) -> Result<(Outputs, Shapes)> {
    let Operands { input, weight, bias, h, c } = *operands;
    if let Some(known) = known {
        return one_step(operands, &known, keep);
    }
    let (product, state) = (weight.f_kind()?, c.f_kind()?);
    let steps = input.size3()?.0;
    if way.is_one_step_of_the_cell(steps, (product, state), c.device()) {
        let known = facts([Some(input), Some(weight), bias, Some(h), Some(c)])?;
        return one_step(operands, &known.map(Facts::of_one_step), keep);
    }
    let shapes = Shapes::Steps { bias: bias.map(Tensor::size), product, state };
    if steps == 0 || h.numel() == 0 {
        // Without steps nothing changes, and without rows or columns there is nothing to compute.
        let (batch, hidden) = h.size2()?;
        let output = Tensor::f_zeros([steps, batch, hidden], (state, c.device()))?;
        let (last_h, last_c) = (row_major_copy(h, state)?, row_major_copy(c, state)?);
        return Ok((Outputs { output, last_h, last_c, c: None, activations: None }, shapes));
    }
    let made = all_steps(operands, way, keep)?;
    let last = |steps: &Tensor| copied(&steps.f_select(0, -1)?, state);
    let (last_c, c) = match made.activations {
        Some(_) => (last(&made.c)?, Some(made.c)),
        // `made.c` is then c of the last step alone.
        None => (made.c.f_view(h.size().as_slice())?.f_to_kind(state)?, None),
    };
    let (output, last_h) = (made.output.f_to_kind(state)?, last(&made.output)?);
    Ok((Outputs { output, last_h, last_c, c, activations: made.activations }, shapes))
}

/// A sequence of one step, as in sampling. The cell's kernels compute it, and write h' a second
/// time, as the output.
fn one_step(
    operands: &Operands<'_>,
    known: &[Facts; place::LEN],
    keep: bool,
) -> Result<(Outputs, Shapes)> {
    let shapes = cell::Shapes::of(known, operands.bias.is_some(), true)?;
    let made = cell::forward(operands, known, &shapes, Default::default(), keep)?;
    let output =
        made.output.ok_or_else(|| Error::msg("internal error: the cell made no output"))?;
    let (last_h, last_c, activations) = (made.new_h, made.new_c, made.activations);
    Ok((Outputs { output, last_h, last_c, c: None, activations }, Shapes::OneStep(shapes)))
}

fn all_steps(operands: &Operands<'_>, way: Way, keep: bool) -> Result<kernels::Outputs> {
    let Operands { input, weight, bias, h, c } = *operands;
    let (input, weight, bias) = (worked(input)?, worked(weight)?, bias.map(worked).transpose()?);
    let (h0, c0) = (worked(h)?, worked(c)?);
    let operands =
        kernels::Operands { input: &input, weight: &weight, bias: bias.as_ref(), h0: &h0, c0: &c0 };
    let plan = plan(way, Direction::Forward, operands.sizes()?, &weight, &c0)?;
    kernels::forward(plan, &operands, keep)
}

fn plan(
    way: Way,
    direction: Direction,
    sizes: Sizes,
    weight: &Tensor,
    state: &Tensor,
) -> Result<Plan> {
    let kinds = (weight.f_kind()?, state.f_kind()?);
    let chip = Chip::of(state.device(), kinds.0)?;
    Ok(Plan::new(way, direction, sizes, kinds, chip))
}

/// The kind in which kernels compute tensors of this kind. There are none for the half kinds on the
/// CPU.
fn worked_in(kind: Kind, device: Device) -> Kind {
    match (device, kind) {
        (Device::Cpu, Kind::Half | Kind::BFloat16) => Kind::Float,
        (_, kind) => kind,
    }
}

/// The tensor in the kind and layout that kernels read.
fn worked(tensor: &Tensor) -> Result<Tensor> {
    plain(&tensor.f_to_kind(worked_in(tensor.f_kind()?, tensor.device()))?)
}

/// A copy, because an output must not share another tensor's memory.
pub(super) fn copied(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(tensor.f_to_dtype(kind, false, true)?)
}

/// A copy that is row-major in whatever layout the tensor is.
fn row_major_copy(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    let mut copy = Tensor::f_empty(tensor.size(), (kind, tensor.device()))?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// What [`backward`] reads. The weight is always there for several steps, and for one step if the
/// gradient of the input or of h is needed. Input, h and, for several steps, the output are there if
/// that of the weight is.
pub(super) struct Saved {
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub h: Option<Tensor>,
    pub output: Option<Tensor>,
    /// c of all steps, or of the one step.
    pub c: Tensor,
    pub activations: Tensor,
}

impl Shapes {
    /// Whether [`backward`] reads the weight.
    pub fn reads_weight(&self, needs: &cell::Needs) -> bool {
        !self.is_one_step() || needs[place::INPUT] || needs[place::H]
    }

    pub fn is_one_step(&self) -> bool {
        matches!(self, Shapes::OneStep(_))
    }
}

/// Computes the gradients that are needed, from those for the output and for h and c after the last
/// step; an absent one is zero.
pub(super) fn backward(
    grads: [Option<&Tensor>; 3],
    saved: Saved,
    shapes: &Shapes,
    needs: &cell::Needs,
    way: Way,
) -> Result<cell::Gradients> {
    match shapes {
        Shapes::OneStep(shapes) => backward_of_one_step(grads, saved, shapes, needs),
        Shapes::Steps { bias, product, state } => {
            let kinds = (*product, *state);
            backward_of_steps(grads, &saved, bias.as_deref(), kinds, needs, way)
        }
    }
}

fn backward_of_one_step(
    [output, last_h, last_c]: [Option<&Tensor>; 3],
    saved: Saved,
    shapes: &cell::Shapes,
    needs: &cell::Needs,
) -> Result<cell::Gradients> {
    let sum = match (output, last_h) {
        (Some(output), Some(h)) => Some(of_one_step(output)?.f_add(h)?),
        _ => None,
    };
    let grad_new_h = sum.as_ref().or(output).or(last_h);
    let Saved { input, weight, h, c: new_c, activations, .. } = saved;
    let saved = cell::Saved { input, weight, h, new_c, activations };
    cell::backward([grad_new_h, last_c], &saved, shapes, needs, Default::default())
}

fn backward_of_steps(
    [grad_output, grad_h, grad_c]: [Option<&Tensor>; 3],
    saved: &Saved,
    bias: Option<&[i64]>,
    (product, state): (Kind, Kind),
    needs: &cell::Needs,
    way: Way,
) -> Result<cell::Gradients> {
    let values = |grad: Option<&Tensor>| grad.map(worked).transpose();
    let (grad_output, grad_h, grad_c) = (values(grad_output)?, values(grad_h)?, values(grad_c)?);
    let c = &saved.c;
    let Some(weight) = &saved.weight else {
        return Err(Error::msg("internal error: lltm's backward lacks the weight"));
    };
    let weight = worked(weight)?;
    let (steps, batch, hidden) = c.size3()?;
    let sizes = Sizes { steps, batch, features: weight.size2()?.1 - hidden, hidden };
    let inputs = kernels::BackwardInputs {
        weight: &weight,
        grad_output: grad_output.as_ref(),
        grad_h: grad_h.as_ref(),
        grad_c: grad_c.as_ref(),
        activations: &saved.activations,
        c,
    };
    let plan = plan(way, Direction::Backward, sizes, &weight, c)?;
    let made = kernels::backward(plan, &inputs, needs[place::H])?;

    let grad_gates = made.gates.f_view([steps * batch, 3 * hidden])?;
    let wanted = |place: usize, gradient: Tensor, kind| -> Result<Option<Tensor>> {
        if needs[place] { Ok(Some(gradient.f_to_kind(kind)?)) } else { Ok(None) }
    };
    let grad_input = match needs[place::INPUT] {
        true => Some(input_gradient(&grad_gates, &weight, sizes)?.f_to_kind(product)?),
        false => None,
    };
    let grad_weight = match (&saved.h, &saved.output, &saved.input) {
        // The gradient of the weight, `Σ dG[t]ᵀ [h[t-1], x[t]]`, over all steps at once.
        (Some(h0), Some(output), Some(input)) if needs[place::WEIGHT] => {
            let grad_gates = &grad_gates;
            let operands = weight::Operands { grad_gates, h0, output, input, sizes };
            Some(operands.product()?.f_to_kind(product)?)
        }
        _ => None,
    };
    let grad_bias = match bias.filter(|_| needs[place::BIAS]) {
        Some(size) => Some(bias_gradient(&grad_gates, size)?.f_to_kind(product)?),
        None => None,
    };
    let (grad_h, grad_c) = (wanted(place::H, made.h0, product)?, wanted(place::C, made.c0, state)?);
    Ok([grad_input, grad_weight, grad_bias, grad_h, grad_c])
}

/// The gradients of a sequence without steps, rows or columns: those for the state are passed
/// through, and the others are zero. `inputs` are the arguments whose gradients are needed.
pub(super) fn backward_of_nothing(
    [_, grad_h, grad_c]: [Option<&Tensor>; 3],
    inputs: [Option<Tensor>; place::LEN],
) -> Result<cell::Gradients> {
    let gradient = |input: Option<Tensor>, grad: Option<&Tensor>| -> Result<Option<Tensor>> {
        let Some(input) = input else { return Ok(None) };
        let kind = input.f_kind()?;
        match grad {
            Some(grad) => row_major_copy(grad, kind).map(Some),
            None => Ok(Some(Tensor::f_zeros(input.size(), (kind, input.device()))?)),
        }
    };
    let [input, weight, bias, h, c] = inputs;
    Ok([
        gradient(input, None)?,
        gradient(weight, None)?,
        gradient(bias, None)?,
        gradient(h, grad_h)?,
        gradient(c, grad_c)?,
    ])
}

/// The gradient of the input, `dG W_x`, for all steps at once.
fn input_gradient(grad_gates: &Tensor, weight: &Tensor, sizes: Sizes) -> Result<Tensor> {
    let Sizes { steps, batch, features, hidden } = sizes;
    let mut weight = weight.f_narrow(1, hidden, features)?;
    /// With fewer rows, the product saves less time than the copy costs.
    const MANY_ROWS: i64 = 256;
    if is_in_tf32(grad_gates)? && steps * batch >= MANY_ROWS {
        // Column by column in memory, the order that csrc/recurrent/columns.cu writes.
        weight = weight.f_transpose(0, 1)?.f_contiguous()?.f_transpose(0, 1)?;
    }
    let gradient = product(grad_gates, &weight, None)?;
    Ok(gradient.f_view([steps, batch, features])?)
}

/// Whether libtorch may use tf32 in products of this operand.
pub(super) fn is_in_tf32(operand: &Tensor) -> Result<bool> {
    Ok(operand.f_kind()? == Kind::Float && operand.device().is_cuda() && matmul_allow_tf32()?)
}
