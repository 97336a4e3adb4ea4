//! Muon: against torch's steps in plain tch operations, against the iteration in `Double`, and
//! against `torch.optim.Muon` itself.

use super::reference::Reference;
use super::*;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write;
use support::gpu::caching_or_skip;
use tch_extension::cuda::Graph;
use tch_extension::nn::state_dict::save_tensors;
use tch_extension::optim::{AdjustLr, Muon};
use tch_extension::testing::{assert_close, devices};

/// torch.optim.Muon, whose iteration runs in this kind.
pub struct Torch {
    config: Muon,
    lr: f64,
    kind: Kind,
    pub weights: Vec<Tensor>,
    buffers: Vec<Tensor>,
}

impl Torch {
    pub fn new(config: Muon, lr: f64, kind: Kind, weights: &[Tensor]) -> Self {
        let own = |tensor: &Tensor| match kind {
            Kind::Double => tensor.detach().to_kind(kind).copy(),
            _ => tensor.detach().copy(),
        };
        let weights: Vec<Tensor> = weights.iter().map(own).collect();
        let buffers = weights.iter().map(Tensor::zeros_like).collect();
        Torch { config, lr, kind, weights, buffers }
    }

    fn orthogonalised(&self, direction: &Tensor) -> Tensor {
        let is_tall = direction.size()[0] > direction.size()[1];
        let turned = |x: Tensor| if is_tall { x.transpose(1, 2) } else { x };
        // Products of one matrix, because tch's addmm has no factors.
        let mut x = turned(direction.to_kind(self.kind).unsqueeze(0));
        x = &x / x.norm().clamp_min(self.config.eps);
        let (a, b, c) = self.config.ns_coefficients;
        for _ in 0..self.config.ns_steps {
            let gram = x.bmm(&x.transpose(1, 2));
            let polynomial = gram.baddbmm(&gram, &gram, b, c);
            x = x.baddbmm(&polynomial, &x, a, 1.0);
        }
        turned(x).squeeze_dim(0)
    }

    pub fn step(&mut self, gradients: &[Tensor]) {
        let Muon { momentum, nesterov, weight_decay, adjust_lr_fn, .. } = self.config;
        for (index, gradient) in gradients.iter().enumerate() {
            let gradient = gradient.to_kind(self.weights[index].kind());
            let _ = self.buffers[index].lerp_(&gradient, 1.0 - momentum);
            let buffer = &self.buffers[index];
            let direction = if nesterov { gradient.lerp(buffer, momentum) } else { buffer.copy() };
            let x = self.orthogonalised(&direction);
            let &[rows, columns] = gradient.size().as_slice() else { panic!("a matrix") };
            let (rows, columns) = (rows as f64, columns as f64);
            let ratio = match adjust_lr_fn {
                AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
                AdjustLr::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
            };
            let weight = &mut self.weights[index];
            *weight *= 1.0 - self.lr * weight_decay;
            *weight -= x.to_kind(weight.kind()) * (self.lr * ratio);
        }
    }
}

/// ‖a - b‖ over all tensors.
pub fn distance(a: &[Tensor], b: &[Tensor]) -> f64 {
    let double = |tensor: &Tensor| tensor.detach().to_kind(Kind::Double);
    let differences: Vec<Tensor> = a.iter().zip(b).map(|(a, b)| double(a) - double(b)).collect();
    Reference::norm(&differences)
}

pub fn muon(config: Muon, tensors: &[Tensor], lr: f64) -> FusedOptimizer {
    config.build_of(named(tensors), lr).expect("an optimizer")
}

pub fn step_with(optimizer: &mut FusedOptimizer, gradients: &[Tensor]) {
    let given: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
    optimizer.step_with(&given).expect("a step");
}

pub fn randoms(sizes: &[&[i64]], kind: Kind, device: Device) -> Vec<Tensor> {
    sizes.iter().map(|size| normal(size, kind, device)).collect()
}

