//! Muon's matrices of one shape, which are orthogonalised together: none sees another one.

use super::muon::{muon, step_with};
use super::*;
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::optim::Muon;
use tch_extension::testing::devices;

/// Matrices of one shape. On a GPU they are large enough for the kernel for symmetric products.
fn alike(device: Device) -> (usize, [i64; 2]) {
    if device.is_cuda() { (12, [1000, 1504]) } else { (6, [24, 40]) }
}

fn config() -> Muon {
    Muon { weight_decay: 0.0, ..Default::default() }
}

#[test]
fn zeros_and_nan_change_no_other_matrix() {
    let _alone = serially();
    const ZERO: usize = 1;
    const NAN: usize = 4;
    for device in devices() {
        let (count, shape) = alike(device);
        let run = |is_spoiled: bool| {
            tch::manual_seed(95);
            let draw = || -> Vec<Tensor> {
                (0..count).map(|_| normal(&shape, Kind::Float, device)).collect()
            };
            let (weights, gradients) = (draw(), draw());
            if is_spoiled {
                let _ = gradients[ZERO].shallow_clone().zero_();
                let _ = gradients[NAN].get(3).get(5).fill_(f64::NAN);
            }
            let before = bits(&weights);
            step_with(&mut muon(config(), &weights, 0.1), &gradients);
            let is_nan = weights[NAN].isnan().all().int64_value(&[]) == 1;
            (before, bits(&weights), is_nan)
        };
        let (before, plain, _) = run(false);
        let (_, spoiled, is_nan) = run(true);
        assert!(spoiled[ZERO] == before[ZERO], "{device:?}: zeros");
        assert!(is_nan, "{device:?}: NaN");
        for other in (0..count).filter(|place| ![ZERO, NAN].contains(place)) {
            assert!(spoiled[other] == plain[other], "{device:?}: matrix {other}");
        }
    }
}

/// Values of a few bits are the same numbers in each kind.
#[test]
fn weights_of_all_kinds_go_together() {
    let _alone = serially();
    for device in devices() {
        for has_masters in [true, false] {
            tch::manual_seed(96);
            let (count, shape) = alike(device);
            let draw = || (normal(&shape, Kind::Float, device) * 8.0).round().clamp(-64, 64) / 64.0;
            let (start, gradients) = (draw(), [draw(), draw()]);
            let kinds = [Kind::Half, Kind::Float, Kind::BFloat16];
            let of = |tensor: &Tensor| -> Vec<Tensor> {
                (0..count).map(|place| tensor.to_kind(kinds[place % 3]).copy()).collect()
            };
            let weights = of(&start);
            let mut optimizer = muon(config(), &weights, 0.02);
            optimizer.set_master_weights(has_masters).expect("set_master_weights");
            // Without masters, roundings of the first step are part of the second one.
            let steps = if has_masters { 2 } else { 1 };
            for gradient in &gradients[..steps] {
                step_with(&mut optimizer, &of(gradient));
            }
            assert!(bits(&weights[1..2]) != bits(&[start]), "{device:?}: no step");
            let rounded: Vec<Tensor> =
                weights.iter().map(|weight| weights[1].to_kind(weight.kind())).collect();
            assert!(bits(&weights) == bits(&rounded), "{device:?}, masters: {has_masters}");
        }
    }
}

#[test]
fn an_infinite_gradient_skips_the_step_of_all() {
    let _alone = serially();
    for device in devices() {
        tch::manual_seed(97);
        let (count, shape) = alike(device);
        let leaves = leaves(&vec![&shape[..]; count], Kind::Float, device);
        let mut optimizer = muon(config(), &leaves, 0.1);
        let mut scaler = GradScaler::new(GradScalerOptions::default()).expect("a scaler");
        for is_skipped in [false, true] {
            let before = (bits(&leaves), optimizer.state_dict().expect("a state"));
            accumulate(&leaves, 1.0);
            let loss = leaves.iter().map(|leaf| leaf.sum(Kind::Float)).sum::<Tensor>();
            scaler.scale(&loss).expect("scaled").backward();
            if is_skipped {
                let _ = leaves[2].grad().get(3).get(5).fill_(f64::INFINITY);
            }
            scaler.step(&mut optimizer).expect("a step");
            scaler.update().expect("an update");
            assert_eq!(bits(&leaves) == before.0, is_skipped, "{device:?}");
            let after = optimizer.state_dict().expect("a state");
            if is_skipped {
                let of = |state: &std::collections::BTreeMap<String, Tensor>| {
                    bits(&state.values().map(Tensor::shallow_clone).collect::<Vec<_>>())
                };
                assert!(of(&after) == of(&before.1), "{device:?}: the state");
            }
        }
    }
}
