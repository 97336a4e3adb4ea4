//! Operators that C++ registers (`csrc/muladd`), with kernels for the CPU and CUDA, called by name:
//! `muladd`, `mul`, and `add_out`, which writes into its last argument. Python would find the same
//! three in `torch.ops`.

use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::autograd::Tensors;
use tch_extension::library::{CallContext, Operator, WithBackward};
use tch_extension::{Result, args};

fn find(name: &str) -> Operator {
    Operator::find(&format!("extension_example::{name}")).expect("csrc/muladd is linked")
}

static MULADD: LazyLock<WithBackward> =
    LazyLock::new(|| find("muladd").with_backward(product_backward));
static MUL: LazyLock<Operator> = LazyLock::new(|| find("mul"));
static ADD_OUT: LazyLock<Operator> = LazyLock::new(|| find("add_out"));

/// Computes `a * b + c` for kinds f32 and f64. The kernels have no gradients; the backward is
/// defined here with the operator `mul`.
pub fn muladd(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
    MULADD.call(args![a, b, c])
}

fn product_backward(ctx: &CallContext<'_>, grads: &Tensors) -> Result<Tensors> {
    let (a, b) = (ctx.saved(0)?, ctx.saved(1)?);
    let grad = grads.get(0)?;
    let times = |factor: &Tensor| MUL.call::<Tensor>(args![grad, factor]);
    let da = ctx.needs_input_grad(0).then(|| times(&b)).transpose()?;
    let db = ctx.needs_input_grad(1).then(|| times(&a)).transpose()?;
    Ok([da, db].into())
}

/// Computes `a * b` without a gradient. It is an error if an input requires one.
pub fn mul(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    MUL.call(args![a, b])
}

/// Writes `a + b` into `out`.
pub fn add_out(a: &Tensor, b: &Tensor, out: &mut Tensor) -> Result<()> {
    ADD_OUT.call(args![a, b, &*out])
}