/// Both kinds of momentum and of learning rates.
fn configs() -> [Muon; 3] {
    let base = Muon { weight_decay: 0.5, ..Default::default() };
    [
        base,
        Muon { nesterov: false, adjust_lr_fn: AdjustLr::MatchRmsAdamw, ..base },
        Muon { momentum: 0.6, ns_steps: 3, ns_coefficients: (2.0, -1.5, 0.5), ..base },
    ]
}

/// A matrix whose rows are alike, or fall from 1 to 10⁻³.
fn gradient(size: &[i64], falls: bool, device: Device) -> Tensor {
    let factors =
        Tensor::logspace(0.0, if falls { -3.0 } else { 0.0 }, size[0], 10.0, (Kind::Float, CPU));
    normal(size, Kind::Float, device) * factors.unsqueeze(1).to_device(device)
}

#[test]
fn steps_are_as_near_to_the_iteration_in_double_as_torchs() {
    let _alone = serially();
    tch::manual_seed(71);
    let shapes: [&[i64]; 7] =
        [&[40, 96], &[96, 40], &[64, 64], &[1, 48], &[48, 1], &[7, 33], &[65, 63]];
    for device in devices() {
        for config in configs() {
            for shape in shapes {
                for falls in [false, true] {
                    let sizes = [shape; 8];
                    let mut weights = randoms(&sizes, Kind::Float, device);
                    // One lies in memory the other way round.
                    weights[7] = weights[7].tr().contiguous().tr();
                    let mut theirs = Torch::new(config, 0.1, Kind::BFloat16, &weights);
                    let mut exact = Torch::new(config, 0.1, Kind::Double, &weights);
                    let mut optimizer = muon(config, &weights, 0.1);
                    for _ in 0..4 {
                        let gradients: Vec<Tensor> =
                            sizes.iter().map(|size| gradient(size, falls, device)).collect();
                        theirs.step(&gradients);
                        exact.step(&gradients);
                        step_with(&mut optimizer, &gradients);
                    }
                    let ours = distance(&weights, &exact.weights);
                    let torchs = distance(&theirs.weights, &exact.weights);
                    let all = Reference::norm(&exact.weights);
                    assert!(torchs < 0.1 * all, "{torchs} of {all}: the reference is wrong");
                    assert!(ours <= 1.5 * torchs, "{shape:?} {config:?}: {ours}, torch {torchs}");
                    let state = optimizer.state_dict().expect("state_dict");
                    for (index, buffer) in exact.buffers.iter().enumerate() {
                        let ours = &state[&format!("momentum_buffer.w{index}")];
                        assert_close(&ours.to_kind(Kind::Double), buffer, 1e-5, 1e-6);
                    }
                }
            }
        }
    }
}

/// Without the iteration, there are three roundings to `BFloat16`: of directions, norms and quotients.
#[test]
fn all_but_the_iteration_is_exact() {
    let _alone = serially();
    tch::manual_seed(72);
    for device in devices() {
        for config in configs().map(|config| Muon { ns_steps: 0, ..config }) {
            for kind in [Kind::Float, Kind::Double] {
                let weights = randoms(&[&[30, 20], &[20, 30], &[1, 9]], kind, device);
                let mut exact = Torch::new(config, 0.1, Kind::Double, &weights);
                let mut optimizer = muon(config, &weights, 0.1);
                for _ in 0..3 {
                    let gradients: Vec<Tensor> = weights.iter().map(Tensor::randn_like).collect();
                    exact.step(&gradients);
                    step_with(&mut optimizer, &gradients);
                }
                // In three steps, each of three matrices goes by at most 0.1·√1.5 a step.
                let bound = 3.0 / 512.0 * 3.0 * 0.1 * 1.5_f64.sqrt() * 3.0_f64.sqrt();
                assert!(distance(&weights, &exact.weights) < bound, "{config:?}");
                // A gradient of zeros leaves the momentum, and later only the decay.
                let still = Muon { momentum: 0.0, ..config };
                let before = copies(&weights);
                let zeros: Vec<Tensor> = weights.iter().map(Tensor::zeros_like).collect();
                step_with(&mut muon(still, &weights, 0.1), &zeros);
                for (ours, before) in weights.iter().zip(before) {
                    assert_close(ours, &(before * (1.0 - 0.1 * 0.5)), 2e-7, 0.0);
                }
            }
        }
    }
}

