//! `a · b + c` by kernels in plain Rust. Its backward pass has a kernel, too, and is therefore an
//! operator of its own: while a program is compiled, both run on fake tensors, which have no values.

use std::sync::LazyLock;
use tch::{Kind, Tensor};
use tch_extension::autograd::Tensors;
use tch_extension::library::{CallContext, Operator};
use tch_extension::strided::contiguous;
use tch_extension::view::{view, view_mut};
use tch_extension::{Result, args, check, dispatch};

const KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

/// Checks the tensors of a kernel: the first decides shape and kind. Returns their elements in a row.
fn flat<const N: usize>(op: &str, tensors: [(&str, &Tensor); N]) -> Result<[Tensor; N]> {
    let first = check!(op, tensors[0].0, tensors[0].1).defined()?.kind_in(&KINDS)?;
    let shape = first.tensor().size();
    for (name, tensor) in &tensors[1..] {
        check!(op, name, *tensor).defined()?.like(&first)?.shape(tensors[0].0, &shape)?;
    }
    let mut rows = tensors.map(|_| Tensor::new());
    for (row, (_, tensor)) in rows.iter_mut().zip(tensors) {
        *row = contiguous(tensor)?.f_view(-1)?;
    }
    Ok(rows)
}

pub fn forward(a: &Tensor, b: &Tensor, c: f64) -> Result<Tensor> {
    let [x, y] = flat("muladd", [("a", a), ("b", b)])?;
    let mut output = x.f_empty_like()?;
    dispatch!("muladd", x.kind(), [f32, f64], |T| {
        let (x, y) = (view::<T, 1>(&x)?, view::<T, 1>(&y)?);
        let mut output = view_mut::<T, 1>(&mut output)?;
        for (at, (x, y)) in x.iter().zip(y.iter()).enumerate() {
            output.set([at], x * y + c as T);
        }
    })?;
    Ok(output.f_view_as(a)?)
}

pub fn backward(grad: &Tensor, a: &Tensor, b: &Tensor) -> Result<(Tensor, Tensor)> {
    let [x, y, grad] = flat("muladd_backward", [("a", a), ("b", b), ("grad", grad)])?;
    let (mut grad_x, mut grad_y) = (x.f_empty_like()?, y.f_empty_like()?);
    dispatch!("muladd_backward", x.kind(), [f32, f64], |T| {
        let (x, y, grad) = (view::<T, 1>(&x)?, view::<T, 1>(&y)?, view::<T, 1>(&grad)?);
        let mut to_x = view_mut::<T, 1>(&mut grad_x)?;
        let mut to_y = view_mut::<T, 1>(&mut grad_y)?;
        for (at, grad) in grad.iter().enumerate() {
            to_x.set([at], grad * y.at([at]));
            to_y.set([at], grad * x.at([at]));
        }
    })?;
    Ok((grad_x.f_view_as(a)?, grad_y.f_view_as(a)?))
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
