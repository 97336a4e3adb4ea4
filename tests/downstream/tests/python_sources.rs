//! Tests of sources that were written for Python and are compiled unchanged into the program. Each
//! `m.def` is an operator.

use downstream as _;
use std::sync::Mutex;
use tch::{Device, Kind, Tensor};
use tch_extension::args;
use tch_extension::library::Operator;
use tch_extension::testing::{GradcheckOptions, assert_close, gradcheck};

fn leaf(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Double, Device::Cpu)).set_requires_grad(true)
}

#[test]
fn linear() {
    let forward = Operator::find("linear_cpp::forward").unwrap();
    let (input, weight, bias) = (leaf(&[4, 3]), leaf(&[2, 3]), leaf(&[2]));
    gradcheck(
        |inputs| forward.call::<Tensor>(args![&inputs[0], &inputs[1], &inputs[2]]),
        &[&input, &weight, &bias],
        &GradcheckOptions::default(),
    )
    .unwrap();
}

#[test]
fn layer_norm() {
    let forward = Operator::find("layer_norm_cpp::forward").unwrap();
    let [input, weight, bias] = [leaf(&[5, 7]), leaf(&[7]), leaf(&[7])].map(|leaf| leaf.detach());
    let (output, ..): (Tensor, Tensor, Tensor) =
        forward.call(args![&input, &weight, &bias]).unwrap();
    assert_close(
        &output,
        &input.layer_norm([7], Some(&weight), Some(&bias), 1e-5, false),
        1e-9,
        1e-11,
    );
}

#[cfg(tch_extension_cuda)]
#[test]
fn cuda_lltm() {
    let forward = Operator::find("lltm_cuda::forward").unwrap();
    let sizes: [&[i64]; 5] = [&[3, 4], &[15, 9], &[1, 15], &[3, 5], &[3, 5]];
    let inputs = sizes.map(|size| leaf(size).detach());
    let call = |[input, weights, bias, h, c]: &[Tensor; 5]| {
        forward.call::<Vec<Tensor>>(args![input, weights, bias, h, c])
    };
    let refused = call(&inputs).expect_err("refused").to_string();
    assert!(refused.contains("input must be a CUDA tensor"), "{refused}");
    let Some(device) = tch_extension::testing::cuda_or_skip("cuda_lltm") else { return };
    let inputs = inputs.map(|input| input.to_device(device));
    let [input, weights, bias, h, c] = &inputs;
    let gates = bias.addmm(&Tensor::cat(&[h, input], 1), &weights.transpose(0, 1)).chunk(3, 1);
    let cell = c + gates[2].elu() * gates[0].sigmoid();
    let all = call(&inputs).unwrap();
    assert_close(&all[0], &(cell.tanh() * gates[1].sigmoid()), 1e-9, 1e-11);
    assert_close(&all[1], &cell, 1e-9, 1e-11);
}

/// Serialises the tests that use the extensions below, because these count calls in the whole
/// process.
static COUNTED: Mutex<()> = Mutex::new(());

/// Two extensions use the same names: `PyInit__C`, functions, inline functions, templates, classes,
/// variables and kernels.
#[test]
fn extensions_with_the_same_names_call_their_own() {
    let _alone = COUNTED.lock().unwrap();
    for (name, factor) in [("double", 2), ("triple", 3)] {
        let find =
            |operator: &str| Operator::find(&format!("tch_test_{name}::{operator}")).unwrap();
        let scale = |x: &Tensor| find("scale").call::<Tensor>(args![x]);
        let count = || find("count").call::<i64>(args![]).unwrap();
        let before = count();
        let x = Tensor::from_slice(&[1.0, -2.0]);
        assert_eq!(scale(&x).unwrap(), &x * factor);
        let refused = scale(&x.slice(0, 0, 0, 1)).expect_err("refused").to_string();
        assert!(refused.contains(&format!("refused by {name}")), "{refused}");
        assert_eq!(count() - before, 202, "two calls, by either count");
    }
}

#[cfg(tch_extension_cuda)]
#[test]
fn cuda_extensions_with_the_same_names_launch_their_own_kernels() {
    let name = "cuda_extensions_with_the_same_names_launch_their_own_kernels";
    let Some(device) = tch_extension::testing::cuda_or_skip(name) else { return };
    let _alone = COUNTED.lock().unwrap();
    let x = Tensor::from_slice(&[1.0, -2.0]).to_device(device);
    for (name, factor) in [("double", 2), ("triple", 3)] {
        let scale = Operator::find(&format!("tch_test_{name}::scale")).unwrap();
        assert_eq!(scale.call::<Tensor>(args![&x]).unwrap(), &x * factor);
    }
}
