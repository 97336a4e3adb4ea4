//! The kernels of the cell's pointwise part, which `csrc/lltm_cell/lltm_cell.h` describes.

use crate::Result;
use crate::ffi::{checked, kind_code, no_kernel, optional_ptr};
use std::ffi::c_void;
use tch::{Device, Tensor};

/// The parameters of the forward kernels of the pointwise part. All arrays are row-major and
/// contiguous, and no two overlap.
#[repr(C)]
struct Forward {
    /// B, the batch size.
    batch: i64,
    /// H, the hidden size.
    hidden: i64,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    /// Whether the kernel overwrites `gates` with `[σ(i) | σ(o) | g]`.
    save_activations: i32,
    /// `[B, 3H]`.
    gates: *mut c_void,
    /// `[B, H]`.
    c: *const c_void,
    /// `[B, H]`.
    new_h: *mut c_void,
    /// `[B, H]`.
    new_c: *mut c_void,
    /// `[B, H]`, a second copy of new_h, as the output of a sequence of one step; null when nobody
    /// needs it.
    output: *mut c_void,
}

/// The parameters of the backward kernels of the pointwise part.
#[repr(C)]
struct Backward {
    /// B, the batch size.
    batch: i64,
    /// H, the hidden size.
    hidden: i64,
    /// The `TchExtensionKind` of every array.
    kind: i32,
    reserved: i32,
    /// `[B, H]`, null for zeros.
    grad_new_h: *const c_void,
    /// `[B, H]`, null for zeros.
    grad_new_c: *const c_void,
    /// `[B, 3H]`: `[σ(i) | σ(o) | g]`.
    activations: *const c_void,
    /// `[B, H]`.
    new_c: *const c_void,
    /// `[B, 3H]`.
    grad_gates: *mut c_void,
    /// `[B, H]`, null when nobody needs it.
    grad_c: *mut c_void,
}

