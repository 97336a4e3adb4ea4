//! The values of many steps.

use super::reference::{Reference, Rule};
use super::*;
use tch::nn::{self, Module};
use tch_extension::testing::{assert_close, devices};

pub const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// All variants of the rules.
pub fn rules() -> Vec<Rule> {
    let sgd = |momentum, dampening, wd, nesterov| {
        Rule::Sgd(Sgd { momentum, dampening, wd, nesterov, maximize: false })
    };
    let other = AdamW { beta1: 0.8, beta2: 0.95, wd: 0.3, eps: 1e-4, ..Default::default() };
    vec![
        Rule::AdamW(AdamW::default()),
        Rule::AdamW(other),
        sgd(0.0, 0.0, 0.0, false),
        sgd(0.0, 0.0, 0.1, false),
        sgd(0.9, 0.0, 0.1, false),
        sgd(0.9, 0.3, 0.0, false),
        sgd(0.7, 0.0, 0.1, true),
        // Squares are soon forgotten, so that the largest are not the last.
        Rule::AdamW(AdamW { beta2: 0.5, ..other }.amsgrad(true)),
        Rule::AdamW(other.amsgrad(true).maximize(true)),
        Rule::AdamW(other.maximize(true)),
        Rule::Sgd(Sgd { momentum: 0.9, wd: 0.1, maximize: true, ..Default::default() }),
    ]
}

pub fn build(rule: Rule, tensors: &[Tensor], lr: f64) -> FusedOptimizer {
    let tensors = named(tensors);
    match rule {
        Rule::AdamW(config) => config.build_of(tensors, lr),
        Rule::Sgd(config) => config.build_of(tensors, lr),
    }
    .expect("an optimizer")
}

/// How far the weights may be from those of the reference after several steps: a few roundings of
/// the kind in which they are computed, and one to their own kind.
fn tolerance(kind: Kind) -> (f64, f64) {
    match kind {
        Kind::Double => (1e-13, 1e-14),
        Kind::Float => (2e-6, 2e-6),
        Kind::Half => (5e-4, 2e-6),
        _ => (4e-3, 2e-6),
    }
}

pub fn assert_agree(ours: &[Tensor], reference: &Reference, kind: Kind) {
    let (rtol, atol) = tolerance(kind);
    for (ours, expected) in ours.iter().zip(&reference.weights) {
        assert_close(&ours.detach().to_kind(Kind::Double), expected, rtol, atol);
    }
}

#[test]
fn steps_agree_with_torchs_formulas_in_every_kind() {
    let _alone = serially();
    tch::manual_seed(1);
    for device in devices() {
        for kind in KINDS {
            for rule in rules() {
                let leaves = leaves(&SIZES, kind, device);
                let mut reference = Reference::new(rule, 0.01, &leaves);
                let mut optimizer = build(rule, &leaves, 0.01);
                for _ in 0..10 {
                    accumulate(&leaves, 1.0);
                    reference.step(&gradients(&leaves), None);
                    optimizer.step().expect("step");
                }
                assert_agree(&leaves, &reference, kind);
            }
        }
    }
}

#[test]
fn parameters_without_gradients_are_skipped_and_count_their_own_steps() {
    let _alone = serially();
    tch::manual_seed(2);
    for device in devices() {
        for rule in rules() {
            let leaves = leaves(&[&[5], &[300], &[7, 7]], Kind::Double, device);
            let mut reference = Reference::new(rule, 0.02, &leaves);
            let mut optimizer = build(rule, &leaves, 0.02);
            for step in 0..9 {
                optimizer.zero_grad().expect("zero_grad");
                assert!(leaves.iter().all(|leaf| !leaf.grad().defined()));
                accumulate(&leaves[..=(step % 3)], 1.0);
                reference.step(&gradients(&leaves), None);
                optimizer.step().expect("step");
            }
            assert_agree(&leaves, &reference, Kind::Double);
        }
    }
}

