//! Tests of operators with a backward, and of calls to operators without one.

use super::*;
use tch_extension::autograd::{GradOptions, grad, live_nodes};
use tch_extension::testing::gradcheck;

fn scaled() -> Operator {
    operator("scaled")
}

#[test]
fn operators_without_a_gradient_are_recognised() {
    let has = |name: &str| operator(name).has_autograd(Device::Cpu).unwrap();
    assert!(has("doubled") && has("cube"));
    assert!(!has("scaled") && !has("scale_") && !has("cuda_only"));
    for name in ["aten::mul.Tensor", "aten::linear", "aten::_foreach_norm.Scalar"] {
        let op = Operator::find(name).unwrap();
        assert!(
            op.has_autograd(Device::Cpu).unwrap() && op.has_autograd(Device::Cuda(0)).unwrap(),
            "{name}"
        );
    }
    assert!(
        !Operator::find("mkldnn::_linear_pointwise").unwrap().has_autograd(Device::Cpu).unwrap()
    );
}

#[test]
fn without_a_gradient_a_call_is_refused_before_it_runs() {
    let x = leaf(&[1.0, 2.0]);
    let text = message(scaled().call::<Tensor>(args![&x, 3.0]));
    assert!(
        text.starts_with("tch_test::scaled: it has no autograd kernel, and an input requires grad"),
        "{text}"
    );
    assert!(
        text.contains(".no_grad()")
            && text.contains(".with_backward(f)")
            && text.contains("the schema is"),
        "{text}"
    );
    // An operator in place is refused before it writes anything.
    let y = &x * 1.0;
    message(operator("scale_").call::<Tensor>(args![&y, 3.0]));
    assert_eq!(y.detach(), doubles(&[1.0, 2.0]));
    let text =
        message(operator("scale_out").call::<()>(args![&x, 3.0, out = &doubles(&[0.0, 0.0])]));
    assert!(text.contains("no autograd kernel"), "{text}");
    // Tensors in a list are checked, too; this call is accepted because it returns no tensor.
    assert!(
        operator("tensors").call::<String>(args![&x, &x, [&x], [&x]]).is_ok(),
        "no tensor comes back"
    );
}

#[test]
fn nobody_asks_for_a_gradient() {
    let x = leaf(&[1.0, 2.0]);
    let guard = tch::no_grad_guard();
    let y: Tensor = scaled().call(args![&x, 3.0]).unwrap();
    drop(guard);
    assert_eq!((y.detach(), y.requires_grad()), (doubles(&[3.0, 6.0]), false));
    let y: Tensor = scaled().call(args![&doubles(&[1.0]), 3.0]).unwrap();
    assert_eq!(y, doubles(&[3.0]));
    let y: Tensor = scaled().no_grad().call(args![&x, 3.0]).unwrap();
    assert_eq!((y.detach(), y.requires_grad()), (doubles(&[3.0, 6.0]), false));
    assert!((&x * 2.0).requires_grad(), "grad mode is on again");
}

fn with_backward() -> tch_extension::library::WithBackward {
    scaled().with_backward(|ctx, grads| {
        assert_eq!(ctx.inputs_len(), 1);
        // Input and result are both saved, and the factor is their quotient.
        Ok((grads.get(0)? * ctx.saved(1)? / ctx.saved(0)?).into())
    })
}

#[test]
fn a_backward_of_ones_own_passes_gradcheck() {
    let (op, x) = (with_backward(), leaf(&[1.0, 2.0, -0.5]));
    gradcheck(|inputs| op.call::<Tensor>(args![&inputs[0], 3.0]), &[&x], &Default::default())
        .unwrap();
    // A wrong backward does not pass gradcheck.
    let wrong = scaled().with_backward(|_, grads| Ok((grads.get(0)? * 2.0).into()));
    let check = |inputs: &[Tensor]| wrong.call::<Tensor>(args![&inputs[0], 3.0]);
    assert!(gradcheck(check, &[&x], &Default::default()).is_err());
}

