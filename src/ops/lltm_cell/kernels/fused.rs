//! The kernels that compute the whole cell at once: `csrc/lltm_cell/fused_forward.cu`,
//! `fused_backward.cu` and `cpu_fused.cpp`.

use crate::ffi::facts::{Facts, Fresh, empty, facts};
#[cfg(not(tch_extension_cuda))]
use crate::ffi::no_kernel;
use crate::ffi::tensor::{describe, plain};
use crate::ops::lltm_cell::plan::Sizes;
use crate::{Error, Result};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};

/// The parameters of the forward kernels that compute the whole cell. All arrays have one kind. In
/// arrays that are read, rows are `…_stride` elements apart, and the elements of a row are
/// adjacent; arrays that are written are contiguous. K is H + F.
#[repr(C)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
pub(super) struct FusedForward {
    /// B, the batch size; at least 1.
    pub batch: i64,
    /// F, the number of features; may be 0.
    pub features: i64,
    /// H, the hidden size; at least 1.
    pub hidden: i64,
    /// The `TchExtensionKind` of every array.
    pub kind: i32,
    /// Whether sizes, strides and addresses allow 16-byte loads.
    pub vectors: i32,
    /// x, `[B, F]`.
    pub input: *const c_void,
    pub input_stride: i64,
    /// W, `[3H, K]`. Its columns are those for h, followed by those for x.
    pub weight: *const c_void,
    pub weight_stride: i64,
    /// b, `[3H]`, null for zeros.
    pub bias: *const c_void,
    /// `[B, H]`.
    pub h: *const c_void,
    pub h_stride: i64,
    /// `[B, H]`.
    pub c: *const c_void,
    pub c_stride: i64,
    /// `[B, H]`.
    pub new_h: *mut c_void,
    /// `[B, H]`; may be c, in a sequence that keeps only the last one.
    pub new_c: *mut c_void,
    /// `[B, 3H]`: `[σ(i) | σ(o) | g]`, null when nobody needs them.
    pub activations: *mut c_void,
    /// Only on CUDA, for a sequence: `[B, 3H]` in the type of the sums, which is added to the
    /// gates; null for zeros. May be `activations`.
    pub input_gates: *const c_void,
    /// `[B, H]`, a second copy of new_h, as the output of a sequence of one step; null when nobody
    /// needs it.
    pub output: *mut c_void,
}

/// The parameters of the backward kernels that compute the whole cell.
#[repr(C)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
pub(super) struct FusedBackward {
    /// B, the batch size.
    pub batch: i64,
    /// F, the number of features.
    pub features: i64,
    /// H, the hidden size.
    pub hidden: i64,
    /// The `TchExtensionKind` of every array.
    pub kind: i32,
    /// Whether grad_new_c, grad_recurrent, grad_h and grad_c have the type of the sums.
    pub wide: i32,
    /// `[B, H]`, null for zeros.
    pub grad_new_h: *const c_void,
    /// `[B, H]`, null for zeros.
    pub grad_new_c: *const c_void,
    /// `[B, 3H]`.
    pub activations: *const c_void,
    /// `[B, H]`.
    pub new_c: *const c_void,
    /// `[B, F]`, null without grad_weight.
    pub input: *const c_void,
    pub input_stride: i64,
    /// `[B, H]`, null without grad_weight.
    pub h: *const c_void,
    pub h_stride: i64,
    /// `[3H, K]`, null without grad_input and grad_h.
    pub weight: *const c_void,
    pub weight_stride: i64,
    /// `[B, F]`; this and the next four are null when nobody needs them.
    pub grad_input: *mut c_void,
    /// `[3H, K]`.
    pub grad_weight: *mut c_void,
    /// `[3H]`.
    pub grad_bias: *mut c_void,
    /// `[B, H]`.
    pub grad_h: *mut c_void,
    /// `[B, H]`.
    pub grad_c: *mut c_void,
    /// Only on CUDA, for a sequence, which needs neither grad_weight nor grad_bias of a single
    /// step: `[B, H]`, added to grad_new_h; null for zeros.
    pub grad_recurrent: *const c_void,
    /// `[B, 3H]`, null when nobody needs it. If it is not null, grad_h must not be null either.
    pub grad_gates: *mut c_void,
}

