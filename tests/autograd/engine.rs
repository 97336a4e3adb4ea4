//! Tests of reentrant backward passes, several threads, and the engine's own threads.

use super::*;

#[test]
fn a_backward_may_run_another_backward() {
    let _alone = alone();
    // x², whose backward calls the engine again.
    let nested = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok(inputs.get(0)?.f_square()?.into())
        },
        |ctx, grads| {
            let inner = tch::with_grad(|| -> Result<Tensor> {
                let x = ctx.saved(0)?.detach().set_requires_grad(true);
                gradient_of(&square(&x), &x)
            })?;
            Ok((grads.get(0)? * inner).into())
        },
    );
    let x = leaf(&[3.0]);
    assert_eq!(values(&gradient_of(&run(nested, &x), &x).expect("gradient")), [6.0]);
}

#[test]
fn a_backward_may_come_through_its_own_node_again() {
    let _alone = alone();
    static GRAPH: Mutex<Option<(Tensor, Tensor)>> = Mutex::new(None);
    let inner_runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&inner_runs);
    let function = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok((inputs.get(0)? * 2.0).into())
        },
        move |ctx, grads| {
            let _ = ctx.saved(0)?;
            let graph = GRAPH.lock().expect("unpoisoned").take();
            if let Some((y, x)) = graph {
                let inner = grad(&[&y], &[&x], &keep())?.single()?;
                assert_eq!(values(&inner), [2.0]);
                counter.fetch_add(1, Ordering::SeqCst);
            }
            Ok((grads.get(0)? * 2.0).into())
        },
    );
    let x = leaf(&[3.0]);
    let y = run(function, &x).sum(Kind::Double);
    *GRAPH.lock().expect("unpoisoned") = Some((y.shallow_clone(), x.shallow_clone()));
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0]);
    assert_eq!(inner_runs.load(Ordering::SeqCst), 1);
}

#[test]
fn several_threads_through_one_graph() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let y = exp(&square(&x)).sum(Kind::Double);
    let expected = 6.0 * 9.0_f64.exp();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (x, y) = (x.shallow_clone(), y.shallow_clone());
            scope.spawn(move || {
                for _ in 0..200 {
                    let gradient =
                        grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("gradient");
                    assert!((gradient.double_value(&[0]) - expected).abs() < 1e-9);
                }
            });
        }
    });
}

#[test]
fn cuda_the_engines_own_thread_calls_back() {
    let _alone = alone();
    let Some(device) =
        tch_extension::testing::cuda_or_skip("cuda_the_engines_own_thread_calls_back")
    else {
        return;
    };
    let caller = std::thread::current().id();
    let elsewhere = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&elsewhere);
    let function = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok(inputs.get(0)?.f_square()?.into())
        },
        move |ctx, grads| {
            flag.store(std::thread::current().id() != caller, Ordering::SeqCst);
            Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
        },
    );
    let before = live_nodes();
    let x = Tensor::from_slice(&[3.0]).to_device(device).set_requires_grad(true);
    let gradient = gradient_of(&run(function, &x), &x).expect("gradient").to_device(Device::Cpu);
    assert_eq!(values(&gradient), [6.0]);
    assert!(elsewhere.load(Ordering::SeqCst), "CUDA nodes run on a thread of the engine");

    let failing =
        op(|_, inputs| Ok((inputs.get(0)? * 1.0).into()), |_, _| panic!("on the device thread"));
    let y = run(failing, &x).sum(Kind::Double);
    let error = y.f_backward().expect_err("a panic on the engine's thread").to_string();
    assert!(error.contains("on the device thread"), "{error}");
    drop(y);
    assert_eq!(live_nodes(), before);
}

/// x, whose backward runs the backward pass of a `Deep` with a depth smaller by one.
struct Deep(usize);