/// The numbers that `muon.py` draws.
fn drawn(state: &mut u64, rows: i64, columns: i64) -> Tensor {
    let draw = |_| {
        *state = (*state * 1_103_515_245 + 12_345) % (1 << 31);
        ((*state >> 16) % 1024) as f32 / 512.0 - 1.0
    };
    let values: Vec<f32> = (0..rows * columns).map(draw).collect();
    Tensor::from_slice(&values).view([rows, columns])
}

#[test]
fn torchs_muon_itself_has_these_weights() {
    let _alone = serially();
    for (rows, columns, nesterov, adjust_lr_fn) in [
        (24_i64, 40_i64, true, "original"),
        (40, 24, false, "original"),
        (33, 17, true, "match_rms_adamw"),
    ] {
        let arguments = [&rows.to_string(), &columns.to_string(), "3", &nesterov.to_string()];
        let arguments: Vec<&OsStr> =
            arguments.into_iter().chain([adjust_lr_fn]).map(OsStr::new).collect();
        let output = match support::python::run("tests/optim/muon.py", &arguments) {
            Ok(output) => String::from_utf8(output.stdout).expect("numbers"),
            Err(why) => {
                let _ = std::io::stderr()
                    .write_all(format!("SKIPPED torchs_muon_itself: {why}\n").as_bytes());
                return;
            }
        };
        let numbers = output.split_whitespace().map(|number| number.parse().expect("a number"));
        let theirs = Tensor::from_slice(&numbers.collect::<Vec<f64>>()).view([rows, columns]);

        let adjust_lr_fn = match adjust_lr_fn {
            "original" => AdjustLr::Original,
            _ => AdjustLr::MatchRmsAdamw,
        };
        let config = Muon { weight_decay: 0.5, nesterov, adjust_lr_fn, ..Default::default() };
        let mut state = 1;
        let weights = [drawn(&mut state, rows, columns)];
        let mut written = Torch::new(config, 0.1, Kind::BFloat16, &weights);
        let mut exact = Torch::new(config, 0.1, Kind::Double, &weights);
        let mut optimizer = muon(config, &weights, 0.1);
        for _ in 0..3 {
            let gradients = [drawn(&mut state, rows, columns)];
            written.step(&gradients);
            exact.step(&gradients);
            step_with(&mut optimizer, &gradients);
        }
        assert_close(&written.weights[0].to_kind(Kind::Double), &theirs, 0.0, 1e-6);
        let torchs = distance(&[theirs], &exact.weights);
        assert!(distance(&weights, &exact.weights) <= 1.5 * torchs, "{config:?}");
    }
}

/// The sizes of three matrices, of which two are alike, and of what AdamW updates.
const MIXED: [&[i64]; 6] = [&[20, 30], &[12], &[20, 30], &[3, 4, 5], &[33, 7], &[]];

