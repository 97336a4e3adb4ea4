//! The kernels of `csrc/recurrent/step`, for any cell and device: libtorch's product and one kernel for
//! each step.

use super::Outputs;
use super::cuda::{Arrays, Gradients, Reversed, Source, gates_kind};
use crate::Result;
use std::ffi::c_void;
use std::ptr::null_mut;
use tch::Tensor;

/// One step forward, after its product. The kinds are those of step/params.h.
#[repr(C)]
pub(crate) struct StepForward {
    pub batch: i64,
    pub hidden: i64,
    /// Of the state.
    pub kind: i32,
    /// Of the products' operands.
    pub product_kind: i32,
    /// `[B, G·H]`, of the gates' kind.
    pub input_gates: *const c_void,
    /// `[B, G·H]`, of the gates' kind.
    pub hidden_gates: *const c_void,
    /// `[G·H]`, of the gates' kind, null for zeros.
    pub bias: *const c_void,
    /// `[S·H]`, of the gates' kind: the bias of the product with h of the separate gates, null for
    /// zeros.
    pub separate_bias: *const c_void,
    /// `[B, H]`, the state before the step, of the state's kind.
    pub c: *const c_void,
    /// `[B, H]`, of the state's kind.
    pub new_h: *mut c_void,
    /// `[B, H]`, of the state's kind; may be c; not written where the state is h.
    pub new_c: *mut c_void,
    /// `[B, H]`, new_h in the product's kind; null if nobody needs it.
    pub operand: *mut c_void,
    /// `[B, V·H]`, of the state's kind; null if nobody needs them; may be input_gates where V = G.
    pub activations: *mut c_void,
}

/// One step backward, before its product.
#[repr(C)]
pub(crate) struct StepBackward {
    pub batch: i64,
    pub hidden: i64,
    pub kind: i32,
    pub product_kind: i32,
    /// `[B, H]`, of the state's kind, null for zeros.
    pub grad_output: *const c_void,
    /// `[B, H]`, of the gates' kind: from the next step; null for zeros.
    pub grad_h: *const c_void,
    /// `[B, H]`, of the gates' kind: on entry for the state after the step, on return for the one
    /// before.
    pub grad_c: *mut c_void,
    /// `[B, V·H]`, of the state's kind.
    pub activations: *const c_void,
    /// `[B, H]`, the state after the step, of the state's kind; null where it is h.
    pub new_c: *const c_void,
    /// `[B, H]`, the state before the step; null unless the cell needs it.
    pub previous_c: *const c_void,
    /// `[B, G·H]`, of the product's kind.
    pub grad_gates: *mut c_void,
    /// `[B, S·H]`, of the product's kind; null without separate gates.
    pub grad_separate: *mut c_void,
}

/// The address of a step, of which each has this many values of a tensor.
fn at(all: *mut c_void, step: i64, values: i64, of: &Tensor) -> *mut c_void {
    let bytes = step * values * of.kind().elt_size_in_bytes() as i64;
    if all.is_null() { all } else { all.cast::<u8>().wrapping_offset(bytes as isize).cast() }
}

/// `a b` in the kind of the gates, into `result`.
fn product(result: &Tensor, a: &Tensor, b: &Tensor) -> Result<()> {
    if a.f_kind()? == result.f_kind()? {
        let _ = a.f_mm_out(result, b)?;
    } else {
        let _ = a.f_mm_dtype_out(result, b, result.f_kind()?)?;
    }
    Ok(())
}

/// All steps forward. `start` runs a step's kernel, with parameters that point to what `Source` and
/// `Arrays` checked or allocated.
pub(super) fn forward(
    source: &Source<'_>,
    start: impl Fn(&StepForward) -> Result<()>,
) -> Result<Outputs> {
    let mut arrays = Arrays::new(source)?;
    let (steps, batch, hidden) = (source.sizes.steps, source.sizes.batch, source.sizes.hidden);
    let size = batch * hidden;
    let (tensors, cell) = (&source.tensors, source.shape);
    let sums = (gates_kind(source.kind), source.device);
    let hidden_gates = Tensor::f_empty([batch, cell.gates * hidden], sums)?;
    let weight = tensors.weight.f_transpose(0, 1)?;
    for step in 0..steps {
        match step {
            0 => product(&hidden_gates, tensors.h0, &weight)?,
            _ => product(&hidden_gates, &arrays.output.f_select(0, step - 1)?, &weight)?,
        }
        let output = |step: i64| at(arrays.output_ptr, step, size, &arrays.output);
        let c = |step: i64| match arrays.c_stride {
            0 => arrays.c_ptr,
            stride => at(arrays.c_ptr, step, stride, &arrays.output),
        };
        let before = match step {
            0 => source.c0,
            _ if cell.state_is_h => output(step - 1),
            _ => c(step - 1),
        };
        let gates = tensors.input_gates.data_ptr();
        let params = StepForward {
            batch,
            hidden,
            kind: source.kind_code,
            product_kind: source.kind_code,
            input_gates: at(gates, step, cell.gates * size, tensors.input_gates),
            hidden_gates: hidden_gates.data_ptr(),
            bias: source.bias,
            separate_bias: source.separate_bias,
            c: before,
            new_h: output(step),
            new_c: c(step),
            // h of the last step is also an output of its own.
            operand: if step + 1 == steps { arrays.last_h.data_ptr() } else { null_mut() },
            activations: at(arrays.activations_ptr, step, cell.saved * size, &arrays.output),
        };
        start(&params)?;
    }
    arrays.copy_last_c()?;
    Ok(arrays.into_outputs())
}

/// All steps backward; `start` as in [`forward`].
pub(super) fn backward(
    of: &Reversed<'_>,
    start: impl Fn(&StepBackward) -> Result<()>,
) -> Result<Gradients> {
    let made = Gradients::new(of)?;
    let (steps, batch, hidden) = (of.sizes.steps, of.sizes.batch, of.sizes.hidden);
    let (size, cell, like) = (batch * hidden, of.shape, &of.tensors.states);
    for step in (0..steps).rev() {
        let states = |step: i64| at(of.states.cast_mut(), step, size, like).cast_const();
        let params = StepBackward {
            batch,
            hidden,
            kind: of.kind_code,
            product_kind: of.kind_code,
            grad_output: at(of.grad_output.cast_mut(), step, size, like),
            grad_h: made.h0.data_ptr(),
            grad_c: made.c0.data_ptr(),
            activations: at(of.activations.cast_mut(), step, cell.saved * size, like),
            new_c: if cell.state_is_h { std::ptr::null() } else { states(step) },
            previous_c: if step == 0 { of.first_state } else { states(step - 1) },
            grad_gates: at(made.gates.data_ptr(), step, cell.gates * size, like),
            grad_separate: at(made.separate_ptr(), step, cell.separate * size, like),
        };
        start(&params)?;
        if step > 0 || of.needs_grad_h0 {
            product(&made.h0, &made.gates.f_select(0, step)?, of.tensors.weight)?;
        }
    }
    if !cell.state_is_h {
        return Ok(made);
    }
    // What the first step passes on directly.
    let h0 = made.h0.f_add(&made.c0)?;
    Ok(Gradients { h0, ..made })
}