#[test]
fn a_backward_of_ones_own_gets_the_arguments_of_the_call() {
    let op = operator("power").with_backward(|ctx, grads| {
        let (n, scale): (i64, f64) = (ctx.argument("n")?, ctx.argument("scale")?);
        Ok((grads.get(0)? * ctx.saved(0)?.pow_tensor_scalar(n - 1) * (n as f64 * scale)).into())
    });
    let x = leaf(&[1.0, 2.0, -0.5]);
    // The arguments by position, by name and by default, and an int for a float.
    let calls: [fn(&Tensor) -> Args<'_>; 3] =
        [|x| args![x, 3, 2.5], |x| args![x, 2, scale = 2], |x| args![x, n = 4]];
    for args in calls {
        gradcheck(|inputs| op.call::<Tensor>(args(&inputs[0])), &[&x], &Default::default())
            .unwrap();
    }
    // Each of several calls has its own arguments.
    let (first, second): (Tensor, Tensor) =
        (op.call(args![&x, 2, 1.0]).unwrap(), op.call(args![&x, 1, 10.0]).unwrap());
    (first.sum(Kind::Double) + second.sum(Kind::Double)).backward();
    assert_eq!(x.grad(), doubles(&[12.0, 14.0, 9.0]));
}

#[test]
fn arguments_of_every_type_reach_the_backward() {
    let op = operator("power").with_backward(|ctx, grads| {
        let given = ctx.argument::<i64>("n")? == 2;
        let expected = match given {
            true => (0.25, 0.75, vec![5, 6], "down", false, Some(1.5), Some(Kind::Float)),
            false => (0.5, 1.0, vec![3, 3], "up", true, None, None),
        };
        let mode: String = ctx.argument("mode")?;
        let found = (
            ctx.argument::<f64>("scale")?,
            ctx.argument::<f64>("shift")?,
            ctx.argument::<Vec<i64>>("pair")?,
            mode.as_str(),
            ctx.argument::<bool>("flag")?,
            ctx.argument::<Option<f64>>("maybe")?,
            ctx.argument::<Option<Kind>>("dtype")?,
        );
        assert_eq!(found, expected);
        // A Scalar has the type that was given.
        assert_eq!(ctx.argument::<i64>("shift").is_ok(), !given);
        Ok(grads.get(0)?.shallow_clone().into())
    });
    let x = leaf(&[1.0]);
    let all = args![
        &x,
        2,
        0.25,
        shift = 0.75,
        pair = [5, 6],
        mode = "down",
        flag = false,
        maybe = 1.5,
        dtype = Kind::Float
    ];
    for args in [all, args![&x, 1]] {
        op.call::<Tensor>(args).unwrap().sum(Kind::Double).backward();
    }
    assert_eq!(x.grad(), doubles(&[2.0]));
}

#[test]
fn wrong_questions_for_arguments_are_errors() {
    for (op, expected) in [
        (
            operator("power")
                .with_backward(|ctx, _| ctx.argument::<i64>("scale").map(|_| ().into())),
            "its argument `scale` is Float(0.5), and i64 was asked for",
        ),
        (
            operator("power").with_backward(|ctx, _| ctx.argument::<i64>("m").map(|_| ().into())),
            "it has no argument `m`",
        ),
        (
            operator("power")
                .with_backward(|ctx, _| ctx.argument::<Tensor>("x").map(|_| ().into())),
            "its argument `x` is of type Tensor, and a backward gets no such argument by name; the tensors of a call are saved",
        ),
        (
            operator("power")
                .with_backward(|ctx, _| ctx.argument::<Option<Tensor>>("other").map(|_| ().into())),
            "its argument `other` is of type Tensor?",
        ),
    ] {
        let y: Tensor = op.call(args![&leaf(&[1.0]), 2]).unwrap();
        let text = y.sum(Kind::Double).f_backward().expect_err("an error").to_string();
        assert!(text.contains("tch_test::power: ") && text.contains(expected), "{text}");
    }
}

/// A function that uses only the autograd context can be used in any backward.
#[test]
fn a_backward_may_be_a_function_of_the_graphs_context() {
    fn quotient(ctx: &tch_extension::autograd::Context<'_>, grad: &Tensor) -> Result<Tensor> {
        Ok(grad * ctx.saved(1)? / ctx.saved(0)?)
    }
    let op = scaled().with_backward(|ctx, grads| Ok(quotient(ctx, grads.get(0)?)?.into()));
    let x = leaf(&[1.0, 2.0]);
    op.call::<Tensor>(args![&x, 3.0]).unwrap().sum(Kind::Double).backward();
    assert_eq!(x.grad(), doubles(&[3.0, 3.0]));
}

#[test]
fn a_second_derivative_is_an_error() {
    let x = leaf(&[2.0]);
    let y: Tensor = with_backward().call(args![&x, 3.0]).unwrap();
    let options = GradOptions { create_graph: true, ..Default::default() };
    let first = grad(&[&(&y * &x).sum(Kind::Double)], &[&x], &options).unwrap().single().unwrap();
    let second = grad(&[&first.sum(Kind::Double)], &[&x], &GradOptions::default());
    assert!(second.is_err(), "{second:?}");
}

#[test]
fn a_backward_for_several_inputs_and_results() {
    let (x, y) = (leaf(&[1.0, 2.0]), leaf(&[3.0, 4.0]));
    // The tensors of a list are separate inputs. The saved tensors are first the inputs and then
    // the results.
    let stack = Operator::find("aten::stack").unwrap().with_backward(|ctx, grads| {
        assert_eq!(ctx.inputs_len(), 2);
        assert_eq!(ctx.saved(2)?, Tensor::stack(&[ctx.saved(0)?, ctx.saved(1)?], 0));
        let gradient = grads.get(0)?;
        Ok([gradient.get(0) * 10.0, gradient.get(1) * 100.0].into())
    });
    let z: Tensor = stack.call(args![&[&x, &y]]).unwrap();
    z.sum(Kind::Double).backward();
    assert_eq!((x.grad(), y.grad()), (doubles(&[10.0, 10.0]), doubles(&[100.0, 100.0])));
    // No input requires grad, so there is no graph.
    let z: Tensor = stack.call(args![&[&x.detach(), &y.detach()]]).unwrap();
    assert!(!z.requires_grad());
}

#[test]
fn a_backward_of_ones_own_fails_by_name() {
    let op = scaled().with_backward(|_, _| Err(tch_extension::Error::msg("on purpose")));
    let y: Tensor = op.call(args![&leaf(&[1.0]), 3.0]).unwrap();
    let text = y.sum(Kind::Double).f_backward().expect_err("an error").to_string();
    assert!(text.contains("tch_test::scaled: on purpose"), "{text}");
}

#[test]
fn in_place_with_a_backward_of_ones_own() {
    let op = operator("scale_").with_backward(|_, grads| Ok((grads.get(0)? * 3.0).into()));
    let x = leaf(&[1.0, 2.0]);
    let y = &x * &x;
    let z: Tensor = op.call(args![&y, 3.0]).unwrap();
    assert_eq!((z.detach(), y.detach()), (doubles(&[3.0, 12.0]), doubles(&[3.0, 12.0])));
    y.sum(Kind::Double).backward();
    assert_eq!(x.grad(), doubles(&[6.0, 12.0]));
    // Writing to a leaf gives libtorch's own message, and nothing is written.
    let text = message(op.call::<Tensor>(args![&x, 3.0]));
    assert!(text.contains("a leaf Variable that requires grad"), "{text}");
    assert_eq!(x.detach(), doubles(&[1.0, 2.0]));
    // This operator writes to an argument that it does not return.
    let op = operator("scale_out").with_backward(|_, _| Ok(().into()));
    let text = message(op.call::<()>(args![&x, 3.0, out = &doubles(&[0.0, 0.0])]));
    assert!(text.contains("it writes into an argument that it does not return"), "{text}");
}

#[test]
fn a_composite_that_lost_the_graph_is_found_out() {
    let x = leaf(&[1.0, 2.0]);
    let y: Tensor = operator("cube").call(args![&x]).unwrap();
    y.sum(Kind::Double).backward();
    assert_eq!(x.grad(), doubles(&[3.0, 12.0]));
    let text = message(operator("raw_scaled").call::<Tensor>(args![&x, 3.0]));
    assert!(text.contains("the operator's results are not part of the graph"), "{text}");
    assert!(text.contains(".with_backward(f)"), "{text}");
    // The input is among the results, too, but that does not make the other result part of the
    // graph.
    let text = message(operator("same_and_raw").call::<(Tensor, Tensor)>(args![&x, 3.0]));
    assert!(text.contains("the operator's results are not part of the graph"), "{text}");
    let y: Tensor = operator("same").call(args![&x]).unwrap();
    assert!(y.requires_grad());
    let y: Tensor = operator("raw_scaled").no_grad().call(args![&x, 3.0]).unwrap();
    assert!(!y.requires_grad());
    // After this operator in place, the tensor still requires grad, but the change is not part of
    // the graph.
    let y = &x * 1.0;
    message(operator("raw_scale_").call::<Tensor>(args![&y, 3.0]));
    let y: Tensor =
        operator("composite_scale_").call(args![&(&x * 1.0), &doubles(&[3.0, 4.0])]).unwrap();
    assert!(y.requires_grad());
    // After this operator in place, a constant is part of the graph.
    let constant = doubles(&[1.0, 1.0]);
    let _ = operator("composite_scale_").call::<Tensor>(args![&constant, &x]).unwrap();
    assert!(constant.requires_grad());
    let text =
        message(operator("composite_scale_").call::<Tensor>(args![&x, &doubles(&[3.0, 4.0])]));
    assert!(text.contains("a leaf Variable that requires grad"), "{text}");
}

#[test]
fn nothing_of_a_call_stays_behind() {
    // Other tests of this program may make nodes at the same time, so this only checks that a
    // thousand calls do not leave a thousand nodes.
    let (op, before) = (with_backward(), live_nodes());
    for _ in 0..1000 {
        let x = leaf(&[1.0]);
        let y: Tensor = op.call(args![&x, 3.0]).unwrap();
        y.sum(Kind::Double).backward();
        assert_eq!(x.grad(), doubles(&[3.0]));
    }
    assert!(live_nodes() - before < 500, "{} nodes", live_nodes() - before);
}

/// The resident memory of this process in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").expect("statm");
    text.split(' ').nth(1).and_then(|pages| pages.parse::<usize>().ok()).expect("a number") * 4096
}

