//! `testing::gradcheck` accepts right gradients and names the place of wrong ones; so do its companions.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad};
use tch_extension::testing::{GradcheckOptions, assert_close, cuda_or_skip, devices, gradcheck, tolerance};
use tch_extension::{Error, Result};

fn random(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Double, Device::Cpu))
}

fn variable(size: &[i64]) -> Tensor {
    random(size).set_requires_grad(true)
}

/// Runs gradcheck, and whatever it says, the caller's tensors must be as they were, bit by bit, and never
/// written to in between either, as libtorch's version counter tells.
fn check<O: Into<Tensors>>(function: impl Fn(&[Tensor]) -> Result<O>, inputs: &[&Tensor]) -> Result<()> {
    check_with(function, inputs, &GradcheckOptions::default())
}

fn check_with<O: Into<Tensors>>(
    function: impl Fn(&[Tensor]) -> Result<O>,
    inputs: &[&Tensor],
    options: &GradcheckOptions,
) -> Result<()> {
    let state = |tensor: &&Tensor| {
        let flat = tensor.detach().to_device(Device::Cpu).contiguous().reshape([-1]);
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

/// x², with any backward: a function of x and the incoming gradient.
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

/// (x², x³), with any backward: a function of x and the incoming gradients, which are not materialised.
struct Powers<B>(B);

impl<B> Function for Powers<B>
where
    B: Fn(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Option<Tensor>> + Send + Sync + 'static,
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
    B: Fn(&Tensor, Option<&Tensor>, Option<&Tensor>) -> Result<Option<Tensor>> + Copy + Send + Sync + 'static,
{
    move |inputs| apply(Powers(backward), &[Some(&inputs[0])])
}

fn right_powers(x: &Tensor, square: Option<&Tensor>, cube: Option<&Tensor>) -> Result<Option<Tensor>> {
    let square = square.map(|grad| grad * x * 2.0);
    let cube = cube.map(|grad| grad * x * x * 3.0);
    Ok(match (square, cube) {
        (Some(square), Some(cube)) => Some(square + cube),
        (square, cube) => square.or(cube),
    })
}

// ---- right gradients ----

#[test]
fn right_functions_pass() -> Result<()> {
    let right = square(|x, grad| grad * x * 2.0);
    check(&right, &[&variable(&[5])])?;
    check(|inputs| Ok(&inputs[0] * &inputs[0]), &[&variable(&[2, 3])])?;
    check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&variable(&[3, 4]), &variable(&[4, 2])])
}

#[test]
fn several_outputs_pass() -> Result<()> {
    check(powers(right_powers), &[&variable(&[4])])?;
    // Outputs of different shapes, one of which depends on one input only.
    let function = |inputs: &[Tensor]| Ok([inputs[0].matmul(&inputs[1]), inputs[0].sin().sum(Kind::Double)]);
    check(function, &[&variable(&[3, 2]), &variable(&[2, 1])])
}

#[test]
fn an_output_may_be_an_input_a_view_of_one_or_absent() -> Result<()> {
    check(|inputs| Ok(inputs[0].shallow_clone()), &[&variable(&[3])])?;
    check(|inputs| Ok([inputs[0].transpose(0, 1), inputs[0].narrow(0, 0, 1)]), &[&variable(&[2, 3])])?;
    check(|inputs| Ok(vec![None, Some(inputs[0].exp())]), &[&variable(&[3])])?;
    check(|inputs| Ok(vec![Some(Tensor::new()), Some(inputs[0].exp())]), &[&variable(&[3])])
}

#[test]
fn any_layout_passes() -> Result<()> {
    let base = random(&[5, 6]);
    let views = [
        base.transpose(0, 1),
        base.slice(1, 1, 6, 2),
        base.narrow(0, 2, 3),
        base.slice(1, 1, 6, 2).transpose(0, 1).narrow(0, 1, 2),
        base.select(1, 3),
        base.select(1, 3).select(0, 2),
    ];
    for view in views {
        let view = view.detach().set_requires_grad(true);
        check(square(|x, grad| grad * x * 2.0), &[&view])?;
    }
    Ok(())
}

/// A kernel chooses its path by strides and alignment: it must see those of the caller.
#[test]
fn the_function_sees_the_callers_layout_and_never_the_callers_memory() -> Result<()> {
    let x = random(&[4, 6]).slice(1, 1, 6, 2).transpose(0, 1).detach().set_requires_grad(true);
    let index = Tensor::arange(8, (Kind::Int64, Device::Cpu)).narrow(0, 3, 3);
    let originals = [x.shallow_clone(), index.shallow_clone()];
    let alignment = |tensor: &Tensor| tensor.data_ptr() as usize % 64;
    let function = |inputs: &[Tensor]| {
        for (input, original) in inputs.iter().zip(&originals) {
            assert_eq!(input.stride(), original.stride());
            assert_eq!(input.size(), original.size());
            assert_eq!(input.requires_grad(), original.requires_grad());
            assert_eq!(alignment(input), alignment(original));
            assert_ne!(input.data_ptr(), original.data_ptr());
            assert!(input.is_leaf());
        }
        assert_eq!(inputs[1], index);
        Ok(&inputs[0] * &inputs[1].unsqueeze(1))
    };
    check(function, &[&x, &index])
}

#[test]
fn scalars_and_empty_tensors_pass() -> Result<()> {
    check(square(|x, grad| grad * x * 2.0), &[&variable(&[])])?;
    check(square(|x, grad| grad * x * 2.0), &[&variable(&[0])])?;
    check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&variable(&[2, 0]), &variable(&[0, 3])])?;
    check(|inputs| Ok(inputs[0].narrow(0, 0, 0)), &[&variable(&[3])])
}

