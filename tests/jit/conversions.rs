//! Tests of each type of argument and result that a function in a PYBIND11_MODULE may have.

use super::*;
use tch_extension::library::{Args, FromOutputs};

fn module() -> &'static Module {
    static MODULE: OnceLock<Result<Module>> = OnceLock::new();
    let module = MODULE
        .get_or_init(|| extension("conversions").source(python_source("conversions.cpp")).load());
    module.as_ref().expect("a module")
}

fn call<T: FromOutputs>(name: &str, arguments: Args<'_>) -> Result<T> {
    module().operator(name)?.call(arguments)
}

fn ones() -> Tensor {
    Tensor::ones([2, 2], (Kind::Float, Device::Cpu))
}

#[test]
fn numbers() {
    for (name, good, bad) in [
        ("int32", [i64::from(i32::MIN), i64::from(i32::MAX)], [i64::from(i32::MIN) - 1, 1 << 31]),
        ("uint32", [0, i64::from(u32::MAX)], [-1, 1 << 32]),
        ("uint8", [0, 255], [-1, 256]),
        ("uint64", [0, i64::MAX], [-1, i64::MIN]),
    ] {
        for value in good {
            assert_eq!(call::<i64>(name, args![value]).unwrap(), value, "{name}");
        }
        for value in bad {
            let text = message(call::<i64>(name, args![value]));
            assert_says(
                &text,
                &[
                    &format!("conversions::{name}"),
                    "arg0",
                    "expected an integer",
                    &value.to_string(),
                ],
            );
        }
    }
    for name in ["int64", "long"] {
        assert_eq!(call::<i64>(name, args![i64::MIN]).unwrap(), i64::MIN);
    }
    assert_eq!(call::<f64>("float32", args![0.1]).unwrap(), f64::from(0.1_f32));
    assert_eq!(call::<f64>("float64", args![0.1]).unwrap(), 0.1);
    assert_eq!(call::<f64>("float64", args![3_i64]).unwrap(), 3.0);
    assert!(!call::<bool>("boolean", args![true]).unwrap());
}

#[test]
fn texts_kinds_devices_scalars() {
    assert_eq!(call::<String>("string", args!["a"]).unwrap(), "a!");
    assert_eq!(call::<String>("string_by_value", args!["a"]).unwrap(), "a?");
    assert_eq!(call::<String>("chars", args!["abc"]).unwrap(), "abc");
    assert_eq!(call::<Tensor>("kind", args![&ones(), Kind::Double]).unwrap().kind(), Kind::Double);
    assert_eq!(call::<Kind>("kind_of", args![&ones()]).unwrap(), Kind::Float);
    assert_eq!(call::<Device>("device", args![Device::Cpu]).unwrap(), Device::Cpu);
    assert_eq!(call::<Tensor>("scalar", args![&ones(), 2.5]).unwrap(), ones() * 2.5);
}

#[test]
fn lists() {
    assert_eq!(call::<i64>("sum", args![[1_i64, 2, 3]]).unwrap(), 6);
    assert_says(
        &message(call::<i64>("sum", args![[1_i64, 1 << 40]])),
        &["conversions::sum", "expected an integer"],
    );
    assert_eq!(call::<Vec<i64>>("ints", args![[4_i64, 5]]).unwrap(), [4, 5]);
    assert_eq!(call::<Vec<f64>>("floats", args![[0.5, 1.5]]).unwrap(), [0.5, 1.5]);
    assert_eq!(call::<Vec<f64>>("doubles", args![[0.1]]).unwrap(), [0.1]);
    assert_eq!(call::<Vec<bool>>("booleans", args![[true, false]]).unwrap(), [true, false]);
    assert_eq!(call::<Vec<String>>("strings", args![["x", "y"]]).unwrap(), ["x", "y"]);
    assert_eq!(call::<Tensor>("reshape", args![&ones(), [4_i64]]).unwrap().size(), [4]);
    for name in ["cat", "cat_vector"] {
        assert_eq!(call::<Tensor>(name, args![[&ones(), &ones()]]).unwrap().size(), [4, 2]);
    }
    let some = ones();
    assert_eq!(call::<Vec<bool>>("present", args![[Some(&some), None]]).unwrap(), [true, false]);
    let swapped: Vec<Tensor> = call("swap", args![[&ones(), &some.zeros_like()]]).unwrap();
    assert_eq!(swapped, [some.zeros_like(), ones()]);
    assert_says(
        &message(call::<Vec<Tensor>>("swap", args![[&ones()]])),
        &["arg0", "expected a list of 2, got one of 1"],
    );
}

