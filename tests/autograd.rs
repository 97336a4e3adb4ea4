//! The autograd bridge: each promise of `autograd::Function` has a test here that fails without it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::*;
use tch_extension::{Error, Result};

/// Tests count live nodes, so only one may make some at a time.
fn alone() -> MutexGuard<'static, ()> {
    static SERIAL: Mutex<()> = Mutex::new(());
    SERIAL.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn leaf(values: &[f64]) -> Tensor {
    Tensor::from_slice(values).set_requires_grad(true)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().contiguous().view(-1)).expect("a double tensor")
}

fn gradient_of(output: &Tensor, input: &Tensor) -> Result<Tensor> {
    grad(&[&output.sum(Kind::Double)], &[input], &GradOptions::default())?.single()
}

fn run<F: Function>(function: F, x: &Tensor) -> Tensor {
    apply(function, &[Some(x)]).and_then(Tensors::single).expect("one output")
}

/// Keep the graph for another backward.
fn keep() -> GradOptions<'static> {
    GradOptions { retain_graph: Some(true), ..Default::default() }
}

/// Make the gradient differentiable.
fn create() -> GradOptions<'static> {
    GradOptions { create_graph: true, ..Default::default() }
}

/// An operator made of two closures.
struct Op<F, B> {
    forward: F,
    backward: B,
}

impl<F, B> Function for Op<F, B>
where
    F: Fn(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors> + Send + Sync + 'static,
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static,
{
    const NAME: &'static str = "op";
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        (self.forward)(saver, inputs)
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        (self.backward)(ctx, grads)
    }
}

fn op<F, B>(forward: F, backward: B) -> Op<F, B>
where
    F: Fn(&mut Saver<'_>, Inputs<'_>) -> Result<Tensors>,
    B: Fn(&Context<'_>, &Tensors) -> Result<Tensors>,
{
    Op { forward, backward }
}

/// x², with the input saved. Its backward may be differentiated or not, as `DOUBLE` says.
struct Square<const DOUBLE: bool>;

impl<const DOUBLE: bool> Function for Square<DOUBLE> {
    const NAME: &'static str = "square";
    const DOUBLE_BACKWARD: bool = DOUBLE;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let x = inputs.get(0)?;
        saver.save(x);
        Ok((x * x).into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
    }
}

fn square(x: &Tensor) -> Tensor {
    run(Square::<false>, x)
}

/// exp, with the output saved.
struct Exp;

impl Function for Exp {
    const NAME: &'static str = "exp";
    const DOUBLE_BACKWARD: bool = true;
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let y = inputs.get(0)?.exp();
        saver.save(&y);
        Ok(y.into())
    }
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        Ok((grads.get(0)? * ctx.saved(0)?).into())
    }
}

fn exp(x: &Tensor) -> Tensor {
    run(Exp, x)
}

#[test]
fn first_derivative_through_grad_and_through_backward() {
    let _alone = alone();
    let x = leaf(&[3.0, -2.0]);
    let y = square(&x);
    assert!(y.requires_grad() && !y.is_leaf());
    assert_eq!(values(&y), [9.0, 4.0]);
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, -4.0]);
    assert!(!x.grad().defined(), "grad() leaves .grad alone");

    square(&square(&x)).sum(Kind::Double).backward();
    assert_eq!(values(&x.grad()), [108.0, -32.0]);
}

#[test]
fn grad_takes_vectors_and_says_what_is_unused() {
    let _alone = alone();
    let (x, unused) = (leaf(&[1.0, 2.0]), leaf(&[0.0]));
    let y = square(&x);
    let v = Tensor::from_slice(&[10.0, 100.0]);
    let options = GradOptions { grad_outputs: &[Some(&v)], ..keep() };
    let found = grad(&[&y], &[&x], &options).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [20.0, 400.0]);

    let error = grad(&[&y], &[&x, &unused], &options).expect_err("unused input").to_string();
    assert!(error.contains("appears to not have been used"), "{error}");
    let found =
        grad(&[&y], &[&x, &unused], &GradOptions { allow_unused: true, ..options }).expect("gradients");
    assert!(found.optional(0).is_some() && found.optional(1).is_none());

    let error = grad(&[&y, &y], &[&x], &options).expect_err("one vector for two outputs").to_string();
    assert!(error.contains("grad_outputs") && error.contains("2 entries"), "{error}");
    let error = grad(&[&y], &[&x], &keep()).expect_err("no vector for two elements").to_string();
    assert!(error.contains("scalar outputs"), "{error}");
}

