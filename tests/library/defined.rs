//! Operators that Rust defines: `operators!`, `define` and `implement`.

use super::*;
use tch_extension::library::{
    CallContext, NONE, SymInt, below_autograd, define, empty, implement, is_traced, new_empty,
    registration_error, sizes,
};
use tch_extension::testing;
use tch_extension::{Error, autograd, check};

tch_extension::operators! {
    namespace defined;

    /// a * b * scale
    fn product(a: &Tensor, b: &Tensor, scale: f64 = 2.0) -> Tensor {
        cpu, cuda = |a, b, scale| Ok(a * b * scale),
        fake = |a, _b, _scale| new_empty(a, &sizes(a)),
        backward = |ctx, grads| {
            let (a, b, scale): (_, _, f64) = (ctx.saved(0)?, ctx.saved(1)?, ctx.argument("scale")?);
            let grad = grads.get(0)? * scale;
            Ok([&grad * b, &grad * a].into())
        },
        save = [a, b],
        double_backward = true,
    }

    fn once(x: &Tensor) -> Tensor {
        cpu, cuda = |x| Ok(x.exp()),
        backward = |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        save = [result],
    }

    fn parts(x: &Tensor, maybe: Option<&Tensor>, list: &[Tensor]) -> (Tensor, Vec<Tensor>, Option<Tensor>, i64) {
        cpu = |x, maybe, list| {
            Ok((x * 2.0, list.iter().map(|item| item * 3.0).collect(), maybe.map(|one| one * 4.0), 7))
        },
        backward = parts_backward,
        save = [list, maybe, result.0],
    }

    fn add_(x: &mut Tensor, other: &Tensor, times: i64 = 1) {
        cpu, cuda = |x, other, times| {
            let _ = x.f_add_(&(other * times))?;
            Ok(())
        },
        fake = |_x, _other, _times| Ok(()),
        backward = |ctx, grads| {
            let grad = grads.get(0)?;
            Ok([grad.shallow_clone(), grad * ctx.argument::<i64>("times")?].into())
        },
        save = [],
    }

    fn without_gradient(x: &Tensor) -> Tensor { cpu = |x| Ok(x * 1.0) }

    fn checked(x: &Tensor, scale: f64) -> Tensor {
        cpu = |x, scale| {
            check!("checked", x).kind_in(&[Kind::Double, Kind::Half])?;
            Ok(x * scale)
        },
        backward = |ctx, grads| Ok((grads.get(0)? * ctx.argument::<i64>("scale")?).into()),
    }

    fn square(x: &Tensor) -> Tensor { composite = |x| Ok(x * x) }

    fn own(x: &Tensor, by: f64) -> Tensor {
        cpu = |x, by| Ok(x * by),
        autograd = own_autograd,
    }

    /// A matrix of another shape: its sizes are arithmetic.
    fn rows(x: &Tensor, columns: SymInt, kind: Option<Kind>) -> Tensor {
        cpu = |x, columns, kind| Ok(x.f_reshape([-1, columns])?.to_kind(kind.unwrap_or(x.kind()))),
        fake = |x, columns, kind| {
            let all = sizes(x).into_iter().fold(SymInt::from(1), |product, size| product * size);
            empty(&[all / &columns, columns], kind.unwrap_or(x.kind()), x)
        },
    }

    fn every_type(
        ints: &[i64] = &[1, -2],
        owned: Vec<i64> = &[3],
        sizes: &[SymInt] = &[4, 5],
        floats: &[f64] = &[0.5, 1e-300],
        bools: &[bool] = &[true, false],
        int: i64 = -7,
        real: f64 = 0.1,
        flag: bool = true,
        text: &str = "a \"quoted\" \\ tëxt",
        eps: Option<f64> = None,
        some: Option<i64> = Some(3),
        size: Option<SymInt> = None,
        device: Option<Device> = None,
        kind: Option<Kind> = None,
        maybe: Option<&[i64]> = None,
        absent: Option<&Tensor> = None,
    ) -> (f64, bool, i64) {
        composite = |ints, owned, sizes, floats, bools, int, real, flag, text, eps, some, size, device, kind, maybe, absent| {
            let all = format!(
                "{ints:?} {owned:?} {sizes:?} {floats:?} {bools:?} {int} {real} {flag} {text} {eps:?} {some:?} {size:?} {device:?} {kind:?} {maybe:?} {absent:?}"
            );
            SEEN.with_borrow_mut(|seen| *seen = all);
            Ok((real, flag, int))
        },
    }

    fn optionals(tensors: &[Option<Tensor>]) -> i64 {
        composite = |tensors| Ok(tensors.iter().flatten().count() as i64),
    }

    fn fails(how: i64) -> Tensor {
        composite = |how| match how {
            0 => Err(Error::msg("it is meant to fail")),
            1 => panic!("it is meant to panic"),
            _ => Ok(Tensor::zeros([1], (Kind::Float, Device::Cpu)).f_reshape([2, 2])?),
        },
    }
}

