//! Tests that wrong gradients are found and that the error names their place.

use super::*;

#[test]
fn a_wrong_factor_is_found() {
    let x = Tensor::from_slice(&[1.0, 2.0, -4.0]).set_requires_grad(true);
    let result = check(square(|x, grad| grad * x * 3.0), &[&x]);
    let whole = result.as_ref().unwrap_err().to_string();
    let text = refusal(result);
    // The error names the entry with the largest difference.
    assert_says(
        &text,
        &["output 0, input 0", "row 2 (output element [2])", "column 2 (input element [2])"],
    );
    assert_says(&text, &["analytical -12.0, numerical -7.99", "3 of 9 entries are wrong"]);
    // The Jacobians follow in the error.
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
        // Values away from zero, because the wrong gradient of zero would be right by chance.
        let x = (random(&[n]).abs() + 0.5).set_requires_grad(true);
        let text = refusal(check(square(last_is_zero), &[&x]));
        let last = n - 1;
        let (row, column) =
            (format!("row {last} (output element [{last}])"), format!("column {last} (input"));
        assert_says(
            &text,
            &[&row, &column, "analytical 0.0", &format!("1 of {} entries is wrong", n * n)],
        );
    }
}

#[test]
fn a_transposed_gradient_is_found() {
    let transposed = square(|x, grad| (grad * x * 2.0).transpose(0, 1));
    let x = Tensor::from_slice(&[1.0, 2.0, 3.0, 4.0]).reshape([2, 2]).set_requires_grad(true);
    let text = refusal(check(&transposed, &[&x]));
    // Two gradients are exchanged, and element [1, 0] has the larger of them.
    assert_says(&text, &["output element [1, 0]", "4 of 16 entries are wrong"]);
}

#[test]
fn a_gradient_that_ignores_the_incoming_one_is_found() {
    let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
    let text = refusal(check(square(|x, _| x * 2.0), &[&x]));
    assert_says(
        &text,
        &["row 0", "column 1", "analytical 4.0, numerical 0.0", "2 of 4 entries are wrong"],
    );
}

#[test]
fn a_scalar_function_that_ignores_the_incoming_gradient_is_found() {
    // For a single element, this Jacobian is right.
    let ignoring = square(|x, _| x * 2.0);
    let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    let text = refusal(check(&ignoring, &[&x]));
    assert_says(
        &text,
        &["input 0: the gradient is 6.0 at element [0]", "every incoming gradient is zero"],
    );

    let unchecked = GradcheckOptions {
        check_zero_grad: false,
        check_undefined_grad: false,
        ..Default::default()
    };
    let text = refusal(check_with(&ignoring, &[&x], &unchecked));
    assert_says(
        &text,
        &["input 0", "give 6.0 at element [0], but -12.0 according to the Jacobian", "linear"],
    );
}

#[test]
fn a_backward_that_is_not_linear_in_the_incoming_gradient_is_found() {
    // Each of these is right for incoming gradients that are all zero or have a single one.
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
    // This is right for every row of the Jacobian and for gradients that are all ones, all zeros or
    // undefined.
    let is_zero = |grad: &Tensor| grad.any().double_value(&[]) == 0.0;
    let wrong = powers(move |x, square, cube| match square {
        Some(square) if !is_zero(square) => right_powers(x, Some(square), None),
        _ => right_powers(x, None, cube),
    });
    let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    // The incoming gradients are -2 and 0.5: -2 · 6 = -12, and the Jacobian gives -12 + 0.5 · 27 =
    // 1.5.
    assert_says(
        &refusal(check(wrong, &[&x])),
        &["give -12.0 at element [0], but 1.5 according to the Jacobian"],
    );

    let silent = powers(move |x, square, cube| match (square, cube) {
        (Some(square), Some(cube)) if !is_zero(square) && !is_zero(cube) => Ok(None),
        _ => right_powers(x, square, cube),
    });
    assert_says(
        &refusal(check(silent, &[&x])),
        &["give 0.0 at element [0], but 1.5 according to the Jacobian"],
    );
}

#[test]
fn a_gradient_from_nowhere_is_found() {
    // This is right for every row of the Jacobian, and wrong for a zero gradient.
    let backward =
        square(
            |x, grad| {
                if grad.any().double_value(&[]) == 0.0 { x.ones_like() } else { grad * x * 2.0 }
            },
        );
    let text = refusal(check(backward, &[&variable(&[2, 2])]));
    assert_says(
        &text,
        &["the gradient is 1.0 at element [0, 0]", "every incoming gradient is zero"],
    );
}

