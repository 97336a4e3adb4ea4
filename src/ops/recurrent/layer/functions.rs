//! A layer's outputs and gradients as functions of tensors and plain values, below autograd.

use super::libtorch::{backward_by_cudnn, backward_by_onednn, forward_by_cudnn, forward_by_onednn};
use super::over_steps::OverSteps;
use super::plan::{self, Choice, Library};
use super::tf32::Tf32;
use super::{Arguments, Cell, Gradients, Needs, Plan, absent, place};
use crate::Result;
use crate::ffi::tensor::plain;
use crate::ops::kinds::Kind;
use crate::ops::recurrent::kernels::biases::sum_of_biases;
use crate::ops::recurrent::kernels::block::{self, BlockCell, BlockGradients};
use crate::ops::recurrent::kernels::cpu::{self, CpuOperands, CpuSaved, InputGates};
use crate::ops::recurrent::kernels::cuda::{self, CudaCell, Kernel, gates_kind};
use crate::ops::recurrent::kernels::{Outputs, product, tf32_product};
use crate::ops::recurrent::operands::{row_major_copy, worked};
use crate::ops::recurrent::plan::{Direction, Sizes, multiplies_input, team};
use tch::Tensor;

pub(super) struct Operands<'a> {
    pub input: &'a Tensor,
    pub w_ih: &'a Tensor,
    pub w_hh: &'a Tensor,
    pub b_ih: Option<&'a Tensor>,
    pub b_hh: Option<&'a Tensor>,
    pub h: &'a Tensor,
    pub c: Option<&'a Tensor>,
    /// Which steps keep a state that is not h, `[T, B, 1]`, because they are padding.
    pub padding: Option<&'a Tensor>,
}

impl<'a> Operands<'a> {
    /// The arguments, without padding.
    pub fn new<C: Cell>(arguments: &Arguments<'a>) -> Result<Self> {
        let [Some(input), Some(h), c, Some(w_ih), Some(w_hh), b_ih, b_hh] = *arguments else {
            return Err(absent::<C>());
        };
        Ok(Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, padding: None })
    }
}

/// What the forward pass kept, as far as it did.
#[derive(Clone, Copy)]
pub(super) struct Kept<'a> {
    /// h of all steps, `[T, B, H]`
    pub output: Option<&'a Tensor>,
    /// c of all steps, if there is one; by oneDNN only the last one
    pub c: Option<&'a Tensor>,
    pub activations: Option<&'a Tensor>,
    /// Whether it may be overwritten.
    pub may_overwrite: &'a dyn Fn() -> Result<bool>,
}

/// What the gradients are computed from.
pub(super) struct Saved<'a> {
    pub operands: &'a Operands<'a>,
    pub output: &'a Tensor,
    pub c: Option<&'a Tensor>,
    pub activations: &'a Tensor,
    pub may_overwrite: &'a dyn Fn() -> Result<bool>,
}

/// `[1, …]` as `[…]`, in place: a view that is made without grad mode may not be changed in place
/// with it.
pub(super) fn without_first_dimension(mut tensor: Tensor) -> Result<Tensor> {
    let _ = tensor.f_squeeze_dim_(0)?;
    Ok(tensor)
}

/// A sum that may lack either part.
fn sum(first: Option<Tensor>, second: Option<Tensor>) -> Result<Option<Tensor>> {
    Ok(match (first, second) {
        (Some(first), Some(second)) => Some(first.f_add(&second)?),
        (first, second) => first.or(second),
    })
}

