//! Tests of sources that were written for Python and are unchanged: the classic examples.

use super::*;
use tch_extension::testing::{GradcheckOptions, gradcheck};

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);

fn assert_equal(actual: &Tensor, expected: &Tensor) {
    tch_extension::testing::assert_close(actual, expected, 1e-9, 1e-11);
}

fn leaf(size: &[i64]) -> Tensor {
    Tensor::randn(size, DOUBLE).set_requires_grad(true)
}

fn tensors(module: &Module, operator: &str, arguments: &[&Tensor]) -> Result<Vec<Tensor>> {
    let values = arguments
        .iter()
        .fold(tch_extension::library::Args::new(), |args, tensor| args.arg(*tensor));
    module.operator(operator)?.call(values)
}

#[test]
fn linear() {
    let module = extension("linear_cpp").source(python_source("linear.cpp")).load().unwrap();
    let (input, weight, bias) = (leaf(&[4, 3]), leaf(&[2, 3]), leaf(&[2]));
    let forward = module.operator("forward").unwrap();
    assert_eq!(
        forward.schema(),
        "linear_cpp::forward(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor"
    );
    // It consists of ATen's operators, so it is differentiable, as in Python.
    gradcheck(
        |inputs| forward.call::<Tensor>(args![&inputs[0], &inputs[1], &inputs[2]]),
        &[&input, &weight, &bias],
        &GradcheckOptions::default(),
    )
    .unwrap();
    let output: Tensor = forward.call(args![&input, weight = &weight]).unwrap();
    assert_equal(&output, &input.linear(&weight, None::<&Tensor>));

    let grad = Tensor::randn([4, 2], DOUBLE);
    let own = tensors(&module, "backward", &[&grad, &input.detach(), &weight.detach()]).unwrap();
    let output: Tensor = forward.call(args![&input, &weight, &bias]).unwrap();
    let expected = Tensor::run_backward(
        &[(output * &grad).sum(Kind::Double)],
        &[&input, &weight, &bias],
        false,
        false,
    );
    for (own, expected) in own.iter().zip(&expected) {
        assert_equal(own, expected);
    }

    let wrong = message(forward.call::<Tensor>(args![&input, &leaf(&[2, 5])]));
    assert_says(&wrong, &["linear_cpp::forward", "input has 3 features, but weight wants 5"]);
}

#[test]
fn layer_norm() {
    let module =
        extension("layer_norm_cpp").source(python_source("layer_norm.cpp")).load().unwrap();
    let forward = module.operator("forward").unwrap();
    assert_says(forward.schema(), &["float eps=1.0000000000000001e-05)"]);
    let (input, weight, bias) = (leaf(&[5, 7]), leaf(&[7]), leaf(&[7]));
    type Three = (Tensor, Tensor, Tensor);
    let detached = [&input, &weight, &bias].map(Tensor::detach);
    let (output, mean, rstd): Three =
        forward.call(args![&detached[0], &detached[1], &detached[2]]).unwrap();
    let expected = input.layer_norm([7], Some(&weight), Some(&bias), 1e-5, false);
    assert_equal(&output, &expected.detach());

    let grad = Tensor::randn([5, 7], DOUBLE);
    let backward = module.operator("backward").unwrap();
    let own: Three = backward.call(args![&grad, &detached[0], &mean, &rstd, &detached[1]]).unwrap();
    let expected = Tensor::run_backward(
        &[(expected * &grad).sum(Kind::Double)],
        &[&input, &weight, &bias],
        false,
        false,
    );
    for (own, expected) in [own.0, own.1, own.2].iter().zip(&expected) {
        assert_equal(own, expected);
    }

    // Its loop is not an ATen operator. With the extension's own backward, the operator is
    // nevertheless differentiable.
    let paired = {
        let backward = backward.clone();
        forward.with_backward(move |ctx, grads| {
            let grad = grads.get(0)?.contiguous();
            let (input, weight) = (ctx.saved(0)?, ctx.saved(1)?);
            let (mean, rstd) = (ctx.saved(4)?, ctx.saved(5)?);
            let (x, w, b): Three = backward.call(args![&grad, &input, &mean, &rstd, &weight])?;
            Ok([x, w, b].into())
        })
    };
    gradcheck(
        |inputs| Ok(paired.call::<Three>(args![&inputs[0], &inputs[1], &inputs[2]])?.0),
        &[&input, &weight, &bias],
        &GradcheckOptions::default(),
    )
    .unwrap();

    let refused = message(forward.call::<Three>(args![
        &detached[0].transpose(0, 1),
        &detached[1],
        &detached[2]
    ]));
    assert_says(&refused, &["layer_norm_cpp::forward", "input must be contiguous"]);
}