#[test]
fn all_but_matrices_are_adamws() {
    let _alone = serially();
    for device in devices() {
        for kind in super::updates::KINDS {
            tch::manual_seed(73);
            let adamw = AdamW { beta2: 0.95, wd: 0.3, ..Default::default() }.amsgrad(true);
            let config = Muon { adamw, adamw_lr_ratio: 0.5, ..Default::default() };
            let weights = randoms(&MIXED, kind, device);
            let alone = copies(&weights);
            let mut optimizer = muon(config, &weights, 0.02);
            optimizer.leave_to_adamw(|name, _| name == "w4").expect("left");
            optimizer.set_lr(0.04).expect("set_lr");
            let rest = [1, 3, 4, 5];
            let of_rest = |all: &[Tensor]| rest.map(|index| all[index].shallow_clone());
            let mut other = adamw.build_of(named(&of_rest(&alone)), 0.02).expect("an optimizer");
            for _ in 0..3 {
                let gradients = randoms(&MIXED, kind, device);
                step_with(&mut optimizer, &gradients);
                step_with(&mut other, &of_rest(&gradients));
            }
            assert!(bits(&of_rest(&weights)) == bits(&of_rest(&alone)), "{kind:?} on {device:?}");
            let state = optimizer.state_dict().expect("state_dict");
            let counts = |index: usize| state[&format!("step.w{index}")].int64_value(&[]);
            assert_eq!([0, 1, 2, 3, 4, 5].map(counts), [3; 6]);
            let number = |name: &str| state[&format!("group.0.{name}")].double_value(&[]);
            assert_eq!(
                (number("lr"), number("adamw.lr"), number("adamw.beta2")),
                (0.04, 0.04, 0.95)
            );
            assert_eq!((number("momentum"), number("adamw.weight_decay")), (0.95, 0.3));
        }
    }
}

#[test]
fn matrices_that_are_left_have_the_numbers_of_their_group() {
    let _alone = serially();
    let weights = randoms(&[&[2, 3], &[4, 5]], Kind::Float, CPU);
    let mut optimizer = muon(Muon::default(), &weights, 0.02);
    optimizer.no_weight_decay(|name, _| name == "w0");
    optimizer.set_lr_group(0, 0.5).expect("set_lr_group");
    optimizer.leave_to_adamw(|_, _| true).expect("left");
    let state = optimizer.state_dict().expect("state_dict");
    let number = |name: &str| state[&format!("group.0.adamw.{name}")].double_value(&[]);
    assert_eq!((number("lr"), number("weight_decay")), (0.5, 0.01));
    let ones: Vec<Tensor> = weights.iter().map(Tensor::ones_like).collect();
    let before = copies(&weights);
    step_with(&mut optimizer, &ones);
    let decay = [1.0, 1.0 - 0.5 * 0.01];
    for ((ours, before), decay) in weights.iter().zip(before).zip(decay) {
        assert_close(ours, &(before * decay - 0.5), 0.0, 1e-5);
    }
}

#[test]
fn packed_rows_are_matrices_of_their_own() {
    let _alone = serially();
    for device in devices() {
        for kind in super::updates::KINDS {
            tch::manual_seed(74);
            let packed = randoms(&[&[26, 10], &[16, 10]], kind, device);
            let rows = [vec![8_i64, 14, 4], vec![8, 8]];
            let parts = |all: &[Tensor]| -> Vec<Tensor> {
                let split = |(tensor, rows): (&Tensor, &Vec<i64>)| tensor.split_sizes(rows, 0);
                all.iter().zip(&rows).flat_map(split).collect()
            };
            let apart: Vec<Tensor> = parts(&packed).iter().map(Tensor::copy).collect();
            let mut optimizer = muon(Muon::default(), &packed, 0.02);
            let of_name = |name: &str| rows[usize::from(name == "w1")].clone();
            optimizer.split_matrices(|name, _| of_name(name)).expect("split");
            let mut other = muon(Muon::default(), &apart, 0.02);
            for _ in 0..3 {
                let gradients = randoms(&[&[26, 10], &[16, 10]], kind, device);
                step_with(&mut optimizer, &gradients);
                step_with(&mut other, &parts(&gradients));
            }
            assert!(bits(&parts(&packed)) == bits(&apart), "{kind:?} on {device:?}");
        }
    }
}

