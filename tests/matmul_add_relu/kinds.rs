//! Tests of the kinds that can be combined, with and without autocast, compared with libtorch at
//! run time.

use super::*;
use support::kinds::gradients_keep_their_kind_inside_a_region;
use tch_extension::amp::Autocast;

const ALL: [Kind; 11] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Int64,
    Kind::Int,
    Kind::Int16,
    Kind::Int8,
    Kind::Uint8,
    Kind::Bool,
    Kind::ComplexFloat,
];

/// Compares every combination of kinds, for tensors with and without dimensions, and returns how
/// many are accepted.
fn compare_with_the_composite(device: Device) -> usize {
    let mut taken = 0;
    let shapes: [Pattern; 4] =
        [(&[2, 3], &[3, 4], &[4]), (&[2, 3], &[3, 4], &[]), (&[3], &[3], &[4]), (&[3], &[3], &[])];
    for (lhs, rhs, bias) in shapes {
        for lhs_kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64] {
            for rhs_kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64] {
                for bias_kind in ALL {
                    let of = [(lhs, lhs_kind), (rhs, rhs_kind), (bias, bias_kind)];
                    let inputs = of.map(|(size, kind)| Tensor::ones(size, (kind, device)));
                    let [found, expected] = OPERATORS.map(|operator| call(operator, &inputs).ok());
                    // Products of integers have no gradients. They are refused, as the docs say.
                    let expected = expected.filter(|_| lhs_kind != Kind::Int64);
                    assert_eq!(
                        found.as_ref().map(Tensor::kind),
                        expected.as_ref().map(Tensor::kind),
                        "{of:?} on {device:?}"
                    );
                    if let (Some(found), Some(expected)) = (found, expected) {
                        assert_close(&found, &expected, 0.0, 0.0);
                        taken += 1;
                    }
                }
            }
        }
    }
    taken
}

#[test]
fn mixed_kinds_are_taken_and_refused_as_libtorch_does() {
    for device in devices() {
        // Four shapes, four kinds of product, ten kinds of bias.
        assert_eq!(compare_with_the_composite(device), 4 * 4 * 10);
    }
}

#[test]
fn under_autocast_kinds_are_as_libtorch_has_them() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            // Any combination of the three kinds that are cast, and all in Double.
            assert_eq!(compare_with_the_composite(device), 4 * 10 * 10, "{kind:?} on {device:?}");
        }
    }
}

#[test]
fn gradients_have_the_inputs_kinds() {
    let patterns: [Pattern; 6] = [
        (&[3, 4], &[4, 5], &[5]),
        (&[3, 4], &[4, 5], &[3, 5]),
        (&[3, 4], &[4, 5], &[3, 1]),
        (&[3, 4], &[4, 5], &[2, 3, 5]),
        (&[3, 4], &[4, 5], &[]),
        (&[4], &[4], &[3]),
    ];
    for device in devices() {
        for pattern in patterns {
            for kind in KINDS {
                for bias_kind in KINDS {
                    let mut inputs = sample(pattern, [Layout::Contiguous; 3], kind, device).inputs;
                    inputs[2] = inputs[2].to_kind(bias_kind);
                    let inputs = leaves(&inputs);
                    let [found, expected] =
                        OPERATORS.map(|operator| results(operator, &inputs, support::incoming));
                    for (found, expected) in found.iter().zip(&expected) {
                        let bound = if support::is_half(kind) || support::is_half(bias_kind) {
                            3e-2
                        } else {
                            1e-5
                        };
                        assert_close(found, expected, bound, bound);
                    }
                }
            }
        }
    }
}

/// A sum over dimensions that only the bias has is computed in the result's kind, because its terms
/// may exceed the range of the product's kind.
#[test]
fn gradients_are_summed_before_they_are_narrowed() {
    for device in devices() {
        let factor = || Tensor::ones([1, 1], (Kind::Half, device));
        let inputs = leaves(&[factor(), factor(), Tensor::ones([2, 1, 1], (Kind::Float, device))]);
        let vector = Tensor::from_slice(&[1e5_f32, -99_000.0]).view([2, 1, 1]).to_device(device);
        for operator in OPERATORS {
            let found = results(operator, &inputs, |_| vector.shallow_clone());
            for gradient in &found[1..3] {
                assert_eq!(gradient.double_value(&[0, 0]), 1000.0);
            }
        }
    }
}

#[test]
fn under_autocast_values_and_gradients_are_libtorchs() {
    for device in devices() {
        let inputs =
            sample((&[33, 20], &[20, 40], &[40]), [Layout::Contiguous; 3], Kind::Float, device)
                .inputs;
        for within in [false, true] {
            let [found, expected] = OPERATORS.map(|operator: Operator| {
                let leaves = leaves(&inputs);
                let autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
                let output = call(operator, &leaves).expect("output");
                let autocast = Some(autocast).filter(|_| within);
                let vector = support::incoming(&output);
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                let gradients = grad(&[&output], &inputs, &options).expect("gradients").into_vec();
                drop(autocast);
                [Some(output.detach())].into_iter().chain(gradients).flatten().collect::<Vec<_>>()
            });
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.kind(), Kind::Float);
                assert_close(found, expected, 1.6e-2, 1e-2);
            }
            let exact = call(f_matmul_add_relu, &inputs).expect("output");
            assert!(!found[0].equal(&exact), "the product ran in half precision");
        }
    }
}

#[test]
fn a_backward_inside_a_region_gives_gradients_of_the_inputs_kind() {
    for device in devices() {
        for sample in samples(LARGE, Kind::Float, device) {
            gradients_keep_their_kind_inside_a_region(&sample.inputs, &|inputs| {
                Ok(vec![call(f_matmul_add_relu, inputs)?])
            });
        }
    }
}
