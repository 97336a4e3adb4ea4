//! Tests of anomaly mode, which reports the forward that made the node that failed.

use super::*;

fn failing() -> impl Function {
    op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, _| Err(Error::msg("out of luck")))
}

/// A function whose name should be in the backtrace.
#[inline(never)]
fn the_forward_in_question(x: &Tensor) -> Tensor {
    std::hint::black_box(run(failing(), std::hint::black_box(x)))
}

/// Whether the backtrace names this function. In a program without symbols, as in a bundle, the
/// backtrace names no function.
fn has_frame(error: &str, function: &str) -> bool {
    error.contains(function) || error.contains("<unknown>")
}

#[test]
fn an_error_names_the_forward() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let guard = detect_anomaly(true);
    let y = the_forward_in_question(&x);
    let error = backward(&[&y], &Default::default()).expect_err("it fails").to_string();
    assert!(error.starts_with("op: out of luck"), "{error}");
    assert!(error.contains("Error detected in opBackward"), "{error}");
    assert!(
        error.contains("called here:\ntests/autograd/main.rs:"),
        "where `run` calls apply: {error}"
    );
    assert!(has_frame(&error, "the_forward_in_question"), "{error}");
    let error = gradient_of(&the_forward_in_question(&x), &x).expect_err("it fails").to_string();
    assert!(has_frame(&error, "the_forward_in_question"), "through grad(), too: {error}");
    drop(guard);
    let error = gradient_of(&the_forward_in_question(&x), &x).expect_err("it fails").to_string();
    assert_eq!(error, "op: out of luck", "without the mode");
}

/// 1·x, whose backward applies another operator, which fails when it is differentiated in turn.
struct Outer;

impl Function for Outer {
    const NAME: &'static str = "outer";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        Ok(inputs.get(0)?.copy().into())
    }
    fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok(run(failing(), grads.get(0)?).into())
    }
}

#[test]
fn a_node_made_in_a_backward_names_that_backwards_forward() {
    let _alone = alone();
    let _guard = detect_anomaly(true);
    let x = leaf(&[3.0]);
    let y = run(Outer, &x);
    let first = grad(&[&(&y * &y)], &[&x], &create()).and_then(Tensors::single).expect("first");
    let error = gradient_of(&first, &x).expect_err("the inner one fails").to_string();
    assert!(
        error.contains(
            "Error detected in opBackward, which was made by the backward of outerBackward"
        ),
        "{error}"
    );
}

#[test]
fn nan_is_an_error_if_wanted() {
    let _alone = alone();
    let nan = || {
        op(
            |_, inputs| Ok(inputs.get(0)?.copy().into()),
            |_, grads| Ok((grads.get(0)? * f64::NAN).into()),
        )
    };
    let x = leaf(&[3.0]);
    for (check_nan, fails) in [(true, true), (false, false)] {
        let _guard = detect_anomaly(check_nan);
        let outcome = gradient_of(&run(nan(), &x), &x);
        assert_eq!(outcome.is_err(), fails);
        if let Err(error) = outcome {
            let error = error.to_string();
            assert!(error.contains("opBackward") && error.contains("nan values"), "{error}");
            assert!(has_frame(&error, "nan_is_an_error_if_wanted"), "the trace: {error}");
        }
    }
    // For libtorch's own nodes, the error has libtorch's own report.
    let _guard = detect_anomaly(true);
    let y = x.log() * 0.0 / 0.0;
    let error = gradient_of(&y, &x).expect_err("NaN").to_string();
    assert!(
        error.contains("nan values") && error.contains("Error detected in MulBackward1"),
        "{error}"
    );
}
