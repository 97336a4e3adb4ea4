//! Tests of mixed kinds and autocast, compared with the composite.

use super::persistent::everything;
use super::*;
use tch_extension::amp::Autocast;
use tch_extension::testing::cuda_or_skip;

fn agrees_with_the_composite(device: Device, kinds: &[Kind], rough: bool) -> usize {
    let operators: [support::Operator<'_>; 2] = [&fused, &reference];
    let inputs = |kind| one([3, 3, 4, 5], kind, device).inputs;
    support::kinds::agree_with_the_composite(operators, &inputs, kinds, rough)
}

#[test]
fn mixed_kinds_match_the_composite() {
    for device in devices() {
        // h and x have the same kind or are promoted to the weight's kind, which the bias has, too.
        // There are 16 pairs of them, and c may have any of 4 kinds.
        assert_eq!(agrees_with_the_composite(device, &KINDS, false), 16 * 4);
    }
}

#[test]
fn under_autocast_kinds_match_the_composite() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let taken = agrees_with_the_composite(device, &[Kind::Float, Kind::Double, kind], true);
            // Either there is no Double in the product, or h or x is Double and then weight and bias
            // are, too; with any c.
            assert_eq!(taken, 3 * 16 + 3 * 5, "{device:?}");
        }
    }
}

/// The root mean square and the largest of the differences, over the largest value.
fn error(found: &Tensor, exact: &Tensor) -> [f64; 2] {
    let difference = found.to_kind(Kind::Double) - exact;
    let largest = exact.abs().max().double_value(&[]);
    let of = |tensor: Tensor| tensor.double_value(&[]) / largest;
    [of(difference.square().mean(Kind::Double).sqrt()), of(difference.abs().max())]
}

/// Over many steps the rounding errors of a half kind grow, to a tenth of the largest value and more. So
/// a difference from the composite proves nothing: each way is compared with the exact values, from which
/// it may be no further than the composite in the same region, except for chance.
#[test]
fn cuda_under_autocast_long_sequences_are_as_exact_as_the_composite() {
    let name = "cuda_under_autocast_long_sequences_are_as_exact_as_the_composite";
    let Some(device) = cuda_or_skip(name) else { return };
    const WAYS: [RnnWay; 5] =
        [RnnWay::Automatic, RnnWay::Step, RnnWay::Cluster, RnnWay::Grid, RnnWay::WideGrid];
    for sizes in
        [[64, 64, 512, 512], [128, 33, 200, 1024], [200, 16, 128, 256], [40, 256, 64, 2048]]
    {
        let inputs = one(sizes, Kind::Float, device).inputs;
        let exact: Vec<Tensor> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        let exact = everything(&reference, &exact);
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let composite = everything(&reference, &inputs);
            for way in WAYS {
                let forced = |inputs: &[Tensor]| force(way, || fused(inputs));
                let found = everything(&forced, &inputs);
                let again = everything(&forced, &inputs);
                for (index, (found, again)) in found.iter().zip(&again).enumerate() {
                    let what = format!("{sizes:?} {kind:?} {way:?} {index}");
                    assert!(found.equal(again), "{what}: other bits in the second run");
                    let [ours, largest] = error(found, &exact[index]);
                    let [theirs, their_largest] = error(&composite[index], &exact[index]);
                    let [apart, most_apart] = error(found, &composite[index].to_kind(Kind::Double));
                    eprintln!(
                        "{what}: rms (largest) error {ours:.5} ({largest:.5}), the composite's {theirs:.5} \
                         ({their_largest:.5}), apart {apart:.5} ({most_apart:.5})"
                    );
                    assert!(ours <= 1.5 * theirs, "{what}: {ours} and {theirs}");
                    assert!(apart <= 1.5 * (ours + theirs), "{what}: {apart}");
                }
            }
        }
    }
}
