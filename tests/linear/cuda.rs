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

/// Rows of an odd length are folded if the matrix is contiguous and aligned, with and without rows
/// left over. Other matrices are read value by value.
#[test]
fn cuda_half_kinds_and_others_sum_long_matrices_of_odd_rows() {
    let test = "cuda_half_kinds_and_others_sum_long_matrices_of_odd_rows";
    let Some(device) = cuda_or_skip(test) else { return };
    for (rows, columns) in
        [(70_003, 31), (4099, 513), (2_100_005, 1), (1031, 2670), (8195, 1028), (65_536, 127)]
    {
        for kind in [Kind::Half, Kind::BFloat16, Kind::Float, Kind::Double] {
            // Small whole numbers: every sum is exact in f32, and in a half kind up to 256.
            let values = Tensor::arange(rows * columns + 1, (Kind::Int64, device))
                .f_remainder(7)
                .expect("numbers");
            let values = (values - 3).to_kind(kind);
            let whole = values.narrow(0, 0, rows * columns).view([rows, columns]);
            let elsewhere = values.narrow(0, 1, rows * columns).view([rows, columns]);
            let with_gaps = whole.narrow(1, 0, (columns - 1).max(1));
            for (what, vector) in
                [("aligned", &whole), ("elsewhere", &elsewhere), ("with gaps", &with_gaps)]
            {
                let (m, n) = vector.size2().expect("a matrix");
                let x = Tensor::zeros([m, 1], (kind, device));
                let w = Tensor::zeros([n, 1], (kind, device));
                let bias = Tensor::zeros([n], (kind, device)).set_requires_grad(true);
                let y = f_linear(&x, &w, Some(&bias)).expect("output");
                let options = GradOptions { grad_outputs: &[Some(vector)], ..Default::default() };
                let gradient =
                    grad(&[&y], &[&bias], &options).expect("gradient").single().expect("one");
                let exact = vector.to_kind(Kind::Double).sum_dim_intlist(
                    [0_i64].as_slice(),
                    false,
                    Kind::Double,
                );
                assert!(gradient.equal(&exact.to_kind(kind)), "{rows} {columns} {kind:?} {what}");
            }
        }
    }
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