/// Gradients and weights of a half kind are exact in `Float`.
#[test]
fn masters_go_as_weights_in_float_go() {
    let _alone = serially();
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            for of_gradients in [kind, Kind::Float] {
                for has_masters in [true, false] {
                    tch::manual_seed(75);
                    let weights = randoms(&MIXED, kind, device);
                    let in_float: Vec<Tensor> =
                        weights.iter().map(|weight| weight.to_kind(Kind::Float)).collect();
                    let mut optimizer = muon(Muon::default(), &weights, 0.02);
                    optimizer.set_master_weights(has_masters).expect("set_master_weights");
                    let mut other = muon(Muon::default(), &in_float, 0.02);
                    for optimizer in [&mut optimizer, &mut other] {
                        optimizer.set_clip_norm(Some(2.0)).expect("set_clip_norm");
                    }
                    for _ in 0..if has_masters { 3 } else { 1 } {
                        let gradients = randoms(&MIXED, kind, device);
                        let cast = |kind| -> Vec<Tensor> {
                            gradients.iter().map(|gradient| gradient.to_kind(kind)).collect()
                        };
                        step_with(&mut optimizer, &cast(of_gradients));
                        step_with(&mut other, &cast(Kind::Float));
                    }
                    let rounded: Vec<Tensor> =
                        in_float.iter().map(|weight| weight.to_kind(kind)).collect();
                    assert!(bits(&weights) == bits(&rounded), "{kind:?}, {of_gradients:?}");
                }
            }
        }
    }
}

#[test]
fn the_norm_is_that_of_all_gradients() {
    let _alone = serially();
    tch::manual_seed(76);
    for device in devices() {
        let weights = randoms(&MIXED, Kind::Float, device);
        let mut optimizer = muon(Muon::default(), &weights, 0.02);
        optimizer.set_clip_norm(Some(0.5)).expect("set_clip_norm");
        let gradients = randoms(&MIXED, Kind::Float, device);
        step_with(&mut optimizer, &gradients);
        let norm = Reference::norm(&gradients);
        let ours = optimizer.grad_norm().expect("grad_norm").expect("a norm").double_value(&[]);
        assert!((ours - norm).abs() < 1e-5 * norm, "{ours}, not {norm}");
        let state = optimizer.state_dict().expect("state_dict");
        for (index, gradient) in gradients.iter().enumerate() {
            let (name, rest) = match gradient.dim() {
                2 => ("momentum_buffer", 0.05),
                _ => ("exp_avg", 0.1),
            };
            let expected = gradient * (rest * 0.5 / norm);
            assert_close(&state[&format!("{name}.w{index}")], &expected, 1e-5, 1e-8);
        }
    }
}

#[test]
fn a_resumed_run_of_muon_has_the_same_bits() {
    let _alone = serially();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("optimizer.safetensors");
    for device in devices() {
        for kind in super::updates::KINDS {
            let run = |is_interrupted: bool| {
                tch::manual_seed(77);
                let weights = randoms(&MIXED, kind, device);
                let build = |config: Muon, lr| {
                    let mut optimizer = muon(config, &weights, lr);
                    optimizer.split_matrices(|name, _| match name {
                        "w4" => vec![11, 22],
                        _ => vec![],
                    })?;
                    optimizer.no_weight_decay(|name, _| name == "w2" || name == "w1");
                    optimizer.set_clip_norm(Some(3.0))?;
                    Ok::<_, tch_extension::Error>(optimizer)
                };
                let mut optimizer = build(Muon::default(), 0.02).expect("an optimizer");
                optimizer.set_momentum(0.8).expect("set_momentum");
                for step in 0..6 {
                    if step == 3 && is_interrupted {
                        optimizer.save(&file).expect("saved");
                        let other =
                            Muon { weight_decay: 0.0, nesterov: false, ..Default::default() };
                        optimizer = build(other, 0.5).expect("an optimizer");
                        optimizer.load(&file).expect("loaded");
                    }
                    step_with(&mut optimizer, &randoms(&MIXED, kind, device));
                }
                bits(&weights)
            };
            assert!(run(true) == run(false), "{kind:?} on {device:?}");
        }
    }
}

