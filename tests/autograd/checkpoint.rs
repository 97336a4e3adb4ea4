//! Tests of `checkpoint`, which gives the same numbers with fewer live tensors.

use super::*;

fn at(inputs: &[Option<Tensor>], index: usize) -> &Tensor {
    inputs[index].as_ref().expect("present")
}

/// exp(x·w)², which has two of our autograd nodes.
fn block(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    Ok(run(Square::<true>, &exp(&(at(inputs, 0) * at(inputs, 1)))).into())
}

fn plain(x: &Tensor, w: &Tensor) -> Tensor {
    block(&[Some(x.shallow_clone()), Some(w.shallow_clone())])
        .and_then(Tensors::single)
        .expect("block")
}

fn checkpointed(x: &Tensor, w: &Tensor) -> Tensor {
    checkpoint(block, &[Some(x), Some(w)]).and_then(Tensors::single).expect("checkpoint")
}

fn shifted(x: &Tensor, w: &Tensor, of: fn(&Tensor, &Tensor) -> Tensor) -> Tensor {
    // Two blocks that share a weight, the second with an input that depends on the first's.
    of(&(of(x, w) * x).sin(), w).sum(Kind::Double)
}

#[test]
fn gradients_and_their_gradients_are_those_of_the_function() {
    let _alone = alone();
    let before = live_nodes();
    let (x, w) = (leaf(&[0.3, -0.2]), leaf(&[0.5, 0.7]));
    let derivatives = |of| {
        let y = shifted(&x, &w, of);
        let first = grad(&[&y], &[&x, &w], &keep()).expect("first");
        let graph = grad(&[&y], &[&x, &w], &create()).expect("first, with a graph");
        let sum = graph.iter().flatten().map(|g| (g * g).sum(Kind::Double)).sum::<Tensor>();
        let second = grad(&[&sum], &[&x, &w], &GradOptions::default()).expect("second");
        [first, graph, second]
            .map(|list| list.iter().flatten().flat_map(values).collect::<Vec<_>>())
            .concat()
    };
    for (expected, found) in derivatives(plain).into_iter().zip(derivatives(checkpointed)) {
        assert!((expected - found).abs() <= 1e-12 * (1.0 + expected.abs()), "{expected} {found}");
    }
    assert_eq!(live_nodes(), before);
}

