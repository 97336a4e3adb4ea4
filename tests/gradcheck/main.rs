//! Tests that `testing::gradcheck` accepts right gradients and names the place of wrong ones, and
//! tests of the functions that belong to it.

mod close;
mod complex;
mod devices;
mod fast;
mod refused;
mod right;
mod wrong;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{
    Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad,
};
use tch_extension::testing::{
    GradcheckOptions, assert_close, cuda_or_skip, devices, gradcheck, tolerance,
};
use tch_extension::{Error, Result};

fn random(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Double, Device::Cpu))
}

fn variable(size: &[i64]) -> Tensor {
    random(size).set_requires_grad(true)
}

/// Runs gradcheck and checks that the caller's tensors are bitwise unchanged. libtorch's version
/// counter shows that they were not even written to in between.
fn check<O: Into<Tensors>>(
    function: impl Fn(&[Tensor]) -> Result<O>,
    inputs: &[&Tensor],
) -> Result<()> {
    check_with(function, inputs, &GradcheckOptions::default())
}

fn check_with<O: Into<Tensors>>(
    function: impl Fn(&[Tensor]) -> Result<O>,
    inputs: &[&Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    let state = |tensor: &&Tensor| {
        let flat = tensor.detach().to_device(Device::Cpu).resolve_conj().contiguous().reshape([-1]);
        let bits = Vec::<u8>::try_from(flat.view_dtype(Kind::Uint8)).unwrap();
        let layout = (tensor.data_ptr(), tensor.size(), tensor.stride());
        let has_grad = tensor.is_leaf() && tensor.grad().defined();
        (bits, layout, tensor.internal_version(), tensor.requires_grad(), has_grad)
    };
    let states = || inputs.iter().map(state).collect::<Vec<_>>();
    let before = states();
    let result = gradcheck(function, inputs, options);
    assert_eq!(states(), before, "the caller's tensors changed");
    result
}

/// The first line of the error.
fn refusal(result: Result<()>) -> String {
    let text = result.expect_err("a wrong gradient passed").to_string();
    text.lines().next().unwrap_or_default().to_string()
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// x², with any backward: a function of x and of the incoming gradient.
struct Square<B>(B);

impl<B: Fn(&Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static> Function for Square<B> {
    const NAME: &'static str = "square";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((self.0)(&ctx.saved(0)?, grads.get(0)?)?.into())
    }
}

fn square(
    backward: impl Fn(&Tensor, &Tensor) -> Tensor + Clone + Send + Sync + 'static,
) -> impl Fn(&[Tensor]) -> Result<Tensors> {
    move |inputs| {
        let backward = backward.clone();
        apply(Square(move |x: &Tensor, grad: &Tensor| Ok(backward(x, grad))), &[Some(&inputs[0])])
    }
}

/// (x², x³), with any backward: a function of x and of the incoming gradients, which are not
/// materialised.
struct Powers<B>(B);

impl<B> Function for Powers<B>
where
    B: Fn(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Option<Tensor>>
        + Send
        + Sync
        + 'static,
{
    const NAME: &'static str = "powers";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        saver.set_materialize_grads(false);
        Ok([x * x, x * x * x].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((self.0)(&ctx.saved(0)?, grads.optional(0), grads.optional(1))?.into())
    }
}

fn powers<B>(backward: B) -> impl Fn(&[Tensor]) -> Result<Tensors>
where
    B: Fn(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Option<Tensor>>
        + Copy
        + Send
        + Sync
        + 'static,
{
    move |inputs| apply(Powers(backward), &[Some(&inputs[0])])
}

fn right_powers(
    x: &Tensor,
    square: Option<&Tensor>,
    cube: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let square = square.map(|grad| grad * x * 2.0);
    let cube = cube.map(|grad| grad * x * x * 3.0);
    Ok(match (square, cube) {
        (Some(square), Some(cube)) => Some(square + cube),
        (square, cube) => square.or(cube),
    })
}
