//! `x · σ(β x)` in tch operations, with a backward pass in tch operations. These work on fake tensors,
//! too, so the backward pass needs no operator of its own.

use tch::Tensor;
use tch_extension::Result;
use tch_extension::autograd::Tensors;
use tch_extension::library::CallContext;

/// Runs on the CPU, on CUDA and on fake tensors.
pub fn forward(x: &Tensor, beta: f64) -> Result<Tensor> {
    Ok(x.f_mul_scalar(beta)?.f_sigmoid()?.f_mul(x)?)
}

/// `grad · σ · (1 + β x (1 − σ))`, with σ of β x. The operations have derivatives of any order.
pub fn gradient(ctx: &CallContext<'_>, grads: &Tensors) -> Result<Tensors> {
    let beta: f64 = ctx.argument("beta")?;
    let scaled = ctx.saved(0)?.f_mul_scalar(beta)?;
    let sigmoid = scaled.f_sigmoid()?;
    let inner = scaled.f_mul(&sigmoid.f_rsub_scalar(1.0)?)?.f_add_scalar(1.0)?;
    Ok(grads.get(0)?.f_mul(&sigmoid.f_mul(&inner)?)?.into())
}