// A second use with the same namespace.
tch_extension::operators! {
    namespace defined;
    fn second(x: &Tensor) -> Tensor { composite = |x| Ok(x.shallow_clone() + 1) }
}

// One of the operators exists, so none is registered.
mod twice {
    tch_extension::operators! {
        namespace aten;
        fn defined_nowhere_else(x: &tch::Tensor) -> tch::Tensor { composite = |x| Ok(x * 2) }
        fn relu(x: &tch::Tensor) -> tch::Tensor { composite = |x| Ok(x * 2) }
    }
}

// The second cannot be registered, after the first was.
mod half {
    tch_extension::operators! {
        namespace defined_half;
        fn first(x: &tch::Tensor) -> tch::Tensor { cpu = |x| Ok(x * 2) }
        fn second(x: &mut tch::Tensor) { cpu = |_x| Ok(()), key("Toaster") = |_x| Ok(()) }
    }
}

thread_local! {
    static SEEN: std::cell::RefCell<String> = const { std::cell::RefCell::new(String::new()) };
}

fn parts_backward(ctx: &CallContext<'_>, grads: &autograd::Tensors) -> Result<autograd::Tensors> {
    // Two items of the list, the optional, and the result.
    assert_eq!(ctx.saved(3)?, ctx.saved(0)? * 0.0 + 2.0 * 5.0);
    assert_eq!(ctx.saved_optional(2)?.is_some(), grads.optional(3).is_some());
    let maybe = ctx.saved_optional(2)?.map(|_| grads.get(3).map(|grad| grad * 4.0)).transpose()?;
    Ok([Some(grads.get(0)? * 2.0), maybe, Some(grads.get(1)? * 3.0), Some(grads.get(2)? * 3.0)]
        .into())
}

fn own_autograd(x: &Tensor, by: f64) -> Result<Tensor> {
    let forward = move |_: &mut autograd::Saver<'_>, inputs: autograd::Inputs<'_>| {
        let own = Operator::find("defined::own")?;
        let y: Tensor = below_autograd(|| own.call(args![inputs.get(0)?, by]))?;
        Ok(y.into())
    };
    let backward =
        move |_: &autograd::Context<'_>, grads: &autograd::Tensors| Ok((grads.get(0)? * by).into());
    autograd::apply_with("own", &[Some(x)], forward, backward)?.single()
}

fn find(name: &str) -> Operator {
    Operator::find(&format!("defined::{name}")).expect("a registered operator")
}

#[test]
fn a_signature_is_a_schema() {
    for (name, schema) in [
        ("product", "defined::product(Tensor a, Tensor b, float scale=2.) -> Tensor"),
        (
            "parts",
            "defined::parts(Tensor x, Tensor? maybe, Tensor[] list) -> (Tensor, Tensor[], Tensor?, int)",
        ),
        ("add_", "defined::add_(Tensor(a0!) x, Tensor other, int times=1) -> ()"),
        ("rows", "defined::rows(Tensor x, SymInt columns, ScalarType? kind) -> Tensor"),
    ] {
        assert_eq!(find(name).schema(), schema);
    }
    assert!(find("product").has_autograd(Device::Cpu).expect("an answer"));
}

