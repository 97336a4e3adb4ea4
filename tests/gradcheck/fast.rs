//! Tests of the fast mode.

use super::*;

fn fast() -> GradcheckOptions {
    GradcheckOptions { fast_mode: true, ..Default::default() }
}

#[test]
fn fast_mode_accepts_right_gradients_of_any_layout() {
    let (x, w) = (variable(&[50, 40]), variable(&[40, 30]));
    check_with(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&x, &w], &fast()).expect("a product");
    let strided = random(&[8, 31]).slice(1, 1, 31, 3).transpose(0, 1).set_requires_grad(true);
    let two = |inputs: &[Tensor]| Ok([inputs[0].sin(), inputs[0].sum(Kind::Double) * &inputs[0]]);
    check_with(two, &[&strided], &fast()).expect("two outputs");
    check_with(|inputs| Ok(inputs[0].exp()), &[&variable(&[0, 3])], &fast())
        .expect("nothing at all");
    // The second input is detached, so its derivative is missing.
    check_with(|inputs| Ok(&inputs[0] * inputs[1].detach()), &[&x, &variable(&[50, 40])], &fast())
        .expect_err("the second has none, but the output depends on it");
}

#[test]
fn fast_mode_names_output_and_input_of_a_wrong_gradient() {
    let x = (random(&[50, 40]).abs() + 1.0).set_requires_grad(true);
    let wrong = square(|x, grad| grad * x * 2.01);
    let text = refusal(check_with(&wrong, &[&x], &fast()));
    assert_says(
        &text,
        &["gradcheck: output 0, input 0: the gradient is wrong", "without fast_mode it says where"],
    );
    let second = |inputs: &[Tensor]| Ok([inputs[0].exp(), wrong(&inputs[1..])?.single()?]);
    let text = refusal(check_with(second, &[&variable(&[2]), &x], &fast()));
    assert_says(&text, &["output 1, input 1"]);
    let nan = square(|x, grad| grad * x * f64::NAN);
    assert_says(&refusal(check_with(nan, &[&x], &fast())), &["the gradient is wrong"]);
}

#[test]
fn fast_mode_runs_the_backward_twice() {
    let calls = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let drifting = square(move |x, grad| {
        grad * x * (2.0 + 1e-9 * calls.fetch_add(1, Ordering::SeqCst) as f64)
    });
    let x = variable(&[5]);
    assert_says(&refusal(check_with(&drifting, &[&x], &fast())), &["not deterministic"]);
    let tolerant = GradcheckOptions { nondet_tol: 1e-6, ..fast() };
    check_with(&drifting, &[&x], &tolerant).expect("within what is allowed");
}

#[test]
fn what_fast_mode_misses_slow_mode_finds() {
    // Only the last of many gradients is slightly wrong.
    let last = square(|x, grad| {
        let right = grad * x * 2.0;
        let _ = right.narrow(0, x.size()[0] - 1, 1).f_mul_scalar_(1.05).expect("in place");
        right
    });
    let x = (random(&[4000]).abs() + 1.0).set_requires_grad(true);
    check_with(&last, &[&x], &fast()).expect("drowned");
    let few = (random(&[40]).abs() + 1.0).set_requires_grad(true);
    assert_says(&refusal(check_with(&last, &[&few], &GradcheckOptions::default())), &["column 39"]);
}

/// x·A, whose backward wrongly does not transpose A.
struct Untransposed;

impl Function for Untransposed {
    const NAME: &'static str = "untransposed";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        saver.save(inputs.get(1)?);
        Ok(inputs.get(0)?.f_matmul(inputs.get(1)?)?.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok([Some(grads.get(0)?.f_matmul(&ctx.saved(0)?)?), None].into())
    }
}

#[test]
fn fast_mode_tells_a_jacobian_from_its_transpose() {
    let (x, a) = (variable(&[30]), random(&[30, 30]));
    let text = refusal(check_with(
        |inputs| apply(Untransposed, &[Some(&inputs[0]), Some(&inputs[1])]),
        &[&x, &a],
        &fast(),
    ));
    assert_says(&text, &["output 0, input 0: the gradient is wrong"]);
}

#[test]
fn fast_mode_moves_one_input_at_a_time() {
    // The function is bilinear, so differences are exact for any step size.
    let options = GradcheckOptions { eps: 0.5, ..fast() };
    let (x, w) = (variable(&[3, 4]), variable(&[3, 4]));
    check_with(|inputs| Ok(&inputs[0] * &inputs[1]), &[&x, &w], &options).expect("a product");
}