#[test]
fn a_wrong_gradient_of_a_scalar_is_found() {
    let text = refusal(check(square(|x, grad| grad * x), &[&variable(&[])]));
    assert_says(
        &text,
        &["row 0 (output element [])", "column 0 (input element [])", "1 of 1 entries is wrong"],
    );
}

#[test]
fn inputs_that_require_no_grad_may_be_of_any_kind_and_layout() -> Result<()> {
    let index = Tensor::from_slice(&[2_i64, 0, 2]);
    let scale = Tensor::from_slice(&[2_f32]).expand([3], false);
    let function = |inputs: &[Tensor]| Ok(inputs[1].index_select(0, &inputs[0]) * &inputs[2]);
    check(function, &[&index, &variable(&[3]), &scale])
}

#[test]
fn a_non_leaf_input_passes() -> Result<()> {
    check(|inputs| Ok(inputs[0].exp()), &[&(variable(&[3]) * 2.0)])
}

#[test]
fn the_same_input_twice_is_two_inputs() -> Result<()> {
    let x = variable(&[3]);
    check(|inputs| Ok(&inputs[0] * &inputs[1]), &[&x, &x])
}

#[test]
fn an_absent_gradient_is_zero() -> Result<()> {
    struct First;
    impl Function for First {
        const NAME: &'static str = "first";
        fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            Ok((inputs.get(0)? * 2.0).into())
        }
        fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            Ok([Some(grads.get(0)? * 2.0), None].into())
        }
    }
    check(|inputs| apply(First, &[Some(&inputs[0]), Some(&inputs[1])]), &[&variable(&[3]), &variable(&[2])])
}

#[test]
fn outputs_without_a_derivative_are_passed_over() -> Result<()> {
    let function = |inputs: &[Tensor]| Ok([inputs[0].argmax(0, false), inputs[0].exp(), inputs[0].detach()]);
    check(function, &[&variable(&[4])])
}

