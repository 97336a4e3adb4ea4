//! Master weights that the caller keeps.

use super::updates::{self, rules};
use super::*;
use tch_extension::testing::devices;

fn build(leaves: &[Tensor]) -> FusedOptimizer {
    AdamW::default().build_of(named(leaves), 0.01).expect("an optimizer")
}

/// The leaves' values in `Float`, with the leaves' strides.
fn masters_of(leaves: &[Tensor]) -> Vec<Tensor> {
    leaves.iter().map(|leaf| leaf.detach().to_kind(Kind::Float)).collect()
}

fn share(optimizer: &mut FusedOptimizer, masters: &[Tensor]) -> tch_extension::Result<()> {
    let names: Vec<String> = (0..masters.len()).map(|index| format!("w{index}")).collect();
    let pairs: Vec<_> = names.iter().map(String::as_str).zip(masters).collect();
    optimizer.set_masters(&pairs)
}

#[test]
fn shared_masters_have_the_values_of_own_ones() {
    let _alone = serially();
    for device in devices() {
        for kind in [Kind::Half, Kind::BFloat16] {
            tch::manual_seed(21);
            let first = leaves(&SIZES, kind, device);
            let second: Vec<Tensor> =
                first.iter().map(|leaf| leaf.detach().copy().set_requires_grad(true)).collect();
            let masters = masters_of(&second);
            let (mut own, mut shared) = (build(&first), build(&second));
            share(&mut shared, &masters).expect("shared");
            for seed in 0..4 {
                for (leaves, optimizer) in [(&first, &mut own), (&second, &mut shared)] {
                    tch::manual_seed(seed);
                    accumulate(leaves, 1.0);
                    optimizer.step().expect("step");
                }
            }
            assert_eq!(bits(&first), bits(&second), "{kind:?} on {device:?}");
            let state = own.state_dict().expect("state_dict");
            for (index, master) in masters.iter().enumerate() {
                let expected = &state[&format!("master.w{index}")];
                assert_eq!(bits(&[master.shallow_clone()]), bits(&[expected.shallow_clone()]));
            }
            assert!(
                shared
                    .state_dict()
                    .expect("state_dict")
                    .keys()
                    .all(|name| !name.starts_with("master"))
            );
        }
    }
}

/// The file has no master weights, and loading it leaves those of the caller alone.
#[test]
fn a_resumed_run_goes_on_from_the_callers_masters() {
    let _alone = serially();
    for device in devices() {
        tch::manual_seed(22);
        let first = leaves(&SIZES, Kind::BFloat16, device);
        let masters = masters_of(&first);
        let mut optimizer = build(&first);
        share(&mut optimizer, &masters).expect("shared");
        let train =
            |leaves: &[Tensor], optimizer: &mut FusedOptimizer, seeds: std::ops::Range<i64>| {
                for seed in seeds {
                    tch::manual_seed(seed);
                    accumulate(leaves, 1.0);
                    optimizer.step().expect("step");
                }
            };
        train(&first, &mut optimizer, 0..3);
        let (state, saved) = (optimizer.state_dict().expect("state_dict"), copies(&masters));
        train(&first, &mut optimizer, 3..5);

        let round = |master: &Tensor| master.to_kind(Kind::BFloat16).set_requires_grad(true);
        let resumed: Vec<Tensor> = saved.iter().map(round).collect();
        let mut other = build(&resumed);
        share(&mut other, &saved).expect("shared");
        other.load_state_dict(&state).expect("load_state_dict");
        train(&resumed, &mut other, 3..5);
        assert_eq!(bits(&resumed), bits(&first));
        assert_eq!(bits(&saved), bits(&masters));
    }
}

