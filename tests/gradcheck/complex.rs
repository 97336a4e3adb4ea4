//! Tests of complex inputs and outputs. They use PyTorch's definition of the gradient: for a real
//! number `s` and `z = x + iy`, it is `∂s/∂x + i ∂s/∂y`.

use super::*;
use tch_extension::testing::{GradgradcheckOptions, gradgradcheck};

fn complex(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::ComplexDouble, Device::Cpu)).set_requires_grad(true)
}

fn of(parts: &[f64]) -> Tensor {
    Tensor::from_slice(parts).reshape([-1, 2]).view_as_complex().set_requires_grad(true)
}

/// Complex numbers away from zero, where |z| has no derivative.
fn away_from_zero(size: &[i64]) -> Tensor {
    let z = complex(size).detach();
    (&z + z.sgn()).set_requires_grad(true)
}

#[test]
fn right_complex_functions_pass() -> Result<()> {
    let (z, w) = (complex(&[2, 3]), complex(&[3]));
    // Holomorphic functions.
    check(|inputs| Ok(&inputs[0] * &inputs[0]), &[&z])?;
    check(|inputs| Ok(inputs[0].matmul(&inputs[1])), &[&z, &w])?;
    // A function that is not holomorphic.
    check(|inputs| Ok(inputs[0].conj() * &inputs[1]), &[&z, &w])?;
    // Functions from complex to real numbers.
    check(|inputs| Ok(inputs[0].abs()), &[&away_from_zero(&[2, 3])])?;
    check(|inputs| Ok([inputs[0].real(), inputs[0].imag()]), &[&z])?;
    // A function from real to complex numbers, and one with both among its inputs and outputs.
    let x = variable(&[3]);
    check(|inputs| Ok(Tensor::complex(&inputs[0], &inputs[0].sin())), &[&x])?;
    check(
        |inputs| Ok([&inputs[0] * &inputs[1], inputs[0].exp(), inputs[1].abs()]),
        &[&x, &away_from_zero(&[3])],
    )
}

/// z·z with the given backward.
fn complex_square(
    backward: fn(&Tensor, &Tensor) -> Tensor,
) -> impl Fn(&[Tensor]) -> Result<Tensors> {
    square(backward)
}

#[test]
fn a_complex_backward_of_ones_own_passes_with_the_conjugate_and_not_without() {
    let z = of(&[1.0, 2.0, -0.5, 0.25]);
    check(complex_square(|z, grad| grad * (z * 2.0).conj()), &[&z]).unwrap();
    let text = refusal(check(complex_square(|z, grad| grad * z * 2.0), &[&z]));
    // The derivatives of the real part are 2 Re(z) with respect to x and -2 Im(z) with respect to
    // y.
    assert_says(
        &text,
        &["row 0 (output element [0], real part), column 1 (input element [0], imaginary part)"],
    );
    assert_says(&text, &["analytical 4.0, numerical -4.0", "4 of 16 entries are wrong"]);
}

/// On the real axis a conjugate makes no difference, so gradcheck must also move inputs along the
/// imaginary axis.
#[test]
fn a_missing_conjugate_of_the_incoming_gradient_is_found() {
    // z|² as a real output; its gradient is 2z.
    struct Norm(bool);
    impl Function for Norm {
        const NAME: &'static str = "norm";
        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            let z = inputs.get(0)?;
            saver.save(z);
            Ok((z * z.conj()).real().into())
        }
        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            let z = ctx.saved(0)?;
            let z = if self.0 { z } else { z.conj() };
            Ok((grads.get(0)? * z * 2.0).into())
        }
    }
    let z = of(&[1.0, 2.0]);
    check(|inputs| apply(Norm(true), &[Some(&inputs[0])]), &[&z]).unwrap();
    let text = refusal(check(|inputs| apply(Norm(false), &[Some(&inputs[0])]), &[&z]));
    assert_says(
        &text,
        &["row 0 (output element [0]), column 1 (input element [0], imaginary part)"],
    );
    assert_says(&text, &["analytical -4.0, numerical 4.0", "1 of 2 entries is wrong"]);
}

/// x + i·sin x, whose backward multiplies the imaginary part of the incoming gradient by this sign.
struct Curve(f64);

