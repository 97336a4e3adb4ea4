//! Tests that `testing::gradgradcheck` accepts right second derivatives and names the place of
//! wrong ones.

use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::ops::f_lltm_cell;
use tch_extension::testing::{GradgradcheckOptions, gradcheck, gradgradcheck};
use tch_extension::{Error, Result};

fn variable(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

fn check<O: Into<Tensors>>(
    function: impl Fn(&[Tensor]) -> Result<O>,
    inputs: &[&Tensor],
) -> Result<()> {
    gradgradcheck(function, inputs, &GradgradcheckOptions::default())
}

#[track_caller]
fn assert_refused(result: Result<()>, parts: &[&str]) -> Error {
    let error = result.expect_err("passed");
    for part in parts {
        assert!(error.to_string().contains(part), "{part:?} is not in: {error}");
    }
    error
}

/// x² y, with any backward: a function of x, y and the incoming gradient.
struct Weighted<B, const DOUBLE: bool>(B);

impl<B, const DOUBLE: bool> Function for Weighted<B, DOUBLE>
where
    B: Fn(&Tensor, &Tensor, &Tensor) -> [Tensor; 2] + Send + Sync + 'static,
{
    const NAME: &'static str = "weighted";
    const DOUBLE_BACKWARD: bool = DOUBLE;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(y);
        Ok((x * x * y).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((self.0)(&ctx.saved(0)?, &ctx.saved(1)?, grads.get(0)?).into())
    }
}

fn right(x: &Tensor, y: &Tensor, grad: &Tensor) -> [Tensor; 2] {
    [grad * x * y * 2.0, grad * x * x]
}

fn weighted<const DOUBLE: bool>(
    backward: impl Fn(&Tensor, &Tensor, &Tensor) -> [Tensor; 2] + Copy + Send + Sync + 'static,
) -> impl Fn(&[Tensor]) -> Result<Tensors> {
    move |inputs| apply(Weighted::<_, DOUBLE>(backward), &[Some(&inputs[0]), Some(&inputs[1])])
}

#[test]
fn right_second_derivatives_pass() -> Result<()> {
    check(weighted::<true>(right), &[&variable(&[3]), &variable(&[3])])?;
    let several =
        |inputs: &[Tensor]| Ok([inputs[0].matmul(&inputs[1]), inputs[0].sin().sum(Kind::Double)]);
    check(several, &[&variable(&[3, 2]), &variable(&[2, 1])])?;
    // A function that also has an output and an input without a derivative.
    let fixed = Tensor::randn([3], (Kind::Float, Device::Cpu));
    check(
        |inputs| Ok([inputs[0].sign().detach(), &inputs[1] * &inputs[1]]),
        &[&fixed, &variable(&[3])],
    )
}

#[test]
fn a_backward_that_cuts_the_graph_is_found_by_nothing_else() -> Result<()> {
    let cut = |x: &Tensor, y: &Tensor, grad: &Tensor| [grad * x.detach() * y * 2.0, grad * x * x];
    let (x, y) = (Tensor::from_slice(&[2.0]).set_requires_grad(true), Tensor::from_slice(&[5.0]));
    gradcheck(weighted::<true>(cut), &[&x, &y], &Default::default())?;
    let one = Tensor::from_slice(&[1.0]);
    let options = GradgradcheckOptions { grad_outputs: &[&one], ..Default::default() };
    let result = gradgradcheck(weighted::<true>(cut), &[&x, &y.set_requires_grad(true)], &options);
    let parts = [
        "gradgradcheck (",
        "inputs from 2 on",
        "output 0, input 0",
        "analytical 0.0, numerical 10.0",
    ];
    assert_refused(result, &parts);
    Ok(())
}

#[test]
fn a_cut_incoming_gradient_is_found_at_its_place() {
    let cut = |x: &Tensor, y: &Tensor, grad: &Tensor| [grad * x * y * 2.0, grad.detach() * x * x];
    let result = check(weighted::<true>(cut), &[&variable(&[2]), &variable(&[2])]);
    assert_refused(result, &["gradgradcheck (", "output 1, input 2", "analytical 0.0"]);
}

#[test]
fn a_function_with_one_derivative_says_so() {
    let result = check(weighted::<false>(right), &[&variable(&[2]), &variable(&[2])]);
    assert_refused(result, &["gradgradcheck (", "backward failed", "weighted", "DOUBLE_BACKWARD"]);
}

#[test]
fn given_gradients_are_taken_as_they_are() {
    let (x, wrong) = (variable(&[2]), variable(&[3]));
    let square = |inputs: &[Tensor]| Ok(&inputs[0] * &inputs[0]);
    let check = |grad_outputs: &[&Tensor]| {
        gradgradcheck(square, &[&x], &GradgradcheckOptions { grad_outputs, ..Default::default() })
    };
    check(&[&variable(&[2])]).unwrap();
    check(&[&variable(&[2]).detach()]).unwrap();
    assert_refused(
        check(&[&x, &x]),
        &["gradgradcheck: grad_outputs: expected 1, one for each", "got 2"],
    );
    assert_refused(check(&[&wrong]), &["[3]"]);
}

#[test]
fn strided_gradients_arrive_strided() {
    let strided = |x: &Tensor, y: &Tensor, grad: &Tensor| {
        assert!(!grad.is_contiguous(), "contiguous");
        right(x, y, grad)
    };
    let (x, y) = (variable(&[3]), variable(&[3]));
    let options = GradgradcheckOptions { strided_grad_outputs: true, ..Default::default() };
    gradgradcheck(weighted::<true>(strided), &[&x, &y], &options).unwrap();
    assert_refused(check(weighted::<true>(strided), &[&x, &y]), &["weighted", "contiguous"]);
}

#[test]
fn what_cannot_be_checked_is_refused() {
    let x = variable(&[2]);
    let result = check(|inputs| Ok(inputs[0].detach()), &[&x]);
    assert_refused(result, &["gradgradcheck: function: expected an output that requires grad"]);
    assert_refused(
        check(|inputs| Ok(inputs[0].exp()), &[&Tensor::new()]),
        &["gradgradcheck: inputs[0]: expected a tensor"],
    );
    let float = Tensor::from_slice(&[1_f32]).set_requires_grad(true);
    let error = assert_refused(
        check(|inputs| Ok(inputs[0].exp()), &[&float]),
        &["gradgradcheck: inputs[0]: expected kind Double"],
    );
    assert!(matches!(error, Error::Argument { .. }));
    let text =
        check(|_| Err::<Tensor, _>(Error::msg("out of order")), &[&x]).unwrap_err().to_string();
    assert_eq!(text, "out of order");
}

#[test]
fn lltm_cell_passes() -> Result<()> {
    let cell = |inputs: &[Tensor]| {
        let [input, weight, bias, h, c] = inputs else {
            unreachable!("as many as are passed below")
        };
        let (h, c) = f_lltm_cell(input, weight, Some(bias), (h, c))?;
        Ok([h, c])
    };
    let [input, weight, bias] = [variable(&[2, 3]), variable(&[6, 5]), variable(&[6])];
    check(cell, &[&input, &weight, &bias, &variable(&[2, 2]), &variable(&[2, 2])])
}

/// x², whose gradient has this factor if a graph is recorded, and else the right one.
struct Square(f64);

impl Function for Square {
    const NAME: &'static str = "square";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let factor = if ctx.create_graph() { self.0 } else { 2.0 };
        Ok((grads.get(0)? * ctx.saved(0)? * factor).into())
    }
}

#[test]
fn the_second_derivative_is_that_of_the_gradients_without_a_graph() {
    let square = |factor: f64| move |inputs: &[Tensor]| apply(Square(factor), &[Some(&inputs[0])]);
    check(square(2.0), &[&variable(&[3])]).unwrap();
    assert_refused(
        check(square(3.0), &[&variable(&[3])]),
        &["gradgradcheck (", "output 0, input 0"],
    );
}

/// x y, whose recorded backward pass drops the gradient of y.
struct Dropped;

impl Function for Dropped {
    const NAME: &'static str = "dropped";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(y);
        Ok((x * y).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, y, grad) = (ctx.saved(0)?, ctx.saved(1)?, grads.get(0)?);
        Ok([Some(grad * y), (!ctx.create_graph()).then(|| grad * x)].into())
    }
}

#[test]
fn a_gradient_that_is_dropped_with_a_graph_is_found() {
    let product = |inputs: &[Tensor]| apply(Dropped, &[Some(&inputs[0]), Some(&inputs[1])]);
    let result = check(product, &[&variable(&[3]), &variable(&[3])]);
    assert_refused(result, &["gradgradcheck (", "output 1 was None"]);
}
