//! Tests of backwards that are right only for some callers.

use super::*;

#[test]
fn a_gradient_that_depends_on_who_asks() {
    let careless = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let wrong = if ctx.needs_input_grad(1) { 1.0 } else { 2.0 };
        Ok([grad * w * wrong, grad * x].into())
    };
    assert_breaks(
        product(value, careless),
        &["needs_input_grad"],
        "with gradients for inputs [0] only, the gradient of input 0: element",
    );
    let cut = |inputs: &[Tensor]| Ok((&inputs[0] * &inputs[1]).detach());
    assert_eq!(broken(cut, Device::Cpu, &defaults()).0[0], "needs_input_grad");
}

#[test]
fn strides_of_incoming_gradients_ignored() {
    let careless = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let grad =
            if grad.requires_grad() { grad.shallow_clone() } else { taken_for_contiguous(grad) };
        Ok([&grad * w, &grad * x].into())
    };
    for device in devices() {
        let (names, report) = broken(product(value, careless), device, &defaults());
        assert!(names.contains(&"incoming gradients".to_string()), "{report}");
        assert!(report.contains("with incoming gradients Transposed"), "{report}");
    }
}

/// x², x·w. If one incoming gradient is absent, the backward wrongly uses the other one instead.
struct Two;

impl Function for Two {
    const NAME: &'static str = "two";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.set_materialize_grads(false);
        saver.save(x);
        saver.save(w);
        Ok([x * x, x * w].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let (x, w) = (ctx.saved(0)?, ctx.saved(1)?);
        let first = grads.optional(0).or(grads.optional(1)).expect("one");
        let second = grads.optional(1).or(grads.optional(0)).expect("one");
        Ok([first * &x * 2.0 + second * &w, second * &x].into())
    }
}

#[test]
fn an_absent_gradient_misread() {
    assert_breaks(
        |inputs| apply(Two, &[Some(&inputs[0]), Some(&inputs[1])]),
        &["incoming gradients"],
        "with an incoming gradient for output 0 alone",
    );
}

/// x·w, differentiated in a wrong way that `differentiate_reference` exists to avoid.
struct Careless {
    /// Whether it differentiates with respect to copies instead of the inputs.
    detached: bool,
}

impl Function for Careless {
    const NAME: &'static str = "careless";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (x, w) = (inputs.get(0)?, inputs.get(1)?);
        saver.save(x);
        saver.save(w);
        Ok((x * w).into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let saved = [ctx.saved(0)?, ctx.saved(1)?];
        let vector = grads.get(0)?;
        if !ctx.create_graph() {
            return Ok([vector * &saved[1], vector * &saved[0]].into());
        }
        let inputs = if self.detached {
            saved.map(|tensor| tensor.detach().set_requires_grad(true))
        } else {
            saved
        };
        let output = &inputs[0] * &inputs[1];
        let vectors = [Some(vector)];
        let options =
            GradOptions { grad_outputs: &vectors, create_graph: true, ..Default::default() };
        grad(&[&output], &[&inputs[0], &inputs[1]], &options)
    }
}

#[test]
fn careless_second_derivatives() {
    let careless = |detached| {
        move |inputs: &[Tensor]| apply(Careless { detached }, &[Some(&inputs[0]), Some(&inputs[1])])
    };
    assert_breaks(careless(false), &["create_graph"], "with create_graph: element");
    assert_breaks(careless(true), &["create_graph"], "a second derivative is");
    struct Careful;
    impl Function for Careful {
        const NAME: &'static str = "careful";
        const DOUBLE_BACKWARD: bool = true;

        fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
            Careless { detached: false }.forward(saver, inputs)
        }

        fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
            if !ctx.create_graph() {
                return Careless { detached: false }.backward(ctx, grads);
            }
            let inputs = [Some(ctx.saved(0)?), Some(ctx.saved(1)?)];
            differentiate_reference(ctx, &inputs, grads, |inputs| match inputs {
                [Some(x), Some(w)] => Ok((x * w).into()),
                _ => unreachable!("two inputs"),
            })
        }
    }
    let careful = |inputs: &[Tensor]| apply(Careful, &[Some(&inputs[0]), Some(&inputs[1])]);
    assert_breaks(careful, &[], "");
}

#[test]
fn careless_second_derivatives_where_no_step_feeds_the_next() {
    let careless = |inputs: &[Tensor]| {
        let output =
            apply(Careless { detached: false }, &[Some(&inputs[0]), Some(&inputs[1])])?.single()?;
        Ok(output.sum_dim_intlist([1_i64].as_slice(), false, Kind::Double))
    };
    assert_breaks(careless, &["create_graph"], "with create_graph: element");
}

#[test]
fn one_buffer_for_all_gradients() {
    static BUFFER: Mutex<Option<Tensor>> = Mutex::new(None);
    let reusing = |ctx: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        if ctx.create_graph() {
            return Ok([grad * w, grad * x].into());
        }
        let mut buffer = BUFFER.lock().expect("unpoisoned");
        let buffer = buffer.get_or_insert_with(|| grad * w);
        buffer.f_copy_(&(grad * w))?;
        Ok([buffer.detach(), grad * x].into())
    };
    let (names, report) = broken(product(value, reusing), Device::Cpu, &defaults());
    assert!(names.contains(&"no aliasing".to_string()), "{report}");
    assert!(
        report.contains("the gradient of input 0 shares memory with that of another call"),
        "{report}"
    );
}

#[test]
fn gradients_without_their_graph() {
    let cut = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let _no_grad = tch::no_grad_guard();
        Ok([grad * w, grad * x].into())
    };
    assert_breaks(product(value, cut), &["create_graph"], "a second derivative is 0.0");
}