#[test]
fn what_cannot_be_a_master_is_refused_by_name() {
    let _alone = serially();
    let leaves = leaves(&[&[3, 4], &[5]], Kind::BFloat16, CPU);
    let mut optimizer = build(&leaves);
    let masters = masters_of(&leaves);
    let mut refused = |name: &str, master: &Tensor| text(optimizer.set_masters(&[(name, master)]));
    assert_eq!(
        refused("w7", &masters[0]),
        "FusedOptimizer::set_masters: masters: expected the name of a parameter, got \"w7\""
    );
    assert!(refused("w0", &masters[0].to_kind(Kind::Double)).contains("w0: expected kind Float"));
    assert!(refused("w0", &masters[1]).contains("w0: expected shape [3, 4] with strides [4, 1]"));
    assert!(refused("w0", &masters[0].tr().contiguous().tr()).contains("strides [1, 3]"));
    assert!(refused("w0", &Tensor::new()).contains("w0"));
    let float = super::leaves(&[&[2]], Kind::Float, CPU);
    let of_float = text(build(&float).set_masters(&[("w0", &float[0])]));
    assert!(of_float.contains("expected kind Half or BFloat16, got Float"), "{of_float}");
    accumulate(&leaves, 1.0);
    optimizer.step().expect("step");
    let late = text(optimizer.set_masters(&[("w1", &masters[1])]));
    assert!(late.contains("w1: expected a parameter without steps, got steps"), "{late}");
}

/// What happens to a parameter or its master weights between the call and the step.
#[test]
fn changes_before_the_first_step_are_refused() {
    let _alone = serially();
    type Change = fn(&mut Tensor, &mut Tensor);
    let changes: [(Change, &str); 4] = [
        (|leaf, _| leaf.set_data(&Tensor::zeros([1 << 12], (Kind::BFloat16, CPU))), "[4096]"),
        (|leaf, _| leaf.set_data(&leaf.detach().to_kind(Kind::Double)), "kind Half or BFloat16"),
        (|leaf, _| leaf.set_data(&leaf.detach().tr().contiguous().tr()), "strides [1, 3]"),
        (|_, master| drop(master.resize_([1 << 12])), "the master of w0: expected shape [3, 4]"),
    ];
    for (change, expected) in changes {
        let mut leaf = super::leaves(&[&[3, 4]], Kind::BFloat16, CPU).remove(0);
        let mut master = leaf.detach().to_kind(Kind::Float);
        let mut optimizer = build(&[leaf.shallow_clone()]);
        optimizer.set_masters(&[("w0", &master)]).expect("shared");
        change(&mut leaf, &mut master);
        leaf.sum(leaf.kind()).backward();
        let error = text(optimizer.step());
        assert!(error.contains(expected), "{error}");
    }
}

/// After `set_data`, as by `flatten_parameters`, the caller's tensor is in other memory.
#[test]
fn masters_with_other_data_are_updated_where_they_are() {
    let _alone = serially();
    for device in devices() {
        let run = |replaces: bool| {
            tch::manual_seed(23);
            let leaves = leaves(&SIZES, Kind::BFloat16, device);
            let mut masters = masters_of(&leaves);
            let mut optimizer = build(&leaves);
            share(&mut optimizer, &masters).expect("shared");
            for step in 0..4 {
                for master in masters.iter_mut().filter(|_| step == 2) {
                    let values = master.shallow_clone() + 0.25;
                    match replaces {
                        true => master.set_data(&values),
                        false => master.copy_(&values),
                    }
                }
                accumulate(&leaves, 1.0);
                optimizer.step().expect("step");
            }
            let rounded: Vec<Tensor> =
                masters.iter().map(|master| master.to_kind(Kind::BFloat16)).collect();
            assert!(bits(&leaves) == bits(&rounded), "of the caller's own tensors");
            bits(&masters)
        };
        assert!(run(true) == run(false), "{device:?}");
    }
}

