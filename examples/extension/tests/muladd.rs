//! Tests operators that C++ registers, called by name.

use extension::muladd::{add_out, mul, muladd};
use tch::{Device, Kind, Tensor};
use tch_extension::testing::{assert_close, conformance, devices, gradcheck};

fn values(size: &[i64], kind: Kind, device: Device) -> Tensor {
    Tensor::randn(size, (kind, device))
}

#[test]
fn values_are_right() {
    for device in devices() {
        for size in [&[3, 5][..], &[0], &[], &[1025]] {
            let (a, b) = (values(size, Kind::Float, device), values(size, Kind::Float, device));
            assert_close(&muladd(&a, &b, 0.5).expect("muladd"), &(&a * &b + 0.5), 1e-6, 1e-6);
            assert_close(&mul(&a, &b).expect("mul"), &(&a * &b), 1e-6, 1e-6);
            let mut out = a.empty_like();
            add_out(&a, &b, &mut out).expect("add_out");
            assert_close(&out, &(&a + &b), 1e-6, 1e-6);
        }
    }
}

#[test]
fn muladd_is_differentiable() {
    for device in devices() {
        let leaf = || values(&[3, 4], Kind::Double, device).set_requires_grad(true);
        let (a, b) = (leaf(), leaf());
        let call = |inputs: &[Tensor]| muladd(&inputs[0], &inputs[1], 0.5);
        gradcheck(call, &[&a, &b], &Default::default()).expect("gradcheck");
        conformance(call, &[&a, &b], &Default::default()).expect("conformance");
    }
}

#[test]
fn a_gradient_that_nobody_wrote_is_an_error() {
    let a = values(&[3], Kind::Float, Device::Cpu).set_requires_grad(true);
    let error = mul(&a, &a).expect_err("there is no backward").to_string();
    assert!(error.contains("extension_example::mul(Tensor a, Tensor b) -> Tensor"), "{error}");
    assert!(error.contains("with_backward"), "{error}");
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let (a, b) = (values(&[3], Kind::Float, Device::Cpu), values(&[4], Kind::Float, Device::Cpu));
    let error = muladd(&a, &b, 1.0).expect_err("3 is not 4").to_string();
    assert!(error.contains("muladd: a has shape [3], but b has [4]"), "{error}");
    let error = muladd(&a, &a.to_kind(Kind::Double), 1.0).expect_err("kinds").to_string();
    assert!(error.contains("a is Float, but b is Double"), "{error}");
}
