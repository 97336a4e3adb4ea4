//! The ways of this crate on the CPU: the kernels of `csrc/recurrent/cpu`, and those of
//! `csrc/recurrent/step`, for any cell.

use super::cuda::checked_rows;
use super::cuda::{Operands, Reversed, Source};
use super::step::{self, StepBackward, StepForward};
use super::{CellShape, Outputs};
use crate::ffi::facts::empty_of;
use crate::ffi::{checked, kind_code, optional_ptr};
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};

/// How threads share a sequence, for the kernels of the CPU: row_groups · column_groups places.
#[repr(C)]
#[derive(Clone, Copy)]
struct CpuTeam {
    /// How many groups share the rows of the batch.
    row_groups: i64,
    /// How many groups share the columns of h.
    column_groups: i64,
    /// Zeros, `[1 + row_groups + places, 8]`: the counters of team.h, a cache line each.
    counters: *mut i64,
}

/// The parameters of the forward pass on the CPU. All arrays are row-major, contiguous unless stated
/// otherwise, and of one kind. G, V and S are a cell's numbers of gates, of saved values and of
/// separate gates (cells/cell.h).
#[repr(C)]
pub(crate) struct CpuForward {
    steps: i64,
    batch: i64,
    hidden: i64,
    /// The distance from a row of W_h to the next, in elements.
    weight_stride: i64,
    /// The distance from a step's state to the next one's: B·H, or 0 if only the last one is needed.
    /// It is B·H where the state is h.
    c_stride: i64,
    /// The distance from a step's input gates to the next one's: B·G·H, or 0 if each step's are
    /// computed when they are needed, and then nobody needs them again.
    gates_stride: i64,
    /// F, the number of features of the input; unused if `input` is null.
    features: i64,
    kind: i32,
    reserved: i32,
    team: CpuTeam,
    /// W_h, `[G·H, H]`.
    weight: *const c_void,
    /// `[T, B, G·H]`: the product with the input, plus the bias. For gates that are separate (the
    /// candidate of a GRU) this excludes the bias of the product with h. The kernel computes it if
    /// `input` is not null.
    input_gates: *mut c_void,
    /// x, `[T, B, F]`, and W_ih, `[G·H, F]`; null if input_gates are given.
    input: *const c_void,
    input_weight: *const c_void,
    /// `[G·H]`: what is added to the product with the input, null for zeros.
    input_bias: *const c_void,
    /// `[B, H]`.
    h0: *const c_void,
    /// `[B, H]`, the state; h0 where the state is h.
    c0: *const c_void,
    /// `[T, B, H]`.
    output: *mut c_void,
    /// `[T, B, H]`, or `[B, H]` with c_stride 0; `output` where the state is h.
    c: *mut c_void,
    /// `[T, B, V·H]`: the saved values, null if nobody needs them. May be input_gates where V = G.
    activations: *mut c_void,
    /// Scratch of G·H' · H' values, where H' is H rounded up to a multiple of 32, and of G·H' · F'
    /// more, with F' likewise, if `input` (in the backward pass `grad_input`) is not null.
    packed: *mut c_void,
    /// `[S·H]`: the bias of the product with h of the S separate gates, null for zeros.
    separate_bias: *const c_void,
}

/// The parameters of the backward pass on the CPU.
#[repr(C)]
pub(crate) struct CpuBackward {
    steps: i64,
    batch: i64,
    hidden: i64,
    weight_stride: i64,
    /// F, the number of features of the input; unused if `grad_input` is null.
    features: i64,
    kind: i32,
    needs_grad_h0: i32,
    team: CpuTeam,
    /// W_h, `[G·H, H]`.
    weight: *const c_void,
    /// W_ih, `[G·H, F]`; null if `grad_input` is.
    input_weight: *const c_void,
    /// `[T, B, F]`: the gradient for the input, null if the caller computes it or nobody needs it.
    grad_input: *mut c_void,
    /// `[T, B, H]`, null for zeros.
    grad_output: *const c_void,
    /// `[T, B, V·H]`.
    activations: *const c_void,
    /// `[T, B, H]`, the states; the output where the state is h.
    c: *const c_void,
    /// `[B, H]`: on entry the gradient for h[T-1], which is added to the last step's of the output;
    /// on return, if needs_grad_h0, the one for h0.
    grad_h: *mut c_void,
    /// `[B, H]`: on entry the gradient for the last state; on return the one for the first. Where
    /// the state is h: zeros on entry, and of no use on return.
    grad_c: *mut c_void,
    /// `[T, B, G·H]`: the gradients for what the product with W_h is added to. The gradients of W_h
    /// and of its bias follow from them, and those of the input, except for gates that are separate.
    grad_gates: *mut c_void,
    /// Scratch as in the forward pass.
    packed: *mut c_void,
    /// `[B, H]`, the first state; null unless the cell needs the state before a step.
    c0: *const c_void,
    /// `[T, B, S·H]`: for the input's part of the separate gates; null without any.
    grad_separate: *mut c_void,
}

