//! Tests of results.

use super::*;

#[test]
fn every_type_comes_back() {
    let x = doubles(&[1.0, 2.0]);
    type First = (Tensor, Vec<Tensor>, i64, f64, bool, String);
    let (double, list, int, float, bool, text): First =
        operator("first_results").call(args![&x]).unwrap();
    assert_eq!(double, doubles(&[2.0, 4.0]));
    assert_eq!(list, [doubles(&[1.0, 2.0]), doubles(&[3.0, 6.0])]);
    assert_eq!((int, float, bool, text.as_str()), (7, 0.5, true, "words"));
    type Second = (f64, Vec<i64>, Vec<f64>, Device, Kind, Option<i64>);
    let second: Second = operator("second_results").call(args![&x]).unwrap();
    assert_eq!(second, (1.5, vec![1, 2, 3], vec![0.5, 1.5], Device::Cpu, Kind::Double, None));
    let some: Vec<Option<Tensor>> = operator("some_tensors").call(args![&x]).unwrap();
    assert_eq!(some, [Some(x.shallow_clone()), None]);
    operator("nothing").call::<()>(args![&x]).unwrap();
}

#[test]
fn more_than_six_results_come_back_as_a_tuple() {
    let x = doubles(&[1.0, 2.0]);
    type Seven = (Tensor, i64, Tensor, f64, Tensor, bool, String);
    let (one, int, three, float, five, bool, text): Seven =
        operator("seven_results").call(args![&x]).unwrap();
    assert_eq!((one, three, five), (&x * 1, &x * 3, &x * 5));
    assert_eq!((int, float, bool, text.as_str()), (2, 0.25, true, "seven"));
    type T = Tensor;
    type Twelve = (T, T, T, T, T, T, T, T, T, T, T, T);
    let twelve: Twelve = operator("twelve_multiples").call(args![&x]).unwrap();
    assert_eq!((twelve.0, twelve.6, twelve.11), (&x * 1, &x * 7, &x * 12));
}

#[test]
fn a_vector_takes_any_number_of_results() {
    let x = doubles(&[1.0, 2.0]);
    for (name, count) in
        [("same", 1), ("two_multiples", 2), ("twelve_multiples", 12), ("thirteen_multiples", 13)]
    {
        let results: Vec<Tensor> = operator(name).call(args![&x]).unwrap();
        let expected: Vec<Tensor> = (1..=count).map(|factor| &x * factor).collect();
        assert_eq!(results, expected, "{name}");
    }
    assert!(operator("nothing").call::<Vec<Tensor>>(args![&x]).unwrap().is_empty());
    // A single list gives its own items, including None.
    let list: Vec<Option<Tensor>> = operator("some_tensors").call(args![&x]).unwrap();
    assert_eq!(list, [Some(x.shallow_clone()), None]);
    // This also works with a user-defined backward.
    let op = operator("thirteen_multiples").with_backward(|_, grads| {
        let terms = grads.iter().flatten().zip(1..).map(|(grad, factor)| grad * factor);
        Ok(terms.reduce(|sum, term| sum + term).into())
    });
    let x = leaf(&[1.0, 2.0]);
    let results: Vec<Tensor> = op.call(args![&x]).unwrap();
    Tensor::stack(&results, 0).sum(Kind::Double).backward();
    assert_eq!(x.grad(), doubles(&[91.0, 91.0]));
    // The message names the position of the result that is not a tensor.
    let text = message(operator("seven_results").call::<Vec<Tensor>>(args![&x]));
    assert!(
        text.contains("result 1 is Int(2), and tch::") && text.contains("Tensor was asked for"),
        "{text}"
    );
}

