//! Trains a small network with the operator and with the composite.

use super::*;
use tch::nn::{OptimizerConfig, Sgd, VarStore};

/// The losses, step by step.
fn curve(device: Device, kind: Kind, steps: usize, operator: Operator) -> Vec<f64> {
    tch::manual_seed(3);
    let mut vs = VarStore::new(device);
    let var = |name: &str, size: &[i64]| vs.root().randn(name, size, 0.0, 0.4);
    let (w1, b1) = (var("w1", &[5, 33]), var("b1", &[33]));
    let (w2, b2) = (var("w2", &[33, 7]), var("b2", &[10, 1]));
    let w3 = var("w3", &[7, 3]);
    vs.set_kind(kind);
    tch::manual_seed(4);
    let input = Tensor::randn([4, 10, 5], (kind, device));
    let target = Tensor::randn([4, 10, 3], (kind, device));
    let mut optimizer =
        Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.02).expect("an optimizer");
    let step = |_| {
        let hidden = operator(&input, &w1, &b1).expect("first");
        let hidden = operator(&hidden, &w2, &b2).expect("second");
        let loss = (hidden.matmul(&w3) - &target).square().mean(kind);
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };
    (0..steps).map(step).collect()
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        for (kind, steps, bound) in [(Kind::Double, 200, 1e-9), (Kind::Float, 50, 1e-3)] {
            let [fused, composite] = OPERATORS.map(|operator| curve(device, kind, steps, operator));
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
