//! Tests that need a GPU.

use super::*;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    for (index, name) in ["rhs", "bias"].iter().enumerate() {
        let mut arguments = sample(SMALL[0], [Layout::Contiguous; 3], Kind::Float, device).inputs;
        arguments[index + 1] = arguments[index + 1].to_device(Device::Cpu);
        let error = fused(&arguments).expect_err("mixed devices").to_string();
        assert!(
            error.starts_with(&format!(
                "matmul_add_relu: {name}: expected device Cuda(0), as lhs, got Cpu"
            )),
            "{error}"
        );
    }
}

#[test]
fn cuda_agrees_with_the_cpu() {
    suite().cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu");
}

/// Some offsets exceed 32 bits. The last elements must be computed, and only in their own places.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let Some(device) = cuda_or_skip("cuda_more_than_two_to_the_31_elements") else { return };
    for columns in [1024_i64, 1025] {
        let rows = (1_i64 << 21) + 3;
        let options = (Kind::Half, device);
        let lhs = Tensor::ones([rows, 1], options);
        let _ = lhs.get(rows - 1).fill_(3.0);
        let rhs = Tensor::ones([1, columns], options);
        let bias = Tensor::full([columns], -2.0, options).set_requires_grad(true);
        let output = f_matmul_add_relu(&lhs, &rhs, &bias).expect("output");
        let positive = output.detach().gt(0.0).sum(Kind::Int64).int64_value(&[]);
        assert_eq!(positive, columns, "only the last row is");
        assert_eq!(output.get(rows - 1).get(columns - 1).double_value(&[]), 1.0);
        let vector = Tensor::full([rows, columns], 5.0, options);
        let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
        let gradient =
            grad(&[&output], &[&bias], &options).expect("gradient").single().expect("one");
        assert!(gradient.equal(&Tensor::full([columns], 5.0, (Kind::Half, device))));
    }
}
