//! Tests that a second derivative is either right or an error.

use super::*;

#[test]
fn a_differentiable_backward_has_right_second_derivatives() {
    let _alone = alone();
    // Through a saved input: the second derivative of (x²)² is 12x².
    let x = leaf(&[3.0]);
    let y = run(Square::<true>, &run(Square::<true>, &x)).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [108.0]);
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [108.0]);

    // Through a saved output, three times: all derivatives of exp are exp.
    let x = leaf(&[0.5]);
    let mut derivative = exp(&x);
    for _ in 0..3 {
        derivative =
            grad(&[&derivative], &[&x], &create()).and_then(Tensors::single).expect("derivative");
        assert!((derivative.double_value(&[0]) - 0.5_f64.exp()).abs() < 1e-12);
    }
}

#[test]
fn a_refused_second_derivative_is_an_error_on_every_path() {
    let _alone = alone();
    let before = live_nodes();
    // For the first two, PyTorch silently gives wrong numbers, because x also reaches the loss
    // without passing through the operator.
    type Loss = fn(&Tensor) -> Tensor;
    let losses: [(&str, Loss); 4] = [
        ("f(x) x", |x| square(x) * x),
        ("f(x) + x²", |x| square(x) + x * x),
        ("f(x)", square),
        ("f(f(x))", |x| square(&square(x))),
    ];
    for (name, loss) in losses {
        let x = leaf(&[3.0]);
        let y = loss(&x).sum(Kind::Double);
        let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect(name);
        let error = gradient_of(&first, &x).expect_err(name).to_string();
        assert!(error.contains("square: the second derivative is not defined"), "{name}: {error}");
    }
    assert_eq!(live_nodes(), before);

    // The same must hold for a gradient that is passed through unchanged together with its graph.
    let x = leaf(&[3.0]);
    let y = run(
        op(
            |_, inputs| Ok(inputs.get(0)?.copy().into()),
            |_, grads| Ok(grads.get(0)?.shallow_clone().into()),
        ),
        &x,
    );
    let first = grad(&[&(&y * &y).sum(Kind::Double)], &[&x], &create())
        .and_then(Tensors::single)
        .expect("first");
    assert_eq!(values(&first), [6.0]);
    assert!(gradient_of(&first, &x).is_err());
}

#[test]
fn an_intermediate_is_no_way_to_a_wrong_second_derivative() {
    let _alone = alone();
    struct Cube;
    impl Function for Cube {
        const NAME: &'static str = "cube";
        const DOUBLE_BACKWARD: bool = true;
        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            let x = inputs.get(0)?;
            let squared = x * x;
            saver.save(&squared);
            Ok((squared * x).into())
        }
        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            Ok((grads.get(0)? * ctx.saved(0)? * 3.0).into())
        }
    }
    let x = leaf(&[2.0]);
    assert_eq!(values(&gradient_of(&run(Cube, &x), &x).expect("the first is fine")), [12.0]);
    let y = run(Cube, &x).sum(Kind::Double);
    let error = grad(&[&y], &[&x], &create()).expect_err("its graph is not there").to_string();
    assert!(error.contains("cube") && error.contains("neither an input nor an output"), "{error}");
}

/// 2·x·y. When a graph is wanted, it differentiates the reference, as the fused operators do.
struct Product;

impl Function for Product {
    const NAME: &'static str = "product";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(y);
        Ok((x * y * 2.0).into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs = [ctx.saved_optional(0)?, ctx.saved_optional(1)?];
            return differentiate_reference(ctx, &inputs, grads, |inputs| {
                let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
                let inputs = Inputs::new(&inputs);
                Ok((inputs.get(0)? * inputs.get(1)? * 2.0).into())
            });
        }
        let grad = grads.get(0)? * 2.0;
        Ok([&grad * ctx.saved(1)?, &grad * ctx.saved(0)?].into())
    }
}