unsafe extern "C" {
    fn tch_extension_lltm_cell_forward_cpu(params: *const Forward);
    fn tch_extension_lltm_cell_backward_cpu(params: *const Backward);
    #[cfg(tch_extension_cuda)]
    fn tch_extension_lltm_cell_forward_cuda(
        params: *const Forward,
        bias: *const c_void,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn tch_extension_lltm_cell_backward_cuda(
        params: *const Backward,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// The tensors that [`forward`] writes.
pub(crate) struct Written<'a> {
    /// `[B, H]`.
    pub new_h: &'a mut Tensor,
    /// `[B, H]`.
    pub new_c: &'a mut Tensor,
    /// `[1, B, H]`, a second copy of `new_h`, for a sequence of one step.
    pub output: Option<&'a mut Tensor>,
}

/// Computes `new_h` and `new_c` from `gates` ([B, 3H]) and `c` ([B, H]). If there is a `bias`
/// ([3H]; only on CUDA), it is first added to `gates`. With `save_activations`, `gates` becomes
/// what [`backward`] reads.
pub(crate) fn forward(
    gates: &mut Tensor,
    bias: Option<&Tensor>,
    c: &Tensor,
    written: Written<'_>,
    save_activations: bool,
) -> Result<()> {
    let (batch, hidden) = c.size2()?;
    let like = (c.f_kind()?, c.device());
    let params = Forward {
        batch,
        hidden,
        kind: kind_code(like.0)?,
        save_activations: i32::from(save_activations),
        gates: checked("gates", gates, &[batch, 3 * hidden], like)?,
        c: checked("c", c, &[batch, hidden], like)?,
        new_h: checked("new_h", written.new_h, &[batch, hidden], like)?,
        new_c: checked("new_c", written.new_c, &[batch, hidden], like)?,
        output: optional_ptr("output", written.output.as_deref(), &[1, batch, hidden], like)?,
    };
    let bias = optional_ptr("bias", bias, &[3 * hidden], like)?;
    match like.1 {
        // SAFETY: `checked` made sure that the arrays are contiguous, of these sizes and of this
        // kind. Those that are written are borrowed exclusively, so they overlap no other.
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => crate::cuda::launch(device, |stream| unsafe {
            tch_extension_lltm_cell_forward_cuda(&params, bias, stream)
        }),
        Device::Cpu if bias.is_null() => {
            // SAFETY: as above.
            unsafe { tch_extension_lltm_cell_forward_cpu(&params) };
            Ok(())
        }
        device => Err(no_kernel("lltm_cell", device)),
    }
}

/// What [`backward`] reads; all tensors are contiguous. For gradients, `None` means zeros.
pub(crate) struct BackwardInputs<'a> {
    pub grad_new_h: Option<&'a Tensor>,
    pub grad_new_c: Option<&'a Tensor>,
    pub activations: &'a Tensor,
    pub new_c: &'a Tensor,
}

/// Computes `grad_gates` ([B, 3H]) and, if it is given, `grad_c` ([B, H]).
pub(crate) fn backward(
    inputs: &BackwardInputs<'_>,
    grad_gates: &mut Tensor,
    grad_c: Option<&mut Tensor>,
) -> Result<()> {
    let (batch, hidden) = inputs.new_c.size2()?;
    let like = (inputs.new_c.f_kind()?, inputs.new_c.device());
    let state = [batch, hidden];
    let gates = [batch, 3 * hidden];
    let params = Backward {
        batch,
        hidden,
        kind: kind_code(like.0)?,
        reserved: 0,
        grad_new_h: optional_ptr("grad_new_h", inputs.grad_new_h, &state, like)?,
        grad_new_c: optional_ptr("grad_new_c", inputs.grad_new_c, &state, like)?,
        activations: checked("activations", inputs.activations, &gates, like)?,
        new_c: checked("new_c", inputs.new_c, &state, like)?,
        grad_gates: checked("grad_gates", grad_gates, &gates, like)?,
        grad_c: optional_ptr("grad_c", grad_c.as_deref(), &state, like)?,
    };
    match like.1 {
        // SAFETY: as in `forward`.
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => crate::cuda::launch(device, |stream| unsafe {
            tch_extension_lltm_cell_backward_cuda(&params, stream)
        }),
        Device::Cpu => {
            // SAFETY: as in `forward`.
            unsafe { tch_extension_lltm_cell_backward_cpu(&params) };
            Ok(())
        }
        device => Err(no_kernel("lltm_cell", device)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    /// For compute-sanitizer's initcheck, which does not see what libtorch's half-precision
    /// products write: here the gates do not come from a product.
    #[test]
    fn cuda_kernels_read_what_was_written() {
        let Some(device) = crate::testing::cuda_or_skip("cuda_kernels_read_what_was_written")
        else {
            return;
        };
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
            // Sizes of whole and of partial vectors, and of one block and of several.
            for (batch, hidden) in [(3, 5), (16, 128), (300, 40)] {
                let on = |device| {
                    let ramp = |columns: i64| {
                        let flat =
                            Tensor::arange(batch * columns, (Kind::Double, Device::Cpu)).sin();
                        flat.view([batch, columns]).to_kind(kind).to_device(device)
                    };
                    let (mut gates, c) = (ramp(3 * hidden), ramp(hidden));
                    let (mut new_h, mut new_c) = (c.empty_like(), c.empty_like());
                    let written = Written { new_h: &mut new_h, new_c: &mut new_c, output: None };
                    forward(&mut gates, None, &c, written, true).expect("forward");
                    let inputs = BackwardInputs {
                        grad_new_h: Some(&c),
                        grad_new_c: None,
                        activations: &gates,
                        new_c: &new_c,
                    };
                    let (mut grad_gates, mut grad_c) = (gates.empty_like(), c.empty_like());
                    backward(&inputs, &mut grad_gates, Some(&mut grad_c)).expect("backward");
                    [new_h, new_c, gates, grad_gates, grad_c]
                        .map(|tensor| tensor.to_device(Device::Cpu))
                };
                let (rtol, atol) = crate::testing::tolerance(kind);
                for (gpu, cpu) in on(device).iter().zip(&on(Device::Cpu)) {
                    crate::testing::assert_close(gpu, cpu, 10.0 * rtol, 10.0 * atol.max(rtol));
                }
            }
        }
    }
}