#[test]
fn nothing_is_kept_but_the_inputs() {
    let _alone = alone();
    let before = live_nodes();
    let (x, w) = (leaf(&[0.3]), leaf(&[0.5]));
    let y = plain(&x, &w);
    assert_eq!(live_nodes(), before + 2);
    drop(y);

    // `most` is the largest number of nodes that were alive while a block ran.
    let mut y = x.shallow_clone();
    let most = Arc::new(AtomicUsize::new(0));
    for _ in 0..10 {
        let most = Arc::clone(&most);
        let counted = move |inputs: &[Option<Tensor>]| {
            let outputs = block(inputs)?;
            most.fetch_max(usize::try_from(live_nodes()).expect("positive"), Ordering::SeqCst);
            Ok(outputs)
        };
        y = checkpoint(counted, &[Some(&y), Some(&w)])
            .and_then(Tensors::single)
            .expect("checkpoint")
            * 0.1;
    }
    let baseline = usize::try_from(before).expect("positive");
    assert_eq!(live_nodes(), before + 10, "one node each");
    assert_eq!(most.load(Ordering::SeqCst), baseline + 9, "none inside the first time");
    let _ = gradient_of(&y, &x).expect("gradient");
    // While a block runs backward, only its own nodes exist in addition; the outer nodes stay,
    // because `y` holds them.
    assert_eq!(most.load(Ordering::SeqCst), baseline + 12);
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn the_second_run_draws_the_same_random_numbers() {
    let _alone = alone();
    tch::manual_seed(3);
    let x = Tensor::ones([1000], (Kind::Double, Device::Cpu)).set_requires_grad(true);
    let dropout = |inputs: &[Option<Tensor>]| Ok(at(inputs, 0).dropout(0.5, true).into());
    for options in [GradOptions::default(), create()] {
        let y = checkpoint(dropout, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
        let _between = Tensor::rand([7], (Kind::Double, Device::Cpu));
        tch::manual_seed(11);
        let found = grad(&[&y.sum(Kind::Double)], &[&x], &options)
            .and_then(Tensors::single)
            .expect("gradient");
        assert_eq!(values(&found), values(&y), "kept where it was kept");
        let next = Tensor::rand([3], (Kind::Double, Device::Cpu));
        tch::manual_seed(11);
        assert_eq!(next, Tensor::rand([3], (Kind::Double, Device::Cpu)), "and puts the state back");
    }
}

#[test]
fn the_second_run_has_the_autocast_of_the_first() {
    /// Sets autocast and returns the previous setting. tch's own `autocast` does nothing without a
    /// GPU.
    fn set_autocast(enabled: bool) -> bool {
        // SAFETY: the call only changes a setting of this thread. C++ returns a bool, so only the
        // lowest bits of the result are defined.
        unsafe { torch_sys::at_autocast_set_enabled(i32::from(enabled)) & 1 == 1 }
    }
    let _alone = alone();
    let x = leaf(&[2.0]);
    for enabled in [true, false] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let log = Arc::clone(&seen);
        let function = move |inputs: &[Option<Tensor>]| {
            let now = set_autocast(false);
            set_autocast(now);
            log.lock().expect("unpoisoned").push(now);
            Ok((at(inputs, 0) * 3.0).into())
        };
        let before = set_autocast(enabled);
        let y = checkpoint(function, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
        set_autocast(!enabled);
        let gradient = gradient_of(&y, &x);
        assert_eq!(set_autocast(before), !enabled, "it is put back");
        assert_eq!(values(&gradient.expect("gradient")), [3.0]);
        assert_eq!(*seen.lock().expect("unpoisoned"), [enabled, enabled]);
    }
}

#[test]
fn only_what_is_asked_for_is_computed() {
    let _alone = alone();
    let (x, w, constant) = (leaf(&[0.3]), leaf(&[0.5]), Tensor::from_slice(&[2.0]));
    let seen = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&seen);
    let function = move |inputs: &[Option<Tensor>]| {
        assert!(inputs[3].is_none() && inputs[4].is_none(), "absent and undefined");
        let needed = [0, 1, 2].map(|index| at(inputs, index).requires_grad());
        log.lock().expect("unpoisoned").push(needed);
        Ok([at(inputs, 0) * at(inputs, 1) * at(inputs, 2), at(inputs, 0).argmax(0, false)].into())
    };
    let undefined = Tensor::new();
    let inputs = [Some(&x), Some(&w), Some(&constant), None, Some(&undefined)];
    let [y, index] = checkpoint(function, &inputs).and_then(Tensors::exactly).expect("checkpoint");
    assert!(y.requires_grad() && !index.requires_grad());
    let y = y.sum(Kind::Double);
    let found = grad(&[&y], &[&w], &keep()).and_then(Tensors::single).expect("w alone");
    assert_eq!(values(&found), [0.6]);
    y.backward();
    assert_eq!((values(&x.grad()), values(&w.grad())), (vec![1.0], vec![0.6]));
    assert_eq!(seen.lock().expect("unpoisoned")[1..], [[false, true, false], [true, true, false]]);

    // The part that leads only to an unused output does not run backward.
    let two = |inputs: &[Option<Tensor>]| {
        let broken = op(
            |_, inputs| Ok((inputs.get(0)? * 2.0).into()),
            |_, _| Err(Error::msg("not asked for")),
        );
        let aside = apply(broken, &[inputs[0].as_ref()])?.single()?;
        Ok([at(inputs, 0) * 3.0, aside].into())
    };
    let [y, _aside] = checkpoint(two, &[Some(&x)]).and_then(Tensors::exactly).expect("checkpoint");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [3.0]);
}

#[test]
fn without_a_graph_it_is_a_plain_call() {
    let _alone = alone();
    let (before, drops) = (live_nodes(), Arc::new(AtomicUsize::new(0)));
    let x = leaf(&[2.0]);
    let call = |x: &Tensor| {
        let held = Counted(Arc::clone(&drops));
        let function = move |inputs: &[Option<Tensor>]| {
            let _held = &held;
            Ok((at(inputs, 0) * 3.0).into())
        };
        checkpoint(function, &[Some(x)]).and_then(Tensors::single).expect("checkpoint")
    };
    let y = tch::no_grad(|| call(&x));
    assert!(!y.requires_grad() && values(&y) == [6.0]);
    assert!(!call(&Tensor::from_slice(&[2.0])).requires_grad());
    assert_eq!((drops.load(Ordering::SeqCst), live_nodes()), (2, before));
    drop(call(&x));
    assert_eq!((drops.load(Ordering::SeqCst), live_nodes()), (3, before));
    let undefined = checkpoint(|_| Ok(Tensor::new().into()), &[]).expect("checkpoint");
    assert!(undefined[0].is_none());
    // A weight that is not an input keeps its gradient when no input requires one.
    let weight = Mutex::new(x.shallow_clone());
    let function = move |inputs: &[Option<Tensor>]| {
        Ok((at(inputs, 0) * &*weight.lock().expect("unpoisoned")).into())
    };
    let constant = Tensor::from_slice(&[5.0]);
    let y = checkpoint(function, &[Some(&constant)]).and_then(Tensors::single).expect("checkpoint");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [5.0]);
}

