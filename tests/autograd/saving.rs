//! Tests of saved tensors: they are checked for changes, freed in time, and form no cycle.

use super::*;

#[test]
fn a_saved_input_changed_in_place_is_an_error() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let middle = &x * 1.0;
    let y = square(&middle);
    let _ = tch::no_grad(|| middle.shallow_clone().fill_(7.0));
    let error = gradient_of(&y, &x).expect_err("the input was changed").to_string();
    assert!(
        error.contains("square") && error.contains("modified by an inplace operation"),
        "{error}"
    );
}

#[test]
fn a_saved_output_changed_in_place_is_an_error() {
    let _alone = alone();
    let x = leaf(&[1.0]);
    let y = exp(&x);
    let _ = tch::no_grad(|| y.shallow_clone().fill_(7.0));
    let error = gradient_of(&y, &x).expect_err("the output was changed").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");
}

#[test]
fn saved_tensors_make_no_cycle() {
    let _alone = alone();
    let before = live_nodes();
    for _ in 0..10 {
        let x = leaf(&[1.0]);
        let y = exp(&square(&exp(&x)));
        assert_eq!(live_nodes(), before + 3);
        drop(y);
    }
    assert_eq!(live_nodes(), before, "graphs that were never used backward are freed");
    let x = leaf(&[1.0]);
    let _ = gradient_of(&exp(&square(&x)), &x).expect("gradient");
    assert_eq!(live_nodes(), before, "and so are used ones");
}

#[test]
fn backward_twice_needs_retain_graph() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let y = square(&x).sum(Kind::Double);
    for _ in 0..3 {
        let gradient = grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("kept");
        assert_eq!(values(&gradient), [6.0]);
    }
    grad(&[&y], &[&x], &GradOptions::default()).expect("the last time");
    let error = grad(&[&y], &[&x], &keep()).expect_err("freed").to_string();
    assert!(error.contains("backward through the graph a second time"), "{error}");
}

/// A pass that failed released nothing, so it was not the last one.
#[test]
fn the_last_backward_is_the_one_that_keeps_no_graph() {
    let _alone = alone();
    static SEEN: std::sync::Mutex<Vec<bool>> = std::sync::Mutex::new(Vec::new());
    let function = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok(inputs.get(0)?.f_square()?.into())
        },
        |ctx, grads| {
            let mut seen = SEEN.lock().expect("a list");
            seen.push(ctx.is_last_backward());
            if seen.len() == 2 {
                return Err(tch_extension::Error::msg("the second pass fails"));
            }
            Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
        },
    );
    let x = leaf(&[3.0]);
    let y = run(function, &x).sum(Kind::Double);
    let once = |options: GradOptions<'_>| grad(&[&y], &[&x], &options).and_then(Tensors::single);
    let _ = once(keep()).expect("kept");
    once(GradOptions::default()).expect_err("the second pass fails");
    let _ = once(keep()).expect("repeated");
    assert_eq!(values(&once(GradOptions::default()).expect("the last time")), [6.0]);
    assert_eq!(*SEEN.lock().expect("a list"), [false, true, false, true]);
}

#[test]
fn a_slot_may_be_saved_empty() {
    let _alone = alone();
    let function = op(
        |saver, inputs| {
            saver.save_optional(None);
            saver.save(inputs.get(0)?);
            Ok(inputs.get(0)?.f_square()?.into())
        },
        |ctx, grads| {
            assert!(ctx.saved_optional(0)?.is_none());
            let error = ctx.saved(0).expect_err("it is absent").to_string();
            assert_eq!(error, "saved tensor 0 was absent in the forward");
            Ok((grads.get(0)? * ctx.saved(1)? * 2.0).into())
        },
    );
    let x = leaf(&[3.0]);
    assert_eq!(values(&gradient_of(&run(function, &x), &x).expect("gradient")), [6.0]);
}

#[test]
fn a_freed_graph_does_not_run_its_backward() {
    let _alone = alone();
    let runs = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&runs);
    // This backward does not even read the saved tensor.
    let function = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok((inputs.get(0)? * 2.0).into())
        },
        move |_, grads| {
            counter.fetch_add(1, Ordering::SeqCst);
            Ok((grads.get(0)? * 2.0).into())
        },
    );
    let x = leaf(&[3.0]);
    let y = run(function, &x);
    let _ = gradient_of(&y, &x).expect("the first time");
    let error = gradient_of(&y, &x).expect_err("freed").to_string();
    assert!(error.contains("backward through the graph a second time"), "{error}");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

#[test]
fn a_graph_that_saved_nothing_can_be_used_again() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let function = op(
        |_, inputs| Ok((inputs.get(0)? * 2.0).into()),
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    );
    let y = run(function, &x);
    for _ in 0..2 {
        assert_eq!(values(&gradient_of(&y, &x).expect("nothing was freed")), [2.0]);
    }
}

#[test]
fn a_graph_freed_while_its_backward_runs_is_an_error() {
    let _alone = alone();
    static GRAPH: Mutex<Option<(Tensor, Tensor)>> = Mutex::new(None);
    let function = op(
        |saver, inputs| {
            saver.save(inputs.get(0)?);
            Ok(inputs.get(0)?.f_square()?.into())
        },
        |ctx, grads| {
            let graph = GRAPH.lock().expect("unpoisoned").take();
            if let Some((y, x)) = graph {
                // This backward pass runs through the same node again and frees it.
                grad(&[&y], &[&x], &GradOptions::default()).expect("the inner one");
            }
            Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
        },
    );
    let x = leaf(&[3.0]);
    let y = run(function, &x).sum(Kind::Double);
    *GRAPH.lock().expect("unpoisoned") = Some((y.shallow_clone(), x.shallow_clone()));
    let error = grad(&[&y], &[&x], &keep()).expect_err("freed under its feet").to_string();
    assert!(error.contains("backward through the graph a second time"), "{error}");
}

