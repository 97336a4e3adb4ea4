//! A kernel written in Rust with cubecl's `#[cube]`, as an operator. The build script turns the
//! functions of `build/kernels.rs` into CUDA text, `tch_extension::jit` compiles the text when the
//! operator is first called, and the kernel runs on the memory of `tch::Tensor`s, on libtorch's
//! current stream. The CPU runs the same text, by a shim, so that tests need no GPU.
//!
//! It is for slices and scalars only: a kernel that takes cubecl's `Tensor` wants sizes and strides
//! in a buffer on the GPU, which would have to be uploaded for each call.

mod launcher;

use launcher::{Kernel, Text};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{
    Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference,
};
use tch_extension::strided::contiguous;
use tch_extension::{Error, Result};

const OP: &str = "cube_silu";

/// The kernels for a kind of elements and a kind of devices.
struct Kernels {
    forward: Kernel,
    backward: Kernel,
}

/// The texts of the forward and of the backward kernel.
fn texts(kind: Kind) -> Option<[&'static Text; 2]> {
    match kind {
        Kind::Float => Some([&launcher::FORWARD_F32, &launcher::BACKWARD_F32]),
        Kind::Double => Some([&launcher::FORWARD_F64, &launcher::BACKWARD_F64]),
        _ => None,
    }
}

fn kernels(kind: Kind, device: Device) -> Result<Arc<Kernels>> {
    type Known = HashMap<(Kind, bool), Arc<Kernels>>;
    static KERNELS: Mutex<Option<Known>> = Mutex::new(None);
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels.get_or_insert_default();
    let key = (kind, device.is_cuda());
    if let Some(kernels) = kernels.get(&key) {
        return Ok(Arc::clone(kernels));
    }
    let [forward, backward] =
        texts(kind).ok_or_else(|| Error::msg(format!("{OP}: no kernel for {kind:?}")))?;
    let [forward, backward] = [Kernel::new(forward, device)?, Kernel::new(backward, device)?];
    let made = Arc::new(Kernels { forward, backward });
    kernels.insert(key, Arc::clone(&made));
    Ok(made)
}

struct Silu;

impl Function for Silu {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        let y = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
        kernels(x.kind(), x.device())?.forward.run(&[&contiguous(x)?, &y])?;
        Ok(y.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let x = ctx.saved(0)?;
        if ctx.create_graph() {
            return differentiate_reference(ctx, &[Some(x)], grads, |inputs| match &inputs[0] {
                Some(x) => Ok(x.f_silu()?.into()),
                None => Err(Error::msg(format!("{OP}: x is missing"))),
            });
        }
        let g = contiguous(grads.get(0)?)?;
        let dx = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
        kernels(x.kind(), x.device())?.backward.run(&[&contiguous(&x)?, &g, &dx])?;
        Ok(dx.into())
    }
}

/// `x / (1 + exp(-x))`, element by element, in f64 or f32, of any shape and strides, on the CPU or
/// CUDA. The result is contiguous. The first call for a kind and a kind of devices compiles, or finds
/// the result in `jit`'s cache: make it before you capture a graph.
///
/// Equivalent to: `x.silu()`.
///
/// # Errors
/// When the kind or the device is another, x has 2³² elements or more, there is no compiler, or
/// libtorch or CUDA fails.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    let refused = |expected: &str, got: String| Err(Error::argument(OP, "x", expected, got, ""));
    let (kind, device) = (x.f_kind()?, x.device());
    if texts(kind).is_none() {
        return refused("f64 or f32", format!("{kind:?}"));
    }
    if !matches!(device, Device::Cpu | Device::Cuda(_)) {
        return refused("the CPU or CUDA", format!("{device:?}"));
    }
    apply(Silu, &[Some(x)])?.single()
}