#[test]
fn what_would_be_silently_wrong_is_an_error() {
    let _alone = alone();
    let before = live_nodes();
    let (x, hidden) = (leaf(&[2.0]), leaf(&[5.0]));
    for captured in [hidden.shallow_clone(), square(&hidden)] {
        for options in [keep(), create()] {
            let captured = Mutex::new(captured.shallow_clone());
            let function = move |inputs: &[Option<Tensor>]| {
                let product = at(inputs, 0) * &*captured.lock().expect("unpoisoned");
                Ok([at(inputs, 0) * 1.0, product].into())
            };
            let outputs = checkpoint(function, &[Some(&x)])
                .and_then(Tensors::exactly::<2>)
                .expect("checkpoint");
            for y in &outputs {
                let error = grad(&[y], &[&x], &options).expect_err("a hidden weight").to_string();
                assert!(
                    error.contains("checkpoint: ") && error.contains("none of its inputs"),
                    "{error}"
                );
            }
        }
    }

    let in_place = |inputs: &[Option<Tensor>]| {
        let mut x = at(inputs, 0).shallow_clone();
        let _ = x.f_mul_scalar_(2.0)?;
        Ok((x * 1.0).into())
    };
    let error = checkpoint(in_place, &[Some(&(&x * 1.0))]).expect_err("changed").to_string();
    assert!(error.contains("changed input 0 in place"), "{error}");

    let calls = AtomicUsize::new(0);
    let fickle = move |inputs: &[Option<Tensor>]| {
        let count = 1 + calls.fetch_add(1, Ordering::SeqCst);
        Ok((0..count).map(|_| at(inputs, 0) * 1.0).collect::<Vec<_>>().into())
    };
    let y = checkpoint(fickle, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
    let error = gradient_of(&y, &x).expect_err("two outputs").to_string();
    drop(y);
    assert!(error.contains("1 outputs the first time and 2 the second"), "{error}");

    let first = AtomicBool::new(true);
    let vanishing = move |inputs: &[Option<Tensor>]| {
        Ok(first.swap(false, Ordering::SeqCst).then(|| at(inputs, 0) * 1.0).into())
    };
    let y = checkpoint(vanishing, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
    let error = gradient_of(&y, &x).expect_err("no output").to_string();
    drop(y);
    assert!(
        error.contains("output 0 has a gradient, but the reference did not return that output"),
        "{error}"
    );

    let middle = &x * 1.0;
    let y = checkpointed(&middle, &x);
    let _ = tch::no_grad(|| middle.shallow_clone().fill_(7.0));
    let error = gradient_of(&y, &x).expect_err("the input was changed").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn failures_of_either_run_reach_the_caller_and_change_nothing() {
    let _alone = alone();
    let x = leaf(&[2.0]);
    let error =
        checkpoint(|_| Err(Error::msg("no")), &[Some(&x)]).expect_err("the first").to_string();
    assert_eq!(error, "no");
    for panics in [false, true] {
        let first = AtomicBool::new(true);
        let second_fails = move |inputs: &[Option<Tensor>]| {
            let y = at(inputs, 0).dropout(0.5, true);
            match (first.swap(false, Ordering::SeqCst), panics) {
                (true, _) => Ok(y.into()),
                (false, false) => Err(Error::msg("not again")),
                (false, true) => panic!("not again"),
            }
        };
        let y =
            checkpoint(second_fails, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
        tch::manual_seed(11);
        let error = gradient_of(&y, &x).expect_err("the second").to_string();
        assert!(error.contains("checkpoint: ") && error.contains("not again"), "{error}");
        let next = Tensor::rand([3], (Kind::Double, Device::Cpu));
        tch::manual_seed(11);
        assert_eq!(
            next,
            Tensor::rand([3], (Kind::Double, Device::Cpu)),
            "the random state is back"
        );
        assert!((&x * 1.0).requires_grad(), "and so is grad mode");
    }
}

#[test]
fn checkpoints_nest_and_return_inputs() {
    let _alone = alone();
    let (x, w) = (leaf(&[0.3]), leaf(&[0.5]));
    let outer = |inputs: &[Option<Tensor>]| {
        let [x, w] = [at(inputs, 0), at(inputs, 1)];
        Ok([checkpointed(&checkpointed(x, w), w), x.shallow_clone()].into())
    };
    let [y, same] = checkpoint(outer, &[Some(&x), Some(&w)])
        .and_then(Tensors::exactly::<2>)
        .expect("checkpoint");
    let sum = |y: Tensor, x: &Tensor| (y * x).sum(Kind::Double);
    let found = grad(&[&sum(y, &same)], &[&x, &w], &GradOptions::default()).expect("gradients");
    let expected = grad(&[&sum(plain(&plain(&x, &w), &w), &x)], &[&x, &w], &GradOptions::default())
        .expect("gradients");
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs().double_value(&[0]) < 1e-12);
    }
}

#[test]
fn cuda_the_second_run_draws_the_same_random_numbers() {
    let _alone = alone();
    let name = "cuda_the_second_run_draws_the_same_random_numbers";
    let Some(device) = tch_extension::testing::cuda_or_skip(name) else {
        return;
    };
    let x = Tensor::ones([1000], (Kind::Double, device)).set_requires_grad(true);
    let dropout = |inputs: &[Option<Tensor>]| Ok(at(inputs, 0).dropout(0.5, true).into());
    let y = checkpoint(dropout, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
    let _between = Tensor::rand([7], (Kind::Double, device));
    let found = gradient_of(&y, &x).expect("gradient").to_device(Device::Cpu);
    assert_eq!(values(&found), values(&y.to_device(Device::Cpu)), "kept where it was kept");
}
