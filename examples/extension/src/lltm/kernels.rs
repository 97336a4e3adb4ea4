//! Level 4: our own kernels for the CPU and CUDA (`csrc/lltm/kernels.{h,cpp,cu}`), which follow
//! libtorch's product. They support kinds f32 and f64.

use super::function::{Pointwise, step};
#[cfg(tch_extension_cuda)]
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};
#[cfg(tch_extension_cuda)]
use tch_extension::cuda::{self, LaunchStatus};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Error, Result, check};

/// Mirrors `LltmForward` in `csrc/lltm/kernels.h`.
#[repr(C)]
struct Forward<'a> {
    gates: StridedMut<'a, 2>,
    c: Strided<'a, 2>,
    new_h: StridedMut<'a, 2>,
    new_c: StridedMut<'a, 2>,
}

/// Mirrors `LltmBackward` in `csrc/lltm/kernels.h`.
#[repr(C)]
struct Backward<'a> {
    activations: Strided<'a, 2>,
    new_c: Strided<'a, 2>,
    grad_new_h: Strided<'a, 2>,
    grad_new_c: Strided<'a, 2>,
    grad_gates: StridedMut<'a, 2>,
    grad_c: StridedMut<'a, 2>,
}

unsafe extern "C" {
    fn extension_lltm_forward_cpu(params: *const Forward<'_>);
    fn extension_lltm_backward_cpu(params: *const Backward<'_>);
    #[cfg(tch_extension_cuda)]
    fn extension_lltm_forward_cuda(params: *const Forward<'_>, stream: *mut c_void)
    -> LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn extension_lltm_backward_cuda(
        params: *const Backward<'_>,
        stream: *mut c_void,
    ) -> LaunchStatus;
}

/// Computes one step.
///
/// # Errors
/// If shapes, kinds or devices do not fit. The error names the argument.
pub fn lltm(
    x: &Tensor,
    w: &Tensor,
    b: &Tensor,
    (h, c): (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "lltm";
    let x_check = check!(OP, x)
        .kind_in(&[Kind::Float, Kind::Double])?
        .supported_device()?
        .dim(2, "[B, F]")?;
    let (batch, features) = x.size2()?;
    check!(OP, h).like(&x_check)?.dim(2, "[B, H]")?;
    let hidden = h.size2()?.1;
    check!(OP, h).shape("[B, H]", &[batch, hidden])?;
    check!(OP, c).like(&x_check)?.shape("[B, H]", &[batch, hidden])?;
    check!(OP, w).like(&x_check)?.shape("[3H, H + F]", &[3 * hidden, hidden + features])?;
    check!(OP, b).like(&x_check)?.shape("[3H]", &[3 * hidden])?;
    step::<Kernels>([x, w, b, h, c])
}

struct Kernels;

impl Pointwise for Kernels {
    const NAME: &'static str = "extension::lltm_kernels";

    fn forward(mut gates: Tensor, c: &Tensor) -> Result<[Tensor; 3]> {
        let empty = || Tensor::f_empty(c.size(), (c.kind(), c.device()));
        let (mut new_h, mut new_c) = (empty()?, empty()?);
        let params = Forward {
            gates: StridedMut::new(&mut gates)?,
            c: Strided::new(c)?,
            new_h: StridedMut::new(&mut new_h)?,
            new_c: StridedMut::new(&mut new_c)?,
        };
        match c.device() {
            // SAFETY: `Forward` mirrors the C++ struct and borrows the tensors. `lltm` checked the
            // inputs' shapes, kinds and device; the other tensors were made here or by `gates`.
            Device::Cpu => unsafe { extension_lltm_forward_cpu(&params) },
            #[cfg(tch_extension_cuda)]
            device @ Device::Cuda(_) => {
                // SAFETY: as for the CPU; `launch` passes a stream of the tensors' device.
                cuda::launch(device, |stream| unsafe {
                    extension_lltm_forward_cuda(&params, stream)
                })?
            }
            device => return Err(Error::msg(format!("lltm: no kernel for {device:?}"))),
        }
        Ok([new_h, new_c, gates])
    }

    fn backward(
        dh: &Tensor,
        dc: &Tensor,
        activations: &Tensor,
        new_c: &Tensor,
    ) -> Result<[Tensor; 2]> {
        let empty = |like: &Tensor| Tensor::f_empty(like.size(), (like.kind(), like.device()));
        let (mut grad_gates, mut grad_c) = (empty(activations)?, empty(new_c)?);
        let params = Backward {
            activations: Strided::new(activations)?,
            new_c: Strided::new(new_c)?,
            grad_new_h: Strided::new(dh)?,
            grad_new_c: Strided::new(dc)?,
            grad_gates: StridedMut::new(&mut grad_gates)?,
            grad_c: StridedMut::new(&mut grad_c)?,
        };
        match new_c.device() {
            // SAFETY: `Backward` mirrors the C++ struct and borrows the tensors. The autograd
            // engine gives incoming gradients the outputs' shape, kind and device.
            Device::Cpu => unsafe { extension_lltm_backward_cpu(&params) },
            #[cfg(tch_extension_cuda)]
            device @ Device::Cuda(_) => {
                // SAFETY: as for the CPU; `launch` passes a stream of the tensors' device.
                cuda::launch(device, |stream| unsafe {
                    extension_lltm_backward_cuda(&params, stream)
                })?
            }
            device => return Err(Error::msg(format!("lltm: no kernel for {device:?}"))),
        }
        Ok([grad_gates, grad_c])
    }
}
