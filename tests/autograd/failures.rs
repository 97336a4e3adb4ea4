//! Tests that every failure in a backward reaches its caller.

use super::*;

/// Runs each kind of failing backward and checks the message that its caller gets.
#[test]
fn failures_in_backward_reach_the_caller() {
    let _alone = alone();
    type Backward = fn(&Context<'_>, &Tensors) -> Result<Tensors>;
    let cases: [(&str, Backward, &[&str]); 11] = [
        ("error", |_, _| Err(Error::msg("out of luck")), &["op: out of luck"]),
        (
            "panic",
            |ctx, _| panic!("boom {}", ctx.inputs_len() + 6),
            &["op: ", "panicked", "boom 7"],
        ),
        ("panic with a literal", |_, _| panic!("bang"), &["op: ", "panicked", "bang"]),
        (
            "tch panic",
            |_, grads| Ok(grads.get(0)?.matmul(&Tensor::from_slice(&[1.0, 2.0])).into()),
            &["op: ", "panicked"],
        ),
        (
            "tch error",
            |_, grads| Ok(grads.get(0)?.f_reshape([5, 5])?.into()),
            &["op: ", "shape '[5, 5]'"],
        ),
        (
            "wrong shape",
            |_, _| Ok(Tensor::from_slice(&[1.0, 2.0]).into()),
            &["op: the gradient of input 0 has shape [2], expected [3], as the input"],
        ),
        (
            "a shape that would be summed",
            |_, _| Ok(Tensor::ones([2, 3], (Kind::Double, Device::Cpu)).into()),
            &["op: the gradient of input 0 has shape [2, 3], expected [3]", "sum_to_size"],
        ),
        (
            "wrong kind",
            |_, grads| Ok(grads.get(0)?.to_kind(Kind::ComplexDouble).into()),
            &["op: the gradient of input 0 has kind ComplexDouble, expected Double", "real part"],
        ),
        ("too few", |_, _| Ok(().into()), &["op: ", "0 gradients for 1 inputs"]),
        (
            "surplus",
            |_, grads| Ok([grads.get(0)?.shallow_clone(), grads.get(0)?.shallow_clone()].into()),
            &["op: ", "2 gradients for 1 inputs"],
        ),
        ("unknown slot", |ctx, _| Ok(ctx.saved(3)?.into()), &["op: ", "saved tensor 3", "saved 0"]),
    ];
    let before = live_nodes();
    for (name, backward, expected) in cases {
        let x = leaf(&[1.0, 2.0, 3.0]);
        let build = || {
            run(op(|_, inputs| Ok((inputs.get(0)? * 1.0).into()), backward), &x).sum(Kind::Double)
        };
        let through_grad =
            grad(&[&build()], &[&x], &GradOptions::default()).expect_err(name).to_string();
        let through_backward = build().f_backward().expect_err(name).to_string();
        for text in expected {
            assert!(through_grad.contains(text), "{name}: {through_grad}");
            assert!(through_backward.contains(text), "{name}: {through_backward}");
        }
        assert!(!x.grad().defined(), "{name}: a failed backward leaves .grad alone");
    }
    assert_eq!(live_nodes(), before, "failures leak nothing");
    let x = leaf(&[3.0]);
    assert_eq!(values(&gradient_of(&square(&x), &x).expect("the engine still works")), [6.0]);
}

#[test]
fn even_failing_failures_end_nothing() {
    let _alone = alone();
    #[derive(Debug)]
    struct Speechless;
    impl std::fmt::Display for Speechless {
        fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            Err(std::fmt::Error)
        }
    }
    impl std::error::Error for Speechless {}
    struct Explosive;
    impl Drop for Explosive {
        fn drop(&mut self) {
            panic!("in drop");
        }
    }
    let x = leaf(&[1.0]);
    let identity = |_: &mut Saver<'_>, inputs: Inputs<'_>| Ok((inputs.get(0)? * 1.0).into());
    let speechless = op(identity, |_, _| Err(Error::Other(Box::new(Speechless))));
    assert!(gradient_of(&run(speechless, &x), &x).is_err());
    let explosive = op(identity, |_, _| std::panic::panic_any(Explosive));
    assert!(gradient_of(&run(explosive, &x), &x).is_err());
    assert_eq!(values(&gradient_of(&square(&x), &x).expect("the engine still works")), [2.0]);
}

#[test]
fn surplus_absent_gradients_are_accepted() {
    let _alone = alone();
    let x = leaf(&[1.0]);
    let function = op(
        |_, inputs| Ok((inputs.get(0)? * 2.0).into()),
        |_, grads| Ok(vec![Some(grads.get(0)? * 2.0), None, None].into()),
    );
    assert_eq!(values(&gradient_of(&run(function, &x), &x).expect("gradient")), [2.0]);
}