#[test]
fn a_second_derivative_passes() -> Result<()> {
    let first = |inputs: &[Tensor]| {
        let options =
            GradOptions { grad_outputs: &[Some(&inputs[1])], create_graph: true, ..Default::default() };
        grad(&[&(&inputs[0] * inputs[0].sin())], &[&inputs[0]], &options)
    };
    check(first, &[&variable(&[3]), &variable(&[3])])
}

// ---- wrong gradients ----

#[test]
fn a_wrong_factor_is_found() {
    let x = Tensor::from_slice(&[1.0, 2.0, -4.0]).set_requires_grad(true);
    let result = check(square(|x, grad| grad * x * 3.0), &[&x]);
    let whole = result.as_ref().unwrap_err().to_string();
    let text = refusal(result);
    // The largest is the worst.
    assert_says(&text, &["output 0, input 0", "row 2 (output element [2])", "column 2 (input element [2])"]);
    assert_says(&text, &["analytical -12.0, numerical -7.99", "3 of 9 entries are wrong"]);
    // The Jacobians follow.
    assert_says(
        &whole,
        &["\nanalytical:\n", "\nnumerical:\n", "[   3.000000e0,    0.000000e0,    0.000000e0]"],
    );
}

#[test]
fn a_wrong_last_element_of_a_ragged_size_is_found() {
    for n in [100, 257, 1000] {
        let last_is_zero = move |x: &Tensor, grad: &Tensor| {
            let gradient = grad * x * 2.0;
            let _ = gradient.narrow(0, n - 1, 1).zero_();
            gradient
        };
        // Away from zero, where the gradient would be right by chance.
        let x = (random(&[n]).abs() + 0.5).set_requires_grad(true);
        let text = refusal(check(square(last_is_zero), &[&x]));
        let last = n - 1;
        let (row, column) =
            (format!("row {last} (output element [{last}])"), format!("column {last} (input"));
        assert_says(&text, &[&row, &column, "analytical 0.0", &format!("1 of {} entries is wrong", n * n)]);
    }
}

#[test]
fn a_transposed_gradient_is_found() {
    let transposed = square(|x, grad| (grad * x * 2.0).transpose(0, 1));
    let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]).set_requires_grad(true);
    let text = refusal(check(&transposed, &[&x]));
    // Element [1, 0] has the larger of the two gradients that changed places.
    assert_says(&text, &["output element [1, 0]", "4 of 16 entries are wrong"]);
}

#[test]
fn a_gradient_that_ignores_the_incoming_one_is_found() {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let text = refusal(check(square(|x, _| x * 2.0), &[&x]));
    assert_says(&text, &["row 0", "column 1", "analytical 4.0, numerical 0.0", "2 of 4 entries are wrong"]);
}

#[test]
fn a_scalar_function_that_ignores_the_incoming_gradient_is_found() {
    // With one element, the Jacobian is right.
    let ignoring = square(|x, _| x * 2.0);
    let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let text = refusal(check(&ignoring, &[&x]));
    assert_says(&text, &["input 0: the gradient is 6.0 at element [0]", "every incoming gradient is zero"]);

    let unchecked =
        GradcheckOptions { check_zero_grad: false, check_undefined_grad: false, ..Default::default() };
    let text = refusal(check_with(&ignoring, &[&x], &unchecked));
    assert_says(&text, &["input 0", "give 6.0 at element [0], but -12.0 by the Jacobian", "linear"]);
}

#[test]
fn a_backward_that_is_not_linear_in_the_incoming_gradient_is_found() {
    // Each is right for zeros and for a single one.
    let wrong: [fn(&Tensor) -> Tensor; 3] =
        [Tensor::square, Tensor::abs, |grad: &Tensor| grad.clamp(-1.0, 1.0)];
    for bend in wrong {
        let x = Tensor::from_slice(&[3.0, 1.0, 2.0]).set_requires_grad(true);
        let text = refusal(check(square(move |x, grad| bend(grad) * x * 2.0), &[&x]));
        assert_says(&text, &["input 0", "backward has to be linear"]);
    }
}

