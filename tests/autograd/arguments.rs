//! Tests of absent tensors, of the gradients that are needed, of marks, and of calls that make no
//! graph.

use super::*;

#[test]
fn absent_inputs_and_outputs() {
    let _alone = alone();
    let function = op(
        |_, inputs| {
            assert!(inputs.optional(0).is_none() && inputs.optional(2).is_none());
            assert!(inputs.get(0).is_err() && inputs.get(9).is_err());
            Ok([None, Some(inputs.get(1)? * 3.0), None].into())
        },
        |ctx, grads| {
            assert_eq!(ctx.inputs_len(), 3);
            assert!(
                !ctx.needs_input_grad(0) && ctx.needs_input_grad(1) && !ctx.needs_input_grad(2)
            );
            assert!(grads.optional(0).is_none() && grads.optional(2).is_none());
            Ok([None, Some(grads.get(1)? * 3.0), None].into())
        },
    );
    let x = leaf(&[2.0]);
    let outputs = apply(function, &[None, Some(&x), None]).expect("apply");
    assert!(outputs.optional(0).is_none() && outputs.optional(2).is_none());
    assert_eq!(
        values(&gradient_of(outputs.get(1).expect("present"), &x).expect("gradient")),
        [3.0]
    );
}

#[test]
fn an_undefined_tensor_counts_as_absent() {
    let _alone = alone();
    let (x, undefined) = (leaf(&[2.0]), Tensor::new());
    let function = op(
        |_, inputs| Ok((inputs.get(1)? * 3.0).into()),
        |ctx, grads| {
            assert!(!ctx.needs_input_grad(0));
            Ok([None, Some(grads.get(0)? * 3.0)].into())
        },
    );
    let y =
        apply(function, &[Some(&undefined), Some(&x)]).and_then(Tensors::single).expect("apply");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [3.0]);
}

#[test]
fn a_gradient_for_an_absent_input_is_an_error() {
    let _alone = alone();
    let x = leaf(&[2.0]);
    let function = op(
        |_, inputs| Ok((inputs.get(1)? * 3.0).into()),
        |_, grads| Ok([grads.get(0)?.shallow_clone(), grads.get(0)? * 3.0].into()),
    );
    let y = apply(function, &[None, Some(&x)]).and_then(Tensors::single).expect("apply");
    let error = gradient_of(&y, &x).expect_err("gradient for an absent input").to_string();
    assert!(error.contains("input 0") && error.contains("absent"), "{error}");
}

#[test]
fn needs_input_grad_follows_requires_grad_and_the_callers_choice() {
    let _alone = alone();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let product = |a: &Tensor, b: &Tensor| {
        let seen = Arc::clone(&seen);
        let function = op(
            |saver, inputs| {
                let (a, b) = (inputs.get(0)?, inputs.get(1)?);
                saver.save(a);
                saver.save(b);
                Ok((a * b).into())
            },
            move |ctx, grads| {
                seen.lock()
                    .expect("unpoisoned")
                    .push([0, 1].map(|index| ctx.needs_input_grad(index)));
                let of = |index: usize, other| -> Result<Option<Tensor>> {
                    let needed = ctx.needs_input_grad(index);
                    needed.then(|| Ok(grads.get(0)? * ctx.saved(other)?)).transpose()
                };
                Ok([of(0, 1)?, of(1, 0)?].into())
            },
        );
        let outputs = apply(function, &[Some(a), Some(b)]);
        outputs.and_then(Tensors::single).expect("product").sum(Kind::Double)
    };
    let (a, b, constant) = (leaf(&[2.0]), leaf(&[5.0]), Tensor::from_slice(&[7.0]));
    let options = GradOptions::default();
    grad(&[&product(&a, &b)], &[&a, &b], &options).expect("both");
    grad(&[&product(&a, &b)], &[&b], &options).expect("only b is asked for");
    product(&a, &constant).backward();
    assert_eq!(*seen.lock().expect("unpoisoned"), [[true, true], [false, true], [true, false]]);
    assert_eq!(values(&a.grad()), [7.0]);
}

#[test]
fn without_need_there_is_no_graph() {
    let _alone = alone();
    let before = live_nodes();
    let build = || {
        op(
            |saver, inputs| {
                assert!(!saver.needs_graph() && !saver.needs_input_grad(0));
                saver.save(inputs.get(0)?);
                Ok((inputs.get(0)? * 2.0).into())
            },
            |_, _| unreachable!("no graph, no backward"),
        )
    };
    let y = run(build(), &Tensor::from_slice(&[1.0]));
    assert!(!y.requires_grad(), "no input requires grad");

    let x = leaf(&[1.0]);
    let guard = tch::no_grad_guard();
    let y = run(build(), &x);
    drop(guard);
    assert!(!y.requires_grad(), "grad mode is off");
    assert_eq!(live_nodes(), before);
}

