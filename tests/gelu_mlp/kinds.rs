//! Tests of mixed kinds and of autocast, compared with libtorch at run time.

use super::*;
use support::kinds::gradients_keep_their_kind_inside_a_region;
use tch_extension::amp::Autocast;

const SIZES: [&[i64]; 5] = [&[2, 3], &[4, 3], &[4], &[5, 4], &[5]];

/// Calls both with every combination of these kinds, and returns how many are taken.
fn count_taken(kinds: &[Kind], device: Device) -> usize {
    let case = cases()[0];
    let mut taken = 0;
    for combination in 0..kinds.len().pow(5) {
        let of = |place: usize| kinds[combination / kinds.len().pow(place as u32) % kinds.len()];
        let arguments: Vec<Tensor> =
            (0..5).map(|place| Tensor::ones(SIZES[place], (of(place), device))).collect();
        let kind = |op| case.call(op, &arguments).ok().map(|output| output.kind());
        let (found, expected) = (kind(f_gelu_mlp), kind(gelu_mlp_reference));
        let names: Vec<Kind> = (0..5).map(of).collect();
        assert_eq!(found, expected, "{names:?} on {device:?}");
        taken += usize::from(found.is_some());
    }
    taken
}

#[test]
fn mixed_kinds_are_taken_and_refused_as_libtorch_does() {
    for device in devices() {
        assert_eq!(count_taken(&KINDS, device), 4);
    }
}

#[test]
fn under_autocast_kinds_are_as_libtorch_has_them() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            // Any combination of the three kinds that are cast, and all in Double.
            assert_eq!(count_taken(&KINDS, device), 3_usize.pow(5) + 1);
        }
    }
}

#[test]
fn under_autocast_values_and_gradients_are_libtorchs() {
    for device in devices() {
        for case in cases() {
            let inputs = case.samples(&[[33, 20, 40, 24]], Kind::Float, device).remove(0).inputs;
            for within in [false, true] {
                let [found, expected] = [f_gelu_mlp, gelu_mlp_reference].map(|op: Op| {
                    let leaves = leaves(&inputs);
                    let autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
                    let output = case.call(op, &leaves).expect("output");
                    let autocast = Some(autocast).filter(|_| within);
                    let vector = support::incoming(&output);
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                    let leaves: Vec<&Tensor> = leaves.iter().collect();
                    let gradients = grad(&[&output], &leaves, &options).expect("gradients");
                    drop(autocast);
                    let gradients = gradients.into_vec().into_iter().flatten();
                    std::iter::once(output.detach()).chain(gradients).collect::<Vec<_>>()
                });
                assert_eq!(found.len(), inputs.len() + 1);
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found.kind(), expected.kind());
                    let largest = expected.abs().max().double_value(&[]);
                    assert_close(found, expected, 1.6e-2, 1e-2 * largest.max(1.0));
                }
                assert_eq!((found[0].kind(), found[1].kind()), (Kind::BFloat16, Kind::Float));
            }
        }
    }
}

#[test]
fn a_backward_inside_a_region_gives_gradients_of_the_inputs_kind() {
    for device in devices() {
        for case in cases() {
            let inputs = case.samples(&[[33, 20, 40, 24]], Kind::Float, device).remove(0).inputs;
            gradients_keep_their_kind_inside_a_region(&inputs, &|inputs| {
                case.call(f_gelu_mlp, inputs).map(|output| vec![output])
            });
        }
    }
}