#[test]
fn one_thread_may_free_what_another_reads() {
    let _alone = alone();
    for _ in 0..1000 {
        let reading = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&reading);
        let function = op(
            |saver, inputs| {
                saver.save(inputs.get(0)?);
                Ok((inputs.get(0)? * 2.0).into())
            },
            move |ctx, grads| {
                if flag.swap(true, Ordering::SeqCst) {
                    // The second backward returns at once, and the engine then frees the saved
                    // tensors.
                    return Ok((grads.get(0)? * 2.0).into());
                }
                loop {
                    let _ = ctx.saved(0)?;
                }
            },
        );
        let x = leaf(&[3.0]);
        let y = run(function, &x).sum(Kind::Double);
        let (other_x, other_y) = (x.shallow_clone(), y.shallow_clone());
        let reader = std::thread::spawn(move || {
            grad(&[&other_y], &[&other_x], &GradOptions::default()).map(drop)
        });
        while !reading.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        grad(&[&y], &[&x], &GradOptions::default()).expect("the one that frees");
        let error =
            reader.join().expect("no panic").expect_err("it reads until it cannot").to_string();
        assert!(error.contains("backward through the graph a second time"), "{error}");
    }
}

#[test]
fn a_used_graph_lets_go_of_what_it_saved() {
    let _alone = alone();
    let before = live_nodes();
    // The saved tensor has a graph of its own, so that the number of live nodes shows when it is
    // freed.
    let kept = Mutex::new(Some(square(&leaf(&[1.0]))));
    let function = op(
        move |saver, inputs| {
            if let Some(kept) = kept.lock().expect("unpoisoned").take() {
                saver.save(&kept);
            }
            Ok((inputs.get(0)? * 2.0).into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    );
    let x = leaf(&[3.0]);
    let y = run(function, &x).sum(Kind::Double);
    assert_eq!(live_nodes(), before + 2);
    grad(&[&y], &[&x], &GradOptions::default()).expect("gradient");
    assert_eq!(live_nodes(), before + 1, "the node is there, what it saved is not");
}

#[test]
fn saved_tensors_are_freed_as_the_backward_goes() {
    let _alone = alone();
    const STEPS: usize = 50;
    let before = live_nodes();
    let alive = Arc::new(Mutex::new(Vec::new()));
    let x = leaf(&[3.0]);
    let mut y = x.shallow_clone();
    for _ in 0..STEPS {
        // The saved tensor has a graph of its own, so that the number of live nodes shows when it
        // is freed.
        let (kept, log) = (Mutex::new(Some(square(&leaf(&[1.0])))), Arc::clone(&alive));
        let step = op(
            move |saver, inputs| {
                if let Some(kept) = kept.lock().expect("unpoisoned").take() {
                    saver.save(&kept);
                }
                Ok((inputs.get(0)? * 1.0).into())
            },
            move |_, grads| {
                log.lock().expect("unpoisoned").push(live_nodes() - before);
                Ok((grads.get(0)? * 1.0).into())
            },
        );
        y = run(step, &y);
    }
    let _ = gradient_of(&y, &x).expect("gradient");
    // `y` keeps the nodes of all steps, while each step of the backward pass frees one saved
    // tensor.
    let expected: Vec<_> = (1..=STEPS).rev().map(|saved| (STEPS + saved) as i64).collect();
    assert_eq!(*alive.lock().expect("unpoisoned"), expected);
    assert_eq!(live_nodes(), before + STEPS as i64);
}

#[test]
fn an_intermediate_may_be_saved_with_its_own_graph() {
    let _alone = alone();
    let before = live_nodes();
    // The forward saves a graph that it has built itself, and the backward runs through that graph.
    let function = op(
        |saver, inputs| {
            let (x, y) = tch::with_grad(|| {
                let x = inputs.optional(0).expect("present").detach().set_requires_grad(true);
                let y = square(&x);
                (x, y)
            });
            saver.save(&x);
            saver.save(&y);
            Ok(y.detach().into())
        },
        |ctx, grads| {
            let grads = [Some(grads.get(0)?)];
            let options = GradOptions { grad_outputs: &grads, ..keep() };
            grad(&[&ctx.saved(1)?], &[&ctx.saved(0)?], &options)
        },
    );
    let x = leaf(&[3.0, 4.0]);
    let y = run(function, &x);
    assert_eq!(live_nodes(), before + 2);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, 8.0]);
    assert_eq!(live_nodes(), before + 1, "freed with what was saved");
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn a_view_of_an_output_makes_no_cycle_when_saved() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[0.5, 1.0]);
    let first_squared = || {
        op(
            |saver, inputs| {
                let y = inputs.get(0)?.exp();
                saver.save(&y.narrow(0, 0, 1));
                Ok(y.into())
            },
            |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        )
    };
    let y = run(first_squared(), &x);
    let found = values(&gradient_of(&y, &x).expect("gradient"));
    assert!(found.iter().all(|value| (value - 0.5_f64.exp()).abs() < 1e-12), "{found:?}");
    drop(run(first_squared(), &x));
    drop(y);
    assert_eq!(live_nodes(), before);
}
