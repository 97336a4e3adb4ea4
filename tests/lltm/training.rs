//! Tests that training takes the same course as with the reference.

use super::*;
use tch::no_grad;

/// The losses of a small recurrent network on a fixed task, step by step.
fn losses(operator: support::Operator<'_>, kind: Kind, device: Device, steps: usize) -> Vec<f64> {
    let inputs = one([6, 4, 3, 5], kind, device).inputs;
    let target = inputs[0].sum_dim_intlist([2].as_slice(), false, kind).sin();
    let parameters = leaves(&inputs[1..3]);
    let zeros = Tensor::zeros([4, 5], (kind, device));
    let mut losses = Vec::new();
    for _ in 0..steps {
        let state = [&zeros, &zeros].map(Tensor::shallow_clone);
        let [h, c] = state;
        let arguments = [
            inputs[0].shallow_clone(),
            parameters[0].shallow_clone(),
            parameters[1].shallow_clone(),
            h,
            c,
        ];
        let output = operator(&arguments).expect("outputs").remove(0);
        let loss =
            (output.sum_dim_intlist([2].as_slice(), false, kind) - &target).square().mean(kind);
        let gradients = grad(&[&loss], &[&parameters[0], &parameters[1]], &GradOptions::default())
            .expect("gradients");
        no_grad(|| {
            for (parameter, gradient) in parameters.iter().zip(gradients.iter().flatten()) {
                let mut parameter = parameter.shallow_clone();
                parameter -= gradient * 0.1;
            }
        });
        losses.push(loss.double_value(&[]));
    }
    losses
}

#[test]
fn training_takes_the_reference_s_course() {
    for device in devices() {
        for (kind, steps, within) in [(Kind::Double, 200, 1e-9), (Kind::Float, 50, 1e-3)] {
            let without = losses(&reference, kind, device, steps);
            for operator in [&fused as support::Operator<'_>, &per_step, &whole] {
                let with = losses(operator, kind, device, steps);
                for (step, (with, without)) in with.iter().zip(&without).enumerate() {
                    let off = (with - without).abs();
                    assert!(
                        off <= within * without.abs(),
                        "{kind:?} on {device:?}, step {step}: {with} {without}"
                    );
                }
                assert!(
                    with[steps - 1] < 0.8 * with[0],
                    "it learns: {} to {}",
                    with[0],
                    with[steps - 1]
                );
            }
        }
    }
}