#[test]
fn gradients_may_be_given_in_float_and_weights_need_no_masters() {
    let _alone = serially();
    tch::manual_seed(3);
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            for has_masters in [true, false] {
                for rule in rules() {
                    let weights: Vec<Tensor> =
                        SIZES.iter().map(|size| normal(size, kind, device)).collect();
                    let mut optimizer = build(rule, &weights, 0.01);
                    optimizer.set_master_weights(has_masters).expect("set_master_weights");
                    let mut reference = Reference::new(rule, 0.01, &weights);
                    for _ in 0..3 {
                        let gradients: Vec<Tensor> =
                            SIZES.iter().map(|size| normal(size, Kind::Float, device)).collect();
                        reference.step(&gradients, None);
                        let given: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
                        optimizer.step_with(&given).expect("a step");
                        if !has_masters {
                            // Each step rounds the weights.
                            for weight in &mut reference.weights {
                                *weight = weight.to_kind(kind).to_kind(Kind::Double);
                            }
                        }
                    }
                    for (ours, expected) in weights.iter().zip(&reference.weights) {
                        // Without masters a rounding may go the other way each time.
                        let digits = if has_masters { 1.0 } else { 3.0 };
                        let rtol = digits * if kind == Kind::Half { 5e-4 } else { 4e-3 };
                        assert_close(&ours.to_kind(Kind::Double), expected, rtol, 1e-5);
                    }
                }
            }
        }
    }
}

#[test]
fn master_weights_keep_steps_that_the_parameter_cannot_show() {
    let _alone = serially();
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            let moved = |has_masters| {
                let w = Tensor::ones([16], (kind, device));
                let mut optimizer = build(rules()[2], &[w.shallow_clone()], 1e-4);
                optimizer.set_master_weights(has_masters).expect("set_master_weights");
                let gradient = Tensor::ones([16], (kind, device));
                for _ in 0..1000 {
                    optimizer.step_with(&[Some(&gradient)]).expect("a step");
                }
                w.to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
            };
            assert!((moved(true) - 0.9).abs() < 4e-3, "{kind:?}");
            assert_eq!(moved(false), 1.0, "{kind:?}: each step is less than half of a digit");
        }
    }
}

#[test]
fn views_that_begin_anywhere_and_strides_are_right() {
    let _alone = serially();
    tch::manual_seed(4);
    for device in devices() {
        for kind in KINDS {
            for rule in [rules()[1], rules()[6]] {
                let base = normal(&[4000], kind, device);
                let before = base.copy();
                let transposed = normal(&[30, 20], kind, device).transpose(0, 1);
                let channels_last = normal(&[2, 5, 6, 3], kind, device).permute([0, 3, 1, 2]);
                let weights = [
                    base.narrow(0, 1, 999),
                    base.narrow(0, 1003, 1),
                    base.narrow(0, 1010, 2048),
                    transposed.shallow_clone(),
                    channels_last.shallow_clone(),
                ];
                let mut optimizer = build(rule, &weights, 0.01);
                let mut reference = Reference::new(rule, 0.01, &weights);
                for _ in 0..3 {
                    let odd = normal(&[3000], kind, device);
                    let gradients = [
                        odd.narrow(0, 3, 999),
                        odd.narrow(0, 1, 1),
                        odd.narrow(0, 7, 2048),
                        normal(&[20, 30], kind, device), // another order than the parameter's
                        normal(&[2, 5, 6, 3], kind, device).permute([0, 3, 1, 2]),
                    ];
                    reference.step(&gradients, None);
                    let given: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
                    optimizer.step_with(&given).expect("a step");
                }
                assert_agree(&weights, &reference, kind);
                // What lies between the views is as before.
                for (at, len) in [(0, 1), (1000, 3), (1004, 6), (3058, 942)] {
                    assert!(base.narrow(0, at, len).equal(&before.narrow(0, at, len)), "{at}");
                }
            }
        }
    }
}

