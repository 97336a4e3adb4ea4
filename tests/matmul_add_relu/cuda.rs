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

/// Rows of an odd length are folded, with and without rows left over.
#[test]
fn cuda_half_kinds_and_others_mask_and_sum_long_matrices_of_odd_rows() {
    let test = "cuda_half_kinds_and_others_mask_and_sum_long_matrices_of_odd_rows";
    let Some(device) = cuda_or_skip(test) else { return };
    for (rows, columns) in
        [(70_003, 31), (4099, 513), (2_100_005, 1), (1031, 2670), (8195, 1028), (65_536, 127)]
    {
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
            // Small whole numbers: every sum is exact in f32.
            let numbers = |range: i64, least: i64, len: i64| {
                let numbers =
                    Tensor::arange(len, (Kind::Int64, device)).f_remainder(range).expect("numbers");
                (numbers + least).to_kind(kind)
            };
            let lhs = numbers(3, -1, rows).view([rows, 1]);
            // The last rows' outputs are positive, so that a tail that is left out shows.
            let _ = lhs.narrow(0, rows - 8, 8).fill_(1);
            let lhs = lhs.set_requires_grad(true);
            let rhs = numbers(5, 1, columns).view([1, columns]);
            let bias = numbers(4, 0, columns).set_requires_grad(true);
            let vector = numbers(7, -3, rows * columns).view([rows, columns]);
            let y = f_matmul_add_relu(&lhs, &rhs, &bias).expect("output");
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            let gradients = grad(&[&y], &[&lhs, &bias], &options).expect("gradients").into_vec();
            let masked = vector.to_kind(Kind::Double) * y.detach().gt(0.0).to_kind(Kind::Double);
            let exact =
                masked.sum_dim_intlist([0_i64].as_slice(), false, Kind::Double).to_kind(kind);
            let found = gradients[1].as_ref().expect("the bias' gradient");
            assert!(found.equal(&exact), "db, {rows} {columns} {kind:?}");
            // Shows every element of the masked gradient.
            let exact = masked.matmul(&rhs.to_kind(Kind::Double).transpose(0, 1));
            let found = gradients[0].as_ref().expect("the factor's gradient").to_kind(Kind::Double);
            let largest = exact.abs().max().double_value(&[]);
            let (rtol, atol) = tch_extension::testing::tolerance(kind);
            tch_extension::testing::assert_close(&found, &exact, 4.0 * rtol, atol + rtol * largest);
        }
    }
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
