//! The kernels of `csrc/recurrent/block`, for any cell: a whole layer in one kernel a direction.

use super::Outputs;
use super::cuda::{CudaCell, Start, gates_kind};
use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{checked, kind_code};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};

/// The parameters of the forward pass. G, V and S are a cell's numbers of gates, of saved values and
/// of separate gates (cells/cell.h). All arrays are contiguous and of one kind, but for the sums.
#[repr(C)]
pub(crate) struct BlockForward {
    pub steps: i64,
    pub batch: i64,
    pub features: i64,
    pub hidden: i64,
    /// The distance from a step's c to the next one's: B·H, or 0 if only the last one is needed.
    pub c_stride: i64,
    pub kind: i32,
    /// How many blocks share the rows.
    pub blocks: i32,
    /// `[T, B, F]`.
    pub input: *const c_void,
    /// `[G·H, F]`.
    pub w_ih: *const c_void,
    /// `[G·H, H]`.
    pub w_hh: *const c_void,
    /// `[G·H]`, both null for zeros.
    pub b_ih: *const c_void,
    pub b_hh: *const c_void,
    /// `[B, H]`.
    pub h0: *const c_void,
    /// `[B, H]`; null where the state is h.
    pub c0: *const c_void,
    /// `[T, B, H]`.
    pub output: *mut c_void,
    /// `[T, B, H]`, or `[B, H]` with c_stride 0; null where the state is h.
    pub c: *mut c_void,
    /// `[B, H]`: h after the last step.
    pub last_h: *mut c_void,
    /// `[B, H]`: c after the last step; null where c has it, and where the state is h.
    pub last_c: *mut c_void,
    /// `[T, B, V·H]`; null if nobody needs them.
    pub activations: *mut c_void,
}

/// The parameters of the backward pass. A gradient that is null is not needed, and one of an output
/// that is null is zero.
#[repr(C)]
pub(crate) struct BlockBackward {
    pub steps: i64,
    pub batch: i64,
    pub features: i64,
    pub hidden: i64,
    pub kind: i32,
    /// How many blocks share the rows.
    pub blocks: i32,
    /// `[T, B, F]`.
    pub input: *const c_void,
    /// `[G·H, F]`.
    pub w_ih: *const c_void,
    /// `[G·H, H]`.
    pub w_hh: *const c_void,
    /// `[B, H]`.
    pub h0: *const c_void,
    /// `[B, H]`; null where the state is h.
    pub c0: *const c_void,
    /// `[T, B, H]`: h of all steps.
    pub output: *const c_void,
    /// `[T, B, H]`: c of all steps; null where the state is h.
    pub c: *const c_void,
    /// `[T, B, V·H]`.
    pub activations: *const c_void,
    /// `[T, B, H]`.
    pub grad_output: *const c_void,
    /// `[B, H]`: of the last h and c.
    pub grad_h: *const c_void,
    pub grad_c: *const c_void,
    /// `[T, B, F]`.
    pub grad_input: *mut c_void,
    /// `[B, H]`.
    pub grad_h0: *mut c_void,
    pub grad_c0: *mut c_void,
    /// `[T, B, G·H]` and `[T, B, S·H]`: the gradients for what the product with h is added to, and
    /// for the input's part of the separate gates; null unless products need them.
    pub grad_gates: *mut c_void,
    pub grad_separate: *mut c_void,
    /// `[blocks, G·H·(F + H) + (G + S)·H]`, or without the weights `[blocks, (G + S)·H]`, of the
    /// gates' kind: what each block adds up for the gradients of the parameters; null if none of
    /// them is needed.
    pub sums: *mut c_void,
    pub grad_w_ih: *mut c_void,
    pub grad_w_hh: *mut c_void,
    pub grad_b_ih: *mut c_void,
    pub grad_b_hh: *mut c_void,
}

/// A cell's kernels.
#[derive(Clone, Copy)]
pub(crate) struct BlockCell {
    pub forward: Start<BlockForward>,
    pub backward: Start<BlockBackward>,
}

/// The arguments of a layer, contiguous.
pub(crate) struct Arguments {
    input: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Option<Tensor>,
    b_hh: Option<Tensor>,
    h0: Tensor,
    c0: Option<Tensor>,
    sizes: [i64; 4],
    like: (Kind, Device),
}

