//! Tests of `register_hook`: what hooks see, what they change, and when they are removed.

use super::*;

fn scale(factor: f64) -> impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static {
    move |grad| Ok(Some(grad * factor))
}

#[test]
fn a_hook_replaces_the_gradient_of_a_leaf_wherever_it_goes() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let hook = register_hook(&x, scale(10.0)).expect("a leaf");
    for expected in [60.0, 120.0] {
        square(&x).sum(Kind::Double).backward();
        assert_eq!(values(&x.grad()), [expected], "accumulated after the hook");
    }
    assert_eq!(
        values(&gradient_of(&square(&x), &x).expect("gradient")),
        [60.0],
        "through grad(), too"
    );
    hook.remove();
    assert_eq!(values(&gradient_of(&square(&x), &x).expect("gradient")), [6.0]);
}

#[test]
fn a_hook_on_an_intermediate_changes_what_flows_on() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let (middle, seen) = (square(&x), Arc::new(Mutex::new(Vec::new())));
    let log = Arc::clone(&seen);
    register_hook(&middle, move |grad| {
        log.lock().expect("unpoisoned").extend(values(grad));
        Ok(None)
    })
    .expect("not a leaf")
    .forget();
    register_hook(&middle, scale(10.0)).expect("the second").forget();
    let y = (&middle * 7.0).sum(Kind::Double);
    let found = grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [420.0]);
    assert_eq!(*seen.lock().expect("unpoisoned"), [7.0], "once, before the second");
    let found = grad(&[&y], &[&middle], &keep()).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [70.0], "what it replaced itself");
}

#[test]
fn a_hook_sees_the_gradient_of_its_own_output_only() {
    let _alone = alone();
    let pair = || {
        op(
            |saver, inputs| {
                saver.set_materialize_grads(false);
                Ok([inputs.get(0)? * 2.0, inputs.get(0)? * 5.0].into())
            },
            |_, grads| {
                let of =
                    |index, factor: f64| grads.optional(index).map(|grad: &Tensor| grad * factor);
                let (a, b) = (of(0, 2.0), of(1, 5.0));
                Ok(match (a, b) {
                    (Some(a), Some(b)) => Some(a + b),
                    (a, b) => a.or(b),
                }
                .into())
            },
        )
    };
    let x = leaf(&[1.0]);
    let [a, b] = apply(pair(), &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    register_hook(&b, scale(100.0)).expect("hook").forget();
    assert_eq!(values(&gradient_of(&(&a + &b), &x).expect("gradient")), [502.0]);
    assert_eq!(values(&gradient_of(&a, &x).expect("gradient")), [2.0], "no gradient, no call");
}

#[test]
fn hooks_are_part_of_a_graph_of_the_gradients() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    register_hook(&x, |grad| Ok(Some(grad * grad))).expect("hook").forget();
    let y = run(Square::<true>, &x).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [36.0]);
    // The second derivative of (2x)² is 8x = 24. It passes the hook again, which squares it.
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [576.0]);
}

#[test]
fn a_hook_that_fails_is_an_error_of_backwards_caller() {
    let _alone = alone();
    type Body = fn(&Tensor) -> Result<Option<Tensor>>;
    let cases: [(&str, Body, &[&str]); 6] = [
        ("error", |_| Err(Error::msg("out of luck")), &["register_hook: out of luck"]),
        ("panic", |_| panic!("boom {}", 7), &["register_hook: the hook panicked: boom 7"]),
        (
            "shape",
            |_| Ok(Some(Tensor::from_slice(&[1.0, 2.0]))),
            &["register_hook", "Double[2]", "Double[3]"],
        ),
        (
            "kind",
            |grad| Ok(Some(grad.to_kind(Kind::Float))),
            &["register_hook", "Float[3]", "Double[3]"],
        ),
        (
            "layout",
            |grad| Ok(Some(grad.to_sparse(None, None::<&[i64]>, None))),
            &["register_hook", "Double[3] on cpu, Sparse", "Double[3] on cpu"],
        ),
        ("undefined", |_| Ok(Some(Tensor::new())), &["register_hook", "None to keep"]),
    ];
    for (name, body, expected) in cases {
        for on_leaf in [true, false] {
            let x = leaf(&[1.0, 2.0, 3.0]);
            let middle = square(&x);
            let hook = register_hook(if on_leaf { &x } else { &middle }, body).expect("hook");
            let y = middle.sum(Kind::Double);
            let through_grad = grad(&[&y], &[&x], &keep()).expect_err(name).to_string();
            let through_backward =
                square(&middle).sum(Kind::Double).f_backward().expect_err(name).to_string();
            for text in expected {
                assert!(through_grad.contains(text), "{name}: {through_grad}");
                assert!(through_backward.contains(text), "{name}: {through_backward}");
            }
            assert!(!x.grad().defined(), "{name}");
            hook.remove();
        }
    }
}