#[test]
fn results_of_another_type_are_an_error() {
    let x = doubles(&[1.0]);
    for (text, expected) in [
        (
            message(operator("nothing").call::<Tensor>(args![&x])),
            "it has 0 results, and 1 were asked for",
        ),
        (
            message(operator("first_results").call::<Tensor>(args![&x])),
            "it has 6 results, and 1 were asked for",
        ),
        (
            message(operator("thrice").call::<f64>(args![1])),
            "result 0 is Int(3), and f64 was asked for",
        ),
        (message(operator("some_tensors").call::<Vec<Tensor>>(args![&x])), "result 0 is None"),
    ] {
        assert!(text.contains(expected) && text.contains("the schema is tch_test::"), "{text}");
    }
    let Outputs(all) = operator("thrice").call(args![1]).unwrap();
    assert!(matches!(all[..], [Output::Int(3)]));
    let Outputs(all) = operator("first_results").call(args![&x]).unwrap();
    assert!(matches!(
        &all[..],
        [Output::Tensor(_), Output::List(_), .., Output::Bool(true), Output::String(_)]
    ));
    let text = message(operator("no_text").call::<String>(args![]));
    assert!(text.contains("it returned a str that is not valid UTF-8: invalid utf-8"), "{text}");
}

#[test]
fn what_is_written_is_the_same_tensor_with_a_new_version() {
    let x = doubles(&[1.0, 2.0]);
    let y: Tensor = operator("scale_").call(args![&x, 3.0]).unwrap();
    assert_eq!(x, doubles(&[3.0, 6.0]));
    assert_eq!(x.data_ptr(), y.data_ptr());
    let out = doubles(&[0.0, 0.0]);
    operator("scale_out").call::<()>(args![&x, 2.0, out = &out]).unwrap();
    assert_eq!(out, doubles(&[6.0, 12.0]));
    // The kernel writes through a pointer, but the change of a saved tensor must nevertheless be
    // noticed.
    let weight = leaf(&[1.0, 1.0]);
    let product = &weight * &x;
    let _ = operator("scale_").call::<Tensor>(args![&x, 3.0]).unwrap();
    let backward = product.sum(Kind::Double).f_backward();
    assert!(
        backward.expect_err("an error").to_string().contains("modified by an inplace operation")
    );
}

#[test]
fn operators_are_found_by_name_and_overload() {
    assert_eq!(operator("twice.int").call::<i64>(args![3]).unwrap(), 6);
    assert_eq!(operator("twice.float").call::<f64>(args![1.5]).unwrap(), 3.0);
    let only = operator("thrice");
    assert_eq!((only.name(), only.call::<i64>(args![2]).unwrap()), ("tch_test::thrice.only", 6));
    assert_eq!(only.schema(), "tch_test::thrice.only(int x) -> int");
    let text = message(Operator::find("tch_test::twice"));
    assert_eq!(
        text,
        "there is no operator tch_test::twice, but tch_test::twice.float, tch_test::twice.int"
    );
    for name in ["tch_test::missing", "tch_test", "", "::", "a\0b", "tch_test::thrice.other"] {
        let text = message(Operator::find(name));
        assert!(text.starts_with("there is no operator "), "{text}");
    }
    let names = operators("tch_test").unwrap();
    assert!(
        names.contains(&"tch_test::twice.int".to_string())
            && names.iter().all(|name| name.starts_with("tch_test::"))
    );
    assert!(operators("tch_tes").unwrap().is_empty());
}

#[test]
fn operators_of_libtorch_that_tch_lacks() {
    let x = Tensor::rand([3, 4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let (w, b) = (
        Tensor::rand([5, 4], (Kind::Float, Device::Cpu)),
        Tensor::rand([5], (Kind::Float, Device::Cpu)),
    );
    let scalars: Vec<f64> = vec![];
    let pointwise = Operator::find("mkldnn::_linear_pointwise").unwrap();
    let none: Option<&str> = None;
    let y: Tensor = pointwise.no_grad().call(args![&x, &w, &b, "relu", &scalars, none]).unwrap();
    assert!(y.allclose(&x.linear(&w, Some(&b)).relu(), 1e-5, 1e-6, false) && !y.requires_grad());
    // tch's binding passes `use_gelu` in the place of beta.
    assert_eq!(
        b.internal_addmm_activation(&x, &w.transpose(0, 1), false),
        x.mm(&w.transpose(0, 1)).relu()
    );
    let op = Operator::find("aten::_addmm_activation").unwrap();
    let y: Tensor = op.call(args![&b, &x, &w.transpose(0, 1)]).unwrap();
    assert!(y.allclose(&x.linear(&w, Some(&b)).relu(), 1e-5, 1e-6, false) && y.requires_grad());
}
