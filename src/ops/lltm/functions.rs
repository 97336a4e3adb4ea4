//! The sequence's outputs and gradients as functions of tensors and plain values, below autograd.

use super::super::lltm_cell::kernels::sequence::{self, Sequence, StepKernel};
use super::super::lltm_cell::{bias_gradient, functions as cell, of_one_step, place};
use super::super::recurrent::kernels::cpu::{self, CpuOperands, CpuSaved, InputGates};
use super::super::recurrent::kernels::cuda::{self, gates_kind};
use super::super::recurrent::kernels::{Outputs, product};
use super::super::recurrent::layer::input_gates;
use super::super::recurrent::operands::{row_major_copy, worked, worked_as, worked_in};
use super::plan::{Chip, Direction, Plan, Sizes, Way};
use super::{kernels, weight};
use crate::cuda::matmul_allow_tf32;
use crate::ffi::facts::facts;
use crate::operator::Meta;
use crate::ops::kinds;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The arguments; the input is `[T, B, F]`.
pub(super) use super::super::lltm_cell::Operands;

/// The kinds in which products and the state are computed. Kernels of the CPU compute one kind, and
/// those on CUDA take a state of kind `Double` with products in it.
fn computed_in((product, state): (Kind, Kind), device: Device) -> (Kind, Kind) {
    let state = worked_in(state, device);
    let is_one_kind = device == Device::Cpu || state == Kind::Double;
    (if is_one_kind { state } else { product }, state)
}

fn plan(
    way: Way,
    direction: Direction,
    sizes: Sizes,
    kinds: (Kind, Kind),
    on: Device,
) -> Result<Plan> {
    let kinds = (kinds::Kind::of(kinds.0)?, kinds::Kind::of(kinds.1)?);
    let chip = Chip::of(on.into(), kinds.0, || i64::from(tch::get_num_threads()))?;
    Ok(Plan::new(way, direction, sizes, kinds, chip))
}

/// Computes all steps. No two outputs share memory, nor does one with an argument. If `keep` is set, it
/// keeps what [`backward`] reads: for a step of the cell no c, because the last one is all.
pub(super) fn forward(
    operands: &Operands<'_>,
    way: Way,
    one_step: Option<&cell::Shapes>,
    keep: bool,
) -> Result<Outputs> {
    if let Some(shapes) = one_step {
        return forward_of_one_step(operands, shapes, keep);
    }
    let Operands { input, h, c, .. } = *operands;
    let kind = c.f_kind()?;
    if input.size3()?.0 == 0 || h.numel() == 0 {
        // Without steps nothing changes, and without rows or columns there is nothing to compute.
        let (batch, hidden) = h.size2()?;
        return Ok(Outputs {
            output: Tensor::f_zeros([input.size3()?.0, batch, hidden], (kind, c.device()))?,
            last_h: row_major_copy(h, kind)?,
            last_c: Some(row_major_copy(c, kind)?),
            c: None,
            activations: None,
        });
    }
    let made = all_steps(operands, way, keep)?;
    Ok(Outputs {
        output: made.output.f_to_kind(kind)?,
        last_h: made.last_h.f_to_kind(kind)?,
        last_c: made.last_c.map(|c| c.f_to_kind(kind)).transpose()?,
        ..made
    })
}

/// A sequence of one step, as in sampling. The cell's kernels compute it, and write h' a second
/// time, as the output.
fn forward_of_one_step(
    operands: &Operands<'_>,
    shapes: &cell::Shapes,
    keep: bool,
) -> Result<Outputs> {
    let Operands { input, weight, bias, h, c } = *operands;
    let known = super::of_one_step(facts([Some(input), Some(weight), bias, Some(h), Some(c)])?);
    let made = cell::forward(operands, &known, shapes, Default::default(), keep)?;
    let output =
        made.output.ok_or_else(|| Error::msg("internal error: the cell made no output"))?;
    let activations = made.activations;
    Ok(Outputs { output, last_h: made.new_h, last_c: Some(made.new_c), c: None, activations })
}

