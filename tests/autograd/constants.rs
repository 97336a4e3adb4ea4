//! Tests that `apply` returns what PyTorch returns, and leaves the same state, when no graph is
//! wanted.

use super::*;
use tch::no_grad;

/// f(x) = x. Its backward multiplies by 10, which shows if it is bypassed.
fn identity() -> impl Function {
    op(
        |_, inputs| Ok(inputs.get(0)?.shallow_clone().into()),
        |_, grads| Ok((grads.get(0)? * 10.0).into()),
    )
}

/// 2x, computed with grad mode on.
fn double_with_a_graph() -> impl Function {
    op(
        |_, inputs| Ok(tch::with_grad(|| inputs.get(0).map(|x| x * 2.0))?.into()),
        |_, grads| Ok((grads.get(0)? * 10.0).into()),
    )
}

#[test]
fn an_input_that_is_returned_without_grad_mode_is_a_constant() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let m = &x * 3.0;
    let y = no_grad(|| run(identity(), &m));
    assert!(!y.requires_grad());
    let loss = (&y * &m).sum(Kind::Double);
    // y is the constant 9, so the gradient is that of 9 · 3x, not of (3x)².
    assert_eq!(values(&gradient_of(&loss, &x).expect("gradient")), [27.0]);
    let y = no_grad(|| run(identity(), &x));
    assert!(!y.requires_grad() && x.requires_grad(), "a leaf, too, which stays one");
}

#[test]
fn a_graph_built_inside_a_forward_stays_there() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    assert!(!no_grad(|| run(double_with_a_graph(), &x)).requires_grad(), "without grad mode");
    let y = run(double_with_a_graph(), &x);
    assert_eq!(grad_fn(&y).expect("a node").as_deref(), Some("opBackward"));
    assert_eq!(
        values(&gradient_of(&y, &x).expect("gradient")),
        [10.0],
        "by the operator's own backward"
    );

    let view = || {
        op(
            |_, inputs| {
                Ok(tch::with_grad(|| inputs.get(0).map(|x| (x * 2.0).narrow(0, 0, 1)))?.into())
            },
            |_, grads| Ok((grads.get(0)? * 10.0).into()),
        )
    };
    assert!(!no_grad(|| run(view(), &x)).requires_grad(), "a view of it, too");

    // The operator's inputs are constants, but its forward builds a graph that leads to another
    // tensor.
    let held = Mutex::new(x.shallow_clone());
    let of_another = op(
        move |_, inputs| {
            let x = held.lock().expect("unpoisoned");
            Ok(tch::with_grad(|| inputs.get(0).map(|constant| constant * &*x))?.into())
        },
        |_, _| unreachable!("there is no graph"),
    );
    assert!(!run(of_another, &Tensor::from_slice(&[2.0])).requires_grad());
}

/// What a view allows: (whether it requires grad, what comes of each change in place).
fn view_facts(make: impl Fn() -> Tensor) -> (bool, Vec<std::result::Result<Vec<i64>, String>>) {
    type Change = fn(&mut Tensor) -> std::result::Result<Tensor, tch::TchError>;
    let changes: [Change; 6] = [
        |y| y.f_mul_(&Tensor::from(2.0)),
        |y| y.f_add_(&leaf(&[1.0])),
        |y| y.f_transpose_(0, 1),
        |y| y.f_squeeze_(),
        |y| y.f_unsqueeze_(0),
        |y| y.f_detach_(),
    ];
    let changed = changes.iter().flat_map(|change| {
        [true, false].map(|grad_mode| {
            let mut y = make();
            let _off = (!grad_mode).then(tch::no_grad_guard);
            let outcome = change(&mut y).map(|y| y.size());
            // The rest of the message says where the view was made.
            outcome.map_err(|error| {
                error.to_string().split('.').next().unwrap_or_default().to_string()
            })
        })
    });
    (make().requires_grad(), changed.collect())
}

#[test]
fn a_view_of_an_input_without_grad_mode_is_one_of_libtorchs() {
    let _alone = alone();
    let view = |x: &Tensor| x.narrow(0, 0, 1).view([1, 2]);
    let returned =
        || op(move |_, inputs| Ok(view(inputs.get(0)?).into()), |_, _| unreachable!("no graph"));
    let x = || Tensor::from_slice2(&[[1.0, 2.0], [3.0, 4.0]]);
    let inputs: [fn(Tensor) -> Tensor; 4] = [
        |x| x,
        |x| x.set_requires_grad(true),
        |x| x.set_requires_grad(true) * 3.0,
        |x| (x.set_requires_grad(true) * 3.0).narrow(0, 0, 2),
    ];
    for (index, input) in inputs.iter().enumerate() {
        let found = view_facts(|| no_grad(|| run(returned(), &input(x()))));
        let expected = view_facts(|| no_grad(|| view(&input(x()))));
        assert_eq!(found, expected, "{index}");
        // It shares the input's memory and version, and is no part of a graph.
        let x = input(x());
        let y = no_grad(|| run(returned(), &x));
        let name = grad_fn(&y).expect("libtorch knows");
        assert_eq!((y.data_ptr(), name), (x.data_ptr(), None), "{index}");
    }
    let error =
        no_grad(|| run(returned(), &x().set_requires_grad(true))).f_mul_(&Tensor::from(2.0));
    let error = error.expect_err("a view that was made without grad mode").to_string();
    assert!(error.contains("A view was created in no_grad mode"), "{error}");
}

