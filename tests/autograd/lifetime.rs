//! Tests that the state is dropped exactly once, and that long graphs can be dropped.

use super::*;
use std::time::{Duration, Instant};
use support::gpu::caching_or_skip;

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

    // The input that is marked dirty is not among the outputs.
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
                op(
                    |_, inputs| Ok(inputs.get(0)?.copy().into()),
                    |_, grads| Ok(grads.get(0)?.copy().into()),
                ),
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
fn a_long_chain_through_saved_tensors_only_does_not_overflow_the_stack() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[1.0]);
    let mut last = run(counted(&Arc::default(), |_| {}), &x);
    for _ in 0..200_000 {
        // The saved tensor is neither an input nor an output, so no edge of the graph leads to its
        // node.
        let held = Mutex::new(last);
        let link = op(
            move |saver, inputs| {
                let held = std::mem::take(&mut *held.lock().expect("unpoisoned"));
                saver.save(&held);
                Ok(inputs.get(0)?.copy().into())
            },
            |_, grads| Ok(grads.get(0)?.copy().into()),
        );
        last = run(link, &x);
    }
    drop(last);
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
            op(
                |_, inputs| Ok(inputs.get(0)?.copy().into()),
                |_, grads| Ok(grads.get(0)?.copy().into()),
            ),
            &y,
        );
    }
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    drop(y);
    drop(first);
    assert_eq!(live_nodes(), before);
}

/// The size in bytes of one link's tensor in the chains below.
const LINK: u64 = 8 << 20;

/// A chain of exp(−x), in which each link saves its output. Each backward appends the number of
/// allocated bytes to `seen`.
fn long_exp(x: &Tensor, links: usize, seen: &Arc<Mutex<Vec<u64>>>) -> Tensor {
    let device = x.device();
    (0..links).fold(x.shallow_clone(), |x, _| {
        let seen = Arc::clone(seen);
        let link = op(
            |saver, inputs| {
                let y = (inputs.get(0)? * -1.0).exp();
                saver.save(&y);
                Ok(y.into())
            },
            move |ctx, grads| {
                seen.lock().expect("a list").push(memory_stats(device)?.allocated);
                Ok((grads.get(0)? * ctx.saved(0)? * -1.0).into())
            },
        );
        run(link, &x)
    })
}

#[test]
fn cuda_saved_tensors_are_freed_as_the_backward_goes() {
    let _alone = alone();
    let name = "cuda_saved_tensors_are_freed_as_the_backward_goes";
    let Some(device) = caching_or_skip(name) else { return };
    let links = 16;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let x = Tensor::zeros([LINK as i64 / 8], (Kind::Double, device)).set_requires_grad(true);
    let y = long_exp(&x, links, &seen);
    let vector = y.detach().copy();
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let before = memory_stats(device).expect("statistics").allocated;
    reset_peak_memory_stats(device).expect("statistics");
    let gradient = grad(&[&y], &[&x], &options).expect("a gradient");
    let after = memory_stats(device).expect("statistics");

    // In addition to what was allocated before, there are at most the incoming gradient and two
    // products of one link.
    assert!(
        after.peak_allocated <= before + 3 * LINK,
        "{} of {before} bytes",
        after.peak_allocated
    );
    // Each link frees one tensor; only `y` itself stays, because the test holds it.
    for (link, &bytes) in seen.lock().expect("a list").iter().enumerate() {
        let freed = (link as u64).saturating_sub(1) * LINK;
        assert!(bytes + freed <= before + 3 * LINK, "link {link}: {bytes} of {before} bytes");
    }
    // Only x, y, the vector and the gradient remain. On a busy machine, libtorch's thread may still
    // be dropping its last link.
    drop((y, vector, gradient));
    let rest = || memory_stats(device).expect("statistics").allocated;
    let is_freed = || rest() + (links as u64 + 1) * LINK <= before;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !is_freed() && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(is_freed(), "{} of {before} bytes", rest());
}

#[test]
fn cuda_a_checkpoint_keeps_inputs_and_outputs_only() {
    let _alone = alone();
    let name = "cuda_a_checkpoint_keeps_inputs_and_outputs_only";
    let Some(device) = caching_or_skip(name) else { return };
    let x = Tensor::zeros([LINK as i64 / 8], (Kind::Double, device)).set_requires_grad(true);
    let allocated = || memory_stats(device).expect("statistics").allocated;
    let before = allocated();
    let links = 16;
    let whole = |x: &Tensor| long_exp(x, links, &Arc::default());
    let y = whole(&x);
    assert_eq!(allocated() - before, links as u64 * LINK, "without");
    drop(y);
    let chain = |inputs: &[Option<Tensor>]| match inputs {
        [Some(x)] => Ok(long_exp(x, 16, &Arc::default()).into()),
        _ => unreachable!("one input"),
    };
    let y = checkpoint(chain, &[Some(&x)]).and_then(Tensors::single).expect("an output");
    assert_eq!(allocated() - before, LINK, "with");
    let vector = Tensor::ones_like(&y);
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let gradient = grad(&[&y], &[&x], &options).and_then(Tensors::single).expect("a gradient");
    let expected =
        grad(&[&whole(&x)], &[&x], &options).and_then(Tensors::single).expect("a gradient");
    assert!(gradient.equal(&expected));
}