#[test]
fn a_backward_that_drops_terms_with_several_gradients_is_found() {
    // Right for every row and for ones, zeros and undefined gradients.
    let is_zero = |grad: &Tensor| grad.any().double_value(&[]) == 0.0;
    let wrong = powers(move |x, square, cube| match square {
        Some(square) if !is_zero(square) => right_powers(x, Some(square), None),
        _ => right_powers(x, None, cube),
    });
    let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    // -2 of 6 and 0.5 of 27
    assert_says(&refusal(check(wrong, &[&x])), &["give -12.0 at element [0], but 1.5 by the Jacobian"]);

    let silent = powers(move |x, square, cube| match (square, cube) {
        (Some(square), Some(cube)) if !is_zero(square) && !is_zero(cube) => Ok(None),
        _ => right_powers(x, square, cube),
    });
    assert_says(&refusal(check(silent, &[&x])), &["give 0.0 at element [0], but 1.5 by the Jacobian"]);
}

#[test]
fn a_gradient_from_nowhere_is_found() {
    // Right for every row of the Jacobian.
    let backward =
        square(|x, grad| if grad.any().double_value(&[]) == 0.0 { x.ones_like() } else { grad * x * 2.0 });
    let text = refusal(check(backward, &[&variable(&[2, 2])]));
    assert_says(&text, &["the gradient is 1.0 at element [0, 0]", "every incoming gradient is zero"]);
}

#[test]
fn nan_is_wrong_everywhere() {
    let nan = square(|x, grad| grad * x * f64::NAN);
    assert_says(&refusal(check(nan, &[&variable(&[2])])), &["analytical NaN", "4 of 4 entries are wrong"]);
    // Also where the numerical derivative is no number either.
    let x = Tensor::from_slice(&[-1.0]).set_requires_grad(true);
    assert_says(&refusal(check(|inputs| Ok(inputs[0].sqrt()), &[&x])), &["analytical NaN, numerical NaN"]);
}

#[test]
fn a_backward_that_alternates_is_found() -> Result<()> {
    let function = |inputs: &[Tensor]| {
        let odd = AtomicBool::new(false);
        let backward = move |x: &Tensor, grad: &Tensor| {
            let slip = if odd.fetch_xor(true, Ordering::Relaxed) { 1.0 + 1e-9 } else { 1.0 };
            Ok(grad * x * 2.0 * slip)
        };
        apply(Square(backward), &[Some(&inputs[0])])
    };
    let x = Tensor::from_slice(&[3.0, 1.0]).set_requires_grad(true);
    let text = refusal(check(function, &[&x]));
    assert_says(&text, &["not deterministic", "row 0", "column 0", "first 6.0, second 6.000000006"]);

    let tolerant = GradcheckOptions { nondet_tol: 1e-6, ..Default::default() };
    check_with(function, &[&x], &tolerant)
}

#[test]
fn a_backward_that_writes_into_what_it_gets_is_no_second_mistake() -> Result<()> {
    check(square(|x, grad| grad.shallow_clone().g_mul_(&(x * 2.0))), &[&variable(&[3])])
}

#[test]
fn a_backward_that_needs_every_gradient_is_found() {
    // Without a graph behind it, an output's gradient is absent.
    let needy = powers(|x, square, cube| match (square, cube) {
        (Some(square), Some(cube)) => Ok(Some(square * x * 2.0 + cube * x * x * 3.0)),
        (Some(square), None) => Ok(Some(square * x * 2.0)),
        (None, Some(cube)) => Ok(Some(cube * x * x * 3.0)),
        (None, None) => Err(Error::msg("no gradient at all")),
    });
    let text = refusal(check(needy, &[&variable(&[2])]));
    assert_says(&text, &["backward failed", "every output is undefined", "powers: no gradient at all"]);
}