fn all_steps(operands: &Operands<'_>, way: Way, keep: bool) -> Result<Outputs> {
    let Operands { input, weight, bias, h, c } = *operands;
    let (steps, batch, features) = input.size3()?;
    let (hidden, device) = (h.size2()?.1, c.device());
    let sizes = Sizes { steps, batch, features, hidden };
    let kinds = computed_in((weight.f_kind()?, c.f_kind()?), device);
    let (input, weight) = (worked_as(kinds.0, input)?, worked_as(kinds.0, weight)?);
    let (h0, c0) = (worked_as(kinds.0, h)?, worked_as(kinds.1, c)?);
    let bias_of = |kind| bias.map(|bias| worked_as(kind, &bias.f_reshape([-1])?)).transpose();
    let of_hidden = weight.f_narrow(1, 0, hidden)?;
    let gates = |bias: Option<&Tensor>| -> Result<Tensor> {
        let of_input = weight.f_narrow(1, hidden, features)?;
        Ok(input_gates(&input, &of_input, bias, false)?.0)
    };
    let by_cells = |kernel, gates: Option<&Tensor>| {
        let bias = bias_of(kinds.0)?;
        let (bias, input_gates) = (bias.as_ref(), gates);
        let of = Sequence { input: &input, weight: &weight, bias, h0: &h0, c0: &c0, input_gates };
        sequence::forward(kernel, &of, keep)
    };
    match plan(way, Direction::Forward, sizes, kinds, device)? {
        Plan::TensorCores => by_cells(StepKernel::TensorCores, None),
        Plan::Fused { input_at_once: false } => by_cells(StepKernel::Fused, None),
        Plan::Fused { input_at_once: true } => by_cells(StepKernel::Fused, Some(&gates(None)?)),
        Plan::Cpu(team) => {
            let gates = gates(bias_of(kinds.0)?.as_ref())?;
            let operands = CpuOperands {
                weight: &of_hidden,
                input_gates: InputGates::Given(&gates),
                separate_bias: None,
                h0: &h0,
                c0: Some(&c0),
            };
            cpu::forward(kernels::CPU, team, &operands, keep)
        }
        Plan::Kernel(kernel) => {
            let bias = bias_of(gates_kind(kinds.0))?;
            let operands = cuda::Operands {
                weight: &of_hidden,
                input_gates: &gates(None)?,
                bias: bias.as_ref(),
                separate_bias: None,
                h0: &h0,
                c0: Some(&c0),
            };
            match kernels::CUDA.filter(|_| device.is_cuda()) {
                Some(cell) => cuda::forward(&cell, kernel, &operands, keep),
                None => cpu::forward_by_steps(kernels::CPU, &operands, keep),
            }
        }
    }
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

impl Saved {
    /// c and the activations without a dimension of the steps, which a trace knows.
    pub fn of_one_step(self) -> Result<Saved> {
        let (c, activations) = (of_one_step(&self.c)?, of_one_step(&self.activations)?);
        Ok(Saved { c, activations, ..self })
    }
}

/// The gradients of a step of the cell, from those for the output and for h and c after it; an absent one
/// is zero.
pub(super) fn backward_of_one_step(
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

/// The gradients of several steps. `product` and `state` are the kinds of the arguments.
pub(super) fn backward(
    [grad_output, grad_h, grad_c]: [Option<&Tensor>; 3],
    saved: &Saved,
    bias: Option<&[i64]>,
    (product, state): (Kind, Kind),
    needs: &cell::Needs,
    way: Way,
) -> Result<cell::Gradients> {
    let device = saved.c.device();
    let kinds = computed_in((product, state), device);
    let grad_output = grad_output.map(|grad| worked_as(kinds.1, grad)).transpose()?;
    let (c, activations) = (worked(&saved.c)?, worked(&saved.activations)?);
    let Some(weight) = &saved.weight else {
        return Err(Error::msg("internal error: lltm's backward lacks the weight"));
    };
    let weight = worked_as(kinds.0, weight)?;
    let (steps, batch, hidden) = c.size3()?;
    let sizes = Sizes { steps, batch, features: weight.size2()?.1 - hidden, hidden };
    let grads = [grad_output.as_ref(), grad_h, grad_c];
    let read = CpuSaved {
        weight: &weight.f_narrow(1, 0, hidden)?,
        activations: &activations,
        states: &c,
        first_state: None,
    };
    let needs_h = needs[place::H];
    let made = match plan(way, Direction::Backward, sizes, kinds, device)? {
        Plan::Cpu(team) => cpu::backward(kernels::CPU, team, &read, None, grads, needs_h)?.0,
        Plan::Fused { .. } => sequence::backward(&weight, &activations, &c, grads)?,
        Plan::Kernel(kernel) => match kernels::CUDA.filter(|_| device.is_cuda()) {
            Some(cell) => cuda::backward(&cell, kernel, &read, grads, needs_h)?,
            None => cpu::backward_by_steps(kernels::CPU, &read, grads, needs_h)?,
        },
        Plan::TensorCores => return Err(Error::msg("internal error: a plan for the forward pass")),
    };

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
/// through, and the others are zero. `inputs` describe the arguments whose gradients are needed.
pub(super) fn backward_of_nothing(
    [_, grad_h, grad_c]: [Option<&Tensor>; 3],
    inputs: [Option<&Meta<i64>>; place::LEN],
) -> Result<cell::Gradients> {
    let mut gradients: cell::Gradients = Default::default();
    for (place, input) in inputs.into_iter().enumerate() {
        let Some(input) = input else { continue };
        let given = [None, None, None, grad_h, grad_c][place];
        gradients[place] = Some(match given {
            Some(grad) => row_major_copy(grad, input.kind())?,
            None => Tensor::f_zeros(input.sizes(), (input.kind(), input.device()))?,
        });
    }
    Ok(gradients)
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
