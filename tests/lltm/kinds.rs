//! Mixed kinds and autocast, as the composite has them.

use super::*;
use tch_extension::amp::Autocast;

/// Every combination of the floating kinds: what the composite takes is taken, with its kinds of outputs and
/// gradients; what it refuses is refused.
fn agrees_with_the_composite(device: Device, kinds: &[Kind], rough: bool) -> usize {
    let samples: Vec<Vec<Tensor>> =
        kinds.iter().map(|&kind| one([3, 3, 4, 5], kind, device).inputs).collect();
    let count = kinds.len();
    let mut taken = 0;
    for combination in 0..count.pow(5) {
        let choice: [usize; 5] = std::array::from_fn(|place| combination / count.pow(place as u32) % count);
        let arguments: Vec<Tensor> =
            (0..5).map(|place| samples[choice[place]][place].detach().set_requires_grad(true)).collect();
        let (found, expected) = (call(f_lltm, &arguments), call(lltm_reference, &arguments));
        let names = choice.map(|index| kinds[index]);
        let (Ok(found), Ok(expected)) = (&found, &expected) else {
            assert_eq!(found.is_ok(), expected.is_ok(), "{names:?}: {found:?} {expected:?}");
            continue;
        };
        taken += 1;
        // The smallest kind that takes part decides.
        let bound = if rough || names.iter().any(|&kind| support::is_half(kind)) { 3e-2 } else { 1e-5 };
        for (found, expected) in found.iter().zip(expected) {
            assert_eq!(found.kind(), expected.kind(), "{names:?}");
            assert_close(&found.detach(), &expected.detach(), bound, bound);
        }
        let inputs: Vec<&Tensor> = arguments.iter().collect();
        let of = |outputs: &[Tensor]| {
            let loss = outputs[0].sum(Kind::Double) + outputs[1].sum(Kind::Double);
            grad(&[&loss], &inputs, &GradOptions::default()).expect("gradients").into_vec()
        };
        for (found, expected) in of(found).iter().flatten().zip(of(expected).iter().flatten()) {
            assert_close(found, expected, bound, 4.0 * bound);
        }
    }
    taken
}

#[test]
fn mixed_kinds_are_the_composite_s() {
    for device in devices() {
        // h and x alike or promoted to the weight's kind, the bias of that kind, c of that or a narrower one: of 7 pairs
        // that give Double, c may be any; of 7 that give Float, 3; Half and BFloat16 are by themselves.
        assert_eq!(agrees_with_the_composite(device, &KINDS, false), 7 * 4 + 7 * 3 + 2);
    }
}

#[test]
fn under_autocast_kinds_are_the_composite_s() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let taken = agrees_with_the_composite(device, &[Kind::Float, Kind::Double, kind], true);
            // No Double in the product, and none in c; or one in h or x, and then in weight and bias, too, with any c.
            assert_eq!(taken, 2 * 16 + 3 * 5, "{device:?}");
        }
    }
}
