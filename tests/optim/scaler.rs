//! Steps by `GradScaler`, which this crate's optimizers take without waiting for the GPU.

use super::updates::{build, rules};
use super::*;
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::optim::Muon;
use tch_extension::testing::devices;

/// An optimizer that does not decide on the device, so that the scaler waits.
struct Waits(FusedOptimizer);

impl tch_extension::optim::Optimizer for Waits {
    fn parameters(&self) -> Vec<Tensor> {
        self.0.trainable_variables()
    }
    fn step(&mut self) -> tch_extension::Result<()> {
        self.0.step()
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    OnTheDevice,
    UnscaledBefore,
    Waiting,
}

fn scaler() -> GradScaler {
    let options =
        GradScalerOptions { init_scale: 1024.0, growth_interval: 3, ..Default::default() };
    GradScaler::new(options).expect("a scaler")
}

type Build<'a> = &'a dyn Fn(&[Tensor]) -> FusedOptimizer;

/// The bits after ten steps, of which two have an infinite gradient, and the scale.
fn train(way: Way, device: Device, max_norm: Option<f64>, build: Build<'_>) -> (Vec<Vec<u8>>, f64) {
    tch::manual_seed(31);
    let leaves = leaves(&SIZES, Kind::Float, device);
    let mut optimizer = build(&leaves);
    optimizer.set_clip_norm(max_norm).expect("set_clip_norm");
    let mut waits = Waits(build(&leaves));
    waits.0.set_clip_norm(max_norm).expect("set_clip_norm");
    let mut scaler = scaler();
    for step in 0..10 {
        let mut loss = Tensor::zeros([], (Kind::Float, device));
        for leaf in &leaves {
            leaf.shallow_clone().zero_grad();
            let noise = normal(&leaf.size(), Kind::Float, device);
            loss += (leaf * noise).sum(Kind::Float);
        }
        scaler.scale(&loss).expect("scaled").backward();
        if step == 0 || step == 6 {
            let _ = leaves[8].grad().get(8192).fill_(f64::INFINITY);
        }
        let stepped = match way {
            Way::OnTheDevice => scaler.step(&mut optimizer),
            Way::UnscaledBefore => {
                scaler.unscale(&optimizer).expect("unscaled");
                scaler.step(&mut optimizer)
            }
            Way::Waiting => scaler.step(&mut waits),
        };
        let is_known = way == Way::Waiting || device == CPU;
        assert_eq!(stepped.expect("a step"), !is_known || (step != 0 && step != 6), "{way:?}");
        scaler.update().expect("an update");
    }
    (bits(&leaves), scaler.scale_factor().expect("a scale"))
}

#[test]
fn all_ways_have_the_same_bits() {
    let _alone = serially();
    let of_rule = |place: usize| move |leaves: &[Tensor]| build(rules()[place], leaves, 0.01);
    let (adamw, sgd, other) = (of_rule(0), of_rule(4), of_rule(8));
    let muon =
        |leaves: &[Tensor]| Muon::default().build_of(named(leaves), 0.01).expect("an optimizer");
    let builds: [Build<'_>; 4] = [&adamw, &sgd, &other, &muon];
    for device in devices() {
        for max_norm in [None, Some(1.5)] {
            for build in builds {
                let expected = train(Way::Waiting, device, max_norm, build);
                for way in [Way::OnTheDevice, Way::UnscaledBefore] {
                    let ours = train(way, device, max_norm, build);
                    assert_eq!(ours.1, expected.1, "{way:?} on {device:?}");
                    assert!(ours.0 == expected.0, "{way:?} on {device:?}, clipped to {max_norm:?}");
                }
            }
        }
    }
}

#[test]
fn gradients_of_half_kinds_are_taken_and_stay_scaled() {
    let _alone = serially();
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            let w = Tensor::ones([300], (kind, device)).set_requires_grad(true);
            let mut optimizer = build(rules()[2], &[w.shallow_clone()], 0.5);
            optimizer.set_clip_norm(Some(f64::INFINITY)).expect("set_clip_norm");
            let mut scaler = scaler();
            let mut step = |factor: f64| {
                w.shallow_clone().zero_grad();
                scaler.scale(&(&w * factor).sum(Kind::Float)).expect("scaled").backward();
                scaler.step(&mut optimizer).expect("a step");
                scaler.update().expect("an update");
                (w.double_value(&[299]), w.grad().double_value(&[0]))
            };
            assert_eq!(step(0.5), (0.75, 512.0));
            assert_eq!(step(f64::INFINITY), (0.75, f64::INFINITY), "skipped");
            assert_eq!(step(0.25), (0.625, 128.0));
            // The norm is that of the gradients without the scale.
            let norm = optimizer.grad_norm().expect("grad_norm").expect("a norm").double_value(&[]);
            assert!((norm - 0.25 * 300.0_f64.sqrt()).abs() < 1e-6, "{norm}");
        }
    }
}

#[test]
fn a_skipped_step_does_not_count() {
    let _alone = serially();
    for device in devices() {
        let run = |with_skips: bool| {
            tch::manual_seed(32);
            let leaves = leaves(&[&[9], &[1500]], Kind::Float, device);
            let mut optimizer = build(rules()[0], &leaves, 0.01);
            let mut scaler = GradScaler::new(GradScalerOptions {
                init_scale: 1.0,
                backoff_factor: 0.999_999_9, // keeps the scale at 1 after rounding
                ..Default::default()
            })
            .expect("a scaler");
            let mut step = |factor: f64| {
                optimizer.zero_grad().expect("zero_grad");
                let loss = leaves.iter().map(|leaf| (leaf * leaf * factor).sum(Kind::Float));
                scaler.scale(&loss.sum::<Tensor>()).expect("scaled").backward();
                scaler.step(&mut optimizer).expect("a step");
                scaler.update().expect("an update");
            };
            for index in 0..4 {
                if with_skips && index % 2 == 0 {
                    step(f64::NAN);
                }
                step(1.0);
            }
            bits(&leaves)
        };
        assert!(run(true) == run(false), "{device:?}");
    }
}

#[test]
fn misuse_is_still_an_error() {
    let _alone = serially();
    for device in devices() {
        let w = Tensor::ones([3], (Kind::Float, device)).set_requires_grad(true);
        let mut optimizer = build(rules()[0], &[w.shallow_clone()], 0.5);
        let mut scaler = scaler();
        assert!(text(scaler.step(&mut optimizer)).contains("GradScaler::step"));
        scaler.scale(&w.sum(Kind::Float)).expect("scaled").backward();
        let mut other = build(rules()[0], &[Tensor::ones([3], (Kind::Float, device))], 0.5);
        assert!(text(scaler.step(&mut other)).contains("a parameter with a gradient, got none"));
        scaler.step(&mut optimizer).expect("a step");
        assert!(text(scaler.step(&mut optimizer)).contains("one after step"));
        assert!(text(scaler.unscale(&optimizer)).contains("one after step"));
        scaler.update().expect("an update");
        assert!(scaler.step(&mut optimizer).is_ok());
    }
}