#[test]
fn the_forward_runs_without_grad_mode_and_leaves_it_as_it_was() {
    let _alone = alone();
    let x = leaf(&[1.0]);
    let function = op(
        |_, inputs| {
            let y = inputs.get(0)? * 2.0;
            assert!(!y.requires_grad(), "the forward's own operations make no graph");
            Ok(y.into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    );
    let _ = run(function, &x);
    assert!((&x * 2.0).requires_grad(), "grad mode is on again");

    let failing = op(|_, _| Err(Error::msg("no")), |_, _| unreachable!("it never ran"));
    assert_eq!(apply(failing, &[Some(&x)]).expect_err("an error").to_string(), "no");
    assert!((&x * 2.0).requires_grad(), "also after an error");

    let panicking = op(|_, _| panic!("boom"), |_, _| unreachable!("it never ran"));
    let caught =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| apply(panicking, &[Some(&x)])));
    assert!(caught.is_err());
    assert!((&x * 2.0).requires_grad(), "also after a panic");
}

#[test]
fn misuse_is_the_same_error_with_and_without_a_graph() {
    let _alone = alone();
    for x in [leaf(&[1.0]), Tensor::from_slice(&[1.0])] {
        let function = op(
            |saver, inputs| {
                saver.mark_non_differentiable(9);
                Ok((inputs.get(0)? * 1.0).into())
            },
            |_, _| unreachable!("apply fails"),
        );
        let error = apply(function, &[Some(&x)]).expect_err("there is no output 9").to_string();
        assert!(error.contains("mark_non_differentiable(9)"), "{error}");

        let function = op(
            |_, _| Ok([Some(Tensor::new()), None].into()),
            |_, _| unreachable!("nothing depends on x"),
        );
        let outputs = apply(function, &[Some(&x)]).expect("apply");
        assert!(
            outputs.optional(0).is_none() && outputs.optional(1).is_none(),
            "an undefined output is absent"
        );
    }
}

#[test]
fn non_differentiable_outputs() {
    let _alone = alone();
    let function = op(
        |saver, inputs| {
            let x = inputs.get(0)?;
            saver.mark_non_differentiable(1);
            Ok([x * 2.0, x * 5.0, x.argmax(0, false)].into())
        },
        |_, grads| {
            assert_eq!(grads.len(), 3);
            Ok((grads.get(0)? * 2.0).into())
        },
    );
    let x = leaf(&[1.0, 4.0]);
    let [y, constant, index] =
        apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert!(y.requires_grad() && !constant.requires_grad() && !index.requires_grad());
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0, 2.0]);
}

#[test]
fn gradients_that_did_not_come_are_zeros_or_nothing() {
    let _alone = alone();
    for materialize in [true, false] {
        let function = op(
            move |saver, inputs| {
                saver.set_materialize_grads(materialize);
                Ok([inputs.get(0)? * 2.0, inputs.get(0)? * 5.0].into())
            },
            move |_, grads| {
                assert_eq!(grads.optional(1).is_some(), materialize);
                if let Some(zeros) = grads.optional(1) {
                    assert_eq!(zeros, &Tensor::from_slice(&[0.0, 0.0]));
                }
                Ok((grads.get(0)? * 2.0).into())
            },
        );
        let x = leaf(&[1.0, 4.0]);
        let [y, _unused] = apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
        assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0, 2.0]);
    }
}

#[test]
fn an_input_returned_as_output() {
    let _alone = alone();
    let function = op(
        |_, inputs| Ok(inputs.get(0)?.shallow_clone().into()),
        |_, grads| Ok((grads.get(0)? * 10.0).into()),
    );
    let x = leaf(&[1.0]);
    let y = run(function, &x);
    assert!(x.is_leaf() && !y.is_leaf(), "the input keeps its own place in the graph");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [10.0]);
}

#[test]
fn grad_mode_stays_off_where_it_was_off() {
    let _alone = alone();
    let x = leaf(&[1.0]);
    tch::no_grad(|| {
        let _ = square(&x);
        assert!(!(&x * 2.0).requires_grad(), "apply must not turn it on");
    });
}