#[test]
fn a_gradient_in_spite_of_undefined_ones_is_found() {
    let inventive = powers(|x, square, cube| match (square, cube) {
        (None, None) => Ok(Some(x.ones_like())),
        _ => right_powers(x, square, cube),
    });
    let text = refusal(check(inventive, &[&variable(&[2])]));
    assert_says(&text, &["the gradient is 1.0 at element [0]", "every incoming gradient is undefined"]);
}

#[test]
fn a_backward_that_fails_without_the_first_gradient_is_found() {
    let needy = powers(|x, square, cube| match (square, cube) {
        (None, Some(_)) => Err(Error::msg("the first is missing")),
        _ => right_powers(x, square, cube),
    });
    // Already the rows of output 1 leave the first gradient out.
    let text = refusal(check(needy, &[&variable(&[2])]));
    assert_says(&text, &["backward failed for row 0 of output 1", "powers: the first is missing"]);
}

/// (x, 2x, 3x), with any backward: a function of the incoming gradients, which are not materialised.
struct Multiples(fn([Option<&Tensor>; 3]) -> Result<Option<Tensor>>);

impl Function for Multiples {
    const NAME: &'static str = "multiples";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.set_materialize_grads(false);
        Ok([x * 1.0, x * 2.0, x * 3.0].into())
    }

    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((self.0)([0, 1, 2].map(|index| grads.optional(index)))?.into())
    }
}

fn right_multiples(grads: [Option<&Tensor>; 3]) -> Result<Option<Tensor>> {
    let terms =
        grads.into_iter().zip([1.0, 2.0, 3.0]).filter_map(|(grad, factor)| grad.map(|grad| grad * factor));
    Ok(terms.reduce(|sum, term| sum + term))
}

/// A row of a Jacobian leaves out all gradients but one: only leaving out one in turn gets here.
#[test]
fn a_backward_that_fails_without_one_of_three_gradients_is_found() {
    let wrong = |inputs: &[Tensor]| {
        let needy = Multiples(|grads| match grads {
            [Some(_), None, Some(_)] => Err(Error::msg("the second is missing")),
            _ => right_multiples(grads),
        });
        apply(needy, &[Some(&inputs[0])])
    };
    let text = refusal(check(wrong, &[&variable(&[2])]));
    assert_says(&text, &["backward failed", "of output 1 is undefined", "multiples: the second is missing"]);
}

#[test]
fn a_backward_that_drops_terms_without_one_of_three_gradients_is_found() {
    let wrong = |inputs: &[Tensor]| {
        let forgetful = Multiples(|grads| match grads {
            [Some(first), Some(_), None] => Ok(Some(first * 1.0)),
            _ => right_multiples(grads),
        });
        apply(forgetful, &[Some(&inputs[0])])
    };
    let text = refusal(check(wrong, &[&variable(&[2])]));
    assert_says(&text, &["gradient of output 2 is undefined", "1.0 at element [0], but 3.0 when it is zero"]);

    let right = |inputs: &[Tensor]| apply(Multiples(right_multiples), &[Some(&inputs[0])]);
    check(right, &[&variable(&[2])]).unwrap();
}

#[test]
fn a_dropped_term_of_the_second_output_is_found() {
    let forgetful = powers(|x, square, cube| right_powers(x, square, cube.map(Tensor::zeros_like).as_ref()));
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let text = refusal(check(forgetful, &[&x]));
    assert_says(
        &text,
        &["output 1, input 0", "row 1", "column 1", "analytical 0.0, numerical 12.", "2 of 4"],
    );
}

#[test]
fn the_second_input_is_named() {
    struct Product;
    impl Function for Product {
        const NAME: &'static str = "product";
        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            let (x, y) = (inputs.get(0)?, inputs.get(1)?);
            saver.save(x);
            saver.save(y);
            Ok((x * y).into())
        }
        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            let grad = grads.get(0)?;
            Ok([grad * ctx.saved(1)?, grad * ctx.saved(1)?].into())
        }
    }
    let product = |inputs: &[Tensor]| apply(Product, &[Some(&inputs[0]), Some(&inputs[1])]);
    let (x, y) = (Tensor::from_slice(&[2.0]).set_requires_grad(true), Tensor::from_slice(&[5.0]));
    let text = refusal(check(product, &[&x, &y.copy().set_requires_grad(true)]));
    assert_says(&text, &["output 0, input 1", "analytical 5.0, numerical 2.0"]);
    // It is not looked at when it requires no grad.
    check(product, &[&x, &y]).unwrap();
}