#[test]
fn what_may_be_absent() {
    assert_eq!(call::<Tensor>("or_zeros", args![None::<&Tensor>]).unwrap().size(), [2]);
    assert_eq!(call::<Tensor>("or_zeros", args![&ones()]).unwrap(), ones());
    assert_eq!(call::<i64>("or_seven", args![None::<i64>]).unwrap(), 7);
    assert_eq!(call::<i64>("or_seven", args![3_i64]).unwrap(), 3);
    assert_eq!(
        call::<Tensor>("sum_dims", args![&ones(), None::<i64>]).unwrap(),
        Tensor::from(4.0_f32)
    );
    assert_eq!(call::<Tensor>("sum_dims", args![&ones(), [0_i64]]).unwrap().size(), [2]);
    assert_says(&message(call::<Tensor>("scale", args![None::<&Tensor>])), &["conversions::scale"]);
}

#[test]
fn results() {
    call::<()>("nothing", args![]).unwrap();
    assert_eq!(call::<(Tensor, i64)>("pair", args![&ones()]).unwrap(), (ones(), 4));
    let triple: (Tensor, f64, Vec<i64>) = call("triple", args![&ones()]).unwrap();
    assert_eq!(triple, (ones(), 2.5, vec![1, 2]));
}

#[test]
fn in_place() {
    let tensor = ones();
    call::<()>("add_one_", args![&tensor]).unwrap();
    assert_eq!(tensor, ones() + 1);
    let same: Tensor = call("double_", args![&tensor]).unwrap();
    assert_eq!((same.data_ptr(), &tensor), (tensor.data_ptr(), &(ones() * 4)));
    let schema = module().operator("double_").unwrap();
    assert_says(schema.schema(), &["double_(Tensor(a!) arg0) -> Tensor(a!)"]);
}

#[test]
fn overloads_are_numbered() {
    assert_eq!(call::<String>("describe", args![&ones()]).unwrap(), "one tensor");
    assert_eq!(
        call::<String>("describe.overload2", args![&ones(), &ones()]).unwrap(),
        "two tensors"
    );
}

#[test]
fn names_and_defaults() {
    let defaults = module().operator("defaults").unwrap();
    assert_says(
        defaults.schema(),
        &[
            "Tensor tensor, int count=3, float eps=1., str mode=\"mean\", float? maybe=None, *, ScalarType kind=7, \
         int[] dims=[0, 1], bool flag=True",
        ],
    );
    let text: String = defaults.call(args![&ones()]).unwrap();
    assert_eq!(text, "mean 3 1.000000 none Double 2 yes");
    let text: String = defaults
        .call(args![&ones(), 1_i64, mode = "sum", maybe = 1.5, kind = Kind::Half, flag = false])
        .unwrap();
    assert_eq!(text, "sum 1 1.000000 1.500000 Half 2 no");
}

#[test]
fn defaults_that_no_schema_has() {
    let hidden = module().operator("hidden").unwrap();
    assert_says(
        hidden.schema(),
        &["Tensor tensor, Tensor? bias=None, Tensor? scale=None, float? limit=None"],
    );
    assert_eq!(hidden.call::<Tensor>(args![&ones()]).unwrap(), ones() * 3);
    assert_eq!(hidden.call::<Tensor>(args![&ones(), limit = 2.0]).unwrap(), ones() * 2);
    // An argument without a default follows one that has a default. Python can use such a default
    // by naming the arguments.
    let first = module().operator("default_first").unwrap();
    assert_says(first.schema(), &["(int a, int b, int c=1)"]);
    assert_eq!(first.call::<i64>(args![7_i64, 2_i64]).unwrap(), 4);
    let unnamed = module().operator("unnamed").unwrap();
    assert_says(unnamed.schema(), &["(Tensor arg0, int arg1=2)"]);
    assert_eq!(call::<String>("literal", args![]).unwrap(), "abc");
}

#[test]
fn guards_run_around_the_call() {
    for _ in 0..2 {
        assert_eq!(call::<i64>("depth", args![]).unwrap(), 1, "the guard of the last call is gone");
    }
    let leaf = ones().set_requires_grad(true);
    assert!(call::<Tensor>("scale", args![&leaf]).unwrap().requires_grad());
    // The `library` module decides whether a function that returns constants is refused.
    let constant =
        module().operator("no_grad").unwrap().no_grad().call::<Tensor>(args![&leaf]).unwrap();
    assert!(!constant.requires_grad());
}

#[test]
fn functions_of_other_sorts() {
    assert_eq!(call::<Tensor>("scale", args![&ones()]).unwrap(), ones() * 3);
    assert_eq!(call::<i64>("wrapped", args![[1_i64, 2]]).unwrap(), 3);
    assert_eq!(call::<Tensor>("sub_negate", args![&ones()]).unwrap(), -ones());
}

#[test]
fn exceptions_become_errors() {
    assert_says(
        &message(call::<Tensor>("fails", args![&ones().flatten(0, 1)])),
        &["fails", "expected 2 dimensions, got 1"],
    );
    assert_says(&message(call::<i64>("throws", args![1_i64])), &["throws", "not that"]);
    assert_says(&message(call::<()>("throws_a_number", args![])), &["throws_a_number"]);
}
