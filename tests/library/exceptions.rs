//! Tests of exceptions that pass through Rust, of forward-mode AD, and of what else a caller in C++ or
//! Python sees of an operator that is written in Rust.

use super::*;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch_extension::autograd::{
    Context, GradOptions, Tensors, apply_with, grad, register_hook, saved_tensors_hooks,
};
use tch_extension::{Error, library};

fn thrown(name: &str) -> Operator {
    compiled::callers();
    Operator::find(&format!("tch_thrown::{name}")).expect(name)
}

/// Living exceptions are counted over all threads, so tests that throw run one after another.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Throws in C++.
fn fail(number: i64) -> Result<()> {
    thrown("fail").call(args![&doubles(&[1.0]), number])
}

fn silent(number: i64) -> Result<()> {
    thrown("fail_silently").call(args![&doubles(&[1.0]), number])
}

/// libtorch's IndexError, by tch.
fn bad_index() -> std::result::Result<Tensor, tch::TchError> {
    doubles(&[1.0]).f_select(9, 0)
}

fn with_backward<B>(backward: B) -> Tensor
where
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    with_backward_of(&leaf(&[1.0]), backward)
}

fn with_backward_of<B>(x: &Tensor, backward: B) -> Tensor
where
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    let forward = |saver: &mut tch_extension::autograd::Saver<'_>,
                   inputs: tch_extension::autograd::Inputs<'_>| {
        saver.save(inputs.get(0)?);
        Ok((inputs.get(0)? * 1.0).into())
    };
    apply_with("op", &[Some(x)], forward, backward).and_then(Tensors::single).expect("a forward")
}

/// What a caller in C++ catches.
fn caught(loss: &Tensor) -> String {
    thrown("thrown_by_backward").call(args![loss, false]).expect("every exception is caught")
}

/// What a caller in C++ catches if the backward pass of an operator is this.
fn caught_of(backward: fn(&Tensor) -> Result<Tensor>) -> String {
    caught(&with_backward(move |_, grads| Ok(backward(grads.get(0)?)?.into())))
}

fn living() -> i64 {
    thrown("living").call(args![]).expect("a number")
}

#[test]
fn an_exception_keeps_its_type_through_rust() {
    let _alone = alone();
    let again = |grad: &Tensor| Ok(grad.shallow_clone());
    assert_eq!(caught_of(again), "nothing");
    assert_eq!(caught_of(|_| fail(7).map(|()| Tensor::new())), "Own 7");
    // Without a text, too.
    assert_eq!(caught_of(|_| silent(8).map(|()| Tensor::new())), "Silent 8");
    let text = message(silent(8));
    assert!(text.contains("tch_thrown::fail_silently: an exception of type "), "{text}");
    assert!(text.contains("Silent without a message"), "{text}");
    // By a function of tch, by an operator of tch, which panics, and as another type of error.
    assert_eq!(caught_of(|_| Ok(bad_index()?)), "IndexError");
    assert_eq!(caught_of(|_| Ok(doubles(&[1.0]).select(9, 0))), "IndexError");
    assert_eq!(caught_of(|_| Ok(bad_index().expect("an element"))), "IndexError");
    let boxed = |_: &Tensor| bad_index().map_err(|error| Error::Other(error.into()));
    assert_eq!(caught_of(boxed), "IndexError");
    let unwrapped = |_: &Tensor| {
        fail(9).unwrap();
        Ok(Tensor::new())
    };
    assert_eq!(caught_of(unwrapped), "Own 9");
    // A message that this crate improves for Rust.
    let cuda_only = |x: &Tensor| thrown("cuda_only").no_grad().call(args![x]);
    assert_eq!(caught_of(cuda_only), "NotImplementedError");
    assert_eq!(living(), 0);
}

#[test]
fn a_mode_that_throws_keeps_its_exception() {
    let _alone = alone();
    let in_mode = |run: fn(&Tensor) -> Result<Tensor>| {
        let loss = with_backward(move |_, grads| Ok(run(grads.get(0)?)?.into()));
        let caught: Result<String> = thrown("thrown_by_backward").call(args![&loss, true]);
        caught.expect("every exception is caught")
    };
    assert_eq!(in_mode(|grad| Ok(grad.f_add(grad)?)), "nothing");
    assert_eq!(in_mode(|grad| Ok(grad.f_mul(grad)?)), "Silent 70");
    assert_eq!(in_mode(|grad| Ok(grad * grad)), "Silent 70");
    let call = |grad: &Tensor| Operator::find("aten::mul.Tensor")?.call(args![grad, grad]);
    assert_eq!(in_mode(call), "Silent 70");
    assert_eq!(living(), 0);
}