#[test]
fn a_wrong_gradient_of_a_view_is_found_at_its_own_index() {
    let wrong = square(|x, grad| {
        let gradient = grad * x * 2.0;
        let _ = gradient.get(2).get(1).zero_();
        gradient
    });
    let x = (random(&[4, 6]).abs() + 0.5).slice(1, 1, 6, 2).transpose(0, 1).detach().set_requires_grad(true);
    let text = refusal(check(wrong, &[&x]));
    assert_says(&text, &["row 9 (output element [2, 1])", "column 9 (input element [2, 1])", "1 of 144"]);
}

#[test]
fn an_output_that_hides_its_graph_is_found() {
    let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let text = refusal(check(|inputs| Ok(inputs[0].detach() * 2.0), &[&x]));
    assert_says(&text, &["no output requires grad", "output 0, input 0", "numerical 2.0"]);
    let text = tch::no_grad(|| refusal(check(|inputs| Ok(inputs[0].exp()), &[&x])));
    assert_says(&text, &["is grad mode off"]);
}

#[test]
fn outputs_that_depend_on_no_input_pass() -> Result<()> {
    check(
        |inputs| Ok([inputs[0].sign().detach(), inputs[0].ones_like()]),
        &[&(random(&[3]).abs() + 0.5).set_requires_grad(true)],
    )
}

// ---- what cannot be checked ----

#[test]
fn float_inputs_are_refused() {
    let x = Tensor::from_slice(&[1_f32]).set_requires_grad(true);
    let text = refusal(check(|inputs| Ok(inputs[0].exp()), &[&variable(&[1]), &x]));
    assert_says(&text, &["gradcheck: inputs[1]: expected kind Double", "got Float", "to_kind(Kind::Double)"]);
}

#[test]
fn it_is_an_error_when_nothing_requires_grad() {
    let text = refusal(check(|inputs| Ok(inputs[0].exp()), &[&random(&[2])]));
    assert_says(&text, &["gradcheck: inputs: expected at least one that requires grad"]);
    let text = refusal(check(|_| Ok(random(&[1])), &[]));
    assert_says(&text, &["expected at least one that requires grad"]);
}

#[test]
fn overlapping_inputs_are_refused() {
    let expanded = random(&[2, 1]).expand([2, 3], false).set_requires_grad(true);
    let overlapping = random(&[4]).as_strided([3, 2], [1, 1], 0).set_requires_grad(true);
    for input in [expanded, overlapping] {
        let text = refusal(check(|inputs| Ok(inputs[0].exp()), &[&input]));
        assert_says(&text, &["gradcheck: inputs[0]: expected elements that do not overlap", "contiguous()"]);
    }
}

#[test]
fn undefined_inputs_and_functions_without_output_are_refused() {
    let result = gradcheck(|inputs| Ok(inputs[0].exp()), &[&Tensor::new()], &GradcheckOptions::default());
    assert_says(&refusal(result), &["gradcheck: inputs[0]: expected a tensor"]);
    assert_says(
        &refusal(check(|_| Ok(()), &[&variable(&[1])])),
        &["gradcheck: function: expected one output"],
    );
}

#[test]
fn an_output_that_changes_its_shape_is_refused() {
    // At first all three are positive; a little less, and one is not.
    let x = Tensor::from_slice(&[1.0, 1e-7, 1.0]).set_requires_grad(true);
    let text = refusal(check(|inputs| Ok(inputs[0].masked_select(&inputs[0].gt(0.0))), &[&x]));
    assert_says(&text, &["output 0 was", "size: [3]", "is Some(Output { size: [2]"]);
}