/// A cell's kernels on the CPU.
#[derive(Clone, Copy)]
pub(crate) struct CpuCell {
    pub shape: CellShape,
    pub step_forward: unsafe extern "C" fn(*const StepForward),
    pub step_backward: unsafe extern "C" fn(*const StepBackward),
    pub forward: unsafe extern "C" fn(*const CpuForward),
    pub backward: unsafe extern "C" fn(*const CpuBackward),
}

/// How many groups share the rows, and how many share the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Team {
    pub row_groups: i64,
    pub column_groups: i64,
}

/// Scratch memory of a team: the packed weights and the counters.
struct Scratch {
    packed: Tensor,
    counters: Tensor,
}

impl Scratch {
    /// `features` is 0 if the kernel does not multiply with W_ih.
    fn new(gates: i64, hidden: i64, features: i64, team: Team, kind: Kind) -> Result<Scratch> {
        /// Columns of the widest panel.
        const PANEL: i64 = 32;
        let padded = |columns: i64| columns.saturating_add(PANEL - 1) / PANEL * PANEL;
        let columns = padded(hidden).saturating_add(padded(features));
        let Team { row_groups, column_groups } = team;
        let lines = 1 + row_groups + row_groups * column_groups;
        Ok(Scratch {
            packed: empty_of(&[gates * padded(hidden), columns], (kind, Device::Cpu))?,
            counters: Tensor::f_zeros([lines, 8], (Kind::Int64, Device::Cpu))?,
        })
    }

    fn team(&self, team: Team) -> CpuTeam {
        let Team { row_groups, column_groups } = team;
        CpuTeam { row_groups, column_groups, counters: self.counters.data_ptr().cast() }
    }
}

/// Where the kernel has the input's part of the gates from.
pub(crate) enum InputGates<'a> {
    /// The caller has computed it, `[T, B, G·H]`.
    Given(&'a Tensor),
    /// The kernel multiplies the input, `[T, B, F]`, with W_ih, `[G·H, F]`, and adds a bias,
    /// `[G·H]`.
    Product { input: &'a Tensor, weight: &'a Tensor, bias: Option<&'a Tensor> },
}

/// What the forward pass reads; all contiguous, of one kind, Float or Double.
pub(crate) struct CpuOperands<'a> {
    /// `[G·H, H]`; its rows may be apart.
    pub weight: &'a Tensor,
    pub input_gates: InputGates<'a>,
    /// `[S·H]`
    pub separate_bias: Option<&'a Tensor>,
    /// `[B, H]`
    pub h0: &'a Tensor,
    /// `[B, H]`; absent where the state is h
    pub c0: Option<&'a Tensor>,
}