impl Arguments {
    pub fn new(
        [input, w_ih, w_hh, h0]: [&Tensor; 4],
        [b_ih, b_hh, c0]: [Option<&Tensor>; 3],
    ) -> Result<Arguments> {
        let (steps, batch, features) = input.size3()?;
        let hidden = h0.size2()?.1;
        let plain_of = |of: Option<&Tensor>| of.map(plain).transpose();
        Ok(Arguments {
            like: (h0.f_kind()?, h0.device()),
            sizes: [steps, batch, features, hidden],
            input: plain(input)?,
            w_ih: plain(w_ih)?,
            w_hh: plain(w_hh)?,
            b_ih: plain_of(b_ih)?,
            b_hh: plain_of(b_hh)?,
            h0: plain(h0)?,
            c0: plain_of(c0)?,
        })
    }

    fn read(&self, name: &str, tensor: &Tensor, size: &[i64]) -> Result<*const c_void> {
        checked(name, tensor, size, self.like).map(<*mut c_void>::cast_const)
    }

    fn read_some(
        &self,
        name: &str,
        tensor: Option<&Tensor>,
        size: &[i64],
    ) -> Result<*const c_void> {
        tensor.map_or(Ok(null()), |tensor| self.read(name, tensor, size))
    }
}

fn pointer(tensor: Option<&Tensor>) -> *mut c_void {
    tensor.map_or(null_mut(), Tensor::data_ptr)
}

/// All steps forward, with this many blocks.
pub(crate) fn forward(
    cell: &CudaCell,
    start: Start<BlockForward>,
    of: &Arguments,
    blocks: i32,
    keep: bool,
) -> Result<Outputs> {
    let [steps, batch, features, hidden] = of.sizes;
    let shape = cell.shape;
    let rows = shape.gates * hidden;
    let empty = |size: &[i64]| empty_of(size, of.like);
    let (all, one) = ([steps, batch, hidden], [batch, hidden]);
    let (output, last_h) = (empty(&all)?, empty(&one)?);
    let has_c = !shape.state_is_h;
    let last_c = has_c.then(|| empty(&one)).transpose()?;
    let c = (has_c && keep).then(|| empty(&all)).transpose()?;
    let activations = keep.then(|| empty(&[steps, batch, shape.saved * hidden])).transpose()?;
    let params = BlockForward {
        steps,
        batch,
        features,
        hidden,
        c_stride: if keep { batch * hidden } else { 0 },
        kind: kind_code(of.like.0)?,
        blocks,
        input: of.read("input", &of.input, &[steps, batch, features])?,
        w_ih: of.read("w_ih", &of.w_ih, &[rows, features])?,
        w_hh: of.read("w_hh", &of.w_hh, &[rows, hidden])?,
        b_ih: of.read_some("b_ih", of.b_ih.as_ref(), &[rows])?,
        b_hh: of.read_some("b_hh", of.b_hh.as_ref(), &[rows])?,
        h0: of.read("h0", &of.h0, &one)?,
        c0: of.read_some("c0", of.c0.as_ref().filter(|_| has_c), &one)?,
        output: output.data_ptr(),
        c: pointer(c.as_ref().or(last_c.as_ref())),
        last_h: last_h.data_ptr(),
        last_c: pointer(last_c.as_ref().filter(|_| keep)),
        activations: pointer(activations.as_ref()),
    };
    crate::cuda::launch(of.like.1, |stream| {
        // SAFETY: what is read was checked, and what is written was allocated with its sizes.
        unsafe { start(&params, stream) }
    })?;
    Ok(Outputs { output, last_h, last_c, c, activations })
}

/// What the backward pass reads beside the arguments; contiguous.
pub(crate) struct Kept<'a> {
    pub output: &'a Tensor,
    /// Absent where the state is h.
    pub c: Option<&'a Tensor>,
    pub activations: &'a Tensor,
    /// Of the output, the last h and the last c.
    pub grads: [Option<Tensor>; 3],
}

/// The gradients of a layer's arguments, as far as they are needed; those of the weights only if the
/// kernel sums them.
#[derive(Default)]
pub(crate) struct BlockGradients {
    pub input: Option<Tensor>,
    pub h0: Option<Tensor>,
    pub c0: Option<Tensor>,
    pub w_ih: Option<Tensor>,
    pub w_hh: Option<Tensor>,
    pub b_ih: Option<Tensor>,
    pub b_hh: Option<Tensor>,
    /// Those of the gates of all steps, if the weights' are needed and the kernel does not sum them, and
    /// of the input's part of the separate gates, if there are any.
    pub gates: Option<Tensor>,
    pub separate: Option<Tensor>,
}

