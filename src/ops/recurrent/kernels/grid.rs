//! The kernels of `csrc/recurrent/grid` and `csrc/recurrent/wide_grid`, for any cell.

use super::Outputs;
use super::cuda::{Arrays, Gradients, OnAGrid, Product, Reversed, Source};
use super::scaled::{Messages, Multiplied};
use crate::Result;
use crate::ffi::facts::empty_of;
use std::ffi::c_void;
use tch::Kind;

/// The parameters of the forward pass; what is not described here is as for clusters.
#[repr(C)]
pub(crate) struct GridForward {
    pub steps: i64,
    pub batch: i64,
    /// A multiple of 8.
    pub hidden: i64,
    pub weight_stride: i64,
    pub c_stride: i64,
    pub kind: i32,
    pub product_kind: i32,
    /// How many columns of h a block has: 16 or 32; for float and double 4, 6 or 16.
    pub columns: i32,
    /// How many groups of blocks share the batch.
    pub row_groups: i32,
    pub weight: *const c_void,
    pub input_gates: *const c_void,
    pub bias: *const c_void,
    pub separate_bias: *const c_void,
    /// At a multiple of 16 bytes.
    pub h0: *const c_void,
    pub c0: *const c_void,
    pub output: *mut c_void,
    /// `[T, B, H]`, of the product's kind: the output, if both kinds are the same.
    pub exchange: *mut c_void,
    pub c: *mut c_void,
    pub last_h: *mut c_void,
    pub last_c: *mut c_void,
    pub activations: *mut c_void,
    pub scales: *const f32,
    pub h0_scales: *const f32,
}

/// The parameters of the backward pass; what is not described here is as for clusters.
#[repr(C)]
pub(crate) struct GridBackward {
    pub steps: i64,
    pub batch: i64,
    pub hidden: i64,
    pub weight_stride: i64,
    pub kind: i32,
    pub product_kind: i32,
    pub columns: i32,
    pub row_groups: i32,
    pub needs_grad_h0: i32,
    pub reserved: i32,
    pub weight: *const c_void,
    /// This and all others of the state's kind are aligned to two of its values.
    pub grad_output: *const c_void,
    pub activations: *const c_void,
    pub c: *const c_void,
    pub c0: *const c_void,
    pub grad_h: *mut c_void,
    pub grad_c: *mut c_void,
    /// At a multiple of 16 bytes.
    pub grad_gates: *mut c_void,
    pub grad_separate: *mut c_void,
    /// `[G·H]`, of W_h's rows. With scales, the messages are in memory of their own, with a scale for
    /// each row and sender.
    pub scales: *const f32,
    /// fp16 values, `[T, B', G·H']`, in the order of scaled.h or of ../wide_grid/scaled.h.
    pub exchange: *mut c_void,
    /// `[T, B', H'' / kColumnsOfScale]`, directly after `exchange`: the scales of the wide grid.
    /// Those of the grid are exponents, one byte each.
    pub exchange_scales: *mut f32,
}

/// How the blocks of a grid share a sequence: the columns of a block, and the groups of rows.
pub(super) type Share = (i32, i32);

/// All steps forward; `None` if not all blocks can run at the same time.
pub(super) fn forward(
    source: &Source<'_>,
    start: OnAGrid<GridForward>,
    (columns, row_groups): Share,
    product: Product,
) -> Result<Option<Outputs>> {
    let arrays = Arrays::new(source)?;
    let multiplied = Multiplied::forward(source, product)?;
    let messages = match product {
        Product::Plain if source.product_kind == source.kind => arrays.output.shallow_clone(),
        _ => {
            let kind = match product {
                Product::Plain => source.product_kind,
                Product::Scaled => Kind::Half,
            };
            empty_of(&arrays.output.size(), (kind, arrays.output.device()))?
        }
    };
    let params = GridForward {
        steps: source.sizes.steps,
        batch: source.sizes.batch,
        hidden: source.sizes.hidden,
        weight_stride: multiplied.weight_stride,
        c_stride: arrays.c_stride,
        kind: source.kind_code,
        product_kind: multiplied.kind_code,
        columns,
        row_groups,
        weight: multiplied.weight,
        input_gates: source.input_gates,
        bias: source.bias,
        separate_bias: source.separate_bias,
        h0: multiplied.h0,
        c0: source.c0,
        output: arrays.output_ptr,
        exchange: messages.data_ptr(),
        c: arrays.c_ptr,
        last_h: arrays.last_h.data_ptr(),
        last_c: arrays.last_c_ptr(),
        activations: arrays.activations_ptr,
        scales: multiplied.scales,
        h0_scales: multiplied.h0_scales,
    };
    let mut fits = false;
    crate::cuda::launch(source.device, |stream| {
        // SAFETY: `Source`, `Multiplied` and `Arrays` checked or allocated what the parameters point to.
        unsafe { start(&params, &mut fits, stream) }
    })?;
    Ok(fits.then(|| arrays.into_outputs()))
}

/// All steps backward; `None` if not all blocks can run at the same time.
pub(super) fn backward(
    of: &Reversed<'_>,
    start: OnAGrid<GridBackward>,
    (columns, row_groups): Share,
    product: Product,
) -> Result<Option<Gradients>> {
    let made = Gradients::new(of)?;
    let multiplied = Multiplied::backward(of, product)?;
    let messages = Messages::new(of, product)?;
    let params = GridBackward {
        steps: of.sizes.steps,
        batch: of.sizes.batch,
        hidden: of.sizes.hidden,
        weight_stride: multiplied.weight_stride,
        kind: of.kind_code,
        product_kind: multiplied.kind_code,
        columns,
        row_groups,
        needs_grad_h0: i32::from(of.needs_grad_h0),
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
        exchange: messages.values,
        exchange_scales: messages.scales,
    };
    let mut fits = false;
    crate::cuda::launch(of.device, |stream| {
        // SAFETY: as in `forward`.
        unsafe { start(&params, &mut fits, stream) }
    })?;
    Ok(fits.then_some(made))
}