/// The bias of the product with the input, to which that of the product with h is added as far as
/// its gates are not separate, and the bias of the separate gates.
fn biases<C: Cell>(
    b_ih: Option<&Tensor>,
    b_hh: Option<&Tensor>,
    hidden: i64,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let is_on_cuda = b_ih.or(b_hh).is_some_and(|bias| bias.device().is_cuda());
    if C::CUDA.is_some() && is_on_cuda {
        return sum_of_biases([b_ih, b_hh], [C::GATES * hidden, C::SEPARATE * hidden]);
    }
    let (b_ih, b_hh) = (b_ih.map(worked).transpose()?, b_hh.map(worked).transpose()?);
    let b_hh = match b_hh {
        Some(b_hh) if C::SEPARATE > 0 => b_hh,
        b_hh => return Ok((sum(b_ih, b_hh)?, None)),
    };
    let summed = (C::GATES - C::SEPARATE) * hidden;
    let of_sums = b_hh.f_narrow(0, 0, summed)?.f_constant_pad_nd([0, C::SEPARATE * hidden])?;
    let separate = plain(&b_hh.f_narrow(0, summed, C::SEPARATE * hidden)?)?;
    Ok((sum(b_ih, Some(of_sums))?, Some(separate)))
}

/// Computes all steps. No output shares memory with an argument. If `keep` is set, this keeps what
/// [`backward`] reads.
pub(super) fn forward<C: Cell>(
    operands: &Operands<'_>,
    Plan { choice, library }: Plan,
    keep: bool,
) -> Result<Outputs> {
    let Operands { input, h, c, .. } = *operands;
    let (steps, batch, features) = input.size3()?;
    let hidden = h.size2()?.1;
    let (kind, device) = (h.f_kind()?, h.device());
    if steps == 0 || batch == 0 || hidden == 0 {
        // Without steps nothing changes, and without rows or columns there is nothing to compute.
        return Ok(Outputs {
            output: Tensor::f_zeros([steps, batch, hidden], (kind, device))?,
            last_h: row_major_copy(h, kind)?,
            last_c: c.map(|c| row_major_copy(c, kind)).transpose()?,
            c: None,
            activations: None,
        });
    }
    let sizes = Sizes { steps, batch, features, hidden };
    match library {
        Library::Cudnn => return forward_by_cudnn(operands, keep),
        Library::Onednn => return forward_by_onednn(operands, keep),
        Library::Ours => {}
    }
    let made = all_steps::<C>(operands, sizes, choice, keep)?;
    Ok(Outputs {
        output: made.output.f_to_kind(kind)?,
        last_h: made.last_h.f_to_kind(kind)?,
        last_c: made.last_c.map(|c| c.f_to_kind(kind)).transpose()?,
        ..made
    })
}

/// The input's part of all gates, `[T, B, G·H]`, in the kind in which products are summed, and
/// whether it includes the bias.
pub(in crate::ops) fn input_gates(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    is_tf32: bool,
) -> Result<(Tensor, bool)> {
    let (steps, batch, features) = input.size3()?;
    let rows = input.f_view([steps * batch, features])?;
    let (weight, sums) = (weight.f_transpose(0, 1)?, gates_kind(input.f_kind()?));
    let has_bias = sums == input.f_kind()? && !is_tf32;
    let gates = match has_bias {
        true => product(&rows, &weight, bias)?,
        false if is_tf32 => tf32_product(&rows, &weight, None)?,
        false => rows.f_mm_dtype(&weight, sums)?,
    };
    Ok((plain(&gates.f_view([steps, batch, -1])?)?, has_bias))
}

/// The cell's kernels and the one that the plan chooses, on CUDA.
fn on_cuda<C: Cell>(
    choice: Choice,
    direction: Direction,
    sizes: Sizes,
    like: &Tensor,
    is_padded: bool,
) -> Result<Option<(CudaCell, Kernel)>> {
    let Some(cell) = C::CUDA.filter(|_| like.device().is_cuda()) else { return Ok(None) };
    let (kind, device) = (like.f_kind()?, like.device());
    let kernel =
        plan::kernel::<C>(choice, direction, sizes, Kind::of(kind)?, device.into(), is_padded)?;
    Ok(Some((cell, kernel)))
}

fn of_block(operands: &Operands<'_>) -> Result<block::Arguments> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *operands;
    block::Arguments::new([input, w_ih, w_hh, h], [b_ih, b_hh, c])
}

