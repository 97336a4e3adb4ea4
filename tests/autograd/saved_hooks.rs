//! Tests of `saved_tensors_hooks` and `save_on_cpu`.

use super::*;

#[test]
fn saved_tensors_are_packed_and_unpacked() {
    let _alone = alone();
    let (before, packs, unpacks) =
        (live_nodes(), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let x = leaf(&[3.0]);
    let y = {
        let (packs, unpacks) = (Arc::clone(&packs), Arc::clone(&unpacks));
        let _hooks = saved_tensors_hooks(
            move |tensor| {
                packs.fetch_add(1, Ordering::SeqCst);
                Ok(values(tensor))
            },
            move |packed: &Vec<f64>| {
                unpacks.fetch_add(1, Ordering::SeqCst);
                Ok(Tensor::from_slice(packed))
            },
        );
        // `square` saves its input, `exp` its output.
        exp(&square(&x))
    };
    let counts = || (packs.load(Ordering::SeqCst), unpacks.load(Ordering::SeqCst));
    assert_eq!(counts(), (2, 0));
    let _ = square(&x);
    assert_eq!(counts(), (2, 0), "the guard is gone");
    for times in [1, 2] {
        let found = grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("gradient");
        assert!((values(&found)[0] - 6.0 * 9.0_f64.exp()).abs() < 1e-6);
        assert_eq!(counts(), (2, 2 * times));
    }
    drop(y);
    assert_eq!(
        (live_nodes(), Arc::strong_count(&packs)),
        (before, 1),
        "the closures went with the graph"
    );
}

#[test]
fn second_derivatives_pass_through_what_was_packed() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let hooks = saved_tensors_hooks(
        |tensor| Ok(tensor.copy()),
        |packed: &Tensor| Ok(packed.shallow_clone()),
    );
    let y = run(Square::<true>, &run(Square::<true>, &x)).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [108.0]);
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [108.0]);
    drop(hooks);
}

#[test]
fn the_youngest_hooks_count() {
    let _alone = alone();
    let scaled = |factor: f64| {
        saved_tensors_hooks(
            move |tensor| Ok(tensor * factor),
            |packed: &Tensor| Ok(packed.shallow_clone()),
        )
    };
    let x = leaf(&[3.0]);
    let gradient = || values(&gradient_of(&square(&x), &x).expect("gradient"))[0];
    let _outer = scaled(10.0);
    {
        let _inner = scaled(100.0);
        assert_eq!(gradient(), 600.0);
    }
    assert_eq!(gradient(), 60.0);
    let elsewhere = x.shallow_clone();
    let other = std::thread::spawn(move || {
        values(&gradient_of(&square(&elsewhere), &elsewhere).expect("gradient"))
    });
    assert_eq!(other.join().expect("the thread"), [6.0], "of this thread only");
}

#[test]
fn hooks_that_fail_are_errors() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[3.0]);
    {
        let _hooks =
            saved_tensors_hooks(|_| Err::<(), _>(Error::msg("no room")), |()| Ok(Tensor::new()));
        let error = apply(Square::<false>, &[Some(&x)]).expect_err("pack fails").to_string();
        assert!(error.contains("square: no room"), "{error}");
    }
    {
        let _hooks =
            saved_tensors_hooks(|_| -> Result<()> { panic!("boom") }, |()| Ok(Tensor::new()));
        let error = apply(Square::<false>, &[Some(&x)]).expect_err("pack panics").to_string();
        assert!(error.contains("the pack hook of a saved tensor panicked: boom"), "{error}");
    }
    let y = {
        let _hooks = saved_tensors_hooks(|_| Ok(()), |()| Err(Error::msg("lost it")));
        square(&x)
    };
    let error = gradient_of(&y, &x).expect_err("unpack fails").to_string();
    assert!(error.contains("lost it"), "{error}");
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn guards_may_be_dropped_in_any_order() {
    let _alone = alone();
    let scaled = |factor: f64| {
        saved_tensors_hooks(
            move |tensor| Ok(tensor * factor),
            |packed: &Tensor| Ok(packed.shallow_clone()),
        )
    };
    let x = leaf(&[3.0]);
    let gradient = || values(&gradient_of(&square(&x), &x).expect("gradient"))[0];
    let (outer, inner) = (scaled(10.0), scaled(100.0));
    drop(outer);
    assert_eq!(gradient(), 600.0);
    let youngest = scaled(1000.0);
    drop(inner);
    assert_eq!(gradient(), 6000.0);
    drop(youngest);
    assert_eq!(gradient(), 6.0);
}

