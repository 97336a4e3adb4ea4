//! Tests of `register_post_accumulate_grad_hook`.

use super::*;

#[test]
fn a_hook_sees_the_accumulated_grad() {
    let _alone = alone();
    let (x, seen) = (leaf(&[3.0]), Arc::new(Mutex::new(Vec::new())));
    let log = Arc::clone(&seen);
    let hook = register_post_accumulate_grad_hook(&x, move |leaf| {
        log.lock().expect("unpoisoned").extend(values(&leaf.grad()));
        Ok(())
    })
    .expect("a leaf");
    // Two paths lead to the leaf, but the hook sees one accumulated gradient.
    for _ in 0..2 {
        (square(&x) + &x).sum(Kind::Double).backward();
    }
    assert_eq!(*seen.lock().expect("unpoisoned"), [7.0, 14.0]);
    let _ = gradient_of(&square(&x), &x).expect("gradient");
    assert_eq!(seen.lock().expect("unpoisoned").len(), 2, "grad() adds to no grad");
    drop(hook);
    square(&x).sum(Kind::Double).backward();
    assert_eq!(seen.lock().expect("unpoisoned").len(), 2, "removed");
}

#[test]
fn hooks_run_in_order_and_may_take_the_grad_away() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let order = Arc::new(Mutex::new(Vec::new()));
    for name in ["first", "second"] {
        let order = Arc::clone(&order);
        register_post_accumulate_grad_hook(&x, move |leaf| {
            order.lock().expect("unpoisoned").push(name);
            let mut leaf = leaf.shallow_clone();
            leaf.zero_grad();
            Ok(())
        })
        .expect("a leaf")
        .forget();
    }
    square(&x).sum(Kind::Double).backward();
    assert_eq!(*order.lock().expect("unpoisoned"), ["first", "second"]);
    assert_eq!(values(&x.grad()), [0.0]);
}

#[test]
fn a_hook_that_fails_is_an_error_of_backwards_caller_and_goes_with_its_tensor() {
    let _alone = alone();
    let drops = Arc::new(AtomicUsize::new(0));
    let (x, held) = (leaf(&[3.0]), Counted(Arc::clone(&drops)));
    register_post_accumulate_grad_hook(&x, move |_| {
        let _held = &held;
        Err(Error::msg("out of luck"))
    })
    .expect("a leaf")
    .forget();
    let error =
        backward(&[&square(&x)], &Default::default()).expect_err("the hook fails").to_string();
    assert!(error.contains("register_post_accumulate_grad_hook: out of luck"), "{error}");
    drop(x);
    assert_eq!(drops.load(Ordering::SeqCst), 1);
}

#[test]
fn only_a_leaf_that_requires_grad_takes_one() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    for (tensor, expected) in [
        (square(&x), "expected a leaf"),
        (Tensor::from_slice(&[1.0]), "one that does not"),
        (Tensor::new(), "an undefined one"),
    ] {
        let error = register_post_accumulate_grad_hook(&tensor, |_| Ok(()))
            .err()
            .expect(expected)
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
}
