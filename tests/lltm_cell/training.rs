//! Tests that training takes the same course as with the reference.

use super::*;
use tch::no_grad;

/// The losses of a small recurrent network on a fixed task, step by step.
fn losses(operator: support::Operator<'_>, kind: Kind, device: Device, steps: usize) -> Vec<f64> {
    let (batch, features, hidden, time) = (4, 3, 5, 6);
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&[[batch * time, features, hidden]]);
    let inputs = table.samples(kind, device).expect("a sample").remove(0).inputs;
    let x = inputs[0].view([time, batch, features]);
    let target = x.sum_dim_intlist([2].as_slice(), false, kind).sin();
    let parameters = leaves(&inputs[1..3]);
    let zeros = Tensor::zeros([batch, hidden], (kind, device));
    let mut losses = Vec::new();
    for _ in 0..steps {
        let (mut h, mut c) = (zeros.shallow_clone(), zeros.shallow_clone());
        let mut loss = Tensor::zeros([], (kind, device));
        for step in 0..time {
            let arguments =
                [x.get(step), parameters[0].shallow_clone(), parameters[1].shallow_clone(), h, c];
            let [new_h, new_c] =
                <[Tensor; 2]>::try_from(operator(&arguments).expect("a step")).expect("two");
            loss += (new_h.sum_dim_intlist([1].as_slice(), false, kind) - target.get(step))
                .square()
                .mean(kind);
            (h, c) = (new_h, new_c);
        }
        let gradients = grad(&[&loss], &[&parameters[0], &parameters[1]], &GradOptions::default())
            .expect("gradients");
        no_grad(|| {
            for (parameter, gradient) in parameters.iter().zip(gradients.iter().flatten()) {
                let mut parameter = parameter.shallow_clone();
                parameter -= gradient * 0.02;
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
            let (with, without) =
                (losses(&fused, kind, device, steps), losses(&reference, kind, device, steps));
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