#[test]
fn an_exception_passes_several_borders() {
    let _alone = alone();
    // A backward pass in a backward pass.
    let inner = |x: &Tensor| {
        tch::with_grad(|| with_backward_of(x, |_, _| fail(10).map(|()| Tensor::new().into())))
    };
    let by_grad = with_backward(move |_, _| {
        let x = leaf(&[1.0]);
        grad(&[&inner(&x)], &[&x], &GradOptions::default())
    });
    assert_eq!(caught(&by_grad), "Own 10");
    let by_tch = with_backward(move |_, grads| {
        inner(&leaf(&[1.0])).f_backward()?;
        Ok(grads.get(0)?.shallow_clone().into())
    });
    assert_eq!(caught(&by_tch), "Own 10");
    // In anomaly mode the types are the same.
    {
        let _anomaly = tch_extension::autograd::detect_anomaly(false);
        let by_grad = with_backward(move |_, _| {
            let x = leaf(&[1.0]);
            grad(&[&inner(&x)], &[&x], &GradOptions::default())
        });
        assert_eq!(caught(&by_grad), "Own 10");
    }
    // A hook of a tensor, and a hook of a saved tensor, which the backward pass calls.
    let x = leaf(&[1.0]);
    let y = &x * 2.0;
    let _hook = register_hook(&y, |_| fail(12).map(|()| None)).expect("a hook");
    assert_eq!(caught(&y), "Own 12");
    let guard = saved_tensors_hooks(
        |tensor| Ok(tensor.shallow_clone()),
        |_: &Tensor| fail(13).map(|()| Tensor::new()),
    );
    let unpacks = with_backward(|ctx, _| Ok(ctx.saved(0)?.into()));
    drop(guard);
    assert_eq!(caught(&unpacks), "Own 13");
    // The forward of an operator in a backward pass.
    let forward = with_backward(|_, grads| {
        let failing = |_: &mut tch_extension::autograd::Saver<'_>,
                       _: tch_extension::autograd::Inputs<'_>| {
            fail(14).map(|()| Tensor::new().into())
        };
        apply_with("inner", &[grads.get(0).ok()], failing, |_, _| Ok(().into()))
    });
    assert_eq!(caught(&forward), "Own 14");
    assert_eq!(living(), 0);
}

#[test]
fn an_exception_passes_the_kernel_of_an_operator() {
    let _alone = alone();
    let caught = |name: &str, kernel: library::Kernel| {
        library::define("tch_kernels", &format!("{name}(Tensor x) -> Tensor")).expect(name);
        library::implement("tch_kernels", name, "CompositeImplicitAutograd", kernel).expect(name);
        let caught: Result<String> = thrown("thrown_by_call")
            .call(args![format!("tch_kernels::{name}").as_str(), &doubles(&[1.0])]);
        caught.expect("every exception is caught")
    };
    assert_eq!(caught("passes", |_| fail(40).map(|()| Vec::new())), "Own 40");
    assert_eq!(caught("passes_tchs", |_| Ok(vec![Output::Tensor(bad_index()?)])), "IndexError");
    assert_eq!(
        caught("panics", |_| Ok(vec![Output::Tensor(doubles(&[1.0]).select(9, 0))])),
        "IndexError"
    );
    // The inner operator is one that is defined in Rust, too.
    let outer = |_: &[Output]| {
        let y: Tensor = Operator::find("tch_kernels::passes")?.call(args![&doubles(&[1.0])])?;
        Ok(vec![Output::Tensor(y)])
    };
    assert_eq!(caught("outer", outer), "Own 40");
    // A name stands once, although the kernel puts it there, too.
    let refuses = |_: &[Output]| Err(Error::argument("refuses", "x", "2 elements", "1", ""));
    assert_eq!(
        caught("refuses", refuses),
        "runtime_error tch_kernels::refuses: x: expected 2 elements, got 1"
    );
    assert_eq!(living(), 0);
}

