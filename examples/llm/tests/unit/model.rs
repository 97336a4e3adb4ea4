//! What a model computes, and how many numbers it has.

use super::*;
use crate::family::{Llama, Member};
use crate::sample::tests::alone;
use tch::Kind;

fn config() -> ModelConfig {
    ModelConfig { vocabulary: 11, context: 8, layers: 2, heads: 2, dim: 8, ..Default::default() }
}

#[test]
fn parameters_are_counted_as_they_are() {
    let model = Model::zeros(&config(), Device::Cpu).unwrap();
    let numbers: usize = model.named_variables().iter().map(|(_, weight)| weight.numel()).sum();
    assert_eq!(numbers as i64, config().parameters());
}

#[test]
fn the_seed_decides_the_weights() {
    let _alone = alone();
    let weights = |seed| Model::new(&config(), Device::Cpu, seed).unwrap().named_variables();
    let (first, again, other) = (weights(1), weights(1), weights(2));
    assert!(first.iter().zip(&again).all(|(a, b)| a == b));
    assert!(first.iter().zip(&other).any(|(a, b)| a != b));
    let deviation = |name: &str| {
        let (_, weight) = first.iter().find(|(found, _)| found == name).unwrap();
        weight.std(true).double_value(&[])
    };
    assert!((deviation("h.0.mlp.c_fc.weight") - 0.02).abs() < 0.004);
    assert!((deviation("h.0.mlp.c_proj.weight") - 0.01).abs() < 0.002);
}

#[test]
fn tokens_one_by_one_give_the_logits_of_the_whole() {
    let _alone = alone();
    let _no_grad = tch::no_grad_guard();
    let model = Model::new(&config(), Device::Cpu, 3).unwrap();
    let tokens = Tensor::randint(11, [2, 8], (Kind::Int64, Device::Cpu));
    let mut caches = model.caches(8);
    for place in 0..8 {
        let one = model.next_logits(&tokens.narrow(1, place, 1), &mut caches).unwrap();
        let whole = tokens.narrow(1, 0, place + 1);
        let whole = model.next_logits(&whole, &mut model.caches(8)).unwrap();
        assert!(one.allclose(&whole, 1e-4, 1e-5, false), "at {place}");
    }
}

/// Rows have tokens at places of their own, as with prompts of different lengths.
#[test]
fn tokens_at_places_give_the_logits_of_their_rows() {
    let _no_grad = tch::no_grad_guard();
    let llama = crate::options::Size::LlamaMini.model(11);
    for config in [config(), ModelConfig { context: 8, layers: 2, ..llama }] {
        let model = Model::new(&config, Device::Cpu, 3).unwrap();
        let tokens = Tensor::randint(11, [2, 7], (Kind::Int64, Device::Cpu));
        let mut caches = model.caches(8);
        let _ = model.continued(&tokens.narrow(1, 0, 6), &mut caches).unwrap();
        // The second row's last tokens are padding.
        let places = [6_i64, 4];
        let of_row = |row: i64| tokens.narrow(0, row, 1).narrow(1, 0, places[row as usize] + 1);
        let last = [0, 1].map(|row| of_row(row).narrow(1, places[row as usize], 1));
        let (last, at) = (Tensor::cat(&last, 0), Tensor::from_slice(&places));
        let hidden = model.placed(&last, &at, &mut caches).unwrap();
        let found = model.logits(&hidden).unwrap();
        for row in 0..2 {
            let expected = model.next_logits(&of_row(row), &mut model.caches(8)).unwrap();
            let found = found.get(row);
            assert!(found.allclose(&expected, 1e-4, 1e-5, false), "row {row}");
        }
    }
}

