//! The same operators from Rust, which finds them by name.

// Links the crate, which registers them when this program starts.
use python_ops as _;

use tch::{Device, Kind, Tensor};
use tch_extension::library::{Operator, operators, registration_error};
use tch_extension::testing::{conformance, gradcheck, gradgradcheck};
use tch_extension::{Result, args};

fn leaf(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

#[test]
fn all_are_registered() {
    registration_error().expect("no error of registration");
    let names = operators("python_ops").expect("the names");
    let expected = ["ema_", "geglu", "muladd", "muladd_backward", "swish", "weighted_sum"];
    assert_eq!(names, expected.map(|name| format!("python_ops::{name}")));
}

#[test]
fn muladd() {
    let operator = Operator::find("python_ops::muladd").expect("the operator");
    let (a, b) = (leaf(&[3, 4]), leaf(&[3, 4]));
    let call =
        |inputs: &[Tensor]| -> Result<Tensor> { operator.call(args![&inputs[0], &inputs[1], 2.0]) };
    gradcheck(call, &[&a, &b], &Default::default()).expect("the backward pass");
    gradgradcheck(call, &[&a, &b], &Default::default()).expect("the second derivative");
    conformance(call, &[&a, &b], &Default::default()).expect("conformance");
}

#[test]
fn weighted_sum() {
    let operator = Operator::find("python_ops::weighted_sum").expect("the operator");
    let (a, b, weights) = (leaf(&[3, 4]), leaf(&[3, 4]), leaf(&[2]));
    let call = |inputs: &[Tensor]| -> Result<Tensor> {
        operator.call(args![&[&inputs[0], &inputs[1]], weights = &inputs[2]])
    };
    gradcheck(call, &[&a, &b, &weights], &Default::default()).expect("the backward pass");
    let message = call(&[a.shallow_clone(), b.narrow(0, 0, 2), weights]).unwrap_err().to_string();
    assert!(message.contains("weighted_sum: tensors: expected shape"), "{message}");
}

#[test]
fn ema_writes_to_its_first_argument() {
    let operator = Operator::find("python_ops::ema_").expect("the operator");
    let average = Tensor::from_slice(&[1.0, 2.0]);
    let value = Tensor::from_slice(&[3.0, 2.0]);
    let () = operator.call(args![&average, &value, 0.5]).expect("a call");
    assert_eq!(average, Tensor::from_slice(&[2.0, 2.0]));
}
