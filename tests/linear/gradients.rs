//! Tests of the gradients.

use super::*;
use tch_extension::testing::{assert_as_accurate, gradcheck};

#[test]
fn gradients_agree_with_the_reference() {
    suite().gradients_agree_with_the_reference();
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    suite().with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn results_can_be_changed_in_place() {
    suite().results_can_be_changed_in_place();
}

#[test]
fn gradcheck_of_every_small_sample() {
    suite().gradcheck_of_every_small_sample();
}

/// Sizes with several slabs of rows: on the CPU, on CUDA with whole vectors, and on CUDA without.
#[test]
fn gradcheck_of_every_way_to_sum() {
    for device in devices() {
        for sizes in [[1030, 1, 2], [257, 1, 34], [257, 1, 33]] {
            let leaves = leaves(&one(sizes, Kind::Double, device).inputs);
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            gradcheck(fused, &inputs, &Default::default())
                .unwrap_or_else(|error| panic!("{sizes:?} on {device:?}: {error}"));
        }
    }
}

/// The gradient of the bias alone, which this crate's own kernel computes.
fn bias_gradient(linear: Linear, sizes: [i64; 3], vector: &Tensor) -> Tensor {
    let inputs = one(sizes, vector.kind(), vector.device()).inputs;
    let bias = inputs[2].detach().set_requires_grad(true);
    let output = linear(&inputs[0], &inputs[1], Some(&bias)).expect("output");
    let options = GradOptions { grad_outputs: &[Some(vector)], ..Default::default() };
    grad(&[&output], &[&bias], &options).expect("gradient").single().expect("one")
}

#[test]
fn every_row_and_column_counts_once() {
    // The numbers are integers whose sums are exact in every kind here, and the wrong sum shows
    // which row or column is missing.
    for device in devices() {
        for kind in [Kind::Double, Kind::Float] {
            for rows in [0, 1, 2, 31, 32, 33, 255, 256, 1024, 1025, 2049] {
                for columns in [1, 2, 3, 4, 8, 15, 31, 63, 64, 65, 127, 129, 130] {
                    let numbers =
                        Tensor::arange(rows * columns, (Kind::Int64, device)).remainder(11) + 1;
                    let vector = numbers.view([rows, columns]).to_kind(kind);
                    let found = bias_gradient(f_linear, [rows, 1, columns], &vector);
                    let expected = numbers.view([rows, columns]).sum_dim_intlist(
                        [0_i64].as_slice(),
                        false,
                        Kind::Int64,
                    );
                    assert!(
                        found.equal(&expected.to_kind(kind)),
                        "{rows} × {columns} {kind:?} {device:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_in_every_layout() {
    for device in devices() {
        for kind in [Kind::Double, Kind::Float] {
            let options = (kind, device);
            let vectors = [
                Tensor::randn([70, 40], options).slice(1, 3, 37, 1),
                Tensor::randn([70, 80], options).slice(1, 0, 68, 2),
                Tensor::randn([34, 70], options).transpose(0, 1),
                Tensor::randn([140, 34], options).slice(0, 1, 140, 2),
                Tensor::randn([1, 34], options).expand([70, 34], false),
                Tensor::randn([70, 1], options).expand([70, 34], false),
                Tensor::randn([], options).expand([70, 34], false),
                Tensor::randn([70, 34], options).internal_neg_view(),
                Tensor::internal_efficientzerotensor([70, 34], options),
                Tensor::randn([70 * 34 + 1], options).slice(0, 1, None, 1).view([70, 34]),
            ];
            for (index, vector) in vectors.iter().enumerate() {
                let (found, expected) = (
                    bias_gradient(f_linear, [70, 3, 34], vector),
                    bias_gradient(linear_reference, [70, 3, 34], vector),
                );
                let bound = if kind == Kind::Double { 1e-13 } else { 1e-5 };
                assert!(
                    found.allclose(&expected, bound, bound, false),
                    "layout {index} {kind:?} {device:?}"
                );
            }
        }
    }
}

#[test]
fn long_sums_are_as_accurate_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            for sizes in [[20_000, 1, 70], [100_000, 1, 3]] {
                let numbers =
                    Tensor::arange(sizes[0] * sizes[2], (Kind::Double, device)).sin() + 0.1;
                let vector = numbers.view([sizes[0], sizes[2]]).to_kind(kind) * 0.1;
                let exact =
                    vector.to_kind(Kind::Double).sum_dim_intlist([0_i64].as_slice(), false, None);
                let found = bias_gradient(f_linear, sizes, &vector);
                assert_as_accurate(
                    &found,
                    &bias_gradient(linear_reference, sizes, &vector),
                    &exact,
                );
            }
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_stays_in_its_column() {
    for device in devices() {
        for kind in KINDS {
            for place in [0, 1, 64, 69] {
                let vector = Tensor::ones([3, 70], (kind, device));
                let _ = vector.get(2).get(place).fill_(f64::NAN);
                let _ = vector.get(1).get(5).fill_(f64::INFINITY);
                let found = bias_gradient(f_linear, [3, 2, 70], &vector);
                let expected = Tensor::full([70], 3.0, (kind, device));
                let _ = expected.get(5).fill_(f64::INFINITY);
                let _ = expected.get(place).fill_(f64::NAN);
                assert_close(&found, &expected, 0.0, 0.0);
            }
        }
    }
}

/// A tensor that the backward does not need may be changed before it, as in libtorch; a tensor that
/// it needs may not.
#[test]
fn only_what_a_gradient_needs_is_kept() {
    for device in devices() {
        for (needs, changed, refused) in [
            (0, 0, false),
            (0, 1, true),
            (1, 1, false),
            (1, 0, true),
            (2, 0, false),
            (2, 1, false),
            (0, 2, false),
        ] {
            let inputs = one([3, 4, 5], Kind::Double, device).inputs;
            let inputs: Vec<Tensor> = inputs
                .iter()
                .enumerate()
                .map(|(index, input)| input.copy().set_requires_grad(index == needs))
                .collect();
            for linear in [f_linear, linear_reference] as [Linear; 2] {
                let output = call(linear, &inputs).expect("output").remove(0);
                tch::no_grad(|| drop(inputs[changed].shallow_clone().fill_(2.0)));
                let found =
                    grad(&[&output.sum(Kind::Double)], &[&inputs[needs]], &GradOptions::default());
                assert_eq!(found.is_err(), refused, "gradient of {needs}, changed {changed}");
            }
        }
    }
}
