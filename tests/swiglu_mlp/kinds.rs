//! Mixed kinds, and autocast.

use super::*;
use tch_extension::amp::Autocast;

/// Calls both with every combination of these kinds, and returns how many are taken.
fn count_taken(kinds: &[Kind], device: Device) -> usize {
    let sizes: [&[i64]; 4] = [&[2, 3], &[4, 3], &[4, 3], &[5, 4]];
    let mut taken = 0;
    for combination in 0..kinds.len().pow(4) {
        let of = |place: usize| kinds[combination / kinds.len().pow(place as u32) % kinds.len()];
        let arguments: Vec<Tensor> =
            (0..4).map(|place| Tensor::ones(sizes[place], (of(place), device))).collect();
        let kind = |op: Op<'_>| call(op, &arguments).ok().map(|output| output.kind());
        let names: Vec<Kind> = (0..4).map(of).collect();
        let found = kind(&fused(BOTH[0]));
        // libtorch multiplies silu(g) and u of different kinds.
        let is_mixed = names[2] != names[0];
        let expected = kind(&swiglu_mlp_reference).filter(|_| !is_mixed || found.is_some());
        assert_eq!(found, expected, "{names:?} on {device:?}");
        taken += usize::from(found.is_some());
    }
    taken
}

#[test]
fn kinds_with_and_without_autocast_are_as_libtorch_has_them() {
    for device in devices() {
        assert_eq!(count_taken(&KINDS, device), 4);
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            // Any combination of the three kinds that are cast, and all in Double.
            assert_eq!(count_taken(&KINDS, device), 3_usize.pow(4) + 1);
        }
    }
}

/// Under autocast in both passes, in the forward pass only, and in the backward pass only.
#[test]
fn under_autocast_values_and_gradients_are_libtorchs() {
    for device in devices() {
        let inputs = samples(&[[33, 20, 40, 24]], Kind::Float, device).remove(0).inputs;
        for (forward, backward, create_graph) in [
            (true, true, false),
            (true, false, false),
            (false, true, false),
            (true, true, true),
            (false, true, true),
        ] {
            let run = |op: Op<'_>, forward: bool, backward: bool| {
                let region = |within: bool| {
                    within.then(|| Autocast::new(device, Kind::BFloat16).expect("autocast"))
                };
                let leaves = leaves(&inputs);
                let autocast = region(forward);
                let y = call(op, &leaves).expect("y");
                drop(autocast);
                let _autocast = region(backward);
                let vector = support::incoming(&y);
                let vectors = [Some(&vector)];
                let options =
                    GradOptions { grad_outputs: &vectors, create_graph, ..Default::default() };
                let leaves: Vec<&Tensor> = leaves.iter().collect();
                let gradients = grad(&[&y], &leaves, &options).expect("gradients").into_vec();
                let gradients = gradients.into_iter().flatten().map(|gradient| gradient.detach());
                std::iter::once(y.detach()).chain(gradients).collect::<Vec<_>>()
            };
            let found = run(&fused(BOTH[0]), forward, backward);
            // Ours does not lose digits if only the backward pass runs in a region.
            let expected = run(&swiglu_mlp_reference, forward, forward && backward);
            assert_eq!(found.len(), 5);
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.abs().max().double_value(&[]).max(1.0);
                let bound = if forward { 1.6e-2 } else { 1e-5 };
                assert_close(found, expected, bound, bound * largest);
            }
        }
    }
}