fn all_steps<C: Cell>(
    operands: &Operands<'_>,
    sizes: Sizes,
    choice: Choice,
    keep: bool,
) -> Result<Outputs> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, padding } = *operands;
    let on_cuda = on_cuda::<C>(choice, Direction::Forward, sizes, h, padding.is_some())?;
    if let Some((cell, Kernel::Block { blocks, .. })) = &on_cuda
        && let Some(BlockCell { forward, .. }) = cell.block
    {
        return block::forward(cell, forward, &of_block(operands)?, *blocks, keep);
    }
    let (bias, separate_bias) = biases::<C>(b_ih, b_hh, sizes.hidden)?;
    let (input, w_ih) = (worked(input)?, worked(w_ih)?);
    let (weight, h0, c0) = (worked(w_hh)?, worked(h)?, c.map(worked).transpose()?);
    let (kind, bias) = (h0.f_kind()?, bias.as_ref());
    let is_tf32 = h0.device().is_cuda() && choice.tf32(Kind::of(kind)?, sizes)?.input;
    let all_input_gates = || -> Result<(Tensor, bool)> {
        let (gates, has_bias) = input_gates(&input, &w_ih, bias, is_tf32)?;
        if let Some(padding) = padding {
            keep_state::<C>(&gates, padding, sizes.hidden)?;
        }
        Ok((gates, has_bias))
    };
    let Some((cell, kernel)) = on_cuda else {
        if plan::is_by_steps(choice, sizes) {
            let (gates, has_bias) = all_input_gates()?;
            let operands = cuda::Operands {
                weight: &weight,
                input_gates: &gates,
                bias: bias.filter(|_| !has_bias),
                separate_bias: separate_bias.as_ref(),
                h0: &h0,
                c0: c0.as_ref(),
            };
            return cpu::forward_by_steps(C::CPU, &operands, keep);
        }
        let team = cpu_team::<C>(sizes, &h0)?;
        let given;
        let operands = CpuOperands {
            weight: &weight,
            input_gates: if padding.is_none()
                && multiplies_input(sizes, C::GATES, Kind::of(kind)?, team)
            {
                InputGates::Product { input: &input, weight: &w_ih, bias }
            } else {
                (given, _) = all_input_gates()?;
                InputGates::Given(&given)
            },
            separate_bias: separate_bias.as_ref(),
            h0: &h0,
            c0: c0.as_ref(),
        };
        return cpu::forward(C::CPU, team, &operands, keep);
    };
    let (gates, has_bias) = all_input_gates()?;
    let operands = cuda::Operands {
        weight: &weight,
        input_gates: &gates,
        bias: bias.filter(|_| !has_bias),
        separate_bias: separate_bias.as_ref(),
        h0: &h0,
        c0: c0.as_ref(),
    };
    cuda::forward(&cell, kernel, &operands, keep)
}

/// Sets gates so that a step which is padding keeps the state exactly, and has gradients of zero.
fn keep_state<C: Cell>(gates: &Tensor, padding: &Tensor, hidden: i64) -> Result<()> {
    for &(gate, value) in C::KEEPS_STATE {
        let mut of_gate = gates.f_narrow(2, gate * hidden, hidden)?;
        let _ = of_gate.f_masked_fill_(padding, value)?;
    }
    Ok(())
}

fn cpu_team<C: Cell>(sizes: Sizes, like: &Tensor) -> Result<cpu::Team> {
    let threads = i64::from(tch::get_num_threads());
    Ok(team([sizes.steps, sizes.batch, sizes.hidden], C::GATES, Kind::of(like.f_kind()?)?, threads))
}