#[test]
fn converted_masters_are_refused() {
    let _alone = serially();
    for device in devices() {
        let mut vs = VarStore::new(device);
        let master = vs.root().ones("w", &[4]);
        let rounded = leaves(&[&[4]], Kind::BFloat16, device);
        let mut optimizer = build(&rounded);
        optimizer.set_masters(&[("w0", &master)]).expect("shared");
        let mut step = || {
            accumulate(&rounded, 1.0);
            optimizer.step()
        };
        step().expect("a step");
        vs.half();
        let before = bits(&[rounded[0].shallow_clone(), master.shallow_clone()]);
        assert_eq!(
            text(step()),
            "FusedOptimizer::step: the master of w0: expected kind Float, got Half; build the optimizer and share them \
             after parameters are converted or moved"
        );
        assert_eq!(bits(&[rounded[0].shallow_clone(), master.shallow_clone()]), before);
        vs.float();
        step().expect("a step as before");
        assert_eq!(bits(&rounded), bits(&[master.to_kind(Kind::BFloat16)]));
    }
}

#[test]
fn masters_that_are_tied_later_are_refused() {
    let _alone = serially();
    let weights = leaves(&[&[4], &[4]], Kind::BFloat16, CPU);
    let mut masters = masters_of(&weights);
    let mut optimizer = build(&weights);
    share(&mut optimizer, &masters).expect("shared");
    let first = masters[0].shallow_clone();
    masters[1].set_data(&first);
    accumulate(&weights, 1.0);
    let error = text(optimizer.step());
    let expected = "the master of w1: expected memory of its own, got memory that it shares with the master of w0";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn masters_that_share_memory_are_refused() {
    let _alone = serially();
    let leaves = leaves(&[&[4], &[4]], Kind::BFloat16, CPU);
    let master = Tensor::zeros([6], (Kind::Float, CPU));
    let overlapping = [master.narrow(0, 0, 4), master.narrow(0, 2, 4)];
    let error = text(share(&mut build(&leaves), &overlapping));
    assert!(error.contains("memory that it shares with the master of w"), "{error}");
}

/// Moments of a half kind are those in `Float`, rounded after each step.
#[test]
fn half_moments_are_rounded_ones() {
    let _alone = serially();
    for device in devices() {
        for (kind, has_own) in [Kind::Half, Kind::BFloat16].map(|kind| (kind, [true, false])) {
            for (rule, has_own) in rules().iter().flat_map(|rule| has_own.map(|own| (*rule, own))) {
                tch::manual_seed(22);
                let first = leaves(&SIZES, kind, device);
                let copy = |leaf: &Tensor| leaf.detach().copy().set_requires_grad(true);
                let second: Vec<Tensor> = first.iter().map(copy).collect();
                let [mut half, mut float] =
                    [&first, &second].map(|leaves| updates::build(rule, leaves, 0.01));
                for optimizer in [&mut half, &mut float] {
                    optimizer.set_master_weights(false).expect("no masters");
                }
                half.set_half_moments(true).expect("half moments");
                for _ in 0..4 {
                    let of = if has_own { kind } else { Kind::Float };
                    let gradients: Vec<Tensor> =
                        first.iter().map(|leaf| normal(&leaf.size(), of, device)).collect();
                    let gradients: Vec<_> = gradients.iter().map(Some).collect();
                    half.step_with(&gradients).expect("step");
                    float.step_with(&gradients).expect("step");
                    let state = float.state_dict().expect("state_dict");
                    let is_moment =
                        |name: &str| !name.starts_with("step.") && !name.starts_with("group.");
                    let rounded = |(name, tensor): (String, Tensor)| match is_moment(&name) {
                        true => (name, tensor.to_kind(kind)),
                        false => (name, tensor),
                    };
                    let state = state.into_iter().map(rounded).collect();
                    float.load_state_dict(&state).expect("the rounded state");
                    assert_eq!(bits(&first), bits(&second), "{rule:?} of {kind:?} on {device:?}");
                    for (name, tensor) in half.state_dict().expect("state_dict") {
                        let expected = &state[&name];
                        assert_eq!(tensor.kind(), expected.kind(), "{name}");
                        assert_eq!(bits(&[tensor]), bits(&[expected.shallow_clone()]), "{name}");
                    }
                }
            }
        }
    }
}