#[test]
fn a_saved_input_changed_in_place_is_an_error() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let middle = &x * 1.0;
    let y = square(&middle);
    let _ = tch::no_grad(|| middle.shallow_clone().fill_(7.0));
    let error = gradient_of(&y, &x).expect_err("the input was changed").to_string();
    assert!(error.contains("square") && error.contains("modified by an inplace operation"), "{error}");
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
            assert!(!ctx.needs_input_grad(0) && ctx.needs_input_grad(1) && !ctx.needs_input_grad(2));
            assert!(grads.optional(0).is_none() && grads.optional(2).is_none());
            Ok([None, Some(grads.get(1)? * 3.0), None].into())
        },
    );
    let x = leaf(&[2.0]);
    let outputs = apply(function, &[None, Some(&x), None]).expect("apply");
    assert!(outputs.optional(0).is_none() && outputs.optional(2).is_none());
    assert_eq!(values(&gradient_of(outputs.get(1).expect("present"), &x).expect("gradient")), [3.0]);
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
    let y = apply(function, &[Some(&undefined), Some(&x)]).and_then(Tensors::single).expect("apply");
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
                seen.lock().expect("unpoisoned").push([0, 1].map(|index| ctx.needs_input_grad(index)));
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
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| apply(panicking, &[Some(&x)])));
    assert!(caught.is_err());
    assert!((&x * 2.0).requires_grad(), "also after a panic");
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

/// Each way for a backward to go wrong, and what its caller must read.
#[test]
fn failures_in_backward_reach_the_caller() {
    let _alone = alone();
    type Backward = fn(&Context<'_>, &Tensors) -> Result<Tensors>;
    let cases: [(&str, Backward, &[&str]); 9] = [
        ("error", |_, _| Err(Error::msg("out of luck")), &["op: out of luck"]),
        ("panic", |ctx, _| panic!("boom {}", ctx.inputs_len() + 6), &["op: ", "panicked", "boom 7"]),
        ("panic with a literal", |_, _| panic!("bang"), &["op: ", "panicked", "bang"]),
        (
            "tch panic",
            |_, grads| Ok(grads.get(0)?.matmul(&Tensor::from_slice(&[1.0, 2.0])).into()),
            &["op: ", "panicked"],
        ),
        ("tch error", |_, grads| Ok(grads.get(0)?.f_reshape([5, 5])?.into()), &["op: ", "shape '[5, 5]'"]),
        (
            "wrong shape",
            |_, _| Ok(Tensor::from_slice(&[1.0, 2.0]).into()),
            &["opBackward", "invalid gradient", "[2]"],
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
        let build = || run(op(|_, inputs| Ok((inputs.get(0)? * 1.0).into()), backward), &x).sum(Kind::Double);
        let through_grad = grad(&[&build()], &[&x], &GradOptions::default()).expect_err(name).to_string();
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

        let function =
            op(|_, _| Ok([Some(Tensor::new()), None].into()), |_, _| unreachable!("nothing depends on x"));
        let outputs = apply(function, &[Some(&x)]).expect("apply");
        assert!(
            outputs.optional(0).is_none() && outputs.optional(1).is_none(),
            "an undefined output is absent"
        );
    }
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

/// Counts its drops.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// x ↦ 2x, which holds a [`Counted`], after what `misuse` does with the saver.
fn counted(drops: &Arc<AtomicUsize>, misuse: fn(&mut Saver<'_>)) -> impl Function + use<> {
    let state = Counted(Arc::clone(drops));
    op(
        move |saver, inputs| {
            misuse(saver);
            Ok((inputs.get(0)? * 2.0).into())
        },
        move |_, grads| {
            let _held = &state;
            Ok((grads.get(0)? * 2.0).into())
        },
    )
}

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

    // The input is not among the outputs.
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
                op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, grads| Ok(grads.get(0)?.copy().into())),
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
fn a_differentiable_backward_has_right_second_derivatives() {
    let _alone = alone();
    // Through a saved input: (x²)² has 12x².
    let x = leaf(&[3.0]);
    let y = run(Square::<true>, &run(Square::<true>, &x)).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [108.0]);
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [108.0]);

    // Through a saved output, three times: exp''' = exp.
    let x = leaf(&[0.5]);
    let mut derivative = exp(&x);
    for _ in 0..3 {
        derivative = grad(&[&derivative], &[&x], &create()).and_then(Tensors::single).expect("derivative");
        assert!((derivative.double_value(&[0]) - 0.5_f64.exp()).abs() < 1e-12);
    }
}

#[test]
fn a_refused_second_derivative_is_an_error_on_every_path() {
    let _alone = alone();
    let before = live_nodes();
    // In PyTorch the first two give silently wrong numbers: the loss reaches x beside the operator, too.
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

    // Also when a gradient passes through unchanged, with whatever graph it brought along.
    let x = leaf(&[3.0]);
    let y = run(
        op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, grads| Ok(grads.get(0)?.shallow_clone().into())),
        &x,
    );
    let first =
        grad(&[&(&y * &y).sum(Kind::Double)], &[&x], &create()).and_then(Tensors::single).expect("first");
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

/// 2·x·y by differentiating the reference when a graph is wanted, as fused operators do.
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
    // 2·x·x² = 2x³: 6x², 12x, 12. One input depends on the other, and then they are the same tensor.
    let x = leaf(&[3.0]);
    for y in [product(&x, &(&x * &x)), product(&(&x * &x), &x), product(&product(&x, &x), &x) / 2.0] {
        let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
        assert_eq!(values(&first), [54.0]);
        let second = grad(&[&first], &[&x], &create()).and_then(Tensors::single).expect("second");
        assert_eq!(values(&second), [36.0]);
        assert_eq!(values(&gradient_of(&second, &x).expect("third")), [12.0]);
    }
}

