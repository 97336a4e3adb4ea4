//! An operator whose backward kernel omits its last element on request.

use std::ffi::c_void;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::{Error, Result, check};

/// Mirrors `CubeBackward` in `csrc/cube/cube.h`.
#[repr(C)]
struct Backward {
    len: i64,
    kind: i32,
    broken: i32,
    x: *const c_void,
    grad: *const c_void,
    grad_x: *mut c_void,
}

unsafe extern "C" {
    fn downstream_cube_backward_cpu(params: *const Backward);
    #[cfg(tch_extension_cuda)]
    fn downstream_cube_backward_cuda(
        params: *const Backward,
        stream: *mut c_void,
    ) -> tch_extension::cuda::LaunchStatus;
}

/// Computes x³ of a contiguous tensor of kind `Double`.
///
/// # Errors
/// If the tensor is undefined, has another kind, is not contiguous, or is on an unsupported device.
pub fn cube(x: &Tensor, broken: bool) -> Result<Tensor> {
    check!("cube", x).defined()?.kind_in(&[Kind::Double])?.supported_device()?;
    if !x.is_contiguous() {
        return Err(Error::argument(
            "cube",
            "x",
            "a contiguous tensor",
            "another",
            "call contiguous()",
        ));
    }
    apply(Cube { broken }, &[Some(x)])?.single()
}

struct Cube {
    broken: bool,
}

impl Function for Cube {
    const NAME: &'static str = "cube";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x * x).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, grad) = (ctx.saved(0)?, grads.get(0)?.contiguous());
        let grad_x = x.zeros_like();
        let params = Backward {
            len: x.numel() as i64,
            kind: 7,
            broken: i32::from(self.broken),
            x: x.data_ptr(),
            grad: grad.data_ptr(),
            grad_x: grad_x.data_ptr(),
        };
        match x.device() {
            // SAFETY: `cube` and the lines above made sure that all three are contiguous arrays of
            // `len` values of kind Double on this device, and nothing else uses the new `grad_x`.
            #[cfg(tch_extension_cuda)]
            device @ Device::Cuda(_) => tch_extension::cuda::launch(device, |stream| unsafe {
                downstream_cube_backward_cuda(&params, stream)
            })?,
            Device::Cpu => {
                // SAFETY: as for CUDA.
                unsafe { downstream_cube_backward_cpu(&params) }
            }
            device => return Err(Error::msg(format!("cube: no kernel for {device:?}"))),
        }
        Ok(grad_x.into())
    }
}