/// Computes the gradients that are needed, from those for the output and for the last h and c; an
/// absent one is zero. What was not kept is computed once more.
pub(super) fn backward<C: Cell>(
    grads: [Option<&Tensor>; 3],
    operands: &Operands<'_>,
    kept: &Kept<'_>,
    needs: &Needs,
    plan: Plan,
) -> Result<Gradients> {
    let (steps, batch, _) = operands.input.size3()?;
    if steps == 0 || batch == 0 || operands.h.size2()?.1 == 0 {
        return backward_of_nothing(grads, operands, needs);
    }
    let Kept { c, may_overwrite, .. } = *kept;
    if let (Some(output), Some(activations)) = (kept.output, kept.activations)
        && (plan.library == Library::Cudnn || c.is_some() != C::STATE_IS_H)
    {
        let saved = Saved { operands, output, c, activations, may_overwrite };
        return by_library::<C>(grads, &saved, needs, plan);
    }
    let Outputs { output, c, activations, .. } = forward::<C>(operands, plan, true)?;
    let activations = activations.ok_or_else(absent::<C>)?;
    let (output, c, activations) = (&output, c.as_ref(), &activations);
    let saved = Saved { operands, output, c, activations, may_overwrite: &|| Ok(true) };
    by_library::<C>(grads, &saved, needs, plan)
}

fn by_library<C: Cell>(
    grads: [Option<&Tensor>; 3],
    saved: &Saved<'_>,
    needs: &Needs,
    Plan { choice, library }: Plan,
) -> Result<Gradients> {
    match library {
        Library::Cudnn => backward_by_cudnn(grads, saved, needs),
        Library::Onednn => backward_by_onednn(grads, saved, needs),
        Library::Ours => backward_by_ours::<C>(grads, saved, needs, choice),
    }
}

fn backward_by_ours<C: Cell>(
    grads: [Option<&Tensor>; 3],
    saved: &Saved<'_>,
    needs: &Needs,
    choice: Choice,
) -> Result<Gradients> {
    let (device, operands) = (saved.output.device(), saved.operands);
    let (steps, batch, hidden) = saved.output.size3()?;
    let rows = steps * batch;
    let kind = saved.output.f_kind()?;
    let features = operands.input.size3()?.2;
    let sizes = Sizes { steps, batch, features, hidden };
    let on_cuda = on_cuda::<C>(choice, Direction::Backward, sizes, saved.output, false)?;
    if let Some((cell, Kernel::Block { blocks, sums_weights })) = &on_cuda
        && let Some(of) = cell.block
    {
        let tf32 = choice.tf32(Kind::of(kind)?, sizes)?;
        let of = (cell, of, (*blocks, *sums_weights));
        return backward_by_block(of, grads, saved, needs, tf32);
    }
    let (output, activations) = (worked(saved.output)?, worked(saved.activations)?);
    let (weight, h0) = (worked(operands.w_hh)?, worked(operands.h)?);
    let (states, first_state) = match saved.c.zip(operands.c) {
        Some((c, c0)) => (worked(c)?, worked(c0)?),
        None => (output.shallow_clone(), h0.shallow_clone()),
    };
    let [grad_output, grad_h, grad_c] = grads;
    let grad_output = grad_output.map(worked).transpose()?;
    let read = CpuSaved {
        weight: &weight,
        activations: &activations,
        states: &states,
        first_state: Some(&first_state),
    };
    let grads = [grad_output.as_ref(), grad_h, grad_c];
    let (made, input_gradient) = match on_cuda {
        None if plan::is_by_steps(choice, sizes) => {
            (cpu::backward_by_steps(C::CPU, &read, grads, needs[place::H])?, None)
        }
        None => {
            let team = cpu_team::<C>(sizes, &states)?;
            let is_input_multiplied = needs[place::INPUT]
                && multiplies_input(sizes, C::GATES, Kind::of(states.f_kind()?)?, team);
            let w_ih = is_input_multiplied.then(|| worked(operands.w_ih)).transpose()?;
            cpu::backward(C::CPU, team, &read, w_ih.as_ref(), grads, needs[place::H])?
        }
        Some((cell, kernel)) => {
            (cuda::backward(&cell, kernel, &read, grads, needs[place::H])?, None)
        }
    };
    let input = worked(operands.input)?;
    let over_steps = OverSteps {
        gates: made.gates.f_view([rows, C::GATES * hidden])?,
        separate: made.separate.map(|of| of.f_view([rows, C::SEPARATE * hidden])).transpose()?,
        input: &input,
        h0: &h0,
        output: &output,
        tf32: if device.is_cuda() { choice.tf32(Kind::of(kind)?, sizes)? } else { Tf32::NONE },
    };
    let wanted = |place: usize, gradient: Option<Tensor>| -> Result<Option<Tensor>> {
        let gradient = gradient.filter(|_| needs[place]);
        Ok(gradient.map(|gradient| gradient.f_to_kind(kind)).transpose()?)
    };
    let needs_weights = [needs[place::W_IH], needs[place::W_HH]];
    let [w_ih, w_hh] = over_steps.of_weights(needs_weights)?;
    let [b_ih, b_hh] = over_steps.of_biases([needs[place::B_IH], needs[place::B_HH]])?;
    let of_input = match input_gradient {
        None if needs[place::INPUT] => Some(over_steps.of_input(&worked(operands.w_ih)?)?),
        computed => computed,
    };
    Ok([
        wanted(place::INPUT, of_input)?,
        wanted(place::H, Some(made.h0))?,
        wanted(place::C, Some(made.c0))?,
        wanted(place::W_IH, w_ih)?,
        wanted(place::W_HH, w_hh)?,
        wanted(place::B_IH, b_ih)?,
        wanted(place::B_HH, b_hh)?,
    ])
}