#[test]
fn every_type_arrives() {
    let (real, flag, int): (f64, bool, i64) = find("every_type").call(args![]).expect("a call");
    assert_eq!((real, flag, int), (0.1, true, -7));
    let seen = || SEEN.with_borrow(String::clone);
    let defaults = "[1, -2] [3] [4, 5] [0.5, 1e-300] [true, false] -7 0.1 true a \"quoted\" \\ tëxt None Some(3) None None None None";
    assert_eq!(seen(), format!("{defaults} None"));
    let _: Outputs = find("every_type")
        .call(args![
            Vec::<i64>::new(),
            [9_i64],
            &[SymInt::from(6)][..],
            [2.5],
            [false],
            1,
            2,
            false,
            "",
            eps = 1e-9,
            some = NONE,
            size = 8,
            device = Device::Cuda(3),
            kind = Kind::BFloat16,
            maybe = [4_i64],
        ])
        .expect("a call");
    assert_eq!(
        seen(),
        "[] [9] [6] [2.5] [false] 1 2 false  Some(1e-9) None Some(8) Some(Cuda(3)) Some(BFloat16) Some([4]) None"
    );
    let x = doubles(&[1.0]);
    let count: i64 = find("optionals").call(args![[Some(&x), None, Some(&x)]]).expect("a call");
    assert_eq!(count, 2);
}

