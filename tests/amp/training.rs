//! Trains a small network in mixed precision.

use super::*;
use tch::nn::{self, Module, OptimizerConfig};
use tch_extension::testing::{assert_close, cuda_or_skip};

struct Outcome {
    first: f64,
    last: f64,
    skipped: usize,
    weights: Vec<Tensor>,
}

/// Trains a network to learn y = sin(3x), with this initial scale or, for `None`, without a scaler.
fn train(device: Device, kind: Kind, init_scale: Option<f64>) -> Outcome {
    tch::manual_seed(5);
    let vs = nn::VarStore::new(Device::Cpu);
    let hidden = nn::linear(vs.root() / "hidden", 1, 32, Default::default());
    let output = nn::linear(vs.root() / "output", 32, 1, Default::default());
    let mut vs = vs;
    vs.set_device(device);
    let mut optimizer = nn::sgd(0.9, 0.0, 0.0, false).build(&vs, 0.05).expect("an optimizer");
    let mut scaler = GradScaler::new(GradScalerOptions {
        init_scale: init_scale.unwrap_or(1.0),
        growth_interval: 20,
        enabled: init_scale.is_some(),
        ..Default::default()
    })
    .expect("a scaler");

    let x = Tensor::linspace(-1.0, 1.0, 64, (Kind::Float, device)).unsqueeze(1);
    let y = (&x * 3.0).sin();
    let (mut losses, mut skipped) = (Vec::new(), 0);
    for _ in 0..200 {
        optimizer.zero_grad();
        let loss = {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let prediction = output.forward(&hidden.forward(&x).tanh());
            assert_eq!(prediction.kind(), kind);
            prediction.mse_loss(&y, tch::Reduction::Mean)
        };
        assert_eq!(loss.kind(), Kind::Float);
        scaler.scale(&loss).expect("scaled").backward();
        skipped += usize::from(!scaler.step(&mut optimizer).expect("a step"));
        scaler.update().expect("an update");
        losses.push(loss.double_value(&[]));
    }
    let weights = vs.trainable_variables();
    Outcome { first: losses[0], last: losses[losses.len() - 1], skipped, weights }
}

fn learns(device: Device) {
    // In this range, multiplying by a power of two commutes with all roundings.
    let (scaled, plain) =
        (train(device, Kind::BFloat16, Some(1024.0)), train(device, Kind::BFloat16, None));
    assert!(scaled.last < 0.1 * scaled.first, "{} {}", scaled.first, scaled.last);
    assert_eq!(scaled.skipped, 0);
    for (scaled, plain) in scaled.weights.iter().zip(&plain.weights) {
        assert_close(scaled, plain, 0.0, 0.0);
    }
    // This scale is too large for Half, so the first steps are skipped until the scale is small
    // enough.
    let half = train(device, Kind::Half, Some(2.0_f64.powi(30)));
    assert!(half.last < 0.1 * half.first, "{} {}", half.first, half.last);
    assert!((5..40).contains(&half.skipped), "{} skipped", half.skipped);
}

#[test]
fn a_network_learns() {
    let _alone = alone();
    learns(Device::Cpu);
}

#[test]
fn cuda_a_network_learns() {
    let _alone = alone();
    if let Some(device) = cuda_or_skip("cuda_a_network_learns") {
        learns(device);
    }
}
