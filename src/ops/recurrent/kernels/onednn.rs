//! oneDNN's LSTM on the CPU, as libtorch calls it (`csrc/recurrent/onednn.cpp`).

use super::{owned, present};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_onednn_is_enabled() -> bool;
    fn tch_extension_onednn_lstm_forward(
        input: *const C_tensor,
        parameters: *const *const C_tensor,
        h: *const C_tensor,
        c: *const C_tensor,
        train: bool,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_onednn_lstm_backward(
        input: *const C_tensor,
        parameters: *const *const C_tensor,
        h: *const C_tensor,
        c: *const C_tensor,
        output: *const C_tensor,
        last_c: *const C_tensor,
        workspace: *const C_tensor,
        grads: *const *const C_tensor,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
}

/// Whether libtorch has oneDNN and its user allows it.
pub(crate) fn is_enabled() -> bool {
    // SAFETY: the function reads two flags.
    unsafe { tch_extension_onednn_is_enabled() }
}

/// A layer's tensors; all contiguous and `Float`, on the CPU, and none of them empty.
pub(crate) struct OnednnOperands<'a> {
    /// `[T, B, F]`
    pub input: &'a Tensor,
    /// W_ih `[4H, F]`, W_hh `[4H, H]`, b_ih and b_hh `[4H]`
    pub parameters: [&'a Tensor; 4],
    /// `[B, H]`
    pub h: &'a Tensor,
    /// `[B, H]`
    pub c: &'a Tensor,
}

/// The output `[T, B, H]`, the last h and c `[B, H]`, and what [`backward`] reads if it is kept.
pub(crate) type OnednnOutputs = (Tensor, Tensor, Tensor, Option<Tensor>);

pub(crate) fn forward(operands: &OnednnOperands<'_>, keep: bool) -> Result<OnednnOutputs> {
    let parameters = operands.parameters.map(|parameter| parameter.as_ptr());
    let mut results = [null_mut(); 4];
    // SAFETY: the operands are live tensors, and `results` has room for four handles.
    let message = unsafe {
        tch_extension_onednn_lstm_forward(
            operands.input.as_ptr(),
            parameters.as_ptr(),
            operands.h.as_ptr(),
            operands.c.as_ptr(),
            keep,
            results.as_mut_ptr(),
        )
    };
    let [output, h, c, workspace] = results.map(owned);
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok((present(output)?, present(h)?, present(c)?, workspace)),
    }
}

/// What [`backward`] reads of the forward pass.
pub(crate) struct OnednnSaved<'a> {
    /// `[T, B, H]`
    pub output: &'a Tensor,
    /// `[B, H]`
    pub last_c: &'a Tensor,
    pub workspace: &'a Tensor,
}

/// The gradients for the input, the four parameters, h and c, given those for the output and the last
/// h and c, of which at least one is there.
pub(crate) fn backward(
    operands: &OnednnOperands<'_>,
    saved: &OnednnSaved<'_>,
    grads: [Option<&Tensor>; 3],
) -> Result<[Tensor; 7]> {
    let parameters = operands.parameters.map(|parameter| parameter.as_ptr());
    let grads = grads.map(|grad| grad.map_or(null(), |grad| grad.as_ptr()));
    let mut results = [null_mut(); 7];
    // SAFETY: as in `forward`; there are three gradients, and room for seven handles.
    let message = unsafe {
        tch_extension_onednn_lstm_backward(
            operands.input.as_ptr(),
            parameters.as_ptr(),
            operands.h.as_ptr(),
            operands.c.as_ptr(),
            saved.output.as_ptr(),
            saved.last_c.as_ptr(),
            saved.workspace.as_ptr(),
            grads.as_ptr(),
            results.as_mut_ptr(),
        )
    };
    let results = results.map(owned);
    if let Some(message) = take_message(message) {
        return Err(Error::Torch(message));
    }
    let all = results.into_iter().map(present).collect::<Result<Vec<_>>>()?;
    all.try_into().map_err(|_| Error::msg("internal error: seven gradients"))
}