#[test]
fn many_and_few_parameters_are_right() {
    let _alone = serially();
    tch::manual_seed(5);
    for device in devices() {
        // More than fit into one launch. At the end, there may be a launch without values.
        for (count, empty) in
            [(43, 0), (44, 0), (45, 0), (367, 0), (368, 0), (369, 0), (368, 3), (0, 400), (800, 0)]
        {
            let sizes: Vec<Vec<i64>> = (0..count).map(|index| vec![index % 5]).collect();
            let sizes: Vec<Vec<i64>> = sizes.into_iter().chain(vec![vec![0]; empty]).collect();
            let sizes: Vec<&[i64]> = sizes.iter().map(Vec::as_slice).collect();
            let leaves = leaves(&sizes, Kind::Double, device);
            let rule = rules()[0];
            let mut optimizer = build(rule, &leaves, 0.01);
            let mut reference = Reference::new(rule, 0.01, &leaves);
            for max_norm in [None, Some(1.0)] {
                optimizer.set_clip_norm(max_norm).expect("set_clip_norm");
                accumulate(&leaves, 1.0);
                reference.step(&gradients(&leaves), max_norm);
                optimizer.step().expect("step");
            }
            assert_agree(&leaves, &reference, Kind::Double);
        }
    }
}

#[test]
fn several_devices_are_one_step() {
    let _alone = serially();
    tch::manual_seed(6);
    let devices = devices();
    for rule in [rules()[0], rules()[4]] {
        let leaves: Vec<Tensor> = (0..6)
            .map(|index| {
                normal(&[100 + index], Kind::Float, devices[index as usize % devices.len()])
            })
            .map(|tensor| tensor.set_requires_grad(true))
            .collect();
        let mut optimizer = build(rule, &leaves, 0.01);
        let on_cpu: Vec<Tensor> = leaves.iter().map(|leaf| leaf.detach().to_device(CPU)).collect();
        let mut reference = Reference::new(rule, 0.01, &on_cpu);
        for max_norm in [None, Some(0.5)] {
            optimizer.set_clip_norm(max_norm).expect("set_clip_norm");
            accumulate(&leaves, 1.0);
            let gradients: Vec<Tensor> =
                leaves.iter().map(|leaf| leaf.grad().to_device(CPU)).collect();
            reference.step(&gradients, max_norm);
            optimizer.step().expect("step");
        }
        for (ours, expected) in leaves.iter().zip(&reference.weights) {
            let ours = ours.detach().to_device(CPU).to_kind(Kind::Double);
            assert_close(&ours, expected, 2e-6, 2e-6);
        }
    }
}

#[test]
fn equal_values_give_equal_bits() {
    let _alone = serially();
    for device in devices() {
        for kind in KINDS {
            for rule in rules() {
                let run = || {
                    tch::manual_seed(7);
                    let leaves = leaves(&SIZES, kind, device);
                    let mut optimizer = build(rule, &leaves, 0.01);
                    optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
                    for _ in 0..3 {
                        accumulate(&leaves, 1.0);
                        optimizer.step().expect("step");
                    }
                    bits(&leaves)
                };
                let first = run();
                assert!((0..3).all(|_| run() == first), "{kind:?} on {device:?}");
            }
        }
    }
}

/// One changed line must change numbers by rounding only.
/// The results of tch's optimizers and of ours.
trait Done {
    fn done(self);
}

impl Done for () {
    fn done(self) {}
}

impl Done for tch_extension::Result<()> {
    fn done(self) {
        self.expect("no error");
    }
}