#[test]
fn differentiating_a_reference_gives_partial_not_total_derivatives() {
    let _alone = alone();
    let product = |x: &Tensor, y: &Tensor| {
        apply(Product, &[Some(x), Some(y)]).and_then(Tensors::single).expect("product")
    };
    // 2·x·x² = 2x³, with the derivatives 6x², 12x and 12. First one input depends on the other, and
    // in the last case the two inputs are the same tensor.
    let x = leaf(&[3.0]);
    for y in [product(&x, &(&x * &x)), product(&(&x * &x), &x), product(&product(&x, &x), &x) / 2.0]
    {
        let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
        assert_eq!(values(&first), [54.0]);
        let second = grad(&[&first], &[&x], &create()).and_then(Tensors::single).expect("second");
        assert_eq!(values(&second), [36.0]);
        assert_eq!(values(&gradient_of(&second, &x).expect("third")), [12.0]);
    }
}

/// x³, whose backward claims to be differentiable and calls the given closure.
struct Claimed<B>(B);

impl<B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static> Function
    for Claimed<B>
{
    const NAME: &'static str = "claimed";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x * x).into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        (self.0)(ctx, grads)
    }
}

#[test]
fn a_backward_that_only_claims_to_be_differentiable_is_found_out() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let kernel = |ctx: &Context<'_>, grads: &Tensors| {
        let _guard = tch::no_grad_guard();
        Ok((grads.get(0)? * ctx.saved(0)?.square() * 3.0).into())
    };
    // (x³)·x = x⁴. If this were not detected, the second derivative would be 27 instead of 108.
    let y = (run(Claimed(kernel), &x) * &x).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [108.0]);
    let error = gradient_of(&first, &x).expect_err("no graph").to_string();
    assert!(
        error.contains("claimed: the second derivative is not defined")
            && error.contains("no graph"),
        "{error}"
    );
}

#[test]
fn differentiating_a_reference_without_need_or_with_another_number_of_outputs_is_an_error() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let cube = |inputs: &[Option<Tensor>]| -> Result<Tensors> {
        let x = inputs[0].as_ref().expect("present");
        Ok((x * x * x).into())
    };
    let always = move |ctx: &Context<'_>, grads: &Tensors| {
        differentiate_reference(ctx, &[ctx.saved_optional(0)?], grads, cube)
    };
    let error =
        gradient_of(&run(Claimed(always), &x), &x).expect_err("no graph to build").to_string();
    assert!(error.contains("claimed: differentiate_reference needs a graph"), "{error}");

    let none = |ctx: &Context<'_>, grads: &Tensors| {
        differentiate_reference(ctx, &[ctx.saved_optional(0)?], grads, |_| Ok(().into()))
    };
    let y = run(Claimed(none), &x).sum(Kind::Double);
    let error = grad(&[&y], &[&x], &create()).expect_err("no output").to_string();
    assert!(error.contains("expected 1 outputs of the reference, got 0"), "{error}");

    let too_many = move |ctx: &Context<'_>, grads: &Tensors| {
        differentiate_reference(ctx, &[ctx.saved_optional(0)?, None], grads, cube)
    };
    let y = run(Claimed(too_many), &x).sum(Kind::Double);
    let error = grad(&[&y], &[&x], &create()).expect_err("two inputs").to_string();
    assert!(error.contains("expected 1 inputs, got 2"), "{error}");
}

#[test]
fn a_backward_that_is_not_differentiable_makes_no_graph() {
    let _alone = alone();
    let function = op(
        |saver, inputs| {
            let squared = inputs.get(0)?.f_square()?;
            saver.save(&squared);
            Ok((squared * inputs.get(0)?).into())
        },
        |ctx, grads| {
            assert!(!ctx.create_graph(), "this operator does not allow it");
            // This is why it may read an intermediate.
            Ok((grads.get(0)? * ctx.saved(0)? * 3.0).into())
        },
    );
    let x = leaf(&[2.0]);
    let y = run(function, &x).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [12.0]);
}