#[test]
fn what_unpack_returns_is_checked() {
    let _alone = alone();
    let x = leaf(&[3.0, 4.0]);
    for (name, wrong) in [
        ("Double[1] on cpu in the place of Double[2]", Tensor::from_slice(&[3.0])),
        ("Float[2]", Tensor::from_slice(&[3.0f32, 4.0])),
        ("an undefined tensor", Tensor::new()),
    ] {
        let wrong = Mutex::new(wrong);
        let hooks = saved_tensors_hooks(
            |_| Ok(()),
            move |()| Ok(wrong.lock().expect("unpoisoned").shallow_clone()),
        );
        let y = square(&x);
        drop(hooks);
        let error = gradient_of(&y, &x).expect_err(name).to_string();
        assert!(error.contains(name), "{error}");
    }
}

#[test]
fn an_unpack_hook_that_needs_its_own_tensor_is_an_error() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let of_itself: Arc<Mutex<Option<(Tensor, Tensor)>>> = Arc::default();
    let inside = Arc::clone(&of_itself);
    let hooks = saved_tensors_hooks(
        |tensor| Ok(tensor.copy()),
        move |packed: &Tensor| {
            let pair = inside.lock().expect("unpoisoned").take();
            if let Some((y, x)) = pair {
                grad(&[&y], &[&x], &keep())?;
            }
            Ok(packed.shallow_clone())
        },
    );
    let y = square(&x).sum(Kind::Double);
    drop(hooks);
    *of_itself.lock().expect("unpoisoned") = Some((y.shallow_clone(), x.shallow_clone()));
    let error = grad(&[&y], &[&x], &keep()).expect_err("it asks for itself").to_string();
    assert!(error.contains("the very tensor that it makes"), "{error}");
    assert_eq!(values(&gradient_of(&y, &x).expect("the second time it does not")), [6.0]);
}

#[test]
fn what_is_saved_on_the_cpu_is_a_copy() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let mut middle = &x * 1.0;
    let y = {
        let _guard = save_on_cpu(false);
        square(&middle)
    };
    let _ = middle.f_mul_(&Tensor::from(100.0)).expect("in place");
    assert_eq!(
        values(&gradient_of(&y, &x).expect("gradient")),
        [6.0],
        "of the value that was saved"
    );
}

#[test]
fn saved_on_the_cpu() {
    let _alone = alone();
    for device in tch_extension::testing::devices() {
        for pin_memory in [false, true] {
            let x = Tensor::from_slice(&[3.0]).to_device(device).set_requires_grad(true);
            let guard = save_on_cpu(pin_memory);
            let y = exp(&square(&x));
            drop(guard);
            let found = gradient_of(&y, &x).expect("gradient").to_device(Device::Cpu);
            assert!((values(&found)[0] - 6.0 * 9.0_f64.exp()).abs() < 1e-6);
        }
    }
}

/// What `unpack` returns may be the hooks' own, so that no backward pass is the last one to read it.
#[test]
fn what_hooks_hold_is_never_written_to() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let times = |held: bool| {
        let held = held.then(|| {
            let keep = |tensor: &Tensor| Ok(tensor.copy());
            saved_tensors_hooks(keep, |packed: &Tensor| Ok(packed.shallow_clone()))
        });
        let seen = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&seen);
        let y = apply_with(
            "counted",
            &[Some(&x)],
            |saver, inputs| {
                saver.save(&inputs.get(0)?.ones_like());
                Ok((inputs.get(0)? * 1.0).into())
            },
            move |ctx, grads| {
                counted.fetch_add(usize::from(ctx.is_last_backward()), Ordering::SeqCst);
                Ok((grads.get(0)? * ctx.saved(0)?).into())
            },
        );
        drop(held);
        let y = y.and_then(Tensors::single).expect("y");
        assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [1.0]);
        seen.load(Ordering::SeqCst)
    };
    assert_eq!((times(false), times(true)), (1, 0));
}
