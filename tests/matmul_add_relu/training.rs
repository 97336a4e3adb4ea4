//! Trains a small network with the operator and with the composite.

use super::*;
use tch::nn::{OptimizerConfig, Sgd, VarStore};

/// Parameters and data. Both operators start from the same, which is drawn once: other tests draw
/// random numbers at the same time, so that a seed would not repeat them.
struct Start {
    parameters: [Tensor; 5],
    input: Tensor,
    target: Tensor,
}

impl Start {
    fn new(kind: Kind, device: Device) -> Start {
        let draw = |size: &[i64]| Tensor::randn(size, (kind, device));
        let sizes: [&[i64]; 5] = [&[5, 33], &[33], &[33, 7], &[10, 1], &[7, 3]];
        let parameters = sizes.map(|size| draw(size) * 0.4);
        Start { parameters, input: draw(&[4, 10, 5]), target: draw(&[4, 10, 3]) }
    }

    /// The losses, step by step.
    fn curve(&self, steps: usize, operator: Operator) -> Vec<f64> {
        let mut vs = VarStore::new(self.input.device());
        let names = ["w1", "b1", "w2", "b2", "w3"];
        let mut at = 0;
        let [w1, b1, w2, b2, w3] = self.parameters.each_ref().map(|value| {
            at += 1;
            vs.root().var_copy(names[at - 1], value)
        });
        vs.set_kind(self.input.kind());
        let mut optimizer =
            Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.02).expect("an optimizer");
        let step = |_| {
            let hidden = operator(&self.input, &w1, &b1).expect("first");
            let hidden = operator(&hidden, &w2, &b2).expect("second");
            let loss = (hidden.matmul(&w3) - &self.target).square().mean(self.input.kind());
            optimizer.backward_step(&loss);
            loss.double_value(&[])
        };
        (0..steps).map(step).collect()
    }
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        for (kind, steps, bound) in [(Kind::Double, 200, 1e-9), (Kind::Float, 50, 1e-3)] {
            let start = Start::new(kind, device);
            let [fused, composite] = OPERATORS.map(|operator| start.curve(steps, operator));
            assert!(
                fused[steps - 1] < 0.9 * fused[0],
                "it learns: {} to {}",
                fused[0],
                fused[steps - 1]
            );
            for (step, (fused, composite)) in fused.iter().zip(&composite).enumerate() {
                assert!((fused - composite).abs() < bound, "step {step}: {fused} and {composite}");
            }
        }
    }
}
