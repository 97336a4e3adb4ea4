//! Parameter groups.

use super::reference::{Reference, Rule};
use super::updates::assert_agree;
use super::*;
use tch_extension::testing::devices;

/// Two parameters in each of the groups 0, 1 and 3, and the references of the groups.
fn store(device: Device) -> (VarStore, Vec<Tensor>) {
    tch::manual_seed(21);
    let vs = VarStore::new(device);
    let mut tensors = Vec::new();
    for group in [0, 1, 3] {
        let path = (vs.root() / group).set_group(group);
        for (name, size) in [("weight", vec![3, 40]), ("bias", vec![3])] {
            tensors.push(path.var_copy(name, &normal(&size, Kind::Float, device)));
        }
    }
    (vs, tensors)
}

#[test]
fn groups_have_their_own_numbers() {
    let _alone = serially();
    for device in devices() {
        let (vs, tensors) = store(device);
        let config = AdamW::default();
        let mut optimizer = config.build(&vs, 0.01).expect("an optimizer");
        optimizer.set_lr_group(1, 0.05).expect("set_lr_group");
        optimizer.set_weight_decay_group(3, 0.4).expect("set_weight_decay_group");
        optimizer.set_betas_group(3, 0.5, 0.6).expect("set_betas_group");
        let groups = [
            (0.01, config),
            (0.05, config),
            (0.01, AdamW { wd: 0.4, beta1: 0.5, beta2: 0.6, ..config }),
        ];
        let pairs: Vec<&[Tensor]> = tensors.chunks(2).collect();
        let mut references: Vec<Reference> = groups
            .iter()
            .zip(&pairs)
            .map(|((lr, config), pair)| Reference::new(Rule::AdamW(*config), *lr, pair))
            .collect();
        let run = |optimizer: &mut FusedOptimizer, references: &mut [Reference]| {
            for _ in 0..3 {
                accumulate(&tensors, 1.0);
                for (reference, pair) in references.iter_mut().zip(&pairs) {
                    reference.step(&gradients(pair), None);
                }
                optimizer.step().expect("step");
            }
            for (reference, pair) in references.iter().zip(&pairs) {
                assert_agree(pair, reference, Kind::Float);
            }
        };
        run(&mut optimizer, &mut references);
        assert_eq!(optimizer.lr_of_group(1), Some(0.05));
        assert_eq!(optimizer.lr_of_group(2), None);

        optimizer.set_lr(0.002).expect("set_lr");
        optimizer.set_weight_decay(0.1).expect("set_weight_decay");
        optimizer.set_momentum(0.7).expect("set_momentum");
        for reference in &mut references {
            reference.lr = 0.002;
            if let Rule::AdamW(config) = &mut reference.rule {
                (config.wd, config.beta1) = (0.1, 0.7);
            }
        }
        run(&mut optimizer, &mut references);
        assert_eq!(optimizer.lr_of_group(1), Some(0.002));
    }
}

#[test]
fn biases_can_be_exempt_from_the_weight_decay_in_one_line() {
    let _alone = serially();
    for device in devices() {
        let (vs, tensors) = store(device);
        let mut optimizer = Sgd { wd: 0.5, ..Default::default() }.build(&vs, 0.1).expect("built");
        optimizer.no_weight_decay(|name, _| name.ends_with("bias"));
        optimizer.set_lr_group(1, 0.2).expect("set_lr_group");
        let run = |optimizer: &mut FusedOptimizer| {
            let before = copies(&tensors);
            for tensor in &tensors {
                tensor.shallow_clone().zero_grad();
                (tensor * 0.0).sum(Kind::Float).backward();
            }
            optimizer.step().expect("step");
            let kept = |(now, before): (&Tensor, &Tensor)| {
                (now.detach() / before).mean(Kind::Float).double_value(&[])
            };
            tensors.iter().zip(&before).map(kept).collect::<Vec<_>>()
        };
        let close = |kept: Vec<f64>, expected: [f64; 6]| {
            for (kept, expected) in kept.iter().zip(expected) {
                assert!((kept - expected).abs() < 1e-6, "{kept} instead of {expected}");
            }
        };
        close(run(&mut optimizer), [0.95, 1.0, 0.9, 1.0, 0.95, 1.0]);
        // An exempt parameter stays so, and follows its group otherwise.
        optimizer.set_weight_decay(1.0).expect("set_weight_decay");
        optimizer.set_weight_decay_group(3, 2.0).expect("set_weight_decay_group");
        optimizer.set_lr(0.05).expect("set_lr");
        close(run(&mut optimizer), [0.95, 1.0, 0.95, 1.0, 0.9, 1.0]);
    }
}

#[test]
fn a_new_variable_gets_the_numbers_of_its_group() {
    let _alone = serially();
    for device in devices() {
        let (vs, _) = store(device);
        let mut optimizer = Sgd::default().build(&vs, 0.1).expect("an optimizer");
        optimizer.set_lr(0.25).expect("set_lr");
        optimizer.set_lr_group(1, 0.5).expect("set_lr_group");
        let mut late = Vec::new();
        for group in [0, 1, 7] {
            let path = (vs.root() / "late").set_group(group);
            late.push(path.ones(&format!("w{group}"), &[2]));
        }
        let loss = late.iter().map(|w| w.sum(Kind::Float)).sum::<Tensor>();
        optimizer.backward_step(&loss).expect("backward_step");
        let values: Vec<f64> = late.iter().map(|w| w.double_value(&[1])).collect();
        assert_eq!(values, [0.75, 0.5, 0.75]);
    }
}

#[test]
fn momentum_may_come_and_go() {
    let _alone = serially();
    tch::manual_seed(22);
    for device in devices() {
        let leaves = leaves(&[&[50]], Kind::Double, device);
        let config = Sgd { dampening: 0.25, ..Default::default() };
        let mut optimizer = config.build_of(named(&leaves), 0.1).expect("an optimizer");
        let mut reference = Reference::new(Rule::Sgd(config), 0.1, &leaves);
        for momentum in [0.0, 0.9, 0.5, 0.0, 0.9] {
            optimizer.set_momentum(momentum).expect("set_momentum");
            reference.rule = Rule::Sgd(Sgd { momentum, ..config });
            for _ in 0..2 {
                accumulate(&leaves, 1.0);
                reference.step(&gradients(&leaves), None);
                optimizer.step().expect("step");
            }
            assert_agree(&leaves, &reference, Kind::Double);
        }
    }
}