/// x³ whose backward claims to be differentiable, and is what `backward` makes of it.
struct Claimed<B>(B);

impl<B: Fn(&Context<'_>, &Tensors) -> Result<Tensors> + Send + Sync + 'static> Function for Claimed<B> {
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
    // (x³)·x = x⁴: its second derivative would come out as 27 instead of 108.
    let y = (run(Claimed(kernel), &x) * &x).sum(Kind::Double);
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [108.0]);
    let error = gradient_of(&first, &x).expect_err("no graph").to_string();
    assert!(
        error.contains("claimed: the second derivative is not defined") && error.contains("no graph"),
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
    let error = gradient_of(&run(Claimed(always), &x), &x).expect_err("no graph to build").to_string();
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
    let [y, constant, index] = apply(function, &[Some(&x)]).and_then(Tensors::exactly).expect("apply");
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

fn double_in_place() -> impl Function {
    op(
        |saver, inputs| {
            saver.mark_dirty(0);
            let mut x = inputs.get(0)?.shallow_clone();
            let _ = x.f_mul_scalar_(2.0)?;
            Ok(x.into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    )
}

#[test]
fn an_input_changed_in_place() {
    let _alone = alone();
    let x = leaf(&[1.0, 4.0]);
    let middle = &x * 3.0;
    let earlier_user = square(&middle);
    let y = run(double_in_place(), &middle);
    assert_eq!(values(&middle), [6.0, 24.0], "the input itself was changed");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [6.0, 6.0]);
    let error = gradient_of(&earlier_user, &x).expect_err("it saved the old value").to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");

    let error = apply(double_in_place(), &[Some(&x)]).expect_err("a leaf").to_string();
    assert!(error.contains("leaf"), "{error}");
}

/// w·v, written into v: the input at `place`.
fn multiply_into(place: usize) -> impl Function {
    op(
        move |saver, inputs| {
            let (mut v, w) = (inputs.get(place)?.shallow_clone(), inputs.get(1 - place)?);
            saver.save(&v.copy());
            saver.save(w);
            saver.mark_dirty(place);
            let _ = v.f_mul_(w)?;
            Ok(v.into())
        },
        move |ctx, grads| {
            let (grad_v, grad_w) = (grads.get(0)? * ctx.saved(1)?, grads.get(0)? * ctx.saved(0)?);
            Ok(if place == 0 { [grad_v, grad_w] } else { [grad_w, grad_v] }.into())
        },
    )
}

#[test]
fn a_view_changed_in_place_has_to_be_the_first_input() {
    let _alone = alone();
    let (x, w) = (leaf(&[1.0, 2.0, 3.0, 4.0]), leaf(&[10.0, 20.0]));
    let base = &x * 1.0;
    let view = base.narrow(0, 1, 2);
    apply(multiply_into(0), &[Some(&view), Some(&w)]).expect("the view first");
    let found = grad(&[&base.sum(Kind::Double)], &[&x, &w], &GradOptions::default()).expect("gradients");
    assert_eq!(values(found.get(0).expect("x")), [1.0, 10.0, 20.0, 1.0]);
    assert_eq!(values(found.get(1).expect("w")), [2.0, 3.0]);

    // Otherwise libtorch would put the gradient in the wrong place, silently.
    let base = &x * 1.0;
    let view = base.narrow(0, 1, 2);
    let error = apply(multiply_into(1), &[Some(&w), Some(&view)]).expect_err("the view second").to_string();
    assert!(error.contains("mark_dirty(1)") && error.contains("first input"), "{error}");
}

#[test]
fn a_view_changed_in_place_and_saved_makes_no_cycle() {
    let _alone = alone();
    let before = live_nodes();
    let exp_in_place = || {
        op(
            |saver, inputs| {
                let mut v = inputs.get(0)?.shallow_clone();
                let _ = v.f_exp_()?;
                saver.save(&v);
                saver.mark_dirty(0);
                Ok(v.into())
            },
            |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
        )
    };
    let x = leaf(&[0.0, 1.0, 2.0]);
    for _ in 0..3 {
        let base = &x * 1.0;
        drop(run(exp_in_place(), &base.narrow(0, 1, 1)));
    }
    assert_eq!(live_nodes(), before);
    let base = &x * 1.0;
    let _ = run(exp_in_place(), &base.narrow(0, 1, 1));
    assert_eq!(values(&gradient_of(&base, &x).expect("gradient")), [1.0, 1.0_f64.exp(), 1.0]);
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
fn a_backward_may_run_another_backward() {
    let _alone = alone();
    // x² by asking the engine again inside the backward.
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
                    let gradient = grad(&[&y], &[&x], &keep()).and_then(Tensors::single).expect("gradient");
                    assert!((gradient.double_value(&[0]) - expected).abs() < 1e-9);
                }
            });
        }
    });
}