#[test]
fn neither_arguments_nor_results_leak() {
    let (results, tensors) = (operator("first_results"), operator("tensors"));
    let (scaled, with_backward) = (scaled(), with_backward());
    let mut before = 0;
    for round in 0..600 {
        // Each of these tensors takes a mebibyte.
        let x = Tensor::ones([1 << 17], (Kind::Double, Device::Cpu)).set_requires_grad(true);
        let _ = first_of(&results, &x.detach());
        let _: String = tensors.call(args![&x, &x, vec![&x, &x], [Some(&x), None]]).unwrap();
        message(tensors.call::<String>(args![&x, &x, [&x], vec![&x, &x], &x]));
        message(tensors.call::<i64>(args![&x, &x, [&x], vec![&x, &x]]));
        message(tensors.call::<String>(args![&x, &x, [&x], vec![1; 1 << 17]]));
        message(scaled.call::<Tensor>(args![&x, 2.0]));
        let y: Tensor = with_backward.call(args![&x, 2.0]).unwrap();
        y.sum(Kind::Double).backward();
        if round == 100 {
            before = resident();
        }
    }
    let grown = resident().saturating_sub(before) >> 20;
    assert!(grown < 250, "{grown} MiB more");
}

fn first_of(op: &Operator, x: &Tensor) -> Tensor {
    let (first, _, _, _, _, _): (Tensor, Vec<Tensor>, i64, f64, bool, String) =
        op.call(args![x]).unwrap();
    first
}

#[test]
fn cuda_kernels_are_found_by_the_device() {
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_kernels_are_found_by_the_device")
    else {
        return;
    };
    let (op, x) = (operator("cuda_only"), leaf(&[1.0, 2.0]).to_device(device));
    assert!(!op.has_autograd(device).unwrap());
    message(op.call::<Tensor>(args![&x]));
    let y: Tensor = op.no_grad().call(args![&x]).unwrap();
    assert_eq!((y.device(), y.requires_grad()), (device, false));
    assert_eq!(y, x.detach());
}