/// A source in the style of the tutorials of 2019 to 2021: dispatch on `x.type()`, and `AT_CHECK`.
#[test]
fn an_older_source() {
    let module = extension("clip_cpp").source(python_source("clip.cpp")).load().unwrap();
    check_clip(&module, Device::Cpu, &[Kind::Double, Kind::Float]);
    let x = Tensor::ones([2, 3], (Kind::Half, Device::Cpu));
    assert_says(&message(clip(&module, &x)), &["\"clip_cpu\" not implemented for 'Half'"]);
    assert_says(&message(clip(&module, &x.transpose(0, 1))), &["x must be contiguous"]);
    let bytes: i64 = module.operator("element_size").unwrap().call(args![&x]).unwrap();
    assert_eq!(bytes, 2);
}

fn clip(module: &Module, x: &Tensor) -> Result<Tensor> {
    module.operator("clip")?.call(args![x, 0.5])
}

/// Checks the kinds that the source's dispatch supports.
pub fn check_clip(module: &Module, device: Device, kinds: &[Kind]) {
    for &kind in kinds {
        let x = Tensor::from_slice(&[-2.0, 0.25, 3.0]).to_kind(kind).to_device(device);
        assert_eq!(clip(module, &x).unwrap(), x.clamp_max(0.5), "{kind:?}");
    }
}

/// Computes `[h', c']` of the LLTM cell with plain tensor operations.
pub fn lltm_reference(inputs: &[Tensor]) -> [Tensor; 2] {
    let [input, weights, bias, h, c] = inputs else { panic!("five inputs") };
    let gates = bias.addmm(&Tensor::cat(&[h, input], 1), &weights.transpose(0, 1)).chunk(3, 1);
    let cell = c + gates[2].elu() * gates[0].sigmoid();
    [cell.tanh() * gates[1].sigmoid(), cell]
}

/// The input, the weights, the bias, h and c.
pub fn lltm_inputs(device: Device) -> [Tensor; 5] {
    let sizes: [&[i64]; 5] = [&[3, 4], &[15, 9], &[1, 15], &[3, 5], &[3, 5]];
    sizes.map(|size| Tensor::randn(size, DOUBLE).to_device(device).set_requires_grad(true))
}

/// Compares the extension's two functions with the reference and its gradients.
pub fn check_lltm(module: &Module, device: Device) {
    let inputs = lltm_inputs(device);
    let detached: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
    let all = tensors(module, "forward", &detached.iter().collect::<Vec<_>>()).unwrap();
    assert_eq!(all.len(), 7);
    let reference = lltm_reference(&inputs);
    for (own, expected) in all.iter().zip(&reference) {
        assert_equal(own, &expected.detach());
    }

    let grads = [Tensor::randn([3, 5], DOUBLE), Tensor::randn([3, 5], DOUBLE)]
        .map(|grad| grad.to_device(device));
    let arguments: Vec<&Tensor> = grads.iter().chain(&all[1..]).chain([&detached[1]]).collect();
    let own = tensors(module, "backward", &arguments).unwrap();
    let [h, c] = &reference;
    let loss = (h * &grads[0] + c * &grads[1]).sum(Kind::Double);
    // The gradients in the order in which the extension returns them.
    let [input, weights, bias, old_h, old_cell] = &inputs;
    let expected =
        Tensor::run_backward(&[loss], &[old_h, input, weights, bias, old_cell], false, false);
    assert_eq!(own.len(), expected.len());
    for (own, expected) in own.iter().zip(&expected) {
        assert_equal(own, expected);
    }
}

#[test]
fn lltm() {
    let module = extension("lltm_cpp").source(python_source("lltm.cpp")).load().unwrap();
    check_lltm(&module, Device::Cpu);
    let inputs = lltm_inputs(Device::Cpu);
    gradcheck(
        |inputs| {
            let mut all = tensors(&module, "forward", &inputs.iter().collect::<Vec<_>>())?;
            all.truncate(2);
            Ok(all)
        },
        &inputs.each_ref(),
        &GradcheckOptions::default(),
    )
    .unwrap();
}
