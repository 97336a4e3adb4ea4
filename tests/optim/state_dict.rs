//! The optimizer's state in files.

use super::reference::{Reference, Rule};
use super::updates::{KINDS, assert_agree, build, rules};
use super::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tch_extension::nn::state_dict::{load_tensors, save_tensors};
use tch_extension::testing::devices;

type State = BTreeMap<String, Tensor>;
/// What is changed in a state, and what the error says then.
type Case<'a> = (&'a dyn Fn(&mut State), &'a str);

/// A folder that is removed afterwards, and a file in it.
fn place() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("optimizer.safetensors");
    (folder, file)
}

#[test]
fn a_resumed_run_has_the_same_bits() {
    let _alone = serially();
    let (_folder, file) = place();
    for device in devices() {
        for kind in KINDS {
            for rule in rules() {
                let run = |is_interrupted: bool| {
                    tch::manual_seed(51);
                    let leaves = leaves(&SIZES, kind, device);
                    let mut optimizer = build(rule, &leaves, 0.01);
                    optimizer.set_clip_norm(Some(3.0)).expect("set_clip_norm");
                    for step in 0..6 {
                        if step == 3 && is_interrupted {
                            optimizer.save(&file).expect("saved");
                            optimizer = build(rule, &leaves, 0.5);
                            optimizer.load(&file).expect("loaded");
                            optimizer.set_clip_norm(Some(3.0)).expect("set_clip_norm");
                        }
                        // The last parameter gets its first gradient after the interruption.
                        let some = if step < 4 { SIZES.len() - 1 } else { SIZES.len() };
                        accumulate(&leaves[..some], 1.0);
                        optimizer.step().expect("step");
                    }
                    (bits(&leaves), optimizer.lr_of_group(0))
                };
                assert!(run(true) == run(false), "{kind:?} on {device:?}");
            }
        }
    }
}

#[test]
fn names_and_numbers_are_readable() {
    let _alone = serially();
    for device in devices() {
        let vs = VarStore::new(device);
        let w = vs.root().ones("w", &[2]);
        let h = vs.root().ones("h", &[2]);
        let late = vs.root().set_group(3).ones("late", &[1]);
        h.shallow_clone().set_data(&h.to_kind(Kind::Half));
        let mut optimizer = AdamW::default().build(&vs, 0.25).expect("an optimizer");
        optimizer.no_weight_decay(|name, _| name == "h");
        let loss = w.sum(Kind::Float) + h.sum(Kind::Float);
        optimizer.backward_step(&loss).expect("backward_step");
        optimizer.backward_step(&(w.sum(Kind::Float) + h.sum(Kind::Float))).expect("backward_step");
        let state = optimizer.state_dict().expect("state_dict");
        let names: Vec<&str> = state.keys().map(String::as_str).collect();
        let group = |id: usize| {
            ["beta1", "beta2", "eps", "lr", "maximize", "weight_decay"]
                .map(|word| format!("group.{id}.{word}"))
        };
        let expected: Vec<String> = ["exp_avg.h", "exp_avg.w", "exp_avg_sq.h", "exp_avg_sq.w"]
            .map(String::from)
            .into_iter()
            .chain(group(0))
            .chain(group(3))
            .chain(["master.h", "step.h", "step.late", "step.w"].map(String::from))
            .collect();
        assert_eq!(names, expected);
        let number = |name: &str| state[name].double_value(&[]);
        assert_eq!((number("group.0.lr"), number("group.0.weight_decay")), (0.25, 0.01));
        assert_eq!((number("step.w"), number("step.late")), (2.0, 0.0));
        assert_eq!(state["exp_avg.w"].device(), device);
        drop(late);
        // They are copies.
        let before = bits(&state.values().map(Tensor::shallow_clone).collect::<Vec<_>>());
        optimizer.backward_step(&w.sum(Kind::Float)).expect("backward_step");
        assert_eq!(bits(&state.values().map(Tensor::shallow_clone).collect::<Vec<_>>()), before);
    }
}