#[test]
fn a_tensor_from_elsewhere_that_is_returned_stays_what_it_is() {
    let _alone = alone();
    let (x, w) = (leaf(&[3.0]), leaf(&[5.0]));
    let product = &w * 2.0;
    let returning = |tensor: &Tensor| {
        let held = Mutex::new(tensor.shallow_clone());
        op(
            move |saver, _| {
                let held = held.lock().expect("unpoisoned").shallow_clone();
                saver.save(&held);
                Ok(held.into())
            },
            |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        )
    };
    for tensor in [&w, &product] {
        assert!(
            !run(returning(tensor), &Tensor::from_slice(&[1.0])).requires_grad(),
            "from constants"
        );
        assert!(!no_grad(|| run(returning(tensor), &x)).requires_grad(), "without grad mode");
        let y = run(returning(tensor), &x);
        assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), values(tensor), "with a graph");
        assert!(tensor.requires_grad());
    }
    assert!(w.is_leaf());
    assert_eq!(values(&gradient_of(&product, &w).expect("its own graph")), [2.0]);
}

#[test]
fn a_constant_that_is_returned_is_an_alias_and_not_the_input() {
    let _alone = alone();
    let constant = Tensor::from_slice(&[3.0]);
    let y = run(identity(), &constant).set_requires_grad(true);
    assert!(y.requires_grad() && !constant.requires_grad());
    assert_eq!(y.data_ptr(), constant.data_ptr(), "no copy");
}

/// w·v, written into v, which is input 1.
fn multiply_into_the_second() -> impl Function {
    op(
        |saver, inputs| {
            saver.mark_dirty(1);
            let mut v = inputs.get(1)?.shallow_clone();
            let _ = v.f_mul_(inputs.get(0)?)?;
            Ok(v.into())
        },
        |_, _| unreachable!("there is no graph"),
    )
}

#[test]
fn without_a_graph_any_view_may_be_changed_in_place() {
    let _alone = alone();
    let (w, base) = (Tensor::from_slice(&[10.0]), Tensor::from_slice(&[1.0, 2.0]));
    apply(multiply_into_the_second(), &[Some(&w), Some(&base.narrow(0, 1, 1))]).expect("constants");
    assert_eq!(values(&base), [1.0, 20.0]);
    let w = leaf(&[10.0]);
    no_grad(|| apply(multiply_into_the_second(), &[Some(&w), Some(&base.narrow(0, 0, 1))]))
        .expect("no_grad");
    assert_eq!(values(&base), [10.0, 20.0]);
}

#[test]
fn a_forward_cannot_leave_grad_mode_changed() {
    let _alone = alone();
    // A panic inside tch's `with_grad` is caught; tch does not restore the mode.
    let careless = || {
        op(
            |_, inputs| {
                let hook = std::panic::take_hook();
                std::panic::set_hook(Box::new(|_| {}));
                let caught = std::panic::catch_unwind(|| tch::with_grad(|| panic!("inside")));
                std::panic::set_hook(hook);
                assert!(caught.is_err());
                Ok((inputs.get(0)? * 2.0).into())
            },
            |_, grads| Ok((grads.get(0)? * 2.0).into()),
        )
    };
    let x = leaf(&[3.0]);
    let after = no_grad(|| {
        let _ = run(careless(), &x);
        (&x * 1.0).requires_grad()
    });
    assert!(!after, "grad mode is off again, as the caller had it");
    assert!(run(careless(), &x).requires_grad(), "and on, as this caller had it");
}

/// x², whose forward changes the input's `requires_grad`.
fn square_and_set_requires_grad(to: bool) -> impl Function {
    op(
        move |saver, inputs| {
            let x = inputs.get(0)?;
            saver.save(x);
            let _ = x.shallow_clone().f_set_requires_grad(to)?;
            Ok((x * x).into())
        },
        |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into()),
    )
}

/// Doubles input 0 in place, after which the forward makes input 1 require grad.
fn double_in_place_and_require_grad() -> impl Function {
    op(
        |saver, inputs| {
            saver.save(inputs.get(1)?);
            saver.mark_dirty(0);
            let mut x = inputs.get(0)?.shallow_clone();
            let _ = x.g_mul_scalar_(2.0);
            let _ = inputs.get(1)?.shallow_clone().f_set_requires_grad(true)?;
            Ok(x.into())
        },
        |ctx, grads| Ok([Some(grads.get(0)? * ctx.saved(0)?), None].into()),
    )
}

#[test]
fn whether_a_graph_is_needed_is_decided_before_the_forward() {
    let _alone = alone();
    let x = Tensor::from_slice(&[3.0]);
    assert!(!run(square_and_set_requires_grad(true), &x).requires_grad() && x.requires_grad());
    // There is a graph, although the leaf no longer requires grad.
    let x = leaf(&[3.0]);
    let y = run(square_and_set_requires_grad(false), &x);
    assert!(y.requires_grad() && !x.requires_grad());

    let before = live_nodes();
    let (x, w) = (Tensor::from_slice(&[3.0]), Tensor::from_slice(&[5.0]));
    let y =
        apply(double_in_place_and_require_grad(), &[Some(&x), Some(&w)]).and_then(Tensors::single);
    assert!(!y.expect("one output").requires_grad(), "there was no graph when it began");
    assert_eq!(live_nodes(), before);
}