#[test]
fn gradients_are_those_of_the_backward() {
    let random = |n| Tensor::randn([n], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let (a, b) = (random(3), random(3));
    let product =
        |inputs: &[Tensor]| find("product").call::<Tensor>(args![&inputs[0], &inputs[1], 0.5]);
    testing::gradcheck(product, &[&a, &b], &Default::default()).expect("right gradients");
    testing::gradgradcheck(product, &[&a, &b], &Default::default()).expect("right gradients");
    let once = |inputs: &[Tensor]| find("once").call::<Tensor>(args![&inputs[0]]);
    testing::gradcheck(once, &[&a], &Default::default()).expect("right gradients");
    let own = |inputs: &[Tensor]| find("own").call::<Tensor>(args![&inputs[0], 1.5]);
    testing::gradcheck(own, &[&a], &Default::default()).expect("right gradients");
    let square = |inputs: &[Tensor]| find("square").call::<Tensor>(args![&inputs[0]]);
    testing::gradgradcheck(square, &[&a], &Default::default()).expect("right gradients");
}

#[test]
fn second_derivatives_are_refused_unless_promised() {
    let x = leaf(&[1.0]);
    let y: Tensor = find("once").call(args![&x]).expect("a call");
    let gradient = Tensor::run_backward(&[y.sum(Kind::Double)], &[&x], true, true).remove(0);
    let error = gradient.sum(Kind::Double).f_backward().map_err(Error::from);
    assert!(message(error).contains("once"));
}

#[test]
fn lists_and_optionals_have_gradients() {
    for with_maybe in [true, false] {
        let (x, one, two, maybe) = (leaf(&[5.0]), leaf(&[1.0]), leaf(&[2.0]), leaf(&[3.0]));
        let (y, list, optional, int): (Tensor, Vec<Tensor>, Option<Tensor>, i64) = find("parts")
            .call(args![&x, with_maybe.then_some(&maybe), [&one, &two]])
            .expect("a call");
        assert_eq!((int, list.len(), optional.is_some()), (7, 2, with_maybe));
        let sum = y + &list[0] + &list[1] * 10.0;
        let sum = optional.map_or(sum.shallow_clone(), |optional| sum + optional);
        sum.sum(Kind::Double).backward();
        assert_eq!((x.grad(), one.grad()), (doubles(&[2.0]), doubles(&[3.0])));
        assert_eq!(two.grad(), doubles(&[30.0]));
        assert_eq!(maybe.grad().defined(), with_maybe);
    }
}

#[test]
fn changes_in_place_are_part_of_the_graph() {
    let (a, b) = (leaf(&[1.0]), leaf(&[2.0]));
    let x = &a * 1.0;
    let y = &x * &x;
    let version = x.f_internal_version().expect("a version");
    let () = find("add_").call(args![&x, &b, 3]).expect("a call");
    assert_eq!(x, doubles(&[7.0]));
    assert!(x.f_internal_version().expect("a version") > version);
    (&x * 2.0).sum(Kind::Double).backward();
    assert_eq!((a.grad(), b.grad()), (doubles(&[2.0]), doubles(&[6.0])));
    // `y` saved the old value.
    assert!(message(y.sum(Kind::Double).f_backward().map_err(Error::from)).contains("inplace"));

    let leaf_error = message(find("add_").call::<()>(args![&a, &b]));
    assert!(leaf_error.contains("defined::add_: x: a leaf Variable"), "{leaf_error}");
    assert_eq!(a, doubles(&[1.0]));
    let () = tch::no_grad(|| find("add_").call::<()>(args![&a, &b])).expect("a call");
    assert_eq!(a, doubles(&[3.0]));
}

#[test]
fn a_missing_gradient_is_never_zero() {
    let x = leaf(&[1.0]);
    let y: Tensor = find("without_gradient").call(args![&x]).expect("a call");
    let error = message((y + &x).sum(Kind::Double).f_backward().map_err(Error::from));
    assert!(error.contains("without_gradient: it has no gradient"), "{error}");
    let y: Tensor =
        tch::no_grad(|| find("without_gradient").call::<Tensor>(args![&x])).expect("a call");
    assert!(!y.requires_grad());
}

#[test]
fn an_operator_of_a_device_behaves() {
    let product = find("product");
    let run = |inputs: &[Tensor]| product.call::<Tensor>(args![&inputs[0], &inputs[1]]);
    let random = |device| Tensor::randn([4, 3], (Kind::Double, device));
    for device in testing::devices() {
        let report =
            testing::conformance(run, &[&random(device), &random(device)], &Default::default());
        report.expect("a well-behaved operator");
    }
}

#[test]
fn failures_are_errors_that_name_the_operator() {
    let call = |how| message(find("fails").call::<Tensor>(args![how]));
    assert!(call(0).starts_with("defined::fails: it is meant to fail;"), "{}", call(0));
    assert!(call(1).starts_with("defined::fails: its kernel panicked: it is meant to panic;"));
    assert!(call(2).starts_with("defined::fails: shape '[2, 2]' is invalid for input of size 1"));
}

/// Whoever calls a registered operator may write Python.
#[test]
fn errors_have_the_words_of_python() {
    let checked = |x: &Tensor| find("checked").call::<Tensor>(args![x, 0.5]);
    let error = message(checked(&Tensor::zeros([2], (Kind::Int64, Device::Cpu))));
    assert_eq!(
        error.split(';').take(2).collect::<String>(),
        "defined::checked: x: expected dtype torch.float64 or torch.float16, got torch.int64 cast it with \
         .to(torch.float64)"
    );
    let y = checked(&leaf(&[1.0])).expect("a call");
    let error = message(y.sum(Kind::Double).f_backward().map_err(Error::from));
    assert!(error.contains("its argument `scale` is 0.5, and int was asked for"), "{error}");
}

#[test]
fn a_sym_int_is_an_int_in_a_kernel() {
    let x = Tensor::zeros([4, 3], (Kind::Float, Device::Cpu));
    let y: Tensor = find("rows").call(args![&x, 2, Kind::Half]).expect("a call");
    assert_eq!((y.size(), y.kind()), (vec![6, 2], Kind::Half));
}

#[test]
fn symbols_calculate() {
    let (a, b) = (SymInt::from(7), SymInt::from(3));
    assert_eq!(
        (&a + &b, &a - &b, &a * &b, &a / &b, &a % &b),
        (10.into(), 4.into(), 21.into(), 2.into(), 1.into())
    );
    assert_eq!((a.min(&b), a.max(&b), a.div_ceil(&b)), (3.into(), 7.into(), 3.into()));
    assert_eq!((2 * &a + 1, 1 + b.clone()), (15.into(), 4.into()));
    assert_eq!(
        [a > b, b < a, a >= b, b <= a, a < b, a == b],
        [true, true, true, true, false, false]
    );
    assert_eq!([a == 7, a == 8, b <= 3, b > 2], [true, false, true, true]);
    assert_eq!((a.guard().expect("a number"), format!("{a} {a:?}")), (7, "7 7".to_string()));
    let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    assert_eq!(sizes(&x), [SymInt::from(2), SymInt::from(3)]);
    assert_eq!(new_empty(&x, &[a, b]).expect("a tensor").size(), [7, 3]);
    assert!(new_empty(&x, &[SymInt::from(-1)]).is_err());
}

#[test]
fn a_program_that_is_not_traced() {
    let x = doubles(&[1.0]);
    assert!(!is_traced(&[]) && !is_traced(&[&x, &Tensor::new()]));
}

#[test]
fn below_autograd_ends() {
    let x = leaf(&[1.0]);
    assert!(!below_autograd(|| &x * 2.0).requires_grad());
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        below_autograd(|| panic!("meant to"))
    }));
    assert!(panicked.is_err() && (&x * 2.0).requires_grad());
}