#[test]
fn the_functions_own_errors_come_through() {
    let text = refusal(check(|_| Err::<Tensor, _>(Error::msg("out of order")), &[&variable(&[1])]));
    assert_eq!(text, "out of order");
    let failing = |inputs: &[Tensor]| {
        apply(Square(|_: &Tensor, _: &Tensor| Err(Error::msg("no way back"))), &[Some(&inputs[0])])
    };
    let text = refusal(check(failing, &[&variable(&[1])]));
    assert_says(&text, &["backward failed for row 0 of output 0", "square: no way back"]);
}

// ---- devices ----

#[test]
fn on_every_device() {
    for device in devices() {
        let on_device = |size: &[i64]| random(size).to_device(device).set_requires_grad(true);
        check(square(|x, grad| grad * x * 2.0), &[&on_device(&[7])]).unwrap();
        let view = random(&[5, 6]).to_device(device).slice(1, 1, 6, 2).detach().set_requires_grad(true);
        check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&view, &on_device(&[3, 2])]).unwrap();
        let text = refusal(check(square(|x, grad| grad * x * 3.0), &[&on_device(&[7])]));
        assert_says(&text, &["the gradient is wrong", "7 of 49 entries are wrong"]);
    }
}

/// Set in the processes that [`run_alone`] starts; says what to do there.
const CHILD: &str = "GRADCHECK_TEST_CHILD";

/// Runs a test of this file again in a process of its own, in which no GPU is visible.
fn run_alone(test: &str, task: &str, require_cuda: &str) -> std::process::Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(CHILD, task)
        .env("CUDA_VISIBLE_DEVICES", "")
        .env("TCH_EXTENSION_REQUIRE_CUDA", require_cuda)
        .output()
        .unwrap()
}

/// What such a process does instead of the test; `false` in the test itself.
fn is_child() -> bool {
    match std::env::var(CHILD).as_deref() {
        Ok("cuda_or_skip") => assert!(cuda_or_skip("a_test").is_none()),
        Ok("devices") => assert_eq!(devices(), [Device::Cpu]),
        _ => return false,
    }
    true
}

#[test]
fn a_missing_gpu_is_a_visible_skip() {
    if is_child() {
        return;
    }
    let test = "a_missing_gpu_is_a_visible_skip";
    let output = run_alone(test, "cuda_or_skip", "0");
    assert!(output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.lines().any(|line| line == "SKIPPED a_test: no CUDA device"), "{stderr}");
    assert!(run_alone(test, "devices", "0").status.success());
}

#[test]
fn a_missing_gpu_is_a_failure_where_one_is_required() {
    if is_child() {
        return;
    }
    for task in ["cuda_or_skip", "devices"] {
        let output = run_alone("a_missing_gpu_is_a_failure_where_one_is_required", task, "1");
        assert!(!output.status.success());
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("TCH_EXTENSION_REQUIRE_CUDA=1, but "), "{text}");
    }
}

// ---- assert_close ----

fn panic_text(compare: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let panic = std::panic::catch_unwind(compare).expect_err("these are not close");
    panic.downcast_ref::<String>().unwrap().clone()
}

fn difference(actual: &'static [f64], expected: &'static [f64], rtol: f64, atol: f64) -> String {
    let reshape = |values: &[f64]| Tensor::from_slice(values).reshape([2, -1]);
    panic_text(move || assert_close(&reshape(actual), &reshape(expected), rtol, atol))
}