#[test]
fn a_refused_second_derivative_covers_the_incoming_gradient() {
    let _alone = alone();
    let (x, v) = (leaf(&[3.0]), leaf(&[1.0]));
    let options = GradOptions { grad_outputs: &[Some(&v)], ..create() };
    let first = grad(&[&square(&x)], &[&x], &options).and_then(Tensors::single).expect("first");
    // v is not an input of the operator, but it is one of the backward, which has a derivative with
    // respect to it.
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let error =
        grad(&[&first.sum(Kind::Double)], &[&v], &options).expect_err("refused").to_string();
    assert!(error.contains("square: the second derivative is not defined"), "{error}");
}

#[test]
fn a_refused_second_derivative_leaves_the_incoming_gradient_alone() {
    let _alone = alone();
    for v in [Tensor::from_slice(&[1.0]), leaf(&[1.0])] {
        let required = v.requires_grad();
        let x = leaf(&[3.0]);
        let y = run(
            op(
                |_, inputs| Ok(inputs.get(0)?.copy().into()),
                |_, grads| Ok(grads.get(0)?.shallow_clone().into()),
            ),
            &x,
        );
        let options = GradOptions { grad_outputs: &[Some(&v)], ..create() };
        let first = grad(&[&y], &[&x], &options).and_then(Tensors::single).expect("first");
        assert!(v.is_leaf() && v.requires_grad() == required, "the caller's own tensor");
        let error = gradient_of(&first, &x).expect_err("refused").to_string();
        assert!(error.contains("op: the second derivative is not defined"), "{error}");
    }
}

#[test]
fn a_refused_second_derivative_may_have_absent_gradients() {
    let _alone = alone();
    let function = op(
        |_, inputs| Ok((inputs.get(0)? * 2.0).into()),
        |_, grads| Ok([Some(grads.get(0)? * 2.0), None].into()),
    );
    let (x, unused) = (leaf(&[1.0]), leaf(&[1.0]));
    let y = apply(function, &[Some(&x), Some(&unused)]).and_then(Tensors::single).expect("apply");
    let options = GradOptions { allow_unused: true, ..create() };
    let found = grad(&[&y.sum(Kind::Double)], &[&x, &unused], &options).expect("gradients");
    assert_eq!(values(found.get(0).expect("present")), [2.0]);
    assert!(found.optional(1).is_none());
}

/// (x², 3y). Its backward always differentiates the reference, whichever gradients are present.
struct Pair;

impl Function for Pair {
    const NAME: &'static str = "pair";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, y) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(y);
        saver.set_materialize_grads(false);
        Ok([x * x, y * 3.0].into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        assert!(ctx.create_graph(), "all the tests' gradients have a graph");
        let inputs = [ctx.saved_optional(0)?, ctx.saved_optional(1)?];
        differentiate_reference(ctx, &inputs, grads, |inputs| {
            let inputs: Vec<_> = inputs.iter().map(Option::as_ref).collect();
            let inputs = Inputs::new(&inputs);
            Ok([inputs.get(0)? * inputs.get(0)?, inputs.get(1)? * 3.0].into())
        })
    }
}

