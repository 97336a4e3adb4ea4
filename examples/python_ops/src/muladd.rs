//! `a · b + c` by kernels in plain Rust. Its backward pass has a kernel, too, and is therefore an
//! operator of its own: while a program is compiled, both run on fake tensors, which have no values.

use std::sync::LazyLock;
use tch::{Kind, Tensor};
use tch_extension::autograd::Tensors;
use tch_extension::library::{CallContext, Operator};
use tch_extension::strided::contiguous;
use tch_extension::view::{view_flat, view_flat_mut};
use tch_extension::{Result, args, check, dispatch};

const KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

/// Checks the tensors of a kernel: the first decides shape and kind. Returns them with their elements
/// in a row.
fn plain<const N: usize>(op: &str, tensors: [(&str, &Tensor); N]) -> Result<[Tensor; N]> {
    let first = check!(op, tensors[0].0, tensors[0].1).defined()?.kind_in(&KINDS)?;
    let shape = first.tensor().size();
    let mut plain = tensors.map(|_| Tensor::new());
    for (plain, (name, tensor)) in plain.iter_mut().zip(tensors) {
        check!(op, name, *tensor).defined()?.like(&first)?.shape(tensors[0].0, &shape)?;
        *plain = contiguous(tensor)?;
    }
    Ok(plain)
}

pub fn forward(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
    let [a, b] = plain("muladd", [("a", a), ("b", b)])?;
    let mut output = a.f_empty_like()?;
    dispatch!("muladd", a.kind(), [f32, f64], |T| {
        let (a, b) = (view_flat::<T>(&a)?, view_flat::<T>(&b)?);
        let mut output = view_flat_mut::<T>(&mut output)?;
        for (at, (a, b)) in a.iter().zip(b.iter()).enumerate() {
            output.set([at], a * b + c as T);
        }
    })?;
    Ok(output)
}

pub fn backward(grad: &Tensor, a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    let [a, b, grad] = plain("muladd_backward", [("a", a), ("b", b), ("grad", grad)])?;
    let (mut grad_a, mut grad_b) = (a.f_empty_like()?, b.f_empty_like()?);
    dispatch!("muladd_backward", a.kind(), [f32, f64], |T| {
        let (a, b, grad) = (view_flat::<T>(&a)?, view_flat::<T>(&b)?, view_flat::<T>(&grad)?);
        let (mut to_a, mut to_b) =
            (view_flat_mut::<T>(&mut grad_a)?, view_flat_mut::<T>(&mut grad_b)?);
        for (at, grad) in grad.iter().enumerate() {
            to_a.set([at], grad * b.at([at]));
            to_b.set([at], grad * a.at([at]));
        }
    })?;
    Ok((grad_a, grad_b))
}

// Registered when this library is loaded.
static MULADD_BACKWARD: LazyLock<Operator> = LazyLock::new(|| {
    Operator::find("python_ops::muladd_backward").expect("an operator of this library")
});

/// The gradients of a and b, which are what is saved.
pub fn gradients(ctx: &CallContext<'_>, grads: &Tensors) -> Result<Tensors> {
    let (grad, a, b) = (grads.get(0)?, ctx.saved(0)?, ctx.saved(1)?);
    if ctx.create_graph() {
        // A second derivative may follow. tch operations have one, the kernel has none.
        return Ok([grad.f_mul(&b)?, grad.f_mul(&a)?].into());
    }
    let (grad_a, grad_b): (Tensor, Tensor) = MULADD_BACKWARD.call(args![grad, &a, &b])?;
    Ok([grad_a, grad_b].into())
}
