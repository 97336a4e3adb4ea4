//! Tests of mixed kinds and autocast, compared with the composite.

use super::*;
use tch_extension::amp::Autocast;

fn agrees_with_the_composite(device: Device, kinds: &[Kind], rough: bool) -> usize {
    let operators: [support::Operator<'_>; 2] = [&fused, &reference];
    let inputs = |kind| one([3, 3, 4, 5], kind, device).inputs;
    support::kinds::agree_with_the_composite(operators, &inputs, kinds, rough)
}

#[test]
fn mixed_kinds_match_the_composite() {
    for device in devices() {
        // h and x have the same kind or are promoted to the weight's kind. The bias has that kind,
        // and c has that kind or a narrower one. For the 7 pairs that give Double, c may have any
        // of 4 kinds; for the 7 that give Float, 3; Half and BFloat16 only go with themselves.
        assert_eq!(agrees_with_the_composite(device, &KINDS, false), 7 * 4 + 7 * 3 + 2);
    }
}

#[test]
fn under_autocast_kinds_match_the_composite() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let taken = agrees_with_the_composite(device, &[Kind::Float, Kind::Double, kind], true);
            // Either there is no Double in the product and none in c, or h or x is Double and then
            // weight and bias are, too, with any c.
            assert_eq!(taken, 2 * 16 + 3 * 5, "{device:?}");
        }
    }
}
