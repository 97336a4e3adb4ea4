//! The state is dropped once; long graphs come apart.

use super::*;

#[test]
fn the_state_is_dropped_exactly_once() {
    let _alone = alone();
    let drops = Arc::new(AtomicUsize::new(0));
    let dropped = || drops.swap(0, Ordering::SeqCst);
    let x = leaf(&[1.0]);
    let double = |x: &Tensor| run(counted(&drops, |_| {}), x);

    drop(double(&Tensor::from_slice(&[1.0])));
    assert_eq!(dropped(), 1, "without a graph");

    let y = double(&x);
    assert_eq!(dropped(), 0, "the graph holds it");
    drop(y);
    assert_eq!(dropped(), 1, "with a graph that is never used");

    let y = double(&x).sum(Kind::Double);
    for _ in 0..3 {
        grad(&[&y], &[&x], &keep()).expect("gradient");
    }
    assert_eq!(dropped(), 0, "a kept graph keeps it");
    drop(y);
    assert_eq!(dropped(), 1, "after several backwards");

    let y = double(&x);
    std::thread::spawn(move || drop(y)).join().expect("the other thread");
    assert_eq!(dropped(), 1, "from another thread");

    let failing = counted(&drops, |saver| saver.mark_dirty(5));
    let error = apply(failing, &[Some(&x)]).expect_err("there is no input 5").to_string();
    assert!(error.contains("mark_dirty(5)"), "{error}");
    assert_eq!(dropped(), 1, "when apply fails before there is a node");

    // The input is not among the outputs.
    let failing = counted(&drops, |saver| saver.mark_dirty(0));
    let error = apply(failing, &[Some(&x)]).expect_err("libtorch refuses").to_string();
    assert!(error.contains("op: "), "{error}");
    assert_eq!(dropped(), 1, "when libtorch refuses");
}

#[test]
fn a_panic_in_drop_ends_nothing() {
    let _alone = alone();
    struct Explosive;
    impl Drop for Explosive {
        fn drop(&mut self) {
            panic!("in drop");
        }
    }
    let state = Explosive;
    let function = op(
        |_, inputs| Ok((inputs.get(0)? * 1.0).into()),
        move |_, grads| {
            let _held = &state;
            Ok(grads.get(0)?.shallow_clone().into())
        },
    );
    let x = leaf(&[1.0]);
    drop(run(function, &x));
    assert_eq!(values(&gradient_of(&square(&x), &x).expect("gradient")), [2.0]);
}

#[test]
fn a_long_chain_does_not_overflow_the_stack() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[1.0]);
    let build = || {
        let mut y = x.shallow_clone();
        for _ in 0..300_000 {
            y = run(
                op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, grads| Ok(grads.get(0)?.copy().into())),
                &y,
            );
        }
        y
    };
    drop(build());
    assert_eq!(live_nodes(), before);
    assert_eq!(values(&gradient_of(&build(), &x).expect("gradient")), [1.0]);
    assert_eq!(live_nodes(), before);
}

#[test]
fn a_long_chain_of_refusals_does_not_overflow_the_stack() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[1.0]);
    let mut y = x.shallow_clone();
    for _ in 0..200_000 {
        y = run(
            op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, grads| Ok(grads.get(0)?.copy().into())),
            &y,
        );
    }
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    drop(y);
    drop(first);
    assert_eq!(live_nodes(), before);
}
