//! Tests of functions and inputs that cannot be checked and must be refused.

use super::*;

#[test]
fn float_inputs_are_refused() {
    let x = Tensor::from_slice(&[1_f32]).set_requires_grad(true);
    let text = refusal(check(|inputs| Ok(inputs[0].exp()), &[&variable(&[1]), &x]));
    assert_says(
        &text,
        &["gradcheck: inputs[1]: expected kind Double", "got Float", "to_kind(Kind::Double)"],
    );
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
        assert_says(
            &text,
            &["gradcheck: inputs[0]: expected elements that do not overlap", "contiguous()"],
        );
    }
}

#[test]
fn undefined_inputs_and_functions_without_output_are_refused() {
    let result =
        gradcheck(|inputs| Ok(inputs[0].exp()), &[&Tensor::new()], &GradcheckOptions::default());
    assert_says(&refusal(result), &["gradcheck: inputs[0]: expected a tensor"]);
    assert_says(
        &refusal(check(|_| Ok(()), &[&variable(&[1])])),
        &["gradcheck: function: expected one output"],
    );
}

#[test]
fn an_output_that_changes_its_shape_is_refused() {
    // At first all three numbers are positive, but after a small step down one of them is not.
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
