//! Tests of inputs that the forward changes in place.

use super::*;

fn double_in_place() -> impl Function {
    op(
        |saver, inputs| {
            saver.mark_dirty(0);
            let mut x = inputs.get(0)?.shallow_clone();
            let _ = x.f_mul_scalar_(2.0)?;
            Ok(x.into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    )
}

#[test]
fn an_input_changed_in_place() {
    let _alone = alone();
    let x = leaf(&[1.0, 4.0]);
    let middle = &x * 3.0;
    let earlier_user = square(&middle);
    let y = run(double_in_place(), &middle);
    assert_eq!(values(&middle), [6.0, 24.0], "the input itself was changed");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, 6.0]);
    let error = gradient_of(&earlier_user, &x).expect_err("it saved the old value").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");

    let error = apply(double_in_place(), &[Some(&x)]).expect_err("a leaf").to_string();
    assert!(error.contains("leaf"), "{error}");
}

/// w·v, written into v, which is the input at index `place`.
fn multiply_into(place: usize) -> impl Function {
    op(
        move |saver, inputs| {
            let (mut v, w) = (inputs.get(place)?.shallow_clone(), inputs.get(1 - place)?);
            saver.save(&v.copy());
            saver.save(w);
            saver.mark_dirty(place);
            let _ = v.f_mul_(w)?;
            Ok(v.into())
        },
        move |ctx, grads| {
            let (grad_v, grad_w) = (grads.get(0)? * ctx.saved(1)?, grads.get(0)? * ctx.saved(0)?);
            Ok(if place == 0 { [grad_v, grad_w] } else { [grad_w, grad_v] }.into())
        },
    )
}

#[test]
fn a_view_changed_in_place_has_to_be_the_first_input() {
    let _alone = alone();
    let (x, w) = (leaf(&[1.0, 2.0, 3.0, 4.0]), leaf(&[10.0, 20.0]));
    let base = &x * 1.0;
    let view = base.narrow(0, 1, 2);
    apply(multiply_into(0), &[Some(&view), Some(&w)]).expect("the view first");
    let found =
        grad(&[&base.sum(Kind::Double)], &[&x, &w], &GradOptions::default()).expect("gradients");
    assert_eq!(values(found.get(0).expect("x")), [1.0, 10.0, 20.0, 1.0]);
    assert_eq!(values(found.get(1).expect("w")), [2.0, 3.0]);

    // Without this error, libtorch would silently put the gradient in the wrong place.
    let base = &x * 1.0;
    let view = base.narrow(0, 1, 2);
    let error =
        apply(multiply_into(1), &[Some(&w), Some(&view)]).expect_err("the view second").to_string();
    assert!(error.contains("mark_dirty(1)") && error.contains("first input"), "{error}");
}

#[test]
fn a_view_changed_in_place_and_saved_makes_no_cycle() {
    let _alone = alone();
    let before = live_nodes();
    let exp_in_place = || {
        op(
            |saver, inputs| {
                let mut v = inputs.get(0)?.shallow_clone();
                let _ = v.f_exp_()?;
                saver.save(&v);
                saver.mark_dirty(0);
                Ok(v.into())
            },
            |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        )
    };
    let x = leaf(&[0.0, 1.0, 2.0]);
    for _ in 0..3 {
        let base = &x * 1.0;
        drop(run(exp_in_place(), &base.narrow(0, 1, 1)));
    }
    assert_eq!(live_nodes(), before);
    let base = &x * 1.0;
    let _ = run(exp_in_place(), &base.narrow(0, 1, 1));
    assert_eq!(values(&gradient_of(&base, &x).expect("gradient")), [1.0, 1.0_f64.exp(), 1.0]);
}

/// Changes its input in place and saves a tensor that shares memory with it: its base, or another
/// view of the base.
fn exp_in_place_and_save(other: &Tensor) -> impl Function + use<> {
    let other = Mutex::new(other.shallow_clone());
    op(
        move |saver, inputs| {
            let mut v = inputs.get(0)?.shallow_clone();
            let _ = v.f_exp_()?;
            saver.mark_dirty(0);
            saver.save(&std::mem::take(&mut *other.lock().expect("unpoisoned")));
            Ok(v.into())
        },
        |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?.narrow(0, 0, 1)).into()),
    )
}

