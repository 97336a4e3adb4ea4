//! Tests of `assert_close` and `tolerance`.

use super::*;

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
    let text =
        difference(&[1.0, 2.0, 3.5, 4.0, 9.0, 6.0], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 0.1, 0.05);
    assert_says(
        &text,
        &["element [1, 1]: actual 9.0, expected 5.0", "differ by 4.0, allowed is 0.55"],
    );
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
    assert_eq!(
        compare(Tensor::new(), Tensor::from(1.0)),
        "assert_close: actual is an undefined tensor"
    );
    let complex = Tensor::zeros([3], (Kind::ComplexDouble, Device::Cpu));
    assert_eq!(
        compare(complex, Tensor::zeros([3], options)),
        "assert_close: actual is ComplexDouble [3], expected is Double [3]"
    );
}

#[test]
fn tolerances_are_those_of_torch_testing() {
    assert_eq!(tolerance(Kind::Double), (1e-7, 1e-7));
    assert_eq!(tolerance(Kind::Float), (1.3e-6, 1e-5));
    assert_eq!(tolerance(Kind::Half), (1e-3, 1e-5));
    assert_eq!(tolerance(Kind::BFloat16), (1.6e-2, 1e-5));
    assert_eq!(tolerance(Kind::Int64), (0.0, 0.0));
}