#[test]
fn nan_is_wrong_everywhere() {
    let nan = square(|x, grad| grad * x * f64::NAN);
    assert_says(
        &refusal(check(nan, &[&variable(&[2])])),
        &["analytical NaN", "4 of 4 entries are wrong"],
    );
    // A NaN is an error even where the numerical derivative is NaN, too.
    let x = Tensor::from_slice(&[-1.0]).set_requires_grad(true);
    assert_says(
        &refusal(check(|inputs| Ok(inputs[0].sqrt()), &[&x])),
        &["analytical NaN, numerical NaN"],
    );
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
    assert_says(
        &text,
        &["not deterministic", "row 0", "column 0", "first 6.0, second 6.000000006"],
    );

    let tolerant = GradcheckOptions { nondet_tol: 1e-6, ..Default::default() };
    check_with(function, &[&x], &tolerant)
}

#[test]
fn a_backward_that_writes_into_what_it_gets_is_no_second_mistake() -> Result<()> {
    check(square(|x, grad| grad.shallow_clone().g_mul_(&(x * 2.0))), &[&variable(&[3])])
}

#[test]
fn a_backward_that_needs_every_gradient_is_found() {
    // An output that has no graph gets no gradient.
    let needy = powers(|x, square, cube| match (square, cube) {
        (Some(square), Some(cube)) => Ok(Some(square * x * 2.0 + cube * x * x * 3.0)),
        (Some(square), None) => Ok(Some(square * x * 2.0)),
        (None, Some(cube)) => Ok(Some(cube * x * x * 3.0)),
        (None, None) => Err(Error::msg("no gradient at all")),
    });
    let text = refusal(check(needy, &[&variable(&[2])]));
    assert_says(
        &text,
        &["backward failed", "every output is undefined", "powers: no gradient at all"],
    );
}

#[test]
fn a_gradient_in_spite_of_undefined_ones_is_found() {
    let inventive = powers(|x, square, cube| match (square, cube) {
        (None, None) => Ok(Some(x.ones_like())),
        _ => right_powers(x, square, cube),
    });
    let text = refusal(check(inventive, &[&variable(&[2])]));
    assert_says(
        &text,
        &["the gradient is 1.0 at element [0]", "every incoming gradient is undefined"],
    );
}

#[test]
fn a_backward_that_fails_without_the_first_gradient_is_found() {
    let needy = powers(|x, square, cube| match (square, cube) {
        (None, Some(_)) => Err(Error::msg("the first is missing")),
        _ => right_powers(x, square, cube),
    });
    // The rows for output 1 are computed without the first gradient, so they already fail.
    let text = refusal(check(needy, &[&variable(&[2])]));
    assert_says(&text, &["backward failed for row 0 of output 1", "powers: the first is missing"]);
}

/// (x, 2x, 3x), with any backward: a function of the incoming gradients, which are not
/// materialised.
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
    let terms = grads
        .into_iter()
        .zip([1.0, 2.0, 3.0])
        .filter_map(|(grad, factor)| grad.map(|grad| grad * factor));
    Ok(terms.reduce(|sum, term| sum + term))
}

/// A row of a Jacobian has only one gradient. Only the check that omits one gradient at a time
/// reaches this error.
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
    assert_says(
        &text,
        &["backward failed", "of output 1 is undefined", "multiples: the second is missing"],
    );
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
    assert_says(
        &text,
        &["gradient of output 2 is undefined", "1.0 at element [0], but 3.0 when it is zero"],
    );

    let right = |inputs: &[Tensor]| apply(Multiples(right_multiples), &[Some(&inputs[0])]);
    check(right, &[&variable(&[2])]).unwrap();
}

#[test]
fn a_dropped_term_of_the_second_output_is_found() {
    let forgetful =
        powers(|x, square, cube| right_powers(x, square, cube.map(Tensor::zeros_like).as_ref()));
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
    // An input that does not require grad is not checked.
    check(product, &[&x, &y]).unwrap();
}

#[test]
fn a_wrong_gradient_of_a_view_is_found_at_its_own_index() {
    let wrong = square(|x, grad| {
        let gradient = grad * x * 2.0;
        let _ = gradient.get(2).get(1).zero_();
        gradient
    });
    let x = (random(&[4, 6]).abs() + 0.5)
        .slice(1, 1, 6, 2)
        .transpose(0, 1)
        .detach()
        .set_requires_grad(true);
    let text = refusal(check(wrong, &[&x]));
    assert_says(
        &text,
        &["row 9 (output element [2, 1])", "column 9 (input element [2, 1])", "1 of 144"],
    );
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