#[test]
fn what_shares_memory_with_a_changed_view_makes_no_cycle_when_saved() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[0.0, 1.0, 2.0]);
    let others: [fn(&Tensor) -> Tensor; 2] = [Tensor::shallow_clone, |base| base.narrow(0, 0, 2)];
    for other in others {
        let base = &x * 1.0;
        drop(run(exp_in_place_and_save(&other(&base)), &base.narrow(0, 0, 1)));
        drop(base);
        assert_eq!(live_nodes(), before);

        let base = &x * 1.0;
        let y = run(exp_in_place_and_save(&other(&base)), &base.narrow(0, 0, 1));
        assert_eq!(values(&gradient_of(&base, &x).expect("gradient")), [1.0, 1.0, 1.0]);
        drop((y, base));
        assert_eq!(live_nodes(), before);

        // Later changes of the saved tensor are still detected.
        let mut base = &x * 1.0;
        let _ = run(exp_in_place_and_save(&other(&base)), &base.narrow(0, 0, 1));
        let _ = base.f_mul_(&Tensor::from(2.0)).expect("in place");
        let error = gradient_of(&base, &x).expect_err("changed since").to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }
}

#[test]
fn a_view_of_a_changed_input_makes_no_cycle_when_saved() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[0.0, 1.0]);
    let changed = &x * 1.0;
    drop(run(exp_in_place_and_save(&changed.narrow(0, 0, 2)), &changed));
    drop(changed);
    assert_eq!(live_nodes(), before);
}

/// Doubles input 0 in place with `Saver::in_place`, which replaces cloning, marking and returning
/// by hand.
fn double_by_saver() -> impl Function {
    op(
        |saver, _| {
            let mut x = saver.in_place(0)?;
            let _ = x.g_mul_scalar_(2.0);
            Ok(x.into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    )
}

#[test]
fn in_place_refuses_before_anything_is_changed() {
    let _alone = alone();
    let x = leaf(&[1.0, 4.0]);
    let middle = &x * 3.0;
    let y = run(double_by_saver(), &middle);
    assert_eq!(values(&middle), [6.0, 24.0]);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, 6.0]);

    let error = apply(double_by_saver(), &[Some(&x)]).expect_err("a leaf").to_string();
    assert!(error.contains("op: in_place(0): a leaf"), "{error}");
    let error =
        apply(double_by_saver(), &[Some(&x.narrow(0, 0, 1))]).expect_err("its view").to_string();
    assert!(error.contains("a view of a leaf"), "{error}");
    assert_eq!(values(&x), [1.0, 4.0], "nothing was changed");

    let second = op(
        |saver, _| {
            let mut x = saver.in_place(1)?;
            let _ = x.g_mul_scalar_(2.0);
            Ok(x.into())
        },
        |_, _| unreachable!("refused"),
    );
    let base = &x * 1.0;
    let error =
        apply(second, &[Some(&x), Some(&base.narrow(0, 0, 1))]).expect_err("not first").to_string();
    assert!(error.contains("in_place(1)") && error.contains("first input"), "{error}");
    assert_eq!(values(&base), [1.0, 4.0], "nothing was changed");

    let base = &x * 1.0;
    let one_of_several = base.chunk(2, 0).remove(0);
    let error =
        apply(double_by_saver(), &[Some(&one_of_several)]).expect_err("of chunk").to_string();
    assert!(error.contains("in_place(0)") && error.contains("multiple views"), "{error}");
    assert_eq!(values(&base), [1.0, 4.0], "nothing was changed");

    let error = apply(double_by_saver(), &[None]).expect_err("absent").to_string();
    assert!(error.contains("input 0"), "{error}");
    // A leaf may be changed when there is no graph.
    let _ = tch::no_grad(|| run(double_by_saver(), &x));
    assert_eq!(values(&x), [2.0, 8.0]);
}

/// x becomes 2x by a write that does not increase libtorch's version counter, like a kernel's
/// write.
fn double_unseen() -> impl Function {
    op(
        |saver, inputs| {
            saver.mark_dirty(0);
            let x = inputs.get(0)?;
            let _ = x.data().f_mul_scalar_(2.0)?;
            Ok(x.shallow_clone().into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    )
}

#[test]
fn an_input_changed_by_a_kernel_counts_as_changed() {
    let _alone = alone();
    for with_graph in [true, false] {
        let x = leaf(&[1.0, 4.0]);
        let middle = &x * 3.0;
        let earlier_user = square(&middle);
        let before = live_nodes();
        let y = if with_graph {
            run(double_unseen(), &middle)
        } else {
            tch::no_grad(|| run(double_unseen(), &middle))
        };
        assert_eq!(live_nodes(), before + i64::from(with_graph));
        assert_eq!(values(&y), [6.0, 24.0]);
        let error = gradient_of(&earlier_user, &x).expect_err("it saved the old value").to_string();
        assert!(error.contains("modified by an inplace operation"), "{with_graph}: {error}");
    }
    let before = live_nodes();
    let constant = Tensor::from_slice(&[1.0]);
    let y = run(double_unseen(), &constant);
    assert!(!y.requires_grad(), "no input requires grad");
    assert_eq!((live_nodes(), values(&constant)), (before, vec![2.0]));
}
