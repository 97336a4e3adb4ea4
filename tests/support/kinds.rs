//! Checks mixed kinds against the composite.

use super::{Operator, is_half, leaves};
use tch::{Kind, Tensor};
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::testing::assert_close;

/// Checks every combination of these kinds for an operator with five inputs. What the composite
/// accepts must be accepted, with the same kinds of outputs and gradients; what it refuses must be
/// refused. Returns how many combinations are accepted.
pub fn agree_with_the_composite(
    [fused, reference]: [Operator<'_>; 2],
    inputs: &dyn Fn(Kind) -> Vec<Tensor>,
    kinds: &[Kind],
    rough: bool,
) -> usize {
    let samples: Vec<Vec<Tensor>> = kinds.iter().map(|&kind| inputs(kind)).collect();
    let count = kinds.len();
    let mut taken = 0;
    for combination in 0..count.pow(5) {
        let choice: [usize; 5] =
            std::array::from_fn(|place| combination / count.pow(place as u32) % count);
        let arguments: Vec<Tensor> = (0..5)
            .map(|place| samples[choice[place]][place].detach().set_requires_grad(true))
            .collect();
        let (found, expected) = (fused(&arguments), reference(&arguments));
        let names = choice.map(|index| kinds[index]);
        let (Ok(found), Ok(expected)) = (&found, &expected) else {
            assert_eq!(found.is_ok(), expected.is_ok(), "{names:?}: {found:?} {expected:?}");
            continue;
        };
        taken += 1;
        // The least precise kind that takes part decides the tolerance.
        let bound = if rough || names.iter().any(|&kind| is_half(kind)) { 3e-2 } else { 1e-5 };
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

/// Runs the forward pass outside a region of autocast and the backward pass inside, with and without
/// `create_graph`. Its intermediate results must keep their kind, `Float`, as the gradients do.
pub fn gradients_keep_their_kind_inside_a_region(inputs: &[Tensor], fused: Operator<'_>) {
    let of = |within: bool, create_graph: bool| {
        let leaves = leaves(inputs);
        let output = fused(&leaves).expect("output").remove(0);
        let device = output.device();
        let region = within.then(|| Autocast::new(device, Kind::BFloat16).expect("autocast"));
        let leaves: Vec<&Tensor> = leaves.iter().collect();
        let sum = output.square().sum(Kind::Float);
        let options = GradOptions { create_graph, ..Default::default() };
        let gradients = grad(&[&sum], &leaves, &options);
        drop(region);
        let gradients = gradients.expect("gradients").into_vec().into_iter().flatten();
        gradients.map(|gradient| gradient.detach()).collect::<Vec<_>>()
    };
    let outside = of(false, false);
    assert_eq!(outside.len(), inputs.len());
    for create_graph in [false, true] {
        for (inside, outside) in of(true, create_graph).iter().zip(&outside) {
            let largest = outside.abs().max().double_value(&[]);
            assert_close(inside, outside, 1e-5, 1e-5 * largest.max(1.0));
        }
    }
}
