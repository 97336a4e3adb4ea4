//! Sequences on CUDA with one kernel of the cell for each step.

use super::fused::{FusedBackward, FusedForward};
use crate::Result;
use crate::cuda::LaunchStatus;
use crate::ffi::facts::empty_of;
use crate::ffi::{checked, kind_code, optional_ptr};
use crate::ops::recurrent::kernels::Outputs;
use crate::ops::recurrent::kernels::cuda::{Gradients, gates_kind};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::Tensor;

/// Which kernel computes a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepKernel {
    Fused,
    /// Only forward.
    TensorCores,
}

/// What the forward pass reads: contiguous tensors of one kind.
pub(crate) struct Sequence<'a> {
    /// `[T, B, F]`
    pub input: &'a Tensor,
    /// `[3H, H + F]`
    pub weight: &'a Tensor,
    /// `[3H]`
    pub bias: Option<&'a Tensor>,
    /// `[B, H]`
    pub h0: &'a Tensor,
    /// `[B, H]`
    pub c0: &'a Tensor,
    /// `[T, B, 3H]`, of the kind of sums: the product with the input, if it was computed for all steps
    /// before the first one. Activations may overwrite it.
    pub input_gates: Option<&'a Tensor>,
}

/// The address of a step of a contiguous tensor whose first dimension is that of the steps; null if there
/// is no tensor.
fn at(all: Option<&Tensor>, step: i64, values: i64) -> *mut c_void {
    all.map_or(null_mut(), |all| {
        let bytes = step * values * all.kind().elt_size_in_bytes() as i64;
        all.data_ptr().cast::<u8>().wrapping_offset(bytes as isize).cast()
    })
}

/// Whether rows of a tensor may be read 16 bytes at a time.
fn allows_vectors(tensor: &Tensor, columns: [i64; 2]) -> bool {
    let lanes = 16 / tensor.kind().elt_size_in_bytes() as i64;
    columns.iter().all(|columns| columns % lanes == 0)
        && tensor.data_ptr().addr().is_multiple_of(16)
}

/// All steps forward.
pub(crate) fn forward(kernel: StepKernel, of: &Sequence<'_>, keep: bool) -> Result<Outputs> {
    let (steps, batch, all_features) = of.input.size3()?;
    let hidden = of.h0.size2()?.1;
    let (kind, device) = (of.h0.f_kind()?, of.h0.device());
    let like = (kind, device);
    let (size, gates) = (batch * hidden, 3 * batch * hidden);
    let features = if of.input_gates.is_some() { 0 } else { all_features };
    let empty = |size: &[i64]| empty_of(size, like);
    let (last, all_gates) = ([batch, hidden], [steps, batch, 3 * hidden]);
    let output = empty(&[steps, batch, hidden])?;
    let c = if keep { empty(&[steps, batch, hidden])? } else { empty(&last)? };
    let last_h = empty(&last)?;
    let activations = match of.input_gates {
        _ if !keep => None,
        // Each gate is read before its activation is written.
        Some(gates) if gates_kind(kind) == kind => Some(gates.shallow_clone()),
        _ => Some(empty(&all_gates)?),
    };
    let columns = hidden + all_features;
    checked("input", of.input, &[steps, batch, all_features], like)?;
    optional_ptr("input_gates", of.input_gates, &all_gates, (gates_kind(kind), device))?;
    let vectors =
        [of.weight, of.h0, &output].iter().all(|matrix| allows_vectors(matrix, [hidden, columns]))
            && allows_vectors(of.input, [features; 2]);
    let mut params = FusedForward {
        batch,
        features,
        hidden,
        kind: kind_code(kind)?,
        vectors: i32::from(vectors),
        input: null(),
        input_stride: features,
        weight: checked("weight", of.weight, &[3 * hidden, columns], like)?,
        weight_stride: columns,
        bias: optional_ptr("bias", of.bias, &[3 * hidden], like)?,
        h: checked("h0", of.h0, &last, like)?,
        h_stride: hidden,
        c: checked("c0", of.c0, &last, like)?,
        c_stride: hidden,
        new_h: null_mut(),
        new_c: null_mut(),
        activations: null_mut(),
        input_gates: null(),
        output: null_mut(),
    };
    for_each(device, 0..steps, |step, stream| {
        params.input = at(Some(of.input), step, batch * all_features);
        params.input_gates = at(of.input_gates, step, gates);
        params.new_h = at(Some(&output), step, size);
        params.new_c = at(Some(&c), if keep { step } else { 0 }, size);
        params.activations = at(activations.as_ref(), step, gates);
        // The last one is also an output of its own.
        params.output = if step + 1 == steps { last_h.data_ptr() } else { null_mut() };
        let status = start_forward(kernel, &params, stream);
        (params.h, params.c) = (params.new_h, params.new_c);
        status
    })?;
    let (last_c, c) = match keep {
        true => (c.f_select(0, -1)?.f_to_dtype(kind, false, true)?, Some(c)),
        false => (c, None),
    };
    Ok(Outputs { output, last_h, last_c: Some(last_c), c, activations })
}