unsafe extern "C" {
    fn tch_extension_lltm_cell_fused_forward_cpu(params: *const FusedForward);
    fn tch_extension_lltm_cell_fused_backward_cpu(
        params: *const FusedBackward,
        grad_gates: *mut c_void,
    );
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    pub(super) fn tch_extension_lltm_cell_fused_forward_cuda(
        params: *const FusedForward,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
    pub(super) fn tch_extension_lltm_cell_fused_backward_cuda(
        params: *const FusedBackward,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
    pub(super) fn tch_extension_lltm_cell_hopper_forward_cuda(
        params: *const FusedForward,
        is_started: *mut bool,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// The cell's tensors.
#[derive(Clone, Copy)]
pub(crate) struct Operands<'a> {
    /// `[B, F]`, or `[1, B, F]` for a sequence of one step.
    pub input: &'a Tensor,
    pub weight: &'a Tensor,
    pub bias: Option<&'a Tensor>,
    pub h: &'a Tensor,
    pub c: &'a Tensor,
}

/// What the caller asks for in addition to h' and c'.
#[derive(Clone, Copy)]
pub(crate) struct Extras {
    /// Whether to return what the backward reads.
    pub activations: bool,
    /// Whether to return h' again, as the output of a sequence of one step.
    pub output: bool,
}

/// h', c', and what was asked for in addition.
pub(crate) struct Outputs {
    pub new_h: Tensor,
    pub new_c: Tensor,
    pub activations: Option<Tensor>,
    /// `[1, B, H]`.
    pub output: Option<Tensor>,
}

/// The facts of a tensor, or of a copy of it if a kernel cannot read the tensor in its own layout.
struct Readable {
    _copy: Option<Tensor>,
    facts: Facts,
}

impl Readable {
    fn new(tensor: &Tensor, known: Facts, is_readable: impl Fn(&Facts) -> bool) -> Result<Self> {
        if is_readable(&known) {
            return Ok(Readable { _copy: None, facts: known });
        }
        let copy = plain(tensor)?;
        let facts = facts([Some(&copy)])?[0].of_one_step();
        if !is_readable(&facts) {
            let found = describe(tensor);
            return Err(Error::msg(format!("internal error: lltm_cell cannot read {found}")));
        }
        Ok(Readable { _copy: Some(copy), facts })
    }

    fn matrix(tensor: &Tensor, known: Facts, like: &Facts, size: [i64; 2]) -> Result<Self> {
        Self::new(tensor, known, |facts| {
            facts.is_like(like) && facts.sizes() == Some(size) && facts.row_stride().is_some()
        })
    }

    fn plain_matrix(tensor: &Tensor, known: Facts, like: &Facts, size: [i64; 2]) -> Result<Self> {
        Self::new(tensor, known, |facts| {
            facts.is_like(like) && facts.sizes() == Some(size) && facts.is_plain_matrix()
        })
    }

    fn row(tensor: &Tensor, known: Facts, like: &Facts, size: i64) -> Result<Self> {
        Self::new(tensor, known, |facts| {
            let fits = facts.sizes() == Some([size]) || facts.sizes() == Some([1, size]);
            facts.is_like(like) && fits && facts.is_row()
        })
    }

    fn data(&self) -> *const c_void {
        self.facts.data()
    }

    fn stride(&self) -> i64 {
        self.facts.row_stride().unwrap_or(0)
    }
}

fn data(tensor: Option<&Readable>) -> *const c_void {
    tensor.map_or(null(), Readable::data)
}

fn written(fresh: &Option<Fresh>) -> *mut c_void {
    fresh.as_ref().map_or(null_mut(), |fresh| fresh.data)
}

/// Whether 16-byte loads can read rows of these matrices that are split into parts of `columns`
/// columns.
fn allow_vectors(matrices: [&Readable; 3], columns: [i64; 2], kind: Kind) -> bool {
    let lanes = 16 / kind.elt_size_in_bytes() as i64;
    let is_whole = |size: i64| size % lanes == 0;
    columns.into_iter().all(is_whole)
        && matrices.iter().all(|matrix| is_whole(matrix.stride()) && matrix.data().addr() % 16 == 0)
}

/// Computes the cell, for tensors of one kind on one device. `known` are the operands' facts, in
/// the operands' order; those of the input describe a single step.
pub(crate) fn forward(
    operands: &Operands<'_>,
    known: &[Facts; 5],
    sizes: Sizes,
    extras: Extras,
) -> Result<Outputs> {
    let outputs = forward_by(operands, known, sizes, extras, |device, params| match device {
        Some(Device::Cpu) => {
            // SAFETY: `forward_by` made sure of every array's kind, device, size and strides; the
            // arrays that are written are new.
            unsafe { tch_extension_lltm_cell_fused_forward_cpu(params) };
            Ok(true)
        }
        device => launch_forward(device, params).map(|()| true),
    })?;
    outputs.ok_or_else(|| Error::msg("internal error: the kernel of lltm_cell was not started"))
}

/// Whether the tensor-core kernel can read the operands without a copy: they begin at multiples of
/// 16 bytes, and their rows are multiples of 16 bytes apart.
pub(crate) fn allow_bulk_copies(known: &[Facts; 5], sizes: Sizes) -> bool {
    const LANES: i64 = 8;
    let [input, weight, _, h, c] = known;
    let allow = |facts: &Facts| {
        facts.row_stride().is_some_and(|stride| stride % LANES == 0)
            && facts.data().addr().is_multiple_of(16)
    };
    (sizes.features == 0 || allow(input)) && [weight, h, c].into_iter().all(allow)
}

/// [`forward`] by the tensor-core kernel. `None` if the kernel cannot read the operands or does not
/// exist for the device.
pub(crate) fn forward_by_tensor_cores(
    operands: &Operands<'_>,
    known: &[Facts; 5],
    sizes: Sizes,
    extras: Extras,
) -> Result<Option<Outputs>> {
    forward_by(operands, known, sizes, extras, launch_tensor_cores)
}

/// Calls `launch` with the parameters; `launch` returns whether it started a kernel.
fn forward_by(
    operands: &Operands<'_>,
    known: &[Facts; 5],
    sizes: Sizes,
    extras: Extras,
    launch: impl FnOnce(Option<Device>, &FusedForward) -> Result<bool>,
) -> Result<Option<Outputs>> {
    let Operands { input, weight, bias, h, c } = *operands;
    let Sizes { batch, features, hidden } = sizes;
    let like = &known[0];
    let kind = like.kind().ok_or_else(|| Error::msg("internal error: a kind without kernels"))?;
    let state = [batch, hidden];
    let input = Readable::matrix(input, known[0], like, [batch, features])?;
    let weight = Readable::matrix(weight, known[1], like, [3 * hidden, hidden + features])?;
    let bias = bias.map(|bias| Readable::row(bias, known[2], like, 3 * hidden)).transpose()?;
    let h = Readable::matrix(h, known[3], like, state)?;
    let c = Readable::matrix(c, known[4], like, state)?;
    let (activations, output) = ([batch, 3 * hidden], [1, batch, hidden]);
    let activations = extras.activations.then_some(&activations[..]);
    let output = extras.output.then_some(&output[..]);
    let outputs = empty([Some(&state), Some(&state), activations, output], like)?;
    let [Some(new_h), Some(new_c), activations, output] = outputs else {
        return Err(Error::msg("internal error: no tensor was made"));
    };
    let params = FusedForward {
        batch,
        features,
        hidden,
        kind: like.kind_code(),
        vectors: i32::from(allow_vectors([&input, &weight, &h], [hidden, features], kind)),
        input: input.data(),
        input_stride: input.stride(),
        weight: weight.data(),
        weight_stride: weight.stride(),
        bias: data(bias.as_ref()),
        h: h.data(),
        h_stride: h.stride(),
        c: c.data(),
        c_stride: c.stride(),
        new_h: new_h.data,
        new_c: new_c.data,
        activations: written(&activations),
        input_gates: null(),
        output: written(&output),
    };
    if !launch(like.device(), &params)? {
        return Ok(None);
    }
    let [activations, output] = [activations, output].map(|fresh| fresh.map(|fresh| fresh.tensor));
    Ok(Some(Outputs { new_h: new_h.tensor, new_c: new_c.tensor, activations, output }))
}

/// What [`backward`] reads. For gradients, `None` means zeros. The weight may be `None` if the
/// gradients of input and h are not asked for; input and h may be `None` if the gradient of the
/// weight is not.
pub(crate) struct BackwardInputs<'a> {
    pub grad_new_h: Option<&'a Tensor>,
    pub grad_new_c: Option<&'a Tensor>,
    pub activations: &'a Tensor,
    pub new_c: &'a Tensor,
    pub input: Option<&'a Tensor>,
    pub h: Option<&'a Tensor>,
    pub weight: Option<&'a Tensor>,
}

/// The gradients that are asked for; for those of the input and the bias, their shapes.
#[derive(Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub input: Option<&'a [i64]>,
    pub weight: bool,
    pub bias: Option<&'a [i64]>,
    pub h: bool,
    pub c: bool,
}

/// Computes the gradients of input, weight, bias, h and c that are asked for.
pub(crate) fn backward(
    inputs: &BackwardInputs<'_>,
    sizes: Sizes,
    asked: Asked<'_>,
) -> Result<[Option<Tensor>; 5]> {
    let Sizes { batch, features, hidden } = sizes;
    let BackwardInputs { grad_new_h, grad_new_c, activations, new_c, input, h, weight } = *inputs;
    let known = facts([Some(new_c), Some(activations), grad_new_h, grad_new_c, input, h, weight])?;
    let known = known.map(Facts::of_one_step);
    let like = &known[0];
    let (state, features_size) = ([batch, hidden], [batch, features]);
    let weight_size = [3 * hidden, hidden + features];
    let optional = |tensor: Option<&Tensor>, place: usize, size| {
        tensor.map(|tensor| Readable::matrix(tensor, known[place], like, size)).transpose()
    };
    let gradient = |tensor: Option<&Tensor>, place: usize| {
        tensor.map(|tensor| Readable::plain_matrix(tensor, known[place], like, state)).transpose()
    };
    let new_c = Readable::plain_matrix(new_c, known[0], like, state)?;
    let activations = Readable::plain_matrix(activations, known[1], like, [batch, 3 * hidden])?;
    let (grad_new_h, grad_new_c) = (gradient(grad_new_h, 2)?, gradient(grad_new_c, 3)?);
    let (input, h) = (optional(input, 4, features_size)?, optional(h, 5, state)?);
    let weight = optional(weight, 6, weight_size)?;
    let is_not = |size: Option<&[i64]>, numel| {
        size.is_some_and(|size| size.iter().product::<i64>() != numel)
    };
    let is_missing = ((asked.input.is_some() || asked.h) && weight.is_none())
        || (asked.weight && (input.is_none() || h.is_none()))
        || is_not(asked.input, batch * features)
        || is_not(asked.bias, 3 * hidden);
    if is_missing {
        return Err(Error::msg("internal error: lltm_cell's backward lacks what a gradient needs"));
    }
    let results = empty(
        [
            asked.input,
            asked.weight.then_some(&weight_size),
            asked.bias,
            asked.h.then_some(&state),
            asked.c.then_some(&state),
        ],
        like,
    )?;
    let [grad_input, grad_weight, grad_bias, grad_h, grad_c] = results.each_ref().map(written);
    let stride = |tensor: &Option<Readable>| tensor.as_ref().map_or(0, Readable::stride);
    let params = FusedBackward {
        batch,
        features,
        hidden,
        kind: like.kind_code(),
        wide: 0,
        grad_new_h: data(grad_new_h.as_ref()),
        grad_new_c: data(grad_new_c.as_ref()),
        activations: activations.data(),
        new_c: new_c.data(),
        input: data(input.as_ref()),
        input_stride: stride(&input),
        h: data(h.as_ref()),
        h_stride: stride(&h),
        weight: data(weight.as_ref()),
        weight_stride: stride(&weight),
        grad_input,
        grad_weight,
        grad_bias,
        grad_h,
        grad_c,
        grad_recurrent: null(),
        grad_gates: null_mut(),
    };
    match like.device() {
        Some(Device::Cpu) => {
            let scratch = empty([Some(&[batch, 3 * hidden])], like)?;
            // SAFETY: as in `forward`, with the checks above; an array that is null is not asked
            // for.
            unsafe { tch_extension_lltm_cell_fused_backward_cpu(&params, written(&scratch[0])) };
        }
        device => launch_backward(device, &params)?,
    }
    Ok(results.map(|result| result.map(|fresh| fresh.tensor)))
}

#[cfg(tch_extension_cuda)]
fn launch_forward(device: Option<Device>, params: &FusedForward) -> Result<()> {
    // SAFETY: `forward_by` made sure of every array's kind, device, size and strides; the arrays
    // that are written are new. The kernel runs after all earlier work on its stream, and
    // libtorch's allocator reuses memory in that order.
    crate::cuda::launch(device.unwrap_or(Device::Cpu), |stream| unsafe {
        tch_extension_lltm_cell_fused_forward_cuda(params, stream)
    })
}

#[cfg(tch_extension_cuda)]
fn launch_tensor_cores(device: Option<Device>, params: &FusedForward) -> Result<bool> {
    let mut is_started = false;
    // SAFETY: as in `launch_forward`.
    crate::cuda::launch(device.unwrap_or(Device::Cpu), |stream| unsafe {
        tch_extension_lltm_cell_hopper_forward_cuda(params, &mut is_started, stream)
    })?;
    Ok(is_started)
}

#[cfg(tch_extension_cuda)]
fn launch_backward(device: Option<Device>, params: &FusedBackward) -> Result<()> {
    // SAFETY: as in `launch_forward`, with the checks of `backward`; a null array is not asked for.
    crate::cuda::launch(device.unwrap_or(Device::Cpu), |stream| unsafe {
        tch_extension_lltm_cell_fused_backward_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn launch_forward(device: Option<Device>, _: &FusedForward) -> Result<()> {
    Err(no_kernel("lltm_cell", device.unwrap_or(Device::Cpu)))
}

#[cfg(not(tch_extension_cuda))]
fn launch_tensor_cores(_: Option<Device>, _: &FusedForward) -> Result<bool> {
    Ok(false)
}

#[cfg(not(tch_extension_cuda))]
fn launch_backward(device: Option<Device>, _: &FusedBackward) -> Result<()> {
    Err(no_kernel("lltm_cell", device.unwrap_or(Device::Cpu)))
}