fn backward_by_block(
    (cell, of, (blocks, sums_weights)): (&CudaCell, BlockCell, (i32, bool)),
    [grad_output, grad_h, grad_c]: [Option<&Tensor>; 3],
    saved: &Saved<'_>,
    needs: &Needs,
    tf32: Tf32,
) -> Result<Gradients> {
    let plain_of = |of: Option<&Tensor>| of.map(plain).transpose();
    let (output, activations) = (plain(saved.output)?, plain(saved.activations)?);
    let c = plain_of(saved.c)?;
    let kept = block::Kept {
        output: &output,
        c: c.as_ref(),
        activations: &activations,
        grads: [plain_of(grad_output)?, plain_of(grad_h)?, plain_of(grad_c)?],
    };
    let arguments = of_block(saved.operands)?;
    let made =
        block::backward(cell, of.backward, &arguments, &kept, blocks, (*needs, sums_weights))?;
    let BlockGradients { input, h0, c0, mut w_ih, mut w_hh, b_ih, b_hh, gates, separate } = made;
    if let Some(gates) = gates {
        let (input, first) = (worked(saved.operands.input)?, worked(saved.operands.h)?);
        let over_steps = OverSteps {
            gates: gates.f_flatten(0, 1)?,
            separate: separate.map(|of| of.f_flatten(0, 1)).transpose()?,
            input: &input,
            h0: &first,
            output: &output,
            tf32,
        };
        [w_ih, w_hh] = over_steps.of_weights([needs[place::W_IH], needs[place::W_HH]])?;
    }
    Ok([input, h0, c0, w_ih, w_hh, b_ih, b_hh])
}

/// The gradients of a sequence without steps, rows or columns: those for the state are passed
/// through, and the others are zero.
fn backward_of_nothing(
    [_, grad_h, grad_c]: [Option<&Tensor>; 3],
    operands: &Operands<'_>,
    needs: &Needs,
) -> Result<Gradients> {
    let Operands { input, w_ih, w_hh, b_ih, b_hh, h, c, .. } = *operands;
    let gradient = |place: usize, of: Option<&Tensor>, given: Option<&Tensor>| -> Result<_> {
        let Some(of) = of.filter(|_| needs[place]) else { return Ok(None) };
        let kind = of.f_kind()?;
        Ok(Some(match given {
            Some(given) => row_major_copy(given, kind)?,
            None => Tensor::f_zeros(of.size(), (kind, of.device()))?,
        }))
    };
    Ok([
        gradient(place::INPUT, Some(input), None)?,
        gradient(place::H, Some(h), grad_h)?,
        gradient(place::C, c, grad_c)?,
        gradient(place::W_IH, Some(w_ih), None)?,
        gradient(place::W_HH, Some(w_hh), None)?,
        gradient(place::B_IH, b_ih, None)?,
        gradient(place::B_HH, b_hh, None)?,
    ])
}
