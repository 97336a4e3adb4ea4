//! Tests of the gradients that `grad` and `backward` compute.

use super::*;

#[test]
fn first_derivative_through_grad_and_through_backward() {
    let _alone = alone();
    let x = leaf(&[3.0, -2.0]);
    let y = square(&x);
    assert!(y.requires_grad() && !y.is_leaf());
    assert_eq!(values(&y), [9.0, 4.0]);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, -4.0]);
    assert!(!x.grad().defined(), "grad() leaves .grad alone");

    square(&square(&x)).sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), [108.0, -32.0]);
}

#[test]
fn grad_takes_vectors_and_says_what_is_unused() {
    let _alone = alone();
    let (x, unused) = (leaf(&[1.0, 2.0]), leaf(&[0.0]));
    let y = square(&x);
    let v = Tensor::from_slice(&[10.0, 100.0]);
    let options = GradOptions { grad_outputs: &[Some(&v)], ..keep() };
    let found = grad(&[&y], &[&x], &options).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [20.0, 400.0]);

    let error = grad(&[&y], &[&x, &unused], &options).expect_err("unused input").to_string();
    assert!(error.contains("appears to not have been used"), "{error}");
    let found = grad(&[&y], &[&x, &unused], &GradOptions { allow_unused: true, ..options })
        .expect("gradients");
    assert!(found.optional(0).is_some() && found.optional(1).is_none());

    let error =
        grad(&[&y, &y], &[&x], &options).expect_err("one vector for two outputs").to_string();
    assert!(error.contains("grad_outputs") && error.contains("2 entries"), "{error}");
    let error = grad(&[&y], &[&x], &keep()).expect_err("no vector for two elements").to_string();
    assert!(error.contains("scalar outputs"), "{error}");
}

#[test]
fn an_absent_vector_means_one() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let (y, z) = (square(&x).sum(Kind::Double), (&x * 7.0).sum(Kind::Double));
    let v = Tensor::from(10.0_f64);
    let options = GradOptions { grad_outputs: &[None, Some(&v)], ..Default::default() };
    let found = grad(&[&y, &z], &[&x], &options).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [76.0]);
}

#[test]
fn libtorchs_errors_come_without_its_backtrace() {
    let _alone = alone();
    let (x, unused) = (leaf(&[1.0]), leaf(&[0.0]));
    let y = square(&x).sum(Kind::Double);
    let error = grad(&[&y], &[&unused], &keep()).expect_err("unused input").to_string();
    assert!(!error.contains("frame #") && !error.contains("Exception raised from"), "{error}");
}

#[test]
fn lists_say_what_is_missing() {
    let list = || Tensors::from([None, Some(Tensor::from_slice(&[1.0]))]);
    assert!(
        list().optional(0).is_none()
            && list().optional(1).is_some()
            && list().optional(9).is_none()
    );
    for (result, expected) in [
        (list().get(0).map(|_| ()), "tensor 0 was asked for, but it is absent"),
        (list().get(9).map(|_| ()), "tensor 9 was asked for, but there are only 2"),
        (list().single().map(|_| ()), "expected 1 tensors, got 2, of which 1 are present"),
        (list().exactly::<2>().map(|_| ()), "expected 2 tensors, got 2, of which 1 are present"),
        (list().exactly::<3>().map(|_| ()), "expected 3 tensors, got 2, of which 1 are present"),
    ] {
        assert_eq!(result.expect_err(expected).to_string(), expected);
    }
}
