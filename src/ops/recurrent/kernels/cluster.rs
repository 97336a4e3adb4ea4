//! The kernels of `csrc/recurrent/cluster`, for any cell.

use super::Outputs;
use super::cuda::{Arrays, Gradients, Product, Reversed, Source, Start};
use super::scaled::Multiplied;
use crate::Result;
use std::ffi::c_void;

/// The parameters of the forward pass. G, V and S are a cell's numbers of gates, of saved values and
/// of separate gates (cells/cell.h). The kinds are those of step/params.h.
#[repr(C)]
pub(crate) struct ClusterForward {
    pub steps: i64,
    pub batch: i64,
    pub hidden: i64,
    /// The distance from a row of W_h to the next, in elements.
    pub weight_stride: i64,
    /// The distance from a step's c to the next one's: B·H, or 0 if only the last one is needed.
    pub c_stride: i64,
    /// Of the state.
    pub kind: i32,
    pub product_kind: i32,
    /// How many blocks share rows.
    pub cluster: i32,
    /// Whether no two blocks may share a multiprocessor, which small blocks otherwise do even where
    /// others are idle.
    pub alone: i32,
    /// W_h, `[G·H, H]`, of the product's kind.
    pub weight: *const c_void,
    /// `[T, B, G·H]`, of the gates' kind.
    pub input_gates: *const c_void,
    /// `[G·H]`, of the gates' kind, null for zeros.
    pub bias: *const c_void,
    /// `[S·H]`, of the gates' kind: the bias of the product with h of the separate gates, null for
    /// zeros.
    pub separate_bias: *const c_void,
    /// `[B, H]`, of the product's kind.
    pub h0: *const c_void,
    /// `[B, H]`, the first state, of the state's kind; h0 where the state is h.
    pub c0: *const c_void,
    /// `[T, B, H]`, of the state's kind.
    pub output: *mut c_void,
    /// `[T, B, H]`, or `[B, H]` with c_stride 0; not written where the state is h.
    pub c: *mut c_void,
    /// `[B, H]`, both of the state's kind: h and c after the last step, in addition. Null if nobody
    /// needs them, and the second where c has them.
    pub last_h: *mut c_void,
    pub last_c: *mut c_void,
    /// `[T, B, V·H]`, of the state's kind; null if nobody needs them; may be input_gates where
    /// V = G.
    pub activations: *mut c_void,
    /// Both come from scale_rows.h where a state of float is multiplied as fp16 values instead of
    /// tf32; otherwise they are null. With them h is sent as h · kMessageScale, or with a smaller
    /// power of two if h0 demands it. These are for W_h's rows, `[G·H]`.
    pub scales: *const f32,
    /// For the rows of h0, `[B]`.
    pub h0_scales: *const f32,
}

/// The parameters of the backward pass.
#[repr(C)]
pub(crate) struct ClusterBackward {
    pub steps: i64,
    pub batch: i64,
    pub hidden: i64,
    pub weight_stride: i64,
    pub kind: i32,
    pub product_kind: i32,
    pub cluster: i32,
    pub needs_grad_h0: i32,
    pub alone: i32,
    pub reserved: i32,
    /// W_h, `[G·H, H]`, of the product's kind.
    pub weight: *const c_void,
    /// `[T, B, H]`, of the state's kind, null for zeros.
    pub grad_output: *const c_void,
    /// `[T, B, V·H]`, of the state's kind.
    pub activations: *const c_void,
    /// `[T, B, H]`, the states, of the state's kind; the output where the state is h.
    pub c: *const c_void,
    /// `[B, H]`, the first state, of the state's kind; null unless the cell needs the state before a
    /// step.
    pub c0: *const c_void,
    /// `[B, H]`, of the gates' kind: on entry the gradient for h[T-1], which is added to the
    /// output's; on return the one for h0.
    pub grad_h: *mut c_void,
    /// `[B, H]`, of the gates' kind: on entry the gradient for c[T-1], on return the one for c0.
    /// Where the state is h: zeros on entry, and of no use on return.
    pub grad_c: *mut c_void,
    /// `[T, B, G·H]`, of the product's kind; of the state's, where there are scales.
    pub grad_gates: *mut c_void,
    /// `[T, B, S·H]`, like grad_gates: for the input's part of the separate gates; null without any.
    pub grad_separate: *mut c_void,
    /// `[G·H]`, of W_h's rows, as in the forward pass.
    pub scales: *const f32,
}

/// All steps forward, with this many blocks for 8 rows.
pub(super) fn forward(
    source: &Source<'_>,
    start: Start<ClusterForward>,
    (cluster, alone): (i32, bool),
    product: Product,
) -> Result<Outputs> {
    let arrays = Arrays::new(source)?;
    let multiplied = Multiplied::forward(source, product)?;
    let params = ClusterForward {
        steps: source.sizes.steps,
        batch: source.sizes.batch,
        hidden: source.sizes.hidden,
        weight_stride: multiplied.weight_stride,
        c_stride: arrays.c_stride,
        kind: source.kind_code,
        product_kind: multiplied.kind_code,
        cluster,
        alone: i32::from(alone),
        weight: multiplied.weight,
        input_gates: source.input_gates,
        bias: source.bias,
        separate_bias: source.separate_bias,
        h0: multiplied.h0,
        c0: source.c0,
        output: arrays.output_ptr,
        c: arrays.c_ptr,
        last_h: arrays.last_h.data_ptr(),
        last_c: arrays.last_c_ptr(),
        activations: arrays.activations_ptr,
        scales: multiplied.scales,
        h0_scales: multiplied.h0_scales,
    };
    crate::cuda::launch(source.device, |stream| {
        // SAFETY: `Source`, `Multiplied` and `Arrays` checked or allocated what the parameters point to.
        unsafe { start(&params, stream) }
    })?;
    Ok(arrays.into_outputs())
}

/// All steps backward.
pub(super) fn backward(
    of: &Reversed<'_>,
    start: Start<ClusterBackward>,
    (cluster, alone): (i32, bool),
    product: Product,
) -> Result<Gradients> {
    let made = Gradients::new(of)?;
    let multiplied = Multiplied::backward(of, product)?;
    let params = ClusterBackward {
        steps: of.sizes.steps,
        batch: of.sizes.batch,
        hidden: of.sizes.hidden,
        weight_stride: multiplied.weight_stride,
        kind: of.kind_code,
        product_kind: multiplied.kind_code,
        cluster,
        needs_grad_h0: i32::from(of.needs_grad_h0),
        alone: i32::from(alone),
        reserved: 0,
        weight: multiplied.weight,
        grad_output: of.grad_output,
        activations: of.activations,
        c: of.states,
        c0: of.first_state,
        grad_h: made.h0.data_ptr(),
        grad_c: made.c0.data_ptr(),
        grad_gates: made.gates.data_ptr(),
        grad_separate: made.separate_ptr(),
        scales: multiplied.scales,
    };
    crate::cuda::launch(of.device, |stream| {
        // SAFETY: as in `forward`.
        unsafe { start(&params, stream) }
    })?;
    Ok(made)
}