/// Which of them are needed, in their order.
pub(crate) type BlockNeeds = [bool; 7];

/// All steps backward, with this many blocks.
pub(crate) fn backward(
    cell: &CudaCell,
    start: Start<BlockBackward>,
    of: &Arguments,
    kept: &Kept<'_>,
    blocks: i32,
    (needs, sums_weights): (BlockNeeds, bool),
) -> Result<BlockGradients> {
    let [steps, batch, features, hidden] = of.sizes;
    let shape = cell.shape;
    let rows = shape.gates * hidden;
    let (all, one, x) = ([steps, batch, hidden], [batch, hidden], [steps, batch, features]);
    let made =
        |is_needed: bool, size: &[i64]| is_needed.then(|| empty_of(size, of.like)).transpose();
    let has_c = !shape.state_is_h;
    let [needs_x, needs_h0, needs_c0, needs_w_ih, needs_w_hh, needs_b_ih, needs_b_hh] = needs;
    let separate = shape.separate * hidden;
    let needs_weights = needs_w_ih || needs_w_hh;
    let needs_gates = needs_weights && !sums_weights;
    let gradients = BlockGradients {
        input: made(needs_x, &x)?,
        h0: made(needs_h0, &one)?,
        c0: made(needs_c0 && has_c, &one)?,
        w_ih: made(needs_w_ih && sums_weights, &[rows, features])?,
        w_hh: made(needs_w_hh && sums_weights, &[rows, hidden])?,
        gates: made(needs_gates, &[steps, batch, rows])?,
        separate: made(needs_gates && separate > 0, &[steps, batch, separate])?,
        b_ih: made(needs_b_ih, &[rows])?,
        b_hh: made(needs_b_hh, &[rows])?,
    };
    let of_weights = if sums_weights { rows * (features + hidden) } else { 0 };
    let count = of_weights + rows + separate;
    let is_summed = needs_b_ih || needs_b_hh || sums_weights && needs_weights;
    let sums = is_summed
        .then(|| empty_of(&[blocks.into(), count], (gates_kind(of.like.0), of.like.1)))
        .transpose()?;
    let [grad_output, grad_h, grad_c] = kept.grads.each_ref().map(Option::as_ref);
    let params = BlockBackward {
        steps,
        batch,
        features,
        hidden,
        kind: kind_code(of.like.0)?,
        blocks,
        input: of.read("input", &of.input, &x)?,
        w_ih: of.read("w_ih", &of.w_ih, &[rows, features])?,
        w_hh: of.read("w_hh", &of.w_hh, &[rows, hidden])?,
        h0: of.read("h0", &of.h0, &one)?,
        c0: of.read_some("c0", of.c0.as_ref().filter(|_| has_c), &one)?,
        output: of.read("output", kept.output, &all)?,
        c: of.read_some("c", kept.c.filter(|_| has_c), &all)?,
        activations: of.read(
            "activations",
            kept.activations,
            &[steps, batch, shape.saved * hidden],
        )?,
        grad_output: of.read_some("grad_output", grad_output, &all)?,
        grad_h: of.read_some("grad_h", grad_h, &one)?,
        grad_c: of.read_some("grad_c", grad_c.filter(|_| has_c), &one)?,
        grad_input: pointer(gradients.input.as_ref()),
        grad_h0: pointer(gradients.h0.as_ref()),
        grad_c0: pointer(gradients.c0.as_ref()),
        grad_gates: pointer(gradients.gates.as_ref()),
        grad_separate: pointer(gradients.separate.as_ref()),
        sums: pointer(sums.as_ref()),
        grad_w_ih: pointer(gradients.w_ih.as_ref()),
        grad_w_hh: pointer(gradients.w_hh.as_ref()),
        grad_b_ih: pointer(gradients.b_ih.as_ref()),
        grad_b_hh: pointer(gradients.b_hh.as_ref()),
    };
    crate::cuda::launch(of.like.1, |stream| {
        // SAFETY: as in `forward`.
        unsafe { start(&params, stream) }
    })?;
    Ok(gradients)
}