#[test]
fn a_tensor_without_a_gradient_takes_no_hook() {
    let _alone = alone();
    let drops = Arc::new(AtomicUsize::new(0));
    for (tensor, got) in
        [(Tensor::new(), "an undefined one"), (Tensor::from_slice(&[1.0]), "one that does not")]
    {
        let held = Counted(Arc::clone(&drops));
        let hook = register_hook(&tensor, move |_| {
            let _held = &held;
            Ok(None)
        });
        let error = hook.err().expect(got).to_string();
        assert!(error.contains("register_hook: tensor") && error.contains(got), "{error}");
    }
    assert_eq!(drops.load(Ordering::SeqCst), 2);
}

#[test]
fn a_hook_is_dropped_once_with_its_removal_or_its_tensor() {
    let _alone = alone();
    let (before, drops) = (live_nodes(), Arc::new(AtomicUsize::new(0)));
    let dropped = || drops.swap(0, Ordering::SeqCst);
    let hold = |tensor: &Tensor| {
        let held = Counted(Arc::clone(&drops));
        register_hook(tensor, move |_| {
            let _held = &held;
            Ok(None)
        })
        .expect("hook")
    };
    for on_leaf in [true, false] {
        let x = leaf(&[1.0]);
        let tensor = if on_leaf { x } else { square(&x) };
        let hook = hold(&tensor);
        hook.remove();
        assert_eq!(dropped(), 1, "removed");
        hook.remove();
        drop(hook);
        assert_eq!(dropped(), 0, "removed twice");

        let hook = hold(&tensor);
        drop(hold(&tensor));
        assert_eq!(dropped(), 1, "dropping the handle removes the hook");
        hold(&tensor).forget();
        assert_eq!(dropped(), 0, "a forgotten one stays");
        drop(tensor);
        assert_eq!((dropped(), live_nodes()), (2, before), "the handle keeps nothing alive");
        hook.remove();
        assert_eq!(dropped(), 0, "after the tensor");
    }
}

#[test]
fn a_hook_may_remove_and_register_hooks() {
    let _alone = alone();
    let (x, runs) = (leaf(&[3.0]), Arc::new(AtomicUsize::new(0)));
    let slot: Arc<Mutex<Vec<Hook>>> = Arc::default();
    let (inner, again, counter) =
        (Arc::clone(&slot), Mutex::new(x.shallow_clone()), Arc::clone(&runs));
    let first = register_hook(&x, move |_| {
        // Removes itself and the next hook, and registers a new one.
        inner.lock().expect("unpoisoned").drain(..).for_each(|hook| hook.remove());
        let counter = Arc::clone(&counter);
        register_hook(&again.lock().expect("unpoisoned"), move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(None)
        })?
        .forget();
        Ok(None)
    })
    .expect("first");
    let second = register_hook(&x, scale(10.0)).expect("second");
    slot.lock().expect("unpoisoned").extend([first, second]);
    assert_eq!(
        values(&gradient_of(&square(&x), &x).expect("gradient")),
        [6.0],
        "the second was removed"
    );
    assert_eq!(runs.load(Ordering::SeqCst), 0, "a new one runs from the next time on");
    let _ = gradient_of(&square(&x), &x).expect("gradient");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[test]
fn what_a_hook_drops_may_remove_and_register_hooks() {
    struct Last(Mutex<Tensor>, Hook);
    impl Drop for Last {
        fn drop(&mut self) {
            self.1.remove();
            register_hook(&self.0.lock().expect("unpoisoned"), scale(100.0))
                .expect("a third")
                .forget();
        }
    }
    let _alone = alone();
    let x = leaf(&[3.0]);
    let first = register_hook(&x, scale(10.0)).expect("first");
    let last = Last(Mutex::new(x.shallow_clone()), first);
    let second = register_hook(&x, move |_| {
        let _held = &last;
        Ok(None)
    })
    .expect("second");
    second.remove();
    assert_eq!(values(&gradient_of(&square(&x), &x).expect("gradient")), [600.0]);
}