#[test]
fn a_saver_knows_what_will_be_needed() {
    let _alone = alone();
    let function = op(
        |saver, inputs| {
            assert!(saver.needs_graph());
            assert_eq!(
                [0, 1, 2, 9].map(|index| saver.needs_input_grad(index)),
                [true, false, false, false]
            );
            Ok((inputs.get(0)? * inputs.get(1)?).into())
        },
        |ctx, grads| {
            assert!(
                !ctx.needs_input_grad(1)
                    && !ctx.needs_input_grad(3)
                    && !ctx.needs_input_grad(1 << 40)
            );
            Ok([Some(grads.get(0)? * 5.0), None, None].into())
        },
    );
    let (x, constant) = (leaf(&[2.0]), Tensor::from_slice(&[5.0]));
    let y = apply(function, &[Some(&x), Some(&constant), None])
        .and_then(Tensors::single)
        .expect("apply");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [5.0]);
}

#[test]
fn gradients_that_did_not_come_are_zeros_unless_told_otherwise() {
    let _alone = alone();
    let function = op(
        |_, inputs| Ok([inputs.get(0)? * 2.0, inputs.get(0)? * 5.0].into()),
        |_, grads| {
            assert_eq!(grads.get(1)?, &Tensor::from_slice(&[0.0]));
            Ok((grads.get(0)? * 2.0).into())
        },
    );
    let x = leaf(&[1.0]);
    let [y, _unused] = apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0]);
}

#[test]
fn marks_are_checked_and_may_hit_what_is_absent() {
    let _alone = alone();
    let x = leaf(&[1.0]);
    let drops = Arc::new(AtomicUsize::new(0));
    let failing = counted(&drops, |saver| saver.mark_non_differentiable(5));
    let error = apply(failing, &[Some(&x)]).expect_err("there is no output 5").to_string();
    assert!(error.contains("op: mark_non_differentiable(5), but there are 1 outputs"), "{error}");

    let function = op(
        |saver, inputs| {
            saver.mark_dirty(0);
            saver.mark_non_differentiable(0);
            Ok([None, Some(inputs.get(1)? * 2.0)].into())
        },
        |_, grads| Ok([None, Some(grads.get(1)? * 2.0)].into()),
    );
    let outputs = apply(function, &[None, Some(&x)]).expect("apply");
    assert_eq!(
        values(&gradient_of(outputs.get(1).expect("present"), &x).expect("gradient")),
        [2.0]
    );
}

/// A small number is stored without an allocation; more than that need one.
#[test]
fn more_inputs_outputs_and_saved_tensors_than_usual() {
    const LEN: usize = 20;
    let _alone = alone();
    let before = live_nodes();
    let is_there = |index: usize| index % 7 != 3;
    let function = op(
        |saver, inputs| {
            let outputs: Vec<Option<Tensor>> =
                inputs.iter().enumerate().map(|(index, x)| x.map(|x| x * (index as f64))).collect();
            inputs.iter().for_each(|input| saver.save_optional(*input));
            outputs.iter().for_each(|output| saver.save_optional(output.as_ref()));
            Ok(outputs.into())
        },
        |ctx, grads| {
            assert_eq!((ctx.inputs_len(), grads.len()), (LEN, LEN));
            let gradients = (0..LEN).map(|index| {
                let Some(grad) = grads.optional(index) else { return Ok(None) };
                // Checks that each saved input belongs to the saved output of the same index.
                assert_eq!(
                    values(&(ctx.saved(index)? * index as f64)),
                    values(&ctx.saved(LEN + index)?)
                );
                Ok(Some(grad * index as f64))
            });
            Ok(gradients.collect::<Result<Vec<_>>>()?.into())
        },
    );
    let leaves: Vec<Tensor> = (0..LEN).map(|index| leaf(&[1.0 + index as f64])).collect();
    let inputs: Vec<Option<&Tensor>> =
        leaves.iter().enumerate().map(|(index, leaf)| is_there(index).then_some(leaf)).collect();
    let outputs = apply(function, &inputs).expect("apply").into_vec();
    assert_eq!(outputs.len(), LEN);
    let sum = outputs.iter().flatten().fold(Tensor::from(0.0), |sum, output| sum + output * 10.0);
    for (index, input) in inputs.iter().enumerate() {
        let Some(input) = input else { continue };
        let gradient = grad(&[&sum.sum(Kind::Double)], &[input], &keep()).and_then(Tensors::single);
        assert_eq!(values(&gradient.expect("a gradient")), [10.0 * index as f64]);
    }
    drop((outputs, sum));
    assert_eq!(live_nodes(), before);
}
