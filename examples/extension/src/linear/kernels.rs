//! Level 4: our own kernels for the CPU and CUDA (`csrc/linear/kernels.{h,cpp,cu}`), for kinds f32
//! and f64 and any strides.

#[cfg(tch_extension_cuda)]
use super::function::second_derivative;
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
#[cfg(tch_extension_cuda)]
use tch_extension::cuda::{self, LaunchStatus};
use tch_extension::strided::{Strided, StridedMut};
use tch_extension::{Error, Result, check};

/// Mirrors `LinearForward` in `csrc/linear/kernels.h`.
#[repr(C)]
struct Forward<'a> {
    x: Strided<'a, 2>,
    wt: Strided<'a, 2>,
    b: Strided<'a, 1>,
    y: StridedMut<'a, 2>,
}

/// Mirrors `LinearProduct` in `csrc/linear/kernels.h`.
#[repr(C)]
struct Product<'a> {
    a: Strided<'a, 2>,
    b: Strided<'a, 2>,
    c: StridedMut<'a, 2>,
}

unsafe extern "C" {
    fn extension_linear_forward_cpu(params: *const Forward<'_>);
    fn extension_linear_product_cpu(params: *const Product<'_>);
    #[cfg(tch_extension_cuda)]
    fn extension_linear_forward_cuda(
        params: *const Forward<'_>,
        stream: *mut c_void,
    ) -> LaunchStatus;
    #[cfg(tch_extension_cuda)]
    fn extension_linear_product_cuda(
        params: *const Product<'_>,
        stream: *mut c_void,
    ) -> LaunchStatus;
}

/// Computes `x Wᵀ + b`.
///
/// # Errors
/// If shapes, kinds or devices do not fit. The error names the argument.
pub fn linear(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    const OP: &str = "linear";
    let x_check = check!(OP, x)
        .kind_in(&[Kind::Float, Kind::Double])?
        .supported_device()?
        .dim(2, "[M, K]")?;
    let columns = x.size2()?.1;
    check!(OP, w).like(&x_check)?.dim(2, "[N, K]")?;
    let rows = w.size2()?.0;
    check!(OP, w).shape("[N, K]", &[rows, columns])?;
    check!(OP, b).like(&x_check)?.shape("[N]", &[rows])?;
    apply(Linear, &[Some(x), Some(w), Some(b)])?.single()
}

struct Linear;

impl Function for Linear {
    const NAME: &'static str = "extension::linear_kernels";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w, b) = (inputs.get(0)?, inputs.get(1)?, inputs.get(2)?);
        saver.save(x);
        saver.save(w);
        saver.save(b);
        Ok(forward(x, w, b)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        // Kernels have no derivative, but the same maths in tch operations has one.
        if ctx.create_graph() {
            return second_derivative(ctx, grads);
        }
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        let dy = grads.get(0)?;
        let needs = |index| ctx.needs_input_grad(index);
        let dx = needs(0).then(|| product(dy, &w)).transpose()?;
        let dw = needs(1).then(|| product(&dy.f_transpose(0, 1)?, &x)).transpose()?;
        let db = needs(2).then(|| dy.f_sum_dim_intlist([0_i64].as_slice(), false, dy.kind()));
        Ok([dx, dw, db.transpose()?].into())
    }
}

fn forward(x: &Tensor, w: &Tensor, b: &Tensor) -> Result<Tensor> {
    let wt = w.f_transpose(0, 1)?;
    let mut y = Tensor::f_empty([x.size()[0], w.size()[0]], (x.kind(), x.device()))?;
    let params = Forward {
        x: Strided::new(x)?,
        wt: Strided::new(&wt)?,
        b: Strided::new(b)?,
        y: StridedMut::new(&mut y)?,
    };
    match x.device() {
        // SAFETY: `Forward` mirrors the C++ struct and borrows the tensors, and `linear` checked
        // their shapes, kinds and device.
        Device::Cpu => unsafe { extension_linear_forward_cpu(&params) },
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => {
            // SAFETY: as for the CPU; `launch` passes a stream of the tensors' device.
            cuda::launch(device, |stream| unsafe {
                extension_linear_forward_cuda(&params, stream)
            })?
        }
        device => return Err(Error::msg(format!("linear: no kernel for {device:?}"))),
    }
    Ok(y)
}

/// Computes `a b`.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let mut c = Tensor::f_empty([a.size()[0], b.size()[1]], (a.kind(), a.device()))?;
    let params = Product { a: Strided::new(a)?, b: Strided::new(b)?, c: StridedMut::new(&mut c)? };
    match a.device() {
        // SAFETY: `Product` mirrors the C++ struct and borrows the tensors. The autograd engine
        // gives the incoming gradient the output's shape, kind and device.
        Device::Cpu => unsafe { extension_linear_product_cpu(&params) },
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => {
            // SAFETY: as for the CPU; `launch` passes a stream of the tensors' device.
            cuda::launch(device, |stream| unsafe {
                extension_linear_product_cuda(&params, stream)
            })?
        }
        device => return Err(Error::msg(format!("linear: no kernel for {device:?}"))),
    }
    Ok(c)
}