/// A state as the Python snippet in the docs of `load_torch` writes it: of Muon, and then of AdamW.
#[test]
fn a_state_of_torchs_muon_goes_on() {
    let _alone = serially();
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("optimizer.safetensors");
    tch::manual_seed(78);
    let sizes: [&[i64]; 2] = [&[6, 9], &[5]];
    let weights = randoms(&sizes, Kind::Float, CPU);
    let resumed = copies(&weights);
    let mut optimizer = muon(Muon::default(), &weights, 0.02);
    step_with(&mut optimizer, &randoms(&sizes, Kind::Float, CPU));
    let state = optimizer.state_dict().expect("state_dict");
    let float = |name: &str| state[name].to_kind(Kind::Float);
    let tensors = BTreeMap::from([
        ("state.0.momentum_buffer".to_string(), float("momentum_buffer.w0")),
        ("state.1.exp_avg".to_string(), float("exp_avg.w1")),
        ("state.1.exp_avg_sq".to_string(), float("exp_avg_sq.w1")),
        ("state.1.step".to_string(), float("step.w1")),
    ]);
    save_tensors(&tensors, &file).expect("saved");
    for (mut to, from) in resumed.iter().map(Tensor::shallow_clone).zip(&weights) {
        to.copy_(from);
    }
    let mut other = muon(Muon::default(), &resumed, 0.02);
    other.load_torch(&file, &["w0", "w1"]).expect("loaded");
    let gradients = randoms(&sizes, Kind::Float, CPU);
    step_with(&mut optimizer, &gradients);
    step_with(&mut other, &gradients);
    assert_eq!(bits(&resumed), bits(&weights));
}

#[test]
fn what_muon_cannot_do_is_refused_by_name() {
    let _alone = serially();
    let weights = randoms(&[&[4, 6], &[3]], Kind::Float, CPU);
    let base = Muon::default();
    for (config, expected) in [
        (Muon { momentum: 1.0, ..base }, "momentum: expected 0 or more and below 1, got 1"),
        (
            Muon { weight_decay: -0.1, ..base },
            "weight_decay: expected a finite number, 0 or more, got -0.1",
        ),
        (Muon { ns_steps: 100, ..base }, "ns_steps: expected fewer than 100, got 100"),
        (Muon { eps: 0.0, ..base }, "eps: expected a finite number above 0, got 0"),
        (
            Muon { ns_coefficients: (1.0, f64::NAN, 0.0), ..base },
            "ns_coefficients: expected finite numbers, got (1.0, NaN, 0.0)",
        ),
        (
            Muon { adamw_lr_ratio: -1.0, ..base },
            "adamw_lr_ratio: expected a finite number, 0 or more, got -1",
        ),
        (
            Muon { adamw: AdamW::default().beta1(1.0), ..base },
            "beta1: expected 0 or more and below 1, got 1",
        ),
    ] {
        let message = text(config.build_of(named(&weights), 0.1));
        assert_eq!(message, format!("Muon::build: {expected}"));
    }

    let mut optimizer = muon(base, &weights, 0.1);
    let mut split = |rows: &[i64]| text(optimizer.split_matrices(|_, _| rows.to_vec()));
    let prefix = "FusedOptimizer::split_matrices: w0: expected";
    let adds_up = "positive numbers of rows that add up to 4, got";
    assert_eq!(split(&[1, 2]), format!("{prefix} {adds_up} [1, 2]"));
    assert_eq!(split(&[5, -1]), format!("{prefix} {adds_up} [5, -1]"));
    let most = i64::MAX; // Their sum would be 4 in 64 bits.
    assert_eq!(split(&[most, most, 6]), format!("{prefix} {adds_up} [{most}, {most}, 6]"));
    let turned = [normal(&[6, 4], Kind::Float, CPU).tr()];
    let mut other = muon(base, &turned, 0.1);
    assert_eq!(
        text(other.split_matrices(|_, _| vec![2, 2])),
        format!("{prefix} contiguous rows, got strides [1, 4]; make it contiguous")
    );
    let mut adamw = AdamW::default().build_of(named(&weights), 0.1).expect("an optimizer");
    assert_eq!(
        text(adamw.leave_to_adamw(|_, _| true)),
        "FusedOptimizer::leave_to_adamw: self: expected an optimizer that Muon has built, got AdamW"
    );

    // A gradient that does not fit, after one that does.
    let before = bits(&weights);
    let (good, bad) =
        (Tensor::ones([4, 6], (Kind::Float, CPU)), Tensor::ones([2], (Kind::Float, CPU)));
    let message = text(optimizer.step_with(&[Some(&good), Some(&bad)]));
    assert!(message.contains("the gradient of w1: expected the size [3]"), "{message}");
    assert_eq!(bits(&weights), before);
    optimizer.step_with(&[Some(&good), None]).expect("a step");
    assert_ne!(bits(&weights), before);
    let late = "expected a parameter without steps, got steps; call it right after build";
    assert_eq!(
        text(optimizer.leave_to_adamw(|_, _| true)),
        format!("FusedOptimizer::leave_to_adamw: w0: {late}")
    );
    // Another shape with as many values.
    let mut weight = weights[0].shallow_clone();
    optimizer.split_matrices(|_, _| vec![]).expect("nothing is split");
    weight.set_data(&weight.view([24]).copy());
    let before = bits(&weights);
    let flat = good.view([24]);
    let message = text(optimizer.step_with(&[Some(&flat), None]));
    assert_eq!(
        message,
        "FusedOptimizer::step: w0: expected two dimensions, as before, got shape [24]"
    );
    assert_eq!(bits(&weights), before);
}