#[test]
fn cuda_the_engines_own_thread_calls_back() {
    let _alone = alone();
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_the_engines_own_thread_calls_back") else {
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

    let failing = op(|_, inputs| Ok((inputs.get(0)? * 1.0).into()), |_, _| panic!("on the device thread"));
    let y = run(failing, &x).sum(Kind::Double);
    let error = y.f_backward().expect_err("a panic on the engine's thread").to_string();
    assert!(error.contains("on the device thread"), "{error}");
    drop(y);
    assert_eq!(live_nodes(), before);
}

#[test]
fn an_absent_vector_means_one() {
    let _alone = alone();
    let x = leaf(&[3.0]);
    let (y, z) = (square(&x).sum(Kind::Double), (&x * 7.0).sum(Kind::Double));
    let v = Tensor::from(10.0_f64);
    let options = GradOptions { grad_outputs: &[None, Some(&v)], ..Default::default() };
    let found = grad(&[&y, &z], &[&x], &options).and_then(Tensors::single).expect("gradient");
    assert_eq!(values(&found), [76.0]);
}

#[test]
fn libtorchs_errors_come_without_its_backtrace() {
    let _alone = alone();
    let (x, unused) = (leaf(&[1.0]), leaf(&[0.0]));
    let y = square(&x).sum(Kind::Double);
    let error = grad(&[&y], &[&unused], &keep()).expect_err("unused input").to_string();
    assert!(!error.contains("frame #") && !error.contains("Exception raised from"), "{error}");
}

#[test]
fn lists_say_what_is_missing() {
    let list = || Tensors::from([None, Some(Tensor::from_slice(&[1.0]))]);
    assert!(list().optional(0).is_none() && list().optional(1).is_some() && list().optional(9).is_none());
    for (result, expected) in [
        (list().get(0).map(|_| ()), "tensor 0 was asked for, but it is absent"),
        (list().get(9).map(|_| ()), "tensor 9 was asked for, but there are only 2"),
        (list().single().map(|_| ()), "expected 1 tensors, got 2, of which 1 are present"),
        (list().exactly::<2>().map(|_| ()), "expected 2 tensors, got 2, of which 1 are present"),
        (list().exactly::<3>().map(|_| ()), "expected 3 tensors, got 2, of which 1 are present"),
    ] {
        assert_eq!(result.expect_err(expected).to_string(), expected);
    }
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
            assert_eq!([0, 1, 2, 9].map(|index| saver.needs_input_grad(index)), [true, false, false, false]);
            Ok((inputs.get(0)? * inputs.get(1)?).into())
        },
        |ctx, grads| {
            assert!(!ctx.needs_input_grad(1) && !ctx.needs_input_grad(3) && !ctx.needs_input_grad(1 << 40));
            Ok([Some(grads.get(0)? * 5.0), None, None].into())
        },
    );
    let (x, constant) = (leaf(&[2.0]), Tensor::from_slice(&[5.0]));
    let y = apply(function, &[Some(&x), Some(&constant), None]).and_then(Tensors::single).expect("apply");
    assert_eq!(values(&gradient_of(&y, &x).expect("gradient")), [5.0]);
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
    // Not even one that reads nothing of what was saved.
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
    let function =
        op(|_, inputs| Ok((inputs.get(0)? * 2.0).into()), |_, grads| Ok((grads.get(0)? * 2.0).into()));
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
                // Comes through this node again, and frees it.
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
                    // The second one: done at once, and the engine frees what was saved.
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
        let reader =
            std::thread::spawn(move || grad(&[&other_y], &[&other_x], &GradOptions::default()).map(drop));
        while !reading.load(Ordering::SeqCst) {
            std::hint::spin_loop();
        }
        grad(&[&y], &[&x], &GradOptions::default()).expect("the one that frees");
        let error = reader.join().expect("no panic").expect_err("it reads until it cannot").to_string();
        assert!(error.contains("backward through the graph a second time"), "{error}");
    }
}

