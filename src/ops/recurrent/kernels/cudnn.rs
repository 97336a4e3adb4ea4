//! cuDNN's own layers, as libtorch calls them (`csrc/recurrent/cudnn.cpp`).

use super::{owned, present};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_cudnn_is_enabled() -> bool;
    fn tch_extension_cudnn_are_flat(parameters: *const *const C_tensor, len: usize) -> bool;
    fn tch_extension_cudnn_rnn_forward(
        input: *const C_tensor,
        parameters: *const *const C_tensor,
        len: usize,
        h: *const C_tensor,
        c: *const C_tensor,
        train: bool,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_cudnn_rnn_backward(
        input: *const C_tensor,
        parameters: *const *const C_tensor,
        len: usize,
        h: *const C_tensor,
        c: *const C_tensor,
        output: *const C_tensor,
        reserve: *const C_tensor,
        grads: *const *const C_tensor,
        needs: *const bool,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// Whether libtorch has cuDNN and its user allows it.
pub(crate) fn is_enabled() -> bool {
    // SAFETY: the function reads two flags.
    unsafe { tch_extension_cudnn_is_enabled() }
}

/// The most parameters of a layer: two weights and two biases.
const MOST: usize = 4;

/// A layer's tensors; all contiguous, of one kind, on one CUDA device.
pub(crate) struct CudnnOperands<'a> {
    /// `[T, B, F]`
    pub input: &'a Tensor,
    /// W_ih `[G·H, F]`, W_hh `[G·H, H]` and, if there are any, b_ih and b_hh `[G·H]`
    pub parameters: &'a [&'a Tensor],
    /// `[1, B, H]`
    pub h: &'a Tensor,
    /// `[1, B, H]`; absent for a GRU
    pub c: Option<&'a Tensor>,
}

/// The handles of a layer's parameters.
fn pointers(parameters: &[&Tensor]) -> Result<[*const C_tensor; MOST]> {
    if ![2, MOST].contains(&parameters.len()) {
        return Err(Error::msg("internal error: a layer has two or four parameters"));
    }
    let pointer = |place: usize| parameters.get(place).map_or(null(), |of| of.as_ptr());
    Ok(std::array::from_fn(pointer))
}

/// Whether these parameters (see [`CudnnOperands`]) follow one another in one piece of memory, so
/// that cuDNN takes them as they are.
pub(crate) fn are_flat(parameters: &[&Tensor]) -> Result<bool> {
    let pointers = pointers(parameters)?;
    // SAFETY: as many of these as `len` says are live tensors.
    Ok(unsafe { tch_extension_cudnn_are_flat(pointers.as_ptr(), parameters.len()) })
}

/// Moves a layer's parameters (see [`CudnnOperands`]) on CUDA into one piece of memory, in which
/// cuDNN takes them as they are. They stay the same tensors for all who hold them.
pub(crate) fn flatten(parameters: &[Tensor]) -> Result<()> {
    const MODE_OF_LSTM: i64 = 2;
    const MODE_OF_GRU: i64 = 3;
    let [w_ih, w_hh, ..] = parameters else { return Ok(()) };
    let ((rows, hidden), features) = (w_hh.size2()?, w_ih.size2()?.1);
    if !is_enabled() || !w_hh.device().is_cuda() || features == 0 {
        return Ok(());
    }
    let mode = if rows == 4 * hidden { MODE_OF_LSTM } else { MODE_OF_GRU };
    let (stride, no_projection, layers) = (parameters.len() as i64, 0, 1);
    let _guard = tch::no_grad_guard();
    let _ = Tensor::f_internal_cudnn_rnn_flatten_weight(
        parameters,
        stride,
        features,
        mode,
        hidden,
        no_projection,
        layers,
        false,
        false,
    )?;
    Ok(())
}

impl CudnnOperands<'_> {
    fn parameters(&self) -> Result<[*const C_tensor; MOST]> {
        pointers(self.parameters)
    }

    fn c(&self) -> *const C_tensor {
        self.c.map_or(null(), |c| c.as_ptr())
    }
}

/// The output `[T, B, H]`, the last h and c `[1, B, H]`, and what [`backward`] reads if it is kept.
pub(crate) type CudnnOutputs = (Tensor, Tensor, Option<Tensor>, Option<Tensor>);

pub(crate) fn forward(operands: &CudnnOperands<'_>, keep: bool) -> Result<CudnnOutputs> {
    let parameters = operands.parameters()?;
    let mut results = [null_mut(); 4];
    // SAFETY: the operands are live tensors, and `results` has room for four handles.
    let message = unsafe {
        tch_extension_cudnn_rnn_forward(
            operands.input.as_ptr(),
            parameters.as_ptr(),
            operands.parameters.len(),
            operands.h.as_ptr(),
            operands.c(),
            keep,
            results.as_mut_ptr(),
        )
    };
    let [output, h, c, reserve] = results.map(owned);
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok((present(output)?, present(h)?, c, reserve)),
    }
}

/// The gradients for the input, h, c and the parameters, as far as they are needed.
pub(crate) fn backward(
    operands: &CudnnOperands<'_>,
    (output, reserve): (&Tensor, &Tensor),
    grads: [Option<&Tensor>; 3],
    needs: [bool; 4],
) -> Result<[Option<Tensor>; 3 + MOST]> {
    let parameters = operands.parameters()?;
    let grads = grads.map(|grad| grad.map_or(null(), |grad| grad.as_ptr()));
    let mut results = [null_mut(); 3 + MOST];
    // SAFETY: as in `forward`; there are three gradients, four needs, and room for as many handles
    // as there can be.
    let message = unsafe {
        tch_extension_cudnn_rnn_backward(
            operands.input.as_ptr(),
            parameters.as_ptr(),
            operands.parameters.len(),
            operands.h.as_ptr(),
            operands.c(),
            output.as_ptr(),
            reserve.as_ptr(),
            grads.as_ptr(),
            needs.as_ptr(),
            results.as_mut_ptr(),
        )
    };
    let results = results.map(owned);
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(results),
    }
}