#[test]
fn an_error_of_rusts_own_is_no_exception() {
    let _alone = alone();
    // A context around the message.
    let context = |_: &Tensor| {
        fail(20).map_err(|error| Error::msg(format!("in layer 3: {error}"))).map(|()| Tensor::new())
    };
    let text = caught_of(context);
    assert!(
        text.starts_with("runtime_error op: in layer 3: tch_thrown::fail: no luck 20;"),
        "{text}"
    );
    // Another error after one that was handled.
    let another = |_: &Tensor| {
        let _ = fail(21);
        Err(Error::msg("something else"))
    };
    assert_eq!(caught_of(another), "runtime_error op: something else");
    let panics = |_: &Tensor| {
        let _ = fail(21);
        panic!("something else")
    };
    assert_eq!(caught_of(panics), "runtime_error op: backward panicked: something else");
    // The first of two, although the second was the last.
    let first = |_: &Tensor| {
        let first = fail(22);
        let _ = fail(23);
        first.map(|()| Tensor::new())
    };
    assert_eq!(caught_of(first), "Own 22");
    assert_eq!(living(), 0);
    // An exception of which nothing but the text is of interest is one with the operator's name.
    let usual = |_: &Tensor| {
        thrown("fail_as_usual").call::<()>(args![&doubles(&[1.0])]).map(|()| Tensor::new())
    };
    let text = caught_of(usual);
    assert!(text.starts_with("runtime_error op: tch_thrown::fail_as_usual: as usual;"), "{text}");
}

#[test]
fn an_exception_that_was_handled_does_not_come_back() {
    let _alone = alone();
    static TEXT: Mutex<String> = Mutex::new(String::new());
    let handles = |grad: &Tensor| {
        *TEXT.lock().unwrap() = message(fail(30));
        assert_eq!(living(), 1, "it is kept as long as this call may still fail with it");
        Ok(grad.shallow_clone())
    };
    assert_eq!(caught_of(handles), "nothing");
    assert_eq!(living(), 0);
    let same_text = |_: &Tensor| Err(Error::msg(TEXT.lock().unwrap().clone()));
    let text = caught_of(same_text);
    assert!(text.starts_with("runtime_error op: tch_thrown::fail: no luck 30;"), "{text}");
    // However many are handled, few are kept.
    let many = |grad: &Tensor| {
        for number in 0..100 {
            assert!(fail(number).is_err());
        }
        assert!(living() < 10, "{}", living());
        Ok(grad.shallow_clone())
    };
    assert_eq!(caught_of(many), "nothing");
    // Outside of a call from libtorch, nothing is kept, and errors are texts as ever.
    assert!(message(fail(31)).starts_with("tch_thrown::fail: no luck 31; the schema is"));
    assert!(bad_index().is_err());
    assert_eq!(living(), 0);
}

#[test]
fn forward_mode_is_refused_with_and_without_a_graph() {
    let square = |x: &Tensor| {
        apply_with(
            "square",
            &[None, Some(x)],
            |_, inputs| Ok(inputs.get(1)?.square().into()),
            |_, grads| Ok([None, Some(grads.get(0)?.shallow_clone())].into()),
        )
        .and_then(Tensors::single)
    };
    let level: i64 = thrown("enter_dual_level").call(args![]).expect("a level");
    for x in [doubles(&[2.0, 3.0]), leaf(&[2.0, 3.0])] {
        let dual = Tensor::internal_make_dual(&x, &doubles(&[1.0, 1.0]), level);
        let refused = |x: &Tensor| {
            let text = message(square(x));
            assert!(text.starts_with("square: forward-mode AD is not defined for it"), "{text}");
        };
        refused(&dual);
        refused(&dual.select(0, 1));
        tch::no_grad(|| refused(&dual));
        // The tensors beside it are fine, and so are operations of tch.
        assert!(square(&x).is_ok() && square(&x.select(0, 1)).is_ok());
        assert!(square(&Tensor::internal_unpack_dual(&dual, level).0).is_ok());
        let (_, tangent) = Tensor::internal_unpack_dual(&dual.square(), level);
        assert_eq!(tangent, doubles(&[4.0, 6.0]));
    }
    let x = doubles(&[2.0]);
    let dual = Tensor::internal_make_dual(&x, &doubles(&[1.0]), level);
    thrown("exit_dual_level").call::<()>(args![level]).expect("the end of a level");
    assert_eq!(square(&dual).expect("no dual tensor any more"), doubles(&[4.0]));
}