#[test]
fn states_that_do_not_fit_change_nothing() {
    let _alone = serially();
    for device in devices() {
        tch::manual_seed(52);
        let leaves = leaves(&[&[4], &[2, 3]], Kind::Float, device);
        let mut optimizer = build(rules()[0], &leaves, 0.01);
        accumulate(&leaves, 1.0);
        optimizer.step().expect("step");
        let good = optimizer.state_dict().expect("state_dict");
        let before = bits(&good.values().map(Tensor::shallow_clone).collect::<Vec<_>>());
        let changed = |change: &dyn Fn(&mut State)| {
            let mut state: State =
                good.iter().map(|(name, tensor)| (name.clone(), tensor.copy())).collect();
            change(&mut state);
            state
        };
        let ones = |size: &[i64]| Tensor::ones(size, (Kind::Float, device));
        let cases: [Case<'_>; 7] = [
            (&|state| drop(state.remove("exp_avg_sq.w1")), "no exp_avg_sq.w1"),
            (&|state| drop(state.remove("step.w0")), "no step.w0"),
            (&|state| drop(state.remove("group.0.lr")), "no group.0.lr"),
            (
                &|state| drop(state.insert("exp_avg.w2".into(), ones(&[1]))),
                "the unexpected exp_avg.w2",
            ),
            (
                &|state| drop(state.insert("exp_avg.w1".into(), ones(&[3, 2]))),
                "exp_avg.w1 of shape [3, 2] and kind Float",
            ),
            (
                &|state| drop(state.insert("step.w1".into(), ones(&[]) * -1.0)),
                "step.w1 of shape [] and kind Float",
            ),
            (
                &|state| drop(state.insert("group.0.lr".into(), ones(&[]) * f64::NAN)),
                "group.0.lr with NaN instead of a finite number, 0 or more",
            ),
        ];
        for (change, expected) in cases {
            let message = text(optimizer.load_state_dict(&changed(change)));
            assert_eq!(
                message,
                format!(
                    "FusedOptimizer::load_state_dict: expected the state of this optimizer's parameters, got {expected}; \
                     nothing was loaded"
                )
            );
            let now = optimizer.state_dict().expect("state_dict");
            assert!(bits(&now.values().map(Tensor::shallow_clone).collect::<Vec<_>>()) == before);
        }
        let mut sgd = build(rules()[4], &leaves, 0.01);
        let message = text(sgd.load_state_dict(&good));
        assert!(
            message.contains("no ") && message.contains("the unexpected exp_avg.w0"),
            "{message}"
        );
        optimizer.load_state_dict(&good).expect("the state fits");
    }
}

#[test]
fn files_that_are_none_are_refused() {
    let _alone = serially();
    let (_folder, file) = place();
    let mut optimizer = build(rules()[0], &[Tensor::ones([2], (Kind::Float, CPU))], 0.1);
    let message = text(optimizer.load(&file));
    assert!(
        message.starts_with("FusedOptimizer::load: ") && message.contains("No such file"),
        "{message}"
    );
    std::fs::write(&file, b"no safetensors").expect("written");
    let message = text(optimizer.load_torch(&file, &["w0"]));
    assert!(message.contains("expected a complete safetensors file"), "{message}");
    let message = text(optimizer.save(file.parent().expect("a folder")));
    assert!(
        message.starts_with("FusedOptimizer::save: ") && message.contains("a folder"),
        "{message}"
    );
}

/// A state as the Python snippet in the docs of `load_torch` writes it.
fn as_torch(reference: &Reference, order: &[usize]) -> BTreeMap<String, Tensor> {
    let mut tensors = BTreeMap::new();
    for (index, &place) in order.iter().enumerate() {
        let float = |tensor: &Tensor| tensor.to_kind(Kind::Float).to_device(CPU);
        let key = |part: &str| format!("state.{index}.{part}");
        let first = reference.first[place].as_ref();
        match reference.rule {
            Rule::AdamW(_) => {
                let step = Tensor::from(f64::from(reference.steps[place])).to_kind(Kind::Float);
                tensors.insert(key("step"), step);
                tensors.insert(key("exp_avg"), float(first.expect("a moment")));
                let second = reference.second[place].as_ref().expect("a moment");
                tensors.insert(key("exp_avg_sq"), float(second));
                let largest = reference.largest[place].as_ref();
                tensors.extend(largest.map(|largest| (key("max_exp_avg_sq"), float(largest))));
            }
            Rule::Sgd(_) => {
                let buffer = first.map(|first| (key("momentum_buffer"), float(first)));
                tensors.extend(buffer);
            }
        }
    }
    tensors
}

#[test]
fn a_state_of_torch_goes_on() {
    let _alone = serially();
    let (_folder, file) = place();
    for device in devices() {
        for rule in rules() {
            tch::manual_seed(53);
            let weights: Vec<Tensor> = [vec![5], vec![2, 3], vec![]]
                .iter()
                .map(|size| normal(size, Kind::Double, device))
                .collect();
            let mut reference = Reference::new(rule, 0.01, &weights);
            let step = |reference: &mut Reference| {
                let gradients: Vec<Tensor> =
                    reference.weights.iter().map(Tensor::randn_like).collect();
                reference.step(&gradients, None);
                gradients
            };
            (0..4).for_each(|_| drop(step(&mut reference)));
            let order = [2, 0, 1];
            save_tensors(&as_torch(&reference, &order), &file).expect("saved");
            let leaves: Vec<Tensor> =
                reference.weights.iter().map(|w| w.to_kind(Kind::Float)).collect();
            let mut optimizer = build(rule, &leaves, 0.01);
            optimizer.load_torch(&file, &["w2", "w0", "w1"]).expect("loaded");
            for _ in 0..3 {
                let gradients: Vec<Tensor> =
                    step(&mut reference).iter().map(|g| g.to_kind(Kind::Float)).collect();
                let given: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
                optimizer.step_with(&given).expect("a step");
            }
            assert_agree(&leaves, &reference, Kind::Float);

            let message = text(optimizer.load_torch(&file, &["w2", "w0"]));
            assert!(message.contains("no w1"), "{message}");
        }
    }
}

