//! Tests that need a GPU.

use super::*;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    for (index, name) in ["weight", "bias"].iter().enumerate() {
        let mut arguments = one([2, 4, 3], Kind::Float, device).inputs;
        arguments[index + 1] = arguments[index + 1].to_device(Device::Cpu);
        let error = fused(&arguments).expect_err("mixed devices").to_string();
        assert!(
            error.starts_with(&format!(
                "linear: {name}: expected device Cuda(0), as input, got Cpu"
            )),
            "{error}"
        );
    }
}

#[test]
fn cuda_agrees_with_the_cpu() {
    suite().cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu");
}

/// Some offsets exceed 32 bits. The last rows must be added, and only to their own columns.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let Some(device) = cuda_or_skip("cuda_more_than_two_to_the_31_elements") else { return };
    let (rows, columns) = ((1_i64 << 21) + 3, 1025_i64);
    let options = (Kind::Half, device);
    let bias = Tensor::zeros([columns], options).set_requires_grad(true);
    let (x, w) = (Tensor::zeros([rows, 1], options), Tensor::zeros([columns, 1], options));
    let output = f_linear(&x, &w, Some(&bias)).expect("output");
    let vector = Tensor::zeros([rows, columns], options);
    let _ = vector.get(rows - 1).fill_(2.0);
    let _ = vector.get(rows - 2).get(columns - 1).fill_(3.0);
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let gradient = grad(&[&output], &[&bias], &options).expect("gradient").single().expect("one");
    let expected = Tensor::full([columns], 2.0, (Kind::Half, device));
    let _ = expected.get(columns - 1).fill_(5.0);
    assert!(gradient.equal(&expected));
}
