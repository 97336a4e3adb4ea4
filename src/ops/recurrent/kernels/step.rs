//! The kernels of `csrc/recurrent/step`, for any cell and device: libtorch's product and one kernel for
//! each step.

use super::Outputs;
use super::cuda::{self, Arrays, Gradients, Reversed, Source, gates_kind};
use crate::ffi::facts::empty_of;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

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

/// A cell's kernel for a step, on the device that has it.
#[derive(Clone, Copy)]
pub(super) enum Start<Params> {
    Cpu(unsafe extern "C" fn(*const Params)),
    Cuda(cuda::Start<Params>),
}

impl<Params> Start<Params> {
    /// The two pointers as C++ gets them, of which one is null.
    fn pointers(self) -> (*const c_void, *const c_void) {
        match self {
            Start::Cpu(start) => (start as *const c_void, null()),
            Start::Cuda(start) => (null(), start as *const c_void),
        }
    }
}

/// All steps forward, each a product and a kernel.
#[repr(C)]
struct StepsForward {
    steps: i64,
    /// The kernel on the CPU, `void (const RecurrentStepForward*) noexcept`, or null.
    on_cpu: *const c_void,
    /// The kernel on CUDA, `LaunchStatus (const RecurrentStepForward*, cudaStream_t)`, or null.
    on_cuda: *const c_void,
    /// Whether the state is h, and there is no c.
    state_is_h: i32,
    /// Whether c of all steps is kept, rather than the last one only.
    keeps_c: i32,
    /// Those of the first step.
    first: StepForward,
    /// `[T, B, G·H]`
    input_gates: *const C_tensor,
    /// `[G·H, H]`; its rows may be apart.
    weight: *const C_tensor,
    /// `[B, H]`
    h0: *const C_tensor,
    /// `[B, G·H]`, which the products are written to.
    hidden_gates: *const C_tensor,
    /// `[T, B, H]`
    output: *const C_tensor,
    /// `[B, H]`, of the product's kind, if the output has another: h of a step for the next product.
    operand: *const C_tensor,
    /// `[T, B, V·H]`; null if nobody needs them.
    activations: *const C_tensor,
    /// `[B, H]`: h after the last step, in addition; null if `operand` is not.
    last_h: *mut c_void,
}

/// All steps backward, each a kernel and a product.
#[repr(C)]
struct StepsBackward {
    steps: i64,
    on_cpu: *const c_void,
    on_cuda: *const c_void,
    state_is_h: i32,
    needs_grad_h0: i32,
    /// Those of the last step. `previous_c` is the first state.
    last: StepBackward,
    /// `[G·H, H]`; its rows may be apart.
    weight: *const C_tensor,
    /// `[T, B, H]`; null for zeros.
    grad_output: *const C_tensor,
    /// `[T, B, V·H]`
    activations: *const C_tensor,
    /// `[T, B, H]`
    states: *const C_tensor,
    /// `[B, H]`
    grad_h: *const C_tensor,
    /// `[T, B, G·H]`
    grad_gates: *const C_tensor,
    /// `[T, B, S·H]`; null without separate gates.
    grad_separate: *const C_tensor,
}

unsafe extern "C" {
    fn tch_extension_recurrent_steps_forward(call: *const StepsForward) -> *mut c_char;
    fn tch_extension_recurrent_steps_backward(call: *const StepsBackward) -> *mut c_char;
}

fn pointer(tensor: Option<&Tensor>) -> *const C_tensor {
    tensor.map_or(null(), Tensor::as_ptr)
}

fn done(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

/// All steps forward.
pub(super) fn forward(source: &Source<'_>, start: Start<StepForward>) -> Result<Outputs> {
    let mut arrays = Arrays::new(source)?;
    let (steps, batch, hidden) = (source.sizes.steps, source.sizes.batch, source.sizes.hidden);
    let (tensors, cell) = (source.tensors, source.shape);
    let sums = (gates_kind(source.product_kind), source.device);
    let hidden_gates = empty_of(&[batch, cell.gates * hidden], sums)?;
    let has_operand = source.product_kind != source.kind;
    let operand = has_operand.then(|| tensors.h0.f_empty_like()).transpose()?;
    let (on_cpu, on_cuda) = start.pointers();
    let call = StepsForward {
        steps,
        on_cpu,
        on_cuda,
        state_is_h: i32::from(cell.state_is_h),
        keeps_c: i32::from(arrays.c_stride != 0),
        first: StepForward {
            batch,
            hidden,
            kind: source.kind_code,
            product_kind: source.product_code,
            input_gates: source.input_gates,
            hidden_gates: hidden_gates.data_ptr(),
            bias: source.bias,
            separate_bias: source.separate_bias,
            c: source.c0,
            new_h: arrays.output_ptr,
            new_c: arrays.c_ptr,
            operand: operand.as_ref().map_or(null_mut(), Tensor::data_ptr),
            activations: arrays.activations_ptr,
        },
        input_gates: tensors.input_gates.as_ptr(),
        weight: tensors.weight.as_ptr(),
        h0: tensors.h0.as_ptr(),
        hidden_gates: hidden_gates.as_ptr(),
        output: arrays.output.as_ptr(),
        operand: pointer(operand.as_ref()),
        activations: pointer(arrays.activations()),
        last_h: if has_operand { null_mut() } else { arrays.last_h.data_ptr() },
    };
    // SAFETY: `Source` and `Arrays` checked or allocated the tensors, and the kernel is the cell's.
    done(unsafe { tch_extension_recurrent_steps_forward(&call) })?;
    if has_operand {
        arrays.last_h.f_copy_(&arrays.output.f_select(0, -1)?)?;
    }
    arrays.copy_last_c()?;
    Ok(arrays.into_outputs())
}

/// All steps backward.
pub(super) fn backward(of: &Reversed<'_>, start: Start<StepBackward>) -> Result<Gradients> {
    let made = Gradients::new(of)?;
    let (on_cpu, on_cuda) = start.pointers();
    let call = StepsBackward {
        steps: of.sizes.steps,
        on_cpu,
        on_cuda,
        state_is_h: i32::from(of.shape.state_is_h),
        needs_grad_h0: i32::from(of.needs_grad_h0),
        last: StepBackward {
            batch: of.sizes.batch,
            hidden: of.sizes.hidden,
            kind: of.kind_code,
            product_kind: of.product_code,
            grad_output: of.grad_output,
            grad_h: made.h0.data_ptr(),
            grad_c: made.c0.data_ptr(),
            activations: of.activations,
            new_c: of.states,
            previous_c: of.first_state,
            grad_gates: made.gates.data_ptr(),
            grad_separate: made.separate_ptr(),
        },
        weight: of.tensors.weight.as_ptr(),
        grad_output: pointer(of.output_gradient),
        activations: of.tensors.activations.as_ptr(),
        states: of.tensors.states.as_ptr(),
        grad_h: made.h0.as_ptr(),
        grad_gates: made.gates.as_ptr(),
        grad_separate: pointer(made.separate.as_ref()),
    };
    // SAFETY: as in `forward`, with `Reversed` and `Gradients`.
    done(unsafe { tch_extension_recurrent_steps_backward(&call) })?;
    if !of.shape.state_is_h {
        return Ok(made);
    }
    // What the first step passes on directly.
    let h0 = made.h0.f_add(&made.c0)?;
    Ok(Gradients { h0, ..made })
}