#[test]
fn differentiating_a_reference_of_which_only_a_part_is_needed() {
    let _alone = alone();
    let options = GradOptions { allow_unused: true, ..create() };
    let pair = |x: &Tensor, y: &Tensor| -> [Tensor; 2] {
        let outputs =
            apply(Pair, &[Some(x), Some(y)]).and_then(Tensors::exactly::<2>).expect("apply");
        outputs.map(|output| output.sum(Kind::Double))
    };
    let (x, y, constant) = (leaf(&[3.0]), leaf(&[5.0]), Tensor::from_slice(&[5.0]));

    // One input is a constant, and so no derivative reaches the second output.
    let [a, b] = pair(&x, &constant);
    let first = grad(&[&a, &b], &[&x], &options).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [6.0]);
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [2.0]);

    // Only that output is differentiated.
    let [_, b] = pair(&x, &constant);
    let first = grad(&[&b], &[&x], &options).expect("nothing to differentiate");
    assert!(first.optional(0).is_none_or(|first| values(first) == [0.0]));

    // The output does not depend on the second input.
    let [a, _] = pair(&x, &y);
    let first = grad(&[&a], &[&x, &y], &options).expect("y is unused");
    assert_eq!(values(first.get(0).expect("x")), [6.0]);
    assert!(first.optional(1).is_none_or(|first| values(first) == [0.0]));
}

#[test]
fn an_intermediate_with_a_graph_from_elsewhere_is_refused_in_a_second_derivative() {
    let _alone = alone();
    /// x·s, where s was computed outside and is not one of the inputs.
    struct ByHidden(Mutex<Option<Tensor>>);
    impl Function for ByHidden {
        const NAME: &'static str = "by_hidden";
        const DOUBLE_BACKWARD: bool = true;
        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            let hidden = self.0.lock().expect("unpoisoned").take().expect("once");
            saver.save(&hidden);
            Ok((inputs.get(0)? * hidden).into())
        }
        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            Ok((grads.get(0)? * ctx.saved(0)?).into())
        }
    }
    let (x, s) = (leaf(&[3.0]), leaf(&[5.0]));
    let y = run(ByHidden(Mutex::new(Some(&s * 2.0))), &x).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("the first is fine");
    assert!(values(&first) == [10.0] && !first.requires_grad());
    // The second derivative would depend on s, which the first derivative did not.
    let error = grad(&[&y], &[&x], &create()).expect_err("refused").to_string();
    assert!(
        error.contains("by_hidden") && error.contains("neither an input nor an output"),
        "{error}"
    );
}

/// floor, whose gradient is zero. There are several ways to say so.
struct Floor {
    declare: bool,
    absent: bool,
}

impl Function for Floor {
    const NAME: &'static str = "floor";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        Ok(inputs.get(0)?.floor().into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if self.declare {
            ctx.mark_constant(0);
        }
        Ok((!self.absent).then(|| grads.get(0).map(Tensor::zeros_like)).transpose()?.into())
    }
}

#[test]
fn a_gradient_that_is_honestly_constant_can_be_declared() {
    let _alone = alone();
    // The second derivative of f(x) = floor(x²)·x² is 2·floor(x²).
    let second = |floor: Floor| -> Result<Tensor> {
        let x = leaf(&[1.5]);
        let squared = run(Square::<true>, &x);
        let y = (run(floor, &squared) * &squared).sum(Kind::Double);
        let first = grad(&[&y], &[&x], &create())?.single()?;
        assert_eq!(values(&first), [6.0]);
        gradient_of(&first, &x)
    };
    for floor in [Floor { declare: true, absent: false }, Floor { declare: false, absent: true }] {
        assert_eq!(values(&second(floor).expect("declared")), [4.0]);
    }
    struct Lost;
    impl Function for Lost {
        const NAME: &'static str = "lost";
        const DOUBLE_BACKWARD: bool = true;
        fn forward(&mut self, _: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            Ok((inputs.get(0)? * 2.0).into())
        }
        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            ctx.mark_constant(0);
            Ok((grads.get(0)?.detach() * 2.0).into())
        }
    }
    let x = leaf(&[1.5]);
    let y = run(Lost, &run(Square::<true>, &x));
    let first = grad(&[&(&y * &y)], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert!(gradient_of(&first, &x).is_err(), "a gradient that is not zero is not constant");
    let error =
        second(Floor { declare: false, absent: false }).expect_err("suspicious").to_string();
    assert!(error.contains("return None") && error.contains("mark_constant"), "{error}");
}
