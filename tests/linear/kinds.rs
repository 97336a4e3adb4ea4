//! Tests of the kinds that can be combined, with and without autocast, compared with libtorch at
//! run time.

use super::*;
use support::kinds::gradients_keep_their_kind_inside_a_region;
use tch_extension::amp::Autocast;

/// Calls `test` with every combination of kinds for (input, weight, bias), and with the kind of our
/// result and of libtorch's; `None` means refused.
fn for_each_combination(
    device: Device,
    mut test: impl FnMut([Kind; 3], Option<Kind>, Option<Kind>),
) {
    let kinds = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16, Kind::Int64];
    let sizes: [&[i64]; 3] = [&[2, 3], &[4, 3], &[4]];
    for input in kinds {
        for weight in kinds {
            for bias in kinds {
                let of = [input, weight, bias];
                let arguments: Vec<Tensor> = of
                    .iter()
                    .zip(sizes)
                    .map(|(&kind, size)| Tensor::ones(size, (kind, device)))
                    .collect();
                let kind = |linear| call(linear, &arguments).ok().map(|outputs| outputs[0].kind());
                test(of, kind(f_linear), kind(linear_reference));
            }
        }
    }
}

#[test]
fn mixed_kinds_are_taken_and_refused_as_libtorch_does() {
    for device in devices() {
        let mut taken = 0;
        for_each_combination(device, |kinds, found, expected| {
            // Integers have no gradients. They are refused, as the docs say.
            let expected = if kinds == [Kind::Int64; 3] { None } else { expected };
            assert_eq!(found, expected, "{kinds:?} on {device:?}");
            taken += usize::from(found.is_some());
        });
        assert_eq!(taken, 4);
    }
}

#[test]
fn under_autocast_kinds_are_as_libtorch_has_them() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let mut taken = 0;
            for_each_combination(device, |kinds, found, expected| {
                let expected = if kinds == [Kind::Int64; 3] { None } else { expected };
                assert_eq!(found, expected, "{kinds:?} on {device:?} under {kind:?}");
                taken += usize::from(found.is_some());
            });
            // Any combination of the three kinds that are cast, and all in Double.
            assert_eq!(taken, 28);
        }
    }
}

#[test]
fn under_autocast_values_and_gradients_are_libtorchs() {
    for device in devices() {
        let inputs = one([33, 20, 40], Kind::Float, device).inputs;
        for within in [false, true] {
            let [found, expected] = [f_linear, linear_reference].map(|linear: Linear| {
                let leaves = leaves(&inputs);
                let autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
                let output = call(linear, &leaves).expect("output").remove(0);
                let autocast = Some(autocast).filter(|_| within);
                let vector = support::incoming(&output);
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                let gradients = grad(&[&output], &inputs, &options).expect("gradients").into_vec();
                drop(autocast);
                [Some(output.detach())].into_iter().chain(gradients).flatten().collect::<Vec<_>>()
            });
            assert_eq!(found.len(), 4);
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 1.6e-2, 1e-2);
            }
            assert_eq!((found[0].kind(), found[1].kind()), (Kind::BFloat16, Kind::Float));
        }
    }
}

/// The forward runs outside a region and the backward inside. libtorch then casts the products of
/// the backward.
#[test]
fn a_backward_inside_a_region_gives_gradients_of_the_inputs_kind() {
    for device in devices() {
        let inputs = one([33, 20, 40], Kind::Float, device).inputs;
        gradients_keep_their_kind_inside_a_region(&inputs, &|inputs| call(f_linear, inputs));
    }
}