#[test]
fn tensors_come_back_from_a_file() {
    let _alone = serially();
    let (_folder, file) = place();
    let tensors = BTreeMap::from([
        ("a".to_string(), normal(&[2, 3], Kind::Float, CPU).transpose(0, 1)),
        ("b".to_string(), normal(&[], Kind::BFloat16, CPU)),
        ("c".to_string(), Tensor::from_slice(&[1_i64, 2])),
    ]);
    save_tensors(&tensors, &file).expect("saved");
    let loaded = load_tensors(&file).expect("loaded");
    assert!(loaded.keys().eq(tensors.keys()));
    for (name, tensor) in &tensors {
        assert_eq!((loaded[name].kind(), loaded[name].size()), (tensor.kind(), tensor.size()));
        assert!(loaded[name].equal(tensor), "{name}");
    }
    let none = text(load_tensors(file.with_extension("none")));
    assert!(none.starts_with("state_dict::load_tensors: "), "{none}");
}

/// What `build` takes can be saved and loaded; what it refuses is refused.
#[test]
fn numbers_of_a_file_are_those_of_build() {
    let _alone = serially();
    let leaves = leaves(&[&[3]], Kind::Float, CPU);
    let sgd = Sgd { momentum: 0.9, dampening: -0.5, ..Default::default() };
    let mut optimizer = sgd.build_of(named(&leaves), 0.1).expect("an optimizer");
    let state = optimizer.state_dict().expect("state_dict");
    optimizer.load_state_dict(&state).expect("load_state_dict");
    let mut optimizer = AdamW::default().build_of(named(&leaves), 0.1).expect("an optimizer");
    let mut state = optimizer.state_dict().expect("state_dict");
    state.insert("group.0.beta1".to_string(), Tensor::from(1.0));
    let error = text(optimizer.load_state_dict(&state));
    assert!(error.contains("group.0.beta1 with 1 instead of 0 or more and below 1"), "{error}");
    state.insert("group.0.beta1".to_string(), Tensor::from_slice(&[0.5, 0.5]));
    let error = text(optimizer.load_state_dict(&state));
    assert!(error.contains("group.0.beta1 that is no number"), "{error}");
}

/// Each number is in its range, but they do not fit together.
#[test]
fn numbers_that_build_refuses_together_are_refused_everywhere() {
    let _alone = serially();
    let leaves = leaves(&[&[3]], Kind::Float, CPU);
    let sgd = Sgd { momentum: 0.9, nesterov: true, ..Default::default() };
    let mut optimizer = sgd.build_of(named(&leaves), 0.1).expect("an optimizer");
    let good = optimizer.state_dict().expect("state_dict");
    let loaded = |optimizer: &mut FusedOptimizer, name: &str, number: f64| {
        let mut state: State =
            good.iter().map(|(name, value)| (name.clone(), value.copy())).collect();
        state.insert(format!("group.0.{name}"), Tensor::from(number));
        text(optimizer.load_state_dict(&state))
    };
    for (name, number, expected) in [
        (
            "dampening",
            0.5,
            "with momentum 0.9 and dampening 0.5 instead of a momentum and no dampening",
        ),
        ("momentum", 0.0, "with momentum 0 and dampening 0 instead of a momentum and no dampening"),
        ("nesterov", 0.5, "with 0.5 instead of 0 or 1"),
    ] {
        let error = loaded(&mut optimizer, name, number);
        assert!(error.contains(&format!("got group.0.nesterov {expected}; nothing")), "{error}");
    }
    let error = text(optimizer.set_momentum(0.0));
    assert_eq!(
        error,
        "FusedOptimizer::set_momentum: nesterov: expected a momentum and no dampening, got momentum 0 and dampening 0"
    );
    assert_eq!(
        optimizer.state_dict().expect("state_dict")["group.0.momentum"].double_value(&[]),
        0.9
    );
}

/// The algorithm is no number: the state itself says whether it fits.
#[test]
fn states_with_amsgrad_and_without_do_not_fit_each_other() {
    let _alone = serially();
    let leaves = leaves(&[&[3]], Kind::Float, CPU);
    let stepped = |amsgrad: bool| {
        let config = AdamW::default().amsgrad(amsgrad);
        let mut optimizer = config.build_of(named(&leaves), 0.1).expect("an optimizer");
        accumulate(&leaves, 1.0);
        optimizer.step().expect("step");
        optimizer
    };
    let (mut plain, mut amsgrad) = (stepped(false), stepped(true));
    let error = text(amsgrad.load_state_dict(&plain.state_dict().expect("state_dict")));
    assert!(error.contains("got no max_exp_avg_sq.w0; nothing"), "{error}");
    let error = text(plain.load_state_dict(&amsgrad.state_dict().expect("state_dict")));
    assert!(error.contains("got the unexpected max_exp_avg_sq.w0; nothing"), "{error}");
}
