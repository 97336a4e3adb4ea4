//! A kernel written in Rust with cubecl's `#[cube]`, as an operator: its CUDA text is compiled by
//! `tch_extension::jit` and runs on the memory of `tch::Tensor`s, on libtorch's current stream. The
//! CPU runs the same text in tests.
//!
//! It is for slices and scalars only: a kernel that takes cubecl's `Tensor` wants sizes and strides in
//! a buffer on the GPU, which would have to be uploaded for each call.

mod launcher;
mod text;

pub use launcher::Kernel;
pub use text::{Text, silu as silu_texts};

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{
    Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference,
};
use tch_extension::{Error, Result};

/// The kernels for a kind and a kind of device: forward, backward.
struct Kernels([Kernel; 2]);

fn kernels(kind: Kind, device: Device) -> Result<Arc<Kernels>> {
    static KERNELS: Mutex<Option<HashMap<(Kind, bool), Arc<Kernels>>>> = Mutex::new(None);
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernels = kernels.get_or_insert_default();
    let key = (kind, device.is_cuda());
    if let Some(kernels) = kernels.get(&key) {
        return Ok(Arc::clone(kernels));
    }
    let (texts, element) = match kind {
        Kind::Float => (text::silu::<f32>(), "float"),
        Kind::Double => (text::silu::<f64>(), "double"),
        kind => return Err(Error::msg(format!("cube_silu: no kernel for {kind:?}"))),
    };
    let [forward, backward] = texts.map_err(Error::msg)?;
    let made = Arc::new(Kernels([
        Kernel::new(&forward, 2, element, device)?,
        Kernel::new(&backward, 3, element, device)?,
    ]));
    kernels.insert(key, Arc::clone(&made));
    Ok(made)
}

struct Silu;

impl Function for Silu {
    const NAME: &'static str = "cube_silu";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        let y = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
        kernels(x.kind(), x.device())?.0[0].run(&[&x.f_contiguous()?, &y])?;
        Ok(y.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let x = ctx.saved(0)?;
        if ctx.create_graph() {
            return differentiate_reference(ctx, &[Some(x)], grads, |inputs| match &inputs[0] {
                Some(x) => Ok(x.f_silu()?.into()),
                None => Err(Error::msg("cube_silu: x is missing")),
            });
        }
        let g = grads.get(0)?.f_contiguous()?;
        let dx = Tensor::f_empty(x.size(), (x.kind(), x.device()))?;
        kernels(x.kind(), x.device())?.0[1].run(&[&x.f_contiguous()?, &g, &dx])?;
        Ok(dx.into())
    }
}

/// `x / (1 + exp(-x))`, element by element, in f64 or f32. The first call for a kind compiles.
///
/// Equivalent to: `x.silu()`.
///
/// # Errors
/// When the kind is another, there is no compiler, or libtorch or CUDA fails.
pub fn silu(x: &Tensor) -> Result<Tensor> {
    apply(Silu, &[Some(x)])?.single()
}
