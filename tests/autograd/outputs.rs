//! Tests of unusual inputs and outputs: no output, the same output twice, an input among the
//! outputs, and no input.

use super::*;

#[test]
fn the_same_output_twice() {
    let _alone = alone();
    let before = live_nodes();
    let function = op(
        |_, inputs| {
            let y = inputs.get(0)? * 2.0;
            Ok([y.shallow_clone(), y].into())
        },
        |_, grads| Ok(((grads.get(0)? + grads.get(1)?) * 2.0).into()),
    );
    let x = leaf(&[1.0]);
    let [a, b] = apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert_eq!(values(&gradient_of(&(&a * 3.0 + &b * 5.0), &x).expect("gradient")), [16.0]);
    drop((a, b));
    assert_eq!(live_nodes(), before);
}

#[test]
fn an_input_twice_and_returned_twice() {
    let _alone = alone();
    let function = op(
        |_, inputs| Ok([inputs.get(0)?.shallow_clone(), inputs.get(1)?.shallow_clone()].into()),
        |_, grads| Ok([grads.get(0)? * 10.0, grads.get(1)? * 100.0].into()),
    );
    let x = leaf(&[1.0]);
    let [a, b] = apply(function, &[Some(&x), Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert!(x.is_leaf() && !a.is_leaf() && !b.is_leaf());
    assert_eq!(values(&gradient_of(&(&a * 3.0 + &b * 5.0), &x).expect("gradient")), [530.0]);
}

#[test]
fn a_constant_input_that_is_returned_stays_a_constant() {
    let _alone = alone();
    let function = op(
        |_, inputs| Ok(inputs.get(1)?.shallow_clone().into()),
        |_, grads| Ok([grads.get(0)? * 3.0, grads.get(0)? * 1.0].into()),
    );
    let (x, constant) = (leaf(&[1.0]), Tensor::from_slice(&[7.0]));
    let y = apply(function, &[Some(&x), Some(&constant)]).and_then(Tensors::single).expect("apply");
    assert!(y.requires_grad() && !constant.requires_grad() && constant.is_leaf());
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [3.0]);
}

#[test]
fn an_input_returned_beside_what_has_no_derivative() {
    let _alone = alone();
    let before = live_nodes();
    let function = op(
        |saver, inputs| {
            let x = inputs.get(0)?;
            saver.mark_non_differentiable(0);
            saver.save(x);
            Ok([x * 5.0, x.shallow_clone(), x.argmax(0, false)].into())
        },
        |ctx, grads| Ok((grads.get(1)? * ctx.saved(0)?).into()),
    );
    let x = leaf(&[1.0, 4.0]);
    let [constant, same, index] =
        apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert!(
        x.is_leaf() && same.requires_grad() && !constant.requires_grad() && !index.requires_grad()
    );
    assert_eq!(values(&gradient_of(&same, &x).expect("gradient")), [1.0, 4.0]);
    drop(same);
    assert_eq!(live_nodes(), before);
}

#[test]
fn an_input_that_is_marked_non_differentiable_loses_its_graph() {
    let _alone = alone();
    let function = op(
        |saver, inputs| {
            saver.mark_non_differentiable(0);
            Ok([inputs.get(0)?.shallow_clone(), inputs.get(0)? * 2.0].into())
        },
        |_, grads| Ok((grads.get(1)? * 2.0).into()),
    );
    let x = leaf(&[1.0]);
    let [same, y] = apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
    assert!(x.requires_grad() && !same.requires_grad());
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [2.0]);
}

#[test]
fn no_outputs_no_defined_outputs_and_no_inputs_leave_no_graph() {
    let _alone = alone();
    let before = live_nodes();
    let drops = Arc::new(AtomicUsize::new(0));
    let returning = |outputs: fn() -> Tensors| {
        let state = Counted(Arc::clone(&drops));
        op(
            move |_, _| Ok(outputs()),
            move |_, _| {
                let _held = &state;
                unreachable!("nothing to differentiate")
            },
        )
    };
    let x = leaf(&[1.0]);
    for inputs in [vec![Some(&x)], vec![], vec![None, None]] {
        assert_eq!(apply(returning(|| ().into()), &inputs).expect("no outputs").len(), 0);
        let outputs =
            apply(returning(|| [None, Some(Tensor::new())].into()), &inputs).expect("undefined");
        assert!(outputs.len() == 2 && outputs.iter().all(Option::is_none));
        assert_eq!(drops.swap(0, Ordering::SeqCst), 2);
        assert_eq!(live_nodes(), before);
    }
    let y = apply(returning(|| Tensor::from_slice(&[2.0]).into()), &[]).and_then(Tensors::single);
    assert!(!y.expect("an output without inputs").requires_grad());
}

#[test]
fn state_computed_in_the_forward_is_there_in_the_backward() {
    let _alone = alone();
    /// x times its largest element, which counts as a constant in the derivative.
    struct ByLargest {
        largest: Option<f64>,
    }
    impl Function for ByLargest {
        const NAME: &'static str = "by_largest";
        fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            let x = inputs.get(0)?;
            let largest = x.max().double_value(&[]);
            self.largest = Some(largest);
            Ok((x * largest).into())
        }
        fn backward(&self, _: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            let largest = self.largest.ok_or_else(|| Error::msg("no forward ran"))?;
            Ok((grads.get(0)? * largest).into())
        }
    }
    let (x, z) = (leaf(&[1.0, 4.0]), leaf(&[7.0]));
    let (y, w) = (run(ByLargest { largest: None }, &x), run(ByLargest { largest: None }, &z));
    for _ in 0..2 {
        assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [4.0, 4.0]);
        assert_eq!(values(&gradient_of(&w, &z).expect("gradient")), [7.0]);
    }
}

#[test]
fn an_output_without_a_derivative_is_a_constant_to_what_follows() {
    let _alone = alone();
    let constant = op(
        |saver, inputs| {
            saver.mark_non_differentiable(0);
            Ok(inputs.get(0)?.copy().into())
        },
        |_, _| unreachable!("nothing comes here"),
    );
    let x = leaf(&[3.0]);
    let y = run(constant, &(&x * &x)) * &x;
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [9.0]);
}

/// libtorch must refuse this change, because its gradient would bypass the operator's node.
#[test]
fn an_output_that_is_a_view_cannot_be_changed_in_place() {
    let _alone = alone();
    for of in [0, 1] {
        let function = op(
            move |_, inputs| Ok(inputs.get(of)?.view(2).into()),
            |_, grads| Ok([Some(grads.get(0)? * 3.0), None].into()),
        );
        let (x, constant) = (leaf(&[1.0, 2.0]), Tensor::from_slice(&[3.0, 4.0]));
        let mut y = apply(function, &[Some(&x), Some(&constant)])
            .and_then(Tensors::single)
            .expect("one output");
        let error = y.f_mul_(&Tensor::from(2.0)).expect_err("a view").to_string();
        assert!(error.contains("created inside a custom Function"), "{error}");
        assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [3.0, 3.0]);
    }
}