#[test]
fn hooks_are_removed_while_other_threads_run_them() {
    let _alone = alone();
    let (x, drops) = (leaf(&[3.0]), Arc::new(AtomicUsize::new(0)));
    let hooks: Vec<_> = (0..100)
        .map(|_| {
            let held = Counted(Arc::clone(&drops));
            register_hook(&x, move |grad| {
                let _held = &held;
                Ok(Some(grad.copy()))
            })
            .expect("hook")
        })
        .collect();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            let x = x.shallow_clone();
            scope.spawn(move || {
                for _ in 0..50 {
                    assert_eq!(values(&gradient_of(&square(&x), &x).expect("gradient")), [6.0]);
                }
            });
            scope.spawn(|| hooks.iter().for_each(Hook::remove));
        }
    });
    assert_eq!(drops.load(Ordering::SeqCst), 100);
}

#[test]
fn hooks_come_and_go_while_another_thread_runs_them() {
    let _alone = alone();
    let (x, done) = (leaf(&[3.0]), AtomicBool::new(false));
    register_hook(&x, scale(10.0)).expect("the list, before it is run").forget();
    std::thread::scope(|scope| {
        let handle = x.shallow_clone();
        scope.spawn(|| {
            let x = handle;
            while !done.load(Ordering::SeqCst) {
                assert_eq!(values(&gradient_of(&square(&x), &x).expect("gradient")), [60.0]);
            }
        });
        for _ in 0..300 {
            let hooks = [(); 100].map(|()| register_hook(&x, |_| Ok(None)).expect("hook"));
            hooks.iter().for_each(Hook::remove);
        }
        done.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_hook_stays_with_the_value_it_was_registered_on() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let mut middle = &x * 1.0;
    register_hook(&middle, scale(10.0)).expect("before the change").forget();
    let _ = middle.f_mul_scalar_(2.0).expect("in place");
    register_hook(&middle, |grad| Ok(Some(grad + 1.0))).expect("after the change").forget();
    // The gradient 1 passes the later hook (+1), the multiplication by 2 and the earlier hook
    // (·10): (1 + 1)·2·10.
    assert_eq!(values(&gradient_of(&middle, &x).expect("gradient")), [40.0]);
}

#[test]
fn a_hook_on_a_view_of_what_is_changed_stays_with_the_value_before() {
    let _alone = alone();
    let x = leaf(&[3.0, 5.0]);
    let mut base = &x * 1.0;
    let part = base.narrow(0, 1, 1);
    register_hook(&part, scale(10.0)).expect("before the change").forget();
    let _ = base.f_mul_scalar_(2.0).expect("in place, through the base");
    register_hook(&part, |grad| Ok(Some(grad + 1.0))).expect("after the change").forget();
    // Only the later hook and the multiplication apply: (1 + 1)·2. The earlier hook is on a value
    // that the graph no longer reaches.
    assert_eq!(values(&gradient_of(&part, &x).expect("gradient")), [0.0, 4.0]);
}

#[test]
fn cuda_a_hook_on_the_engines_own_thread() {
    let _alone = alone();
    let Some(device) =
        tch_extension::testing::cuda_or_skip("cuda_a_hook_on_the_engines_own_thread")
    else {
        return;
    };
    let x = Tensor::from_slice(&[3.0]).to_device(device).set_requires_grad(true);
    let hook = register_hook(&x, scale(10.0)).expect("hook");
    let gradient = gradient_of(&square(&x), &x).expect("gradient").to_device(Device::Cpu);
    assert_eq!(values(&gradient), [60.0]);
    hook.remove();
    register_hook(&x, |grad| Ok(Some(grad.to_device(Device::Cpu)))).expect("hook").forget();
    let error = gradient_of(&square(&x), &x).expect_err("another device").to_string();
    assert!(
        error.contains("register_hook") && error.contains("cpu") && error.contains("cuda"),
        "{error}"
    );
}
