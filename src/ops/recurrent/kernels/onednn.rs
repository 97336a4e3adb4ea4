//! oneDNN's LSTM on the CPU, as libtorch calls it (`csrc/recurrent/onednn.cpp`).

use super::{owned, present};
use crate::ffi::{checked, optional_ptr, take_message};
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::{Device, Kind, Tensor};
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

/// A layer's tensors, none of them empty. oneDNN checks nothing, so their sizes, kinds and layouts are
/// checked here.
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

const LIKE: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The sizes of a layer.
#[derive(Clone, Copy)]
struct Sizes {
    steps: i64,
    batch: i64,
    hidden: i64,
}

impl Sizes {
    fn all(self) -> [i64; 3] {
        [self.steps, self.batch, self.hidden]
    }

    fn state(self) -> [i64; 2] {
        [self.batch, self.hidden]
    }
}

impl OnednnOperands<'_> {
    fn checked(&self) -> Result<Sizes> {
        let ((steps, batch, features), hidden) = (self.input.size3()?, self.h.size2()?.1);
        let sizes = Sizes { steps, batch, hidden };
        if steps * batch * features * hidden == 0 {
            return Err(Error::msg("internal error: oneDNN takes no empty tensors"));
        }
        let [w_ih, w_hh, b_ih, b_hh] = self.parameters;
        let rows = 4 * hidden;
        checked("input", self.input, &[steps, batch, features], LIKE)?;
        checked("w_ih", w_ih, &[rows, features], LIKE)?;
        checked("w_hh", w_hh, &[rows, hidden], LIKE)?;
        checked("b_ih", b_ih, &[rows], LIKE)?;
        checked("b_hh", b_hh, &[rows], LIKE)?;
        checked("h", self.h, &sizes.state(), LIKE)?;
        checked("c", self.c, &sizes.state(), LIKE)?;
        Ok(sizes)
    }
}

/// The output `[T, B, H]`, the last h and c `[B, H]`, and what [`backward`] reads if it is kept.
pub(crate) type OnednnOutputs = (Tensor, Tensor, Tensor, Option<Tensor>);

pub(crate) fn forward(operands: &OnednnOperands<'_>, keep: bool) -> Result<OnednnOutputs> {
    operands.checked()?;
    let parameters = operands.parameters.map(|parameter| parameter.as_ptr());
    let mut results = [null_mut(); 4];
    // SAFETY: the operands are live tensors of the checked sizes and kind, and `results` has room for
    // four handles.
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
    let sizes = operands.checked()?;
    let OnednnSaved { output, last_c, workspace } = saved;
    checked("output", output, &sizes.all(), LIKE)?;
    checked("last_c", last_c, &sizes.state(), LIKE)?;
    checked("workspace", workspace, &workspace.size(), (Kind::Uint8, Device::Cpu))?;
    optional_ptr("grad_output", grads[0], &sizes.all(), LIKE)?;
    optional_ptr("grad_h", grads[1], &sizes.state(), LIKE)?;
    optional_ptr("grad_c", grads[2], &sizes.state(), LIKE)?;
    let parameters = operands.parameters.map(|parameter| parameter.as_ptr());
    let grads = grads.map(|grad| grad.map_or(null(), |grad| grad.as_ptr()));
    let mut results = [null_mut(); 7];
    // SAFETY: as in `forward`. There are three gradients, of the checked sizes where they are present,
    // and room for seven handles. The workspace is what `forward` returned for these sizes: nobody else
    // has it.
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