/// All steps backward, by the fused kernel, from the gradients for the output, the last h and the last c.
/// There are always those of h0 and c0.
pub(crate) fn backward(
    weight: &Tensor,
    activations: &Tensor,
    c: &Tensor,
    [grad_output, grad_h, grad_c]: [Option<&Tensor>; 3],
) -> Result<Gradients> {
    let (steps, batch, hidden) = c.size3()?;
    let (kind, device) = (c.f_kind()?, c.device());
    let (like, size) = ((kind, device), batch * hidden);
    let all = [steps, batch, hidden];
    // Blocks read gradients that other blocks would overwrite, so there are two buffers for each.
    let buffers = |given: Option<&Tensor>| -> Result<[Tensor; 2]> {
        let mut own = Tensor::f_zeros([batch, hidden], (gates_kind(kind), device))?;
        given.map(|given| own.f_copy_(given)).transpose()?;
        Ok([own.f_empty_like()?, own])
    };
    let ([mut other_h, mut h0], [mut other_c, mut c0]) = (buffers(grad_h)?, buffers(grad_c)?);
    let gates = empty_of(&[steps, batch, 3 * hidden], like)?;
    let weight_stride = weight.size2()?.1;
    optional_ptr("grad_output", grad_output, &all, like)?;
    checked("activations", activations, &[steps, batch, 3 * hidden], like)?;
    checked("c", c, &all, like)?;
    let mut params = FusedBackward {
        batch,
        features: 0,
        hidden,
        kind: kind_code(kind)?,
        wide: 1,
        grad_new_h: null(),
        grad_new_c: null(),
        activations: null(),
        new_c: null(),
        input: null(),
        input_stride: 0,
        h: null(),
        h_stride: 0,
        weight: checked("weight", weight, &[3 * hidden, weight_stride], like)?,
        weight_stride,
        grad_input: null_mut(),
        grad_weight: null_mut(),
        grad_bias: null_mut(),
        grad_h: null_mut(),
        grad_c: null_mut(),
        grad_recurrent: null(),
        grad_gates: null_mut(),
    };
    for_each(device, (0..steps).rev(), |step, stream| {
        params.grad_new_h = at(grad_output, step, size);
        params.grad_recurrent = h0.data_ptr();
        params.grad_new_c = c0.data_ptr();
        params.activations = at(Some(activations), step, 3 * size);
        params.new_c = at(Some(c), step, size);
        params.grad_h = other_h.data_ptr();
        params.grad_c = other_c.data_ptr();
        params.grad_gates = at(Some(&gates), step, 3 * size);
        let status = start_backward(&params, stream);
        std::mem::swap(&mut h0, &mut other_h);
        std::mem::swap(&mut c0, &mut other_c);
        status
    })?;
    Ok(Gradients { gates, separate: None, h0, c0 })
}

/// Starts a kernel for each step, until one fails.
fn for_each(
    device: tch::Device,
    steps: impl Iterator<Item = i64>,
    mut start: impl FnMut(i64, *mut c_void) -> LaunchStatus,
) -> Result<()> {
    crate::cuda::launch(device, |stream| {
        let mut status = LaunchStatus::of_nothing();
        for step in steps {
            status = start(step, stream);
            if status.is_error() {
                break;
            }
        }
        status
    })
}

#[cfg(tch_extension_cuda)]
fn start_forward(kernel: StepKernel, params: &FusedForward, stream: *mut c_void) -> LaunchStatus {
    use super::fused::{
        tch_extension_lltm_cell_fused_forward_cuda, tch_extension_lltm_cell_hopper_forward_cuda,
    };
    // SAFETY: `forward` checked or allocated what the parameters point to.
    unsafe {
        match kernel {
            StepKernel::Fused => tch_extension_lltm_cell_fused_forward_cuda(params, stream),
            StepKernel::TensorCores => {
                let mut is_started = false;
                let status =
                    tch_extension_lltm_cell_hopper_forward_cuda(params, &mut is_started, stream);
                if is_started || status.is_error() {
                    return status;
                }
                LaunchStatus::failed(c"lltm_cell_hopper_forward", c"it cannot compute this step")
            }
        }
    }
}

#[cfg(tch_extension_cuda)]
fn start_backward(params: &FusedBackward, stream: *mut c_void) -> LaunchStatus {
    // SAFETY: `backward` checked or allocated what the parameters point to.
    unsafe { super::fused::tch_extension_lltm_cell_fused_backward_cuda(params, stream) }
}

#[cfg(not(tch_extension_cuda))]
fn start_forward(_: StepKernel, _: &FusedForward, _: *mut c_void) -> LaunchStatus {
    LaunchStatus::failed(c"lltm_cell", c"this build has no CUDA kernels")
}

#[cfg(not(tch_extension_cuda))]
fn start_backward(_: &FusedBackward, _: *mut c_void) -> LaunchStatus {
    LaunchStatus::failed(c"lltm_cell", c"this build has no CUDA kernels")
}
