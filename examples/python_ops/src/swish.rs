//! `x · σ(β x)` in tch operations, with a backward pass in tch operations. These work on fake tensors,
//! too, so the backward pass needs no operator of its own.

use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::library::{Operator, below_autograd};
use tch_extension::{Result, args};

/// Runs on the CPU, on CUDA and on fake tensors.
pub fn forward(x: &Tensor, beta: f64) -> Result<Tensor> {
    Ok(x.f_mul_scalar(beta)?.f_sigmoid()?.f_mul(x)?)
}

// Registered when this library is loaded.
static SWISH: LazyLock<Operator> =
    LazyLock::new(|| Operator::find("python_ops::swish").expect("swish"));

pub fn autograd(x: &Tensor, beta: f64) -> Result<Tensor> {
    apply(Swish { beta }, &[Some(x)])?.single()
}

struct Swish {
    beta: f64,
}

impl Function for Swish {
    const NAME: &'static str = "swish";
    /// The operations below have derivatives of any order.
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        let output: Tensor = below_autograd(|| SWISH.call(args![x, self.beta]))?;
        Ok(output.into())
    }

    /// `grad · σ · (1 + β x (1 − σ))`, with σ of β x.
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let scaled = ctx.saved(0)?.f_mul_scalar(self.beta)?;
        let sigmoid = scaled.f_sigmoid()?;
        let inner = scaled.f_mul(&sigmoid.f_rsub_scalar(1.0)?)?.f_add_scalar(1.0)?;
        Ok(grads.get(0)?.f_mul(&sigmoid.f_mul(&inner)?)?.into())
    }
}