#[test]
fn assert_close_accepts_what_is_close() {
    let x = Tensor::from_slice(&[1.0, f64::NAN, f64::INFINITY, -0.0]).reshape([2, 2]);
    assert_close(&x, &x, 0.0, 0.0);
    assert_close(&(&x * 1.01), &x, 0.011, 0.0);
    assert_close(&(&x + 0.01), &x, 0.0, 0.011);
    assert_close(&x.transpose(0, 1).contiguous().transpose(0, 1), &x, 0.0, 0.0);
    for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double, Kind::Int64, Kind::Bool] {
        let (rtol, atol) = tolerance(kind);
        for device in devices() {
            let ones = Tensor::ones([3], (kind, device));
            assert_close(&ones, &Tensor::ones([3], (kind, Device::Cpu)), rtol, atol);
        }
    }
    assert_close(&random(&[0, 3]), &random(&[0, 3]), 0.0, 0.0);
    assert_close(&Tensor::from(1.5), &Tensor::from(1.5), 0.0, 0.0);
}

#[test]
fn assert_close_names_the_worst_element() {
    let text = difference(&[1.0, 2.0, 3.5, 4.0, 9.0, 6.0], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.1, 0.05);
    assert_says(&text, &["element [1, 1]: actual 9.0, expected 5.0", "differ by 4.0, allowed is 0.55"]);
    assert_says(&text, &["2 of 6 elements are not close"]);
}

#[test]
fn assert_close_takes_nan_and_infinity_for_themselves_only() {
    let (nan, infinity) = (f64::NAN, f64::INFINITY);
    for (actual, expected) in
        [(nan, 0.0), (0.0, nan), (infinity, 1.0), (1.0, infinity), (-infinity, infinity)]
    {
        let (actual, expected) = (Tensor::from(actual), Tensor::from(expected));
        let compare = std::panic::AssertUnwindSafe(|| assert_close(&actual, &expected, 0.5, 0.5));
        assert_says(&panic_text(compare), &["element []", "1 of 1 elements is not close"]);
    }
}

#[test]
fn assert_close_looks_at_values_and_not_at_memory() {
    let x = Tensor::from_slice(&[1.0, 2.0]);
    let negated = x.internal_neg_view();
    assert_close(&negated, &Tensor::from_slice(&[-1.0, -2.0]), 0.0, 0.0);
    assert_says(
        &panic_text(std::panic::AssertUnwindSafe(|| assert_close(&negated, &x, 0.0, 0.0))),
        &["actual -2.0"],
    );
    let zeros = Tensor::internal_efficientzerotensor([2], (Kind::Double, Device::Cpu));
    assert_close(&zeros, &Tensor::from_slice(&[0.0, 0.0]), 0.0, 0.0);
}

#[test]
fn assert_close_refuses_other_shapes_and_kinds() {
    let compare = |actual: Tensor, expected: Tensor| {
        panic_text(std::panic::AssertUnwindSafe(move || assert_close(&actual, &expected, 1.0, 1.0)))
    };
    let options = (Kind::Double, Device::Cpu);
    let text = compare(Tensor::zeros([2, 3], options), Tensor::zeros([3], options));
    assert_eq!(text, "assert_close: actual is Double [2, 3], expected is Double [3]");
    let text = compare(Tensor::zeros([3], (Kind::Float, Device::Cpu)), Tensor::zeros([3], options));
    assert_eq!(text, "assert_close: actual is Float [3], expected is Double [3]");
    assert_eq!(compare(Tensor::new(), Tensor::from(1.0)), "assert_close: actual is an undefined tensor");
    let complex = Tensor::zeros([1], (Kind::ComplexFloat, Device::Cpu));
    assert_says(&compare(complex.shallow_clone(), complex), &["complex numbers", "view_as_real"]);
}

#[test]
fn tolerances_are_those_of_torch_testing() {
    assert_eq!(tolerance(Kind::Double), (1e-7, 1e-7));
    assert_eq!(tolerance(Kind::Float), (1.3e-6, 1e-5));
    assert_eq!(tolerance(Kind::Half), (1e-3, 1e-5));
    assert_eq!(tolerance(Kind::BFloat16), (1.6e-2, 1e-5));
    assert_eq!(tolerance(Kind::Int64), (0.0, 0.0));
}