/// Losses and gradients are near to those of the same rounded weights in `Float`.
#[test]
fn half_kinds_give_the_loss_and_gradients_of_float() {
    let _alone = alone();
    let of = |precision: Precision| {
        let mut model = Model::new(&config(), Device::Cpu, 3).unwrap();
        tch::no_grad(|| {
            for (_, mut weight) in model.named_variables() {
                weight.copy_(&weight.to_kind(Kind::BFloat16));
            }
        });
        model.set_precision(precision).unwrap();
        assert_eq!(model.set_precision(precision).is_err(), precision != Precision::F32, "twice");
        tch::manual_seed(5);
        let tokens = Tensor::randint(11, [2, 9], (Kind::Int64, Device::Cpu));
        let (inputs, targets) = (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
        let batch = [inputs.shallow_clone(), targets];
        let loss = model.loss(&batch, None, true, Reduction::Mean).unwrap();
        loss.backward();
        let mut variables: Vec<_> = model.variables.variables().into_iter().collect();
        variables.sort_by(|a, b| a.0.cmp(&b.0));
        let logits = tch::no_grad(|| model.next_logits(&inputs, &mut model.caches(8)).unwrap());
        let masters = model.masters();
        assert!(masters.iter().all(|(_, master)| master.kind() == Kind::Float));
        (loss.double_value(&[]), variables, logits.to_kind(Kind::Float), masters.len())
    };
    let expected = of(Precision::F32);
    for (precision, kind, masters) in [
        (Precision::Bf16, Kind::BFloat16, expected.1.len()),
        (Precision::Bf16Mixed, Kind::Float, 0),
        (Precision::Bf16True, Kind::BFloat16, 0),
    ] {
        let found = of(precision);
        assert_eq!((found.3, expected.3), (masters, 0));
        assert!((found.0 - expected.0).abs() < 2e-3, "{precision:?}: {} {}", found.0, expected.0);
        assert!(found.2.allclose(&expected.2, 2e-2, 2e-2, false), "{precision:?}");
        for ((name, variable), (_, expected)) in found.1.iter().zip(&expected.1) {
            assert_eq!((variable.kind(), variable.grad().kind()), (kind, kind), "{name}");
            let expected = expected.grad();
            let distance = (variable.grad().to_kind(Kind::Float) - &expected).norm();
            let share = distance.double_value(&[]) / expected.norm().double_value(&[]);
            assert!(share < 0.03, "{precision:?}: {name} is {share} away");
        }
    }
}

#[test]
fn the_loss_is_that_of_the_logits() {
    let _alone = alone();
    let model = Model::new(&config(), Device::Cpu, 3).unwrap();
    let tokens = Tensor::randint(11, [2, 9], (Kind::Int64, Device::Cpu));
    let (inputs, targets) = (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
    let batch = [inputs.shallow_clone(), targets.shallow_clone()];
    let loss = model.loss(&batch, None, true, Reduction::Mean).unwrap();
    let rows = model.tokens.f_forward(&inputs).unwrap();
    let hidden = model.hidden_of(rows, At::Start(0), true, None).unwrap();
    let logits = hidden.linear::<&Tensor>(&model.tokens.ws, None);
    let expected = logits.flatten(0, 1).cross_entropy_for_logits(&targets.flatten(0, 1));
    assert!(loss.allclose(&expected, 1e-5, 1e-6, false));
}

#[test]
fn sizes_that_do_not_fit_are_errors_that_name_the_option() {
    let refused =
        |config: ModelConfig| Model::zeros(&config, Device::Cpu).err().unwrap().to_string();
    assert!(refused(ModelConfig { heads: 3, ..config() }).contains("--heads 3"));
    assert!(refused(ModelConfig { dim: 0, ..config() }).contains("--dim 0"));
    assert!(refused(ModelConfig { dropout: 1.0, ..config() }).contains("--dropout 1.0"));
}

/// With normalised queries and keys, and frozen or rounded weights.
#[test]
fn layers_that_are_computed_again_give_the_same_bits() {
    let _alone = alone();
    let qwen = Llama {
        member: Member::Qwen3,
        kv_heads: 1,
        head_dim: 4,
        hidden: 12,
        eps: 1e-5,
        theta: 1e4,
        scaling: crate::family::Scaling::Default,
        tied: true,
        bias: false,
        positions: 8,
        window: None,
    };
    let tokens = Tensor::randint(11, [2, 9], (Kind::Int64, Device::Cpu));
    let (inputs, targets) = (tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8));
    for llama in [None, Some(qwen)] {
        for (how, precision) in [
            ("float", Precision::F32),
            ("autocast", Precision::Bf16Mixed),
            ("rounded", Precision::Bf16),
            ("adapted", Precision::Bf16True),
        ] {
            let config = ModelConfig { llama: llama.clone(), ..config() };
            let mut model = Model::new(&config, Device::Cpu, 3).unwrap();
            if how == "adapted" {
                model.adapt(&Lora::new(2, &config), 7).unwrap();
                let _no_grad = tch::no_grad_guard();
                for (_, mut factor) in model.trained().variables() {
                    let _ = factor.fill_(0.1);
                }
            }
            model.set_precision(precision).unwrap();
            let mut of = |recompute_layers| {
                model.config.recompute_layers = recompute_layers;
                let batch = [inputs.shallow_clone(), targets.shallow_clone()];
                let loss = model.loss(&batch, None, true, Reduction::Mean).unwrap();
                loss.backward();
                let mut all: Vec<_> = model.trained().variables().into_iter().collect();
                all.sort_by(|a, b| a.0.cmp(&b.0));
                let gradients = all.iter_mut().map(|(name, weight)| {
                    let gradient = weight.grad().copy();
                    weight.zero_grad();
                    (name.clone(), gradient)
                });
                (loss.double_value(&[]), gradients.collect::<Vec<_>>())
            };
            let (kept, again) = (of(false), of(true));
            assert_eq!(kept.0, again.0, "{how}");
            for ((name, expected), (_, found)) in kept.1.iter().zip(&again.1) {
                assert_eq!(found.kind(), expected.kind(), "{how}: {name}");
                assert_eq!(found, expected, "{how}: {name}");
            }
        }
    }
}