#[test]
fn empty_matrices_and_zeros_are_left_alone() {
    let _alone = serially();
    for device in devices() {
        let weights = randoms(&[&[0, 4], &[3, 0], &[4, 5]], Kind::Float, device);
        let before = bits(&weights);
        let mut optimizer = muon(Muon { weight_decay: 0.0, ..Default::default() }, &weights, 0.1);
        let zeros: Vec<Tensor> = weights.iter().map(Tensor::zeros_like).collect();
        step_with(&mut optimizer, &zeros);
        assert_eq!(bits(&weights), before);
    }
}

/// An autocast region must not cast the products.
#[test]
fn steps_in_an_autocast_region_have_the_same_bits() {
    let _alone = serially();
    for device in devices() {
        let run = |casts: bool| {
            tch::manual_seed(79);
            let weights = randoms(&MIXED, Kind::Float, device);
            let mut optimizer = muon(Muon::default(), &weights, 0.02);
            let gradients = randoms(&MIXED, Kind::Float, device);
            let cast = || tch_extension::amp::Autocast::new(device, Kind::Half).expect("a region");
            let _region = casts.then(cast);
            step_with(&mut optimizer, &gradients);
            bits(&weights)
        };
        assert!(run(true) == run(false), "{device:?}");
    }
}

#[test]
fn cuda_replays_are_steps_of_muon() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_replays_are_steps_of_muon") else { return };
    for kind in [Kind::Float, Kind::BFloat16] {
        let run = |is_captured: bool| {
            tch::manual_seed(80);
            let leaves = leaves(&MIXED, kind, device);
            accumulate(&leaves, 1.0);
            let mut optimizer = muon(Muon::default(), &leaves, 0.02);
            optimizer.set_clip_norm(Some(2.0)).expect("set_clip_norm");
            optimizer.step().expect("a step");
            let graph = is_captured
                .then(|| Graph::capture(device, || optimizer.step()).expect("a capture").0);
            for step in 0..6 {
                for leaf in &leaves {
                    leaf.grad().copy_(&normal(&leaf.size(), kind, CPU));
                }
                optimizer.set_lr(0.02 / f64::from(step + 1)).expect("set_lr");
                optimizer.set_momentum(0.9 - 0.1 * f64::from(step)).expect("set_momentum");
                optimizer.set_clip_norm(Some(f64::from(step + 1))).expect("set_clip_norm");
                match &graph {
                    Some(graph) => graph.replay().expect("a replay"),
                    None => optimizer.step().expect("a step"),
                }
            }
            bits(&leaves)
        };
        assert!(run(true) == run(false), "{kind:?}");
    }
}