impl Function for Deep {
    const NAME: &'static str = "deep";
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        saver.save(inputs.get(0)?);
        Ok((inputs.get(0)? * 1.0).into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if self.0 == 0 {
            return Ok((grads.get(0)? * 7.0).into());
        }
        let inner = tch::with_grad(|| -> Result<Tensor> {
            let x = ctx.saved(0)?.detach().set_requires_grad(true);
            gradient_of(&run(Deep(self.0 - 1), &x), &x)
        })?;
        Ok((grads.get(0)? * inner).into())
    }
}

#[test]
fn a_backward_may_nest_deeper_than_one_thread_goes() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[3.0]);
    // The engine continues on another thread after every 60 levels.
    let y = run(Deep(400), &x);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [7.0]);
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn several_threads_add_to_one_leaf() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[3.0]);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let x = x.shallow_clone();
            scope.spawn(move || {
                for _ in 0..200 {
                    square(&x).sum(Kind::Double).backward();
                }
            });
        }
    });
    assert_eq!(values(&x.grad()), [4.0 * 200.0 * 6.0]);
    assert_eq!(live_nodes(), before);
}

#[test]
fn what_leads_to_no_input_asked_for_does_not_run() {
    let _alone = alone();
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    let function = op(
        |_, inputs| Ok((inputs.get(0)? * 2.0).into()),
        move |_, grads| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok((grads.get(0)? * 2.0).into())
        },
    );
    let (x, elsewhere) = (leaf(&[1.0]), leaf(&[1.0]));
    let y = run(function, &(&x + 1.0));
    let options =
        GradOptions { allow_unused: true, retain_graph: Some(true), ..Default::default() };
    let gradient = grad(&[&y], &[&elsewhere], &options).expect("nothing to do");
    assert!(gradient.optional(0).is_none());
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0]);
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[test]
fn an_absent_gradient_leaves_no_grad_behind() {
    let _alone = alone();
    let nothing = || op(|_, inputs| Ok((inputs.get(0)? * 2.0).into()), |_, _| Ok(None.into()));
    let x = leaf(&[1.0]);
    for y in [
        run(nothing(), &x),
        run(nothing(), &x.square()),
        run(nothing(), &x).sum(Kind::Double) * 3.0,
    ] {
        y.backward();
        assert!(!x.grad().defined());
    }
    let options = GradOptions { allow_unused: true, ..Default::default() };
    assert!(grad(&[&run(nothing(), &x)], &[&x], &options).expect("none").optional(0).is_none());
}

#[test]
fn a_nested_backward_comes_before_what_waits_outside() {
    let _alone = alone();
    static ORDER: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    fn note(what: &'static str) {
        ORDER.lock().expect("unpoisoned").push(what);
    }
    /// The identity. Its backward runs the backward pass of another such operator, nested `depth`
    /// times.
    fn nested(x: &Tensor, depth: usize) -> Tensor {
        let function = op(
            |_, inputs| Ok((inputs.get(0)? * 1.0).into()),
            move |_, grads| {
                note("nested");
                if depth > 1 {
                    let _ = tch::with_grad(|| {
                        let x = leaf(&[1.0]);
                        gradient_of(&nested(&x, depth - 1), &x)
                    })?;
                }
                Ok(grads.get(0)?.shallow_clone().into())
            },
        );
        run(function, x)
    }
    let outside = op(
        |_, inputs| Ok((inputs.get(0)? * 1.0).into()),
        |_, grads| {
            note("outside");
            Ok(grads.get(0)?.shallow_clone().into())
        },
    );
    let (x, y) = (leaf(&[1.0]), leaf(&[1.0]));
    // The engine runs this node first, because it was made later.
    let outside = run(outside, &x);
    (outside * nested(&y, 9)).backward();
    let order = std::mem::take(&mut *ORDER.lock().expect("unpoisoned"));
    assert_eq!(order.len(), 10);
    assert_eq!((order[0], order[8], order[9]), ("nested", "nested", "outside"));
}