#[test]
fn training_is_tchs_training() {
    let _alone = serially();
    for device in devices() {
        let model = || {
            tch::manual_seed(8);
            let vs = nn::VarStore::new(device);
            let first = nn::linear(vs.root() / "first", 6, 16, Default::default());
            let path = (vs.root() / "last").set_group(2);
            let last = nn::linear(path, 16, 1, Default::default());
            (vs, first, last)
        };
        let x = normal(&[32, 6], Kind::Float, device);
        macro_rules! train {
            ($config:expr, $has_momentum:expr, $trait:path) => {{
                use $trait as _;
                let (vs, first, last) = model();
                let mut optimizer = $config.build(&vs, 0.02).expect("an optimizer");
                optimizer.set_lr_group(2, 0.01).done();
                optimizer.set_weight_decay_group(2, 0.2).done();
                let mut losses = Vec::new();
                for step in 0..30 {
                    let loss = (last.forward(&first.forward(&x).tanh())
                        - x.sum_dim_intlist(1, true, Kind::Float))
                    .square()
                    .mean(Kind::Float);
                    losses.push(loss.double_value(&[]));
                    match step % 3 {
                        0 => optimizer.backward_step(&loss).done(),
                        1 => optimizer.backward_step_clip(&loss, 0.1).done(),
                        _ => optimizer.backward_step_clip_norm(&loss, 0.5).done(),
                    }
                    if step == 10 {
                        optimizer.set_lr(0.005).done();
                        optimizer.set_momentum(0.8).done();
                        optimizer.set_weight_decay(0.0).done();
                    }
                    // For AdamW, tch 0.24 sets it and panics.
                    if step == 15 && $has_momentum {
                        optimizer.set_momentum_group(2, 0.5).done();
                    }
                }
                losses
            }};
        }
        let ours = train!(AdamW::default(), false, tch_extension::optim::OptimizerConfig);
        let theirs = train!(nn::AdamW::default(), false, nn::OptimizerConfig);
        let amsgrad = (
            train!(
                AdamW::default().beta2(0.6).amsgrad(true),
                false,
                tch_extension::optim::OptimizerConfig
            ),
            train!(nn::AdamW::default().beta2(0.6).amsgrad(true), false, nn::OptimizerConfig),
        );
        let sgd = (
            train!(
                Sgd { momentum: 0.9, wd: 0.1, nesterov: true, ..Default::default() },
                true,
                tch_extension::optim::OptimizerConfig
            ),
            train!(
                nn::Sgd { momentum: 0.9, dampening: 0.0, wd: 0.1, nesterov: true },
                true,
                nn::OptimizerConfig
            ),
        );
        assert_ne!(ours, amsgrad.0, "AMSGrad is another algorithm");
        for (ours, theirs) in [(ours, theirs), amsgrad, sgd] {
            assert!(ours[29] < 0.5 * ours[0], "it trains: {ours:?}");
            for (step, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
                assert!((ours / theirs - 1.0).abs() < 1e-4, "step {step}: {ours} and {theirs}");
            }
        }
    }
}

#[test]
fn versions_grow_and_history_does_not() {
    let _alone = serially();
    for device in devices() {
        let w = Tensor::ones([4], (Kind::Float, device)).set_requires_grad(true);
        let mut optimizer = build(rules()[0], &[w.shallow_clone()], 0.1);
        let y = (&w * &w).sum(Kind::Float);
        accumulate(&[w.shallow_clone()], 1.0);
        optimizer.step().expect("step");
        let error = y.f_backward().expect_err("w was saved before the step").to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
        assert!(w.is_leaf() && w.requires_grad());
    }
}

#[test]
fn variables_that_join_later_are_updated() {
    let _alone = serially();
    for device in devices() {
        let vs = VarStore::new(device);
        let first = vs.root().ones("first", &[3]);
        let mut optimizer = Sgd::default().build(&vs, 0.5).expect("an optimizer");
        let (first, second) = (first, vs.root().ones("second", &[2]));
        let loss = first.sum(Kind::Float) + second.sum(Kind::Float);
        optimizer.backward_step(&loss).expect("backward_step");
        assert_eq!(Vec::<f32>::try_from(&first).expect("values"), [0.5; 3]);
        assert_eq!(Vec::<f32>::try_from(&second).expect("values"), [0.5; 2]);
        assert_eq!(optimizer.names().collect::<Vec<_>>(), ["first", "second"]);
        assert_eq!(optimizer.trainable_variables().len(), 2);
    }
}

#[test]
fn ten_thousand_steps_take_no_more_memory() {
    let _alone = serially();
    let resident = || {
        let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
        let line = status.lines().find(|line| line.starts_with("VmRSS")).expect("a size");
        line.split_whitespace().nth(1).expect("a number").parse::<i64>().expect("a number")
    };
    for device in devices() {
        let leaves = leaves(&[&[10], &[3, 3]], Kind::Float, device);
        let mut optimizer = build(rules()[0], &leaves, 1e-3);
        optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
        accumulate(&leaves, 1.0);
        let mut run = |steps| {
            for step in 0..steps {
                optimizer.set_lr(1e-3 / f64::from(step + 1)).expect("set_lr");
                optimizer.step().expect("step");
            }
        };
        run(1000);
        let before = resident();
        run(10_000);
        let grown = resident() - before;
        assert!(grown < 4096, "{grown} KiB more on {device:?}");
    }
}