/// All steps, of which there is at least one, as there are rows and columns.
pub(crate) fn forward(
    cell: CpuCell,
    team: Team,
    operands: &CpuOperands<'_>,
    keep: bool,
) -> Result<Outputs> {
    let (batch, hidden) = operands.h0.size2()?;
    let (steps, features, input) = match operands.input_gates {
        InputGates::Given(gates) => (gates.size3()?.0, 0, None),
        InputGates::Product { input, weight, bias } => {
            (input.size3()?.0, input.size3()?.2, Some((input, weight, bias)))
        }
    };
    let kind = operands.h0.f_kind()?;
    let like = (kind, Device::Cpu);
    let empty = |size: &[i64]| empty_of(size, like);
    let (all, last) = ([steps, batch, hidden], [batch, hidden]);
    let output = empty(&all)?;
    let c_size: &[i64] = if keep { &all } else { &last };
    let c = (!cell.shape.state_is_h).then(|| empty(c_size)).transpose()?;
    // Each gate is read before its activation is written.
    let are_same = keep && cell.shape.saved == cell.shape.gates;
    let gates_steps = if input.is_none() || are_same { steps } else { 1 };
    let gates_size = [gates_steps, batch, cell.shape.gates * hidden];
    let input_gates = match operands.input_gates {
        InputGates::Given(gates) => gates.shallow_clone(),
        InputGates::Product { .. } => empty(&gates_size)?,
    };
    let activations = match keep {
        true if are_same => Some(input_gates.shallow_clone()),
        true => Some(empty(&[steps, batch, cell.shape.saved * hidden])?),
        false => None,
    };
    let scratch = Scratch::new(cell.shape.gates, hidden, features, team, kind)?;
    let rows = [cell.shape.gates * hidden, hidden];
    let (weight, weight_stride) = checked_rows("weight", operands.weight, rows, like)?;
    let h0 = checked("h0", operands.h0, &[batch, hidden], like)?;
    let output_ptr = checked("output", &output, &all, like)?;
    let gates = [cell.shape.gates * hidden];
    let (input, input_weight, input_bias) = match input {
        None => (null(), null(), null()),
        Some((input, weight, bias)) => (
            checked("input", input, &[steps, batch, features], like)?.cast_const(),
            checked("input_weight", weight, &[gates[0], features], like)?.cast_const(),
            optional_ptr("input_bias", bias, &gates, like)?.cast_const(),
        ),
    };
    let params = CpuForward {
        steps,
        batch,
        hidden,
        weight_stride,
        c_stride: if keep || cell.shape.state_is_h { batch * hidden } else { 0 },
        gates_stride: if gates_steps == steps { batch * cell.shape.gates * hidden } else { 0 },
        features,
        kind: kind_code(kind)?,
        reserved: 0,
        team: scratch.team(team),
        weight,
        input_gates: checked("input_gates", &input_gates, &gates_size, like)?,
        input,
        input_weight,
        input_bias,
        h0,
        c0: operands.c0.map_or(Ok(h0), |c0| checked("c0", c0, &last, like))?,
        output: output_ptr,
        c: c.as_ref().map_or(output_ptr, Tensor::data_ptr),
        activations: activations.as_ref().map_or(null_mut(), Tensor::data_ptr),
        packed: scratch.packed.data_ptr(),
        separate_bias: optional_ptr(
            "separate_bias",
            operands.separate_bias,
            &[cell.shape.separate * hidden],
            like,
        )?,
    };
    // SAFETY: the tensors are alive, and were checked or allocated above to be as `CpuForward`
    // states. The input gates may be overwritten by the activations: the caller made them, or they
    // are new.
    unsafe { (cell.forward)(&params) };
    let of_last_step =
        |of: &Tensor| -> Result<Tensor> { Ok(of.f_select(0, -1)?.f_to_dtype(kind, false, true)?) };
    let (last_c, c) = match c {
        Some(c) if keep => (Some(of_last_step(&c)?), Some(c)),
        last_c => (last_c, None),
    };
    Ok(Outputs { last_h: of_last_step(&output)?, output, last_c, c, activations })
}

/// What the backward pass reads.
pub(crate) struct CpuSaved<'a> {
    /// `[G·H, H]`; its rows may be apart.
    pub weight: &'a Tensor,
    /// `[T, B, V·H]`
    pub activations: &'a Tensor,
    /// `[T, B, H]`: c, or the output where the state is h
    pub states: &'a Tensor,
    /// `[B, H]`: c0, or h0 where the state is h; absent if the cell does not need the state before a step
    pub first_state: Option<&'a Tensor>,
}