#[test]
fn wrong_definitions_are_errors() {
    define("defined_low", "twice(Tensor x) -> Tensor").expect("a definition");
    let twice = |arguments: &[Output]| match arguments {
        [Output::Tensor(x)] => Ok(vec![Output::Tensor(x * 2.0)]),
        other => Err(Error::msg(format!("{other:?}"))),
    };
    implement("defined_low", "twice", "CPU", twice).expect("a kernel");
    let twice_of: Tensor = Operator::find("defined_low::twice")
        .expect("it")
        .call(args![&doubles(&[2.0])])
        .expect("a call");
    assert_eq!(twice_of, doubles(&[4.0]));
    for (error, says) in [
        (define("defined_low", "twice(Tensor x) -> Tensor"), "multiple times"),
        (define("defined_low", "bad(Tensor x -> Tensor"), "expected"),
        (define("defined_low", "worse(Tenzor x) -> Tensor"), "Tenzor"),
        (define("defined_low", "other::name(Tensor x) -> Tensor"), "other"),
        (define("defined low", "name(Tensor x) -> Tensor"), "defined low"),
        (define("defined_low", "zero\0(Tensor x) -> Tensor"), "zero byte"),
        (implement("defined_low", "twice", "CPU", twice), "it has a kernel for CPU already"),
        (implement("defined_low", "absent", "CPU", twice), "it is not defined"),
        (implement("defined_low", "twice.overload", "CPU", twice), "it is not defined"),
        (implement("defined_low", "twice", "Toaster", twice), "Toaster"),
    ] {
        let error = message(error);
        assert!(error.contains(says), "{error}");
        assert!(error.contains("defined_low::") || error.contains("defined low"), "{error}");
    }
    define("defined_low", "returns(Tensor x) -> (Tensor, int)").expect("a definition");
    let returns = |_: &[Output]| Ok(vec![Output::Int(1), Output::Int(2)]);
    implement("defined_low", "returns", "CPU", returns).expect("a kernel");
    let call = || {
        Operator::find("defined_low::returns").expect("it").call::<Outputs>(args![&doubles(&[2.0])])
    };
    let error = message(call());
    assert!(error.contains("returned the int 1 for result 0, which is Tensor"), "{error}");
}

#[test]
fn a_block_is_registered_whole_or_not_at_all() {
    let error = message(registration_error());
    assert!(error.contains("the operators of aten (tests/library/defined.rs:"), "{error}");
    assert!(error.contains("aten::relu is defined already, registered at "), "{error}");
    assert!(error.contains("the operators of defined_half (tests/library/defined.rs:"), "{error}");
    assert!(error.contains("defined_half::second: its kernel for Toaster was refused"), "{error}");
    assert_eq!(error.lines().count(), 2, "{error}");
    for absent in ["aten::defined_nowhere_else", "defined_half::first", "defined_half::second"] {
        assert!(Operator::find(absent).is_err(), "{absent}");
    }
    let y: Tensor = find("second").call(args![&doubles(&[1.0])]).expect("a call");
    assert_eq!(y, doubles(&[2.0]));

    // What ended is as if it had never been.
    define("defined_half", "first(Tensor x, int by) -> Tensor").expect("a definition");
    implement("defined_half", "first", "CPU", |arguments| match arguments {
        [Output::Tensor(x), Output::Int(by)] => Ok(vec![Output::Tensor(x * *by)]),
        other => Err(Error::msg(format!("{other:?}"))),
    })
    .expect("a kernel");
    let first = Operator::find("defined_half::first").expect("an operator");
    assert_eq!(first.call::<Tensor>(args![&doubles(&[2.0]), 3]).expect("a call"), doubles(&[6.0]));
}