impl Function for Curve {
    const NAME: &'static str = "curve";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok(Tensor::complex(x, &x.sin()).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let grad = grads.get(0)?;
        Ok((grad.real() + grad.imag() * ctx.saved(0)?.cos() * self.0).into())
    }
}

#[test]
fn a_real_to_complex_backward_of_ones_own_passes_or_is_found() {
    let x = Tensor::from_slice(&[0.5, -1.0]).set_requires_grad(true);
    check(|inputs| apply(Curve(1.0), &[Some(&inputs[0])]), &[&x]).unwrap();
    let text = refusal(check(|inputs| apply(Curve(-1.0), &[Some(&inputs[0])]), &[&x]));
    assert_says(
        &text,
        &["row 1 (output element [0], imaginary part), column 0 (input element [0])"],
    );
    assert_says(&text, &["2 of 8 entries are wrong"]);
    // libtorch itself refuses a complex gradient for a real input.
    let wrong = square(|x, grad| Tensor::complex(&(grad * x * 2.0), grad));
    assert_says(&refusal(check(wrong, &[&x])), &["backward failed for row 0 of output 0"]);
}

#[test]
fn complex_gradients_from_nowhere_are_found() {
    let z = of(&[1.0, 2.0]);
    let is_zero = |grad: &Tensor| grad.abs().sum(Kind::Double).double_value(&[]) == 0.0;
    let wrong = square(move |z, grad| match is_zero(grad) {
        true => Tensor::complex(&z.real().zeros_like(), &z.real().ones_like()),
        false => grad * (z * 2.0).conj(),
    });
    let text = refusal(check(wrong, &[&z]));
    assert_says(
        &text,
        &["the gradient is 1.0 at element [0], imaginary part, although every incoming gradient"],
    );
    // This backward is right for the gradients 1 and i, but it is not linear.
    let bent = square(|z, grad| {
        Tensor::complex(&grad.real().abs(), &grad.imag().abs()) * (z * 2.0).conj()
    });
    assert_says(&refusal(check(bent, &[&z])), &["backward has to be linear"]);
}

#[test]
fn complex_inputs_of_any_layout_pass() -> Result<()> {
    let base = complex(&[4, 6]).detach();
    for view in [
        base.transpose(0, 1),
        base.slice(1, 1, 6, 2).transpose(0, 1),
        base.select(1, 3),
        base.conj(),
    ] {
        let view = view.narrow(0, 1, 2).detach().set_requires_grad(true);
        check(square(|z, grad| grad * (z * 2.0).conj()), &[&view])?;
    }
    check(|inputs| Ok(inputs[0].exp()), &[&complex(&[])])?;
    check(|inputs| Ok(inputs[0].exp()), &[&complex(&[0, 2])])
}

#[test]
fn smaller_complex_kinds_are_refused() {
    let z = Tensor::randn([1], (Kind::ComplexFloat, Device::Cpu)).set_requires_grad(true);
    let text = refusal(check(|inputs| Ok(inputs[0].exp()), &[&z]));
    assert_says(
        &text,
        &["expected kind ComplexDouble", "got ComplexFloat", "to_kind(Kind::ComplexDouble)"],
    );
}

#[test]
fn complex_outputs_that_hide_their_graph_are_found() {
    let text = refusal(check(|inputs| Ok(inputs[0].detach() * 2.0), &[&of(&[3.0, 1.0])]));
    assert_says(&text, &["no output requires grad", "output 0, input 0", "numerical 2."]);
}

#[test]
fn fast_mode_tells_a_conjugate_too() {
    let fast = GradcheckOptions { fast_mode: true, ..Default::default() };
    let z = of(&[1.0, 2.0, -0.5, 0.25]);
    check_with(complex_square(|z, grad| grad * (z * 2.0).conj()), &[&z], &fast).unwrap();
    let text = refusal(check_with(complex_square(|z, grad| grad * z * 2.0), &[&z], &fast));
    assert_says(&text, &["the gradient is wrong"]);
}

#[test]
fn second_derivatives_of_complex_functions() {
    let z = complex(&[2]);
    let options = GradgradcheckOptions::default();
    gradgradcheck(|inputs| Ok(&inputs[0] * &inputs[0].conj() * &inputs[0]), &[&z], &options)
        .unwrap();
    gradgradcheck(
        |inputs| Ok(Tensor::complex(&inputs[0].sin(), &inputs[0])),
        &[&variable(&[2])],
        &options,
    )
    .unwrap();
}