#[test]
fn a_used_graph_lets_go_of_what_it_saved() {
    let _alone = alone();
    let before = live_nodes();
    // What is saved here brings a graph along, so that its end can be seen.
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
            // So an intermediate may be read.
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
    // v is no input of the operator, but its derivative is one of the backward, too.
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let error = grad(&[&first.sum(Kind::Double)], &[&v], &options).expect_err("refused").to_string();
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

#[test]
fn a_long_chain_of_refusals_does_not_overflow_the_stack() {
    let _alone = alone();
    let before = live_nodes();
    let x = leaf(&[1.0]);
    let mut y = x.shallow_clone();
    for _ in 0..200_000 {
        y = run(
            op(|_, inputs| Ok(inputs.get(0)?.copy().into()), |_, grads| Ok(grads.get(0)?.copy().into())),
            &y,
        );
    }
    let first = grad(&[&y], &[&x], &create()).and_then(Tensors::single).expect("first");
    drop(y);
    drop(first);
    assert_eq!(live_nodes(), before);
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

/// x becomes 2x by a write that libtorch's version counter does not see, as a kernel's is.
fn double_unseen() -> impl Function {
    op(
        |saver, inputs| {
            saver.mark_dirty(0);
            let x = inputs.get(0)?;
            let _ = x.data().f_mul_scalar_(2.0)?;
            Ok(x.shallow_clone().into())
        },
        |_, grads| Ok((grads.get(0)? * 2.0).into()),
    )
}

#[test]
fn an_input_changed_by_a_kernel_counts_as_changed() {
    let _alone = alone();
    for with_graph in [true, false] {
        let x = leaf(&[1.0, 4.0]);
        let middle = &x * 3.0;
        let earlier_user = square(&middle);
        let before = live_nodes();
        let y = if with_graph {
            run(double_unseen(), &middle)
        } else {
            tch::no_grad(|| run(double_unseen(), &middle))
        };
        assert_eq!(live_nodes(), before + i64::from(with_graph));
        assert_eq!(values(&y), [6.0, 24.0]);
        let error = gradient_of(&earlier_user, &x).expect_err("it saved the old value").to_string();
        assert!(error.contains("modified by an inplace operation"), "{with_graph}: {error}");
    }
    let before = live_nodes();
    let constant = Tensor::from_slice(&[1.0]);
    let y = run(double_unseen(), &constant);
    assert!(!y.requires_grad(), "no input requires grad");
    assert_eq!((live_nodes(), values(&constant)), (before, vec![2.0]));
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
    assert_eq!(values(&gradient_of(outputs.get(1).expect("present"), &x).expect("gradient")), [2.0]);
}

/// (x², 3y) by differentiating the reference, from whatever gradients come.
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
        let outputs = apply(Pair, &[Some(x), Some(y)]).and_then(Tensors::exactly::<2>).expect("apply");
        outputs.map(|output| output.sum(Kind::Double))
    };
    let (x, y, constant) = (leaf(&[3.0]), leaf(&[5.0]), Tensor::from_slice(&[5.0]));

    // An input and an output that no derivative concerns.
    let [a, b] = pair(&x, &constant);
    let first = grad(&[&a, &b], &[&x], &options).and_then(Tensors::single).expect("first");
    assert_eq!(values(&first), [6.0]);
    assert_eq!(values(&gradient_of(&first, &x).expect("second")), [2.0]);

    // Nothing but such an output.
    let [_, b] = pair(&x, &constant);
    let first = grad(&[&b], &[&x], &options).expect("nothing to differentiate");
    assert!(first.optional(0).is_none_or(|first| values(first) == [0.0]));

    // An input on which the output in question does not depend.
    let [a, _] = pair(&x, &y);
    let first = grad(&[&a], &[&x, &y], &options).expect("y is unused");
    assert_eq!(values(first.get(0).expect("x")), [6.0]);
    assert!(first.optional(1).is_none_or(|first| values(first) == [0.0]));
}