pub(crate) struct CpuGradients {
    /// `[T, B, G·H]`
    pub gates: Tensor,
    /// `[T, B, S·H]`
    pub separate: Option<Tensor>,
    /// `[B, H]`; of no use unless it was asked for
    pub h0: Tensor,
    /// `[B, H]`; of no use where the state is h
    pub c0: Tensor,
}

/// The gradients of all steps. `grads` are those for the output, the last h and the last c. With
/// W_ih, `[G·H, F]`, the kernel also computes the gradient for the input, `[T, B, F]`.
pub(crate) fn backward(
    cell: CpuCell,
    team: Team,
    saved: &CpuSaved<'_>,
    input_weight: Option<&Tensor>,
    grads: [Option<&Tensor>; 3],
    needs_grad_h0: bool,
) -> Result<(CpuGradients, Option<Tensor>)> {
    let (steps, batch, hidden) = saved.states.size3()?;
    let kind = saved.states.f_kind()?;
    let like = (kind, Device::Cpu);
    let all = [steps, batch, hidden];
    // Copies, because the kernel overwrites them.
    let own = |given: Option<&Tensor>| -> Result<Tensor> {
        let mut own = Tensor::f_zeros([batch, hidden], like)?;
        given.map(|given| own.f_copy_(given)).transpose()?;
        Ok(own)
    };
    let [grad_output, grad_h, grad_c] = grads;
    let (grad_h, grad_c) = (own(grad_h)?, own(grad_c)?);
    let gates = empty_of(&[steps, batch, cell.shape.gates * hidden], like)?;
    let separate = (cell.shape.separate > 0)
        .then(|| empty_of(&[steps, batch, cell.shape.separate * hidden], like))
        .transpose()?;
    let features = input_weight.map_or(Ok(0), |weight| Ok::<_, Error>(weight.size2()?.1))?;
    let input = input_weight.map(|_| empty_of(&[steps, batch, features], like)).transpose()?;
    let scratch = Scratch::new(cell.shape.gates, hidden, features, team, kind)?;
    let rows = [cell.shape.gates * hidden, hidden];
    let (weight, weight_stride) = checked_rows("weight", saved.weight, rows, like)?;
    let params = CpuBackward {
        steps,
        batch,
        hidden,
        weight_stride,
        features,
        kind: kind_code(kind)?,
        needs_grad_h0: i32::from(needs_grad_h0),
        team: scratch.team(team),
        weight,
        input_weight: optional_ptr(
            "input_weight",
            input_weight,
            &[cell.shape.gates * hidden, features],
            like,
        )?,
        grad_input: input.as_ref().map_or(null_mut(), Tensor::data_ptr),
        grad_output: optional_ptr("grad_output", grad_output, &all, like)?,
        activations: checked(
            "activations",
            saved.activations,
            &[steps, batch, cell.shape.saved * hidden],
            like,
        )?,
        c: checked("states", saved.states, &all, like)?,
        grad_h: grad_h.data_ptr(),
        grad_c: grad_c.data_ptr(),
        grad_gates: gates.data_ptr(),
        packed: scratch.packed.data_ptr(),
        c0: optional_ptr("first_state", saved.first_state, &[batch, hidden], like)?,
        grad_separate: separate.as_ref().map_or(null_mut(), Tensor::data_ptr),
    };
    // SAFETY: as in `forward`.
    unsafe { (cell.backward)(&params) };
    Ok((CpuGradients { gates, separate, h0: grad_h, c0: grad_c }, input))
}

/// All steps, each by a product and a kernel, without packed weights.
pub(crate) fn forward_by_steps(
    cell: CpuCell,
    operands: &Operands<'_>,
    keep: bool,
) -> Result<Outputs> {
    let source = Source::new(cell.shape, operands, keep)?;
    step::forward(&source, step::Start::Cpu(cell.step_forward))
}

/// The gradients of all steps, as [`backward`], by products and kernels for each step.
pub(crate) fn backward_by_steps(
    cell: CpuCell,
    saved: &CpuSaved<'_>,
    grads: [Option<&Tensor>; 3],
    needs_grad_h0: bool,
) -> Result<CpuGradients> {
    let of = Reversed::new(cell.shape, saved, grads, needs_grad_h0)?;
    step::backward(&of, step::Start::Cpu(cell.step_backward))
}
