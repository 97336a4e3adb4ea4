//! Tests of the layers in the way that a tch user uses them.

mod rnn;

use tch::nn::{OptimizerConfig, RNN, Sgd, VarStore};
use tch::{Kind, Tensor};
use tch_extension::nn::{Lltm, LltmConfig, LltmOp, LltmState, lltm};
use tch_extension::testing::{assert_close, devices};

fn layer(device: tch::Device, kind: Kind, op: LltmOp) -> (VarStore, Lltm) {
    tch::manual_seed(3);
    let mut vs = VarStore::new(device);
    let layer = lltm(vs.root() / "lltm", 5, 8, LltmConfig { op });
    vs.set_kind(kind);
    (vs, layer)
}

#[test]
fn parameters_have_the_tutorials_names_shapes_and_distribution() {
    for device in devices() {
        let vs = VarStore::new(device);
        let layer = lltm(vs.root() / "lltm", 300, 64, LltmConfig::default());
        let variables = vs.variables();
        let shapes: Vec<_> =
            ["lltm.weights", "lltm.bias"].iter().map(|name| variables[*name].size()).collect();
        assert_eq!(shapes, [vec![192, 364], vec![192]]);
        assert!(vs.trainable_variables().len() == 2 && layer.hidden_dim() == 64);

        // Uniform on ±1/8: the largest value is just inside, and the standard deviation is
        // 1/(8·√3).
        let weights = &layer.weights;
        let (largest, deviation) =
            (weights.abs().max().double_value(&[]), weights.std(false).double_value(&[]));
        assert!(largest <= 0.125 && largest > 0.1249, "{largest}");
        assert!((deviation - 0.125 / 3.0_f64.sqrt()).abs() < 1e-3, "{deviation}");
        let largest = layer.bias.abs().max().double_value(&[]);
        assert!(largest <= 0.125 && largest > 0.1, "{largest}");
    }
}

#[test]
fn a_sequence_is_its_steps() {
    for device in devices() {
        let (_vs, layer) = layer(device, Kind::Double, LltmOp::Fused);
        let input = Tensor::randn([3, 6, 5], (Kind::Double, device));
        let start = LltmState((
            Tensor::randn([3, 8], (Kind::Double, device)),
            Tensor::randn([3, 8], (Kind::Double, device)),
        ));
        let (output, last) = layer.seq_init(&input, &start);
        assert_eq!(output.size(), [3, 6, 8]);
        let mut state = start;
        for step in 0..6 {
            state = layer.step(&input.select(1, step), &state);
            assert!(output.select(1, step).equal(&state.h()));
        }
        assert!(last.h().equal(&state.h()) && last.c().equal(&state.c()));

        let (from_zero, _) = layer.seq(&input);
        let zeros = || Tensor::zeros([3, 8], (Kind::Double, device));
        let (expected, _) = layer.seq_init(&input, &LltmState((zeros(), zeros())));
        assert!(from_zero.equal(&expected));
    }
}

#[test]
fn a_sequence_of_no_steps_and_a_batch_of_no_rows() {
    for device in devices() {
        let (_vs, layer) = layer(device, Kind::Float, LltmOp::Fused);
        let (output, state) = layer.seq(&Tensor::zeros([2, 0, 5], (Kind::Float, device)));
        assert_eq!((output.size(), state.h().size()), (vec![2, 0, 8], vec![2, 8]));
        let (output, _) = layer.seq(&Tensor::zeros([0, 4, 5], (Kind::Float, device)));
        assert_eq!(output.size(), [0, 4, 8]);
    }
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        let curve = |op| -> Vec<f64> {
            let (vs, layer) = layer(device, Kind::Double, op);
            tch::manual_seed(4);
            let input = Tensor::randn([4, 10, 5], (Kind::Double, device));
            let target = Tensor::randn([4, 10, 8], (Kind::Double, device));
            let mut optimizer =
                Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.1).expect("an optimizer");
            let step = |_| {
                let loss = (layer.seq(&input).0 - &target).square().mean(Kind::Double);
                optimizer.backward_step(&loss);
                loss.double_value(&[])
            };
            (0..200).map(step).collect()
        };
        let (fused, composite) = (curve(LltmOp::Fused), curve(LltmOp::Composite));
        assert!(fused[199] < 0.9 * fused[0], "it learns: {} to {}", fused[0], fused[199]);
        for (step, (fused, composite)) in fused.iter().zip(&composite).enumerate() {
            assert!((fused - composite).abs() < 1e-9, "step {step}: {fused} and {composite}");
        }
    }
}

#[test]
fn detached_states_carry_values_and_no_graph() {
    for device in devices() {
        let (_vs, layer) = layer(device, Kind::Float, LltmOp::Fused);
        let state = layer.step(&Tensor::randn([2, 5], (Kind::Float, device)), &layer.zero_state(2));
        let detached = state.detach();
        assert!(
            state.h().requires_grad()
                && !detached.h().requires_grad()
                && !detached.c().requires_grad()
        );
        assert_close(&detached.h(), &state.h().detach(), 0.0, 0.0);
        assert_close(&detached.c(), &state.c().detach(), 0.0, 0.0);
    }
}

#[test]
fn weights_travel_through_safetensors() {
    let (vs, original) = layer(tch::Device::Cpu, Kind::Float, LltmOp::Fused);
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights.safetensors");
    vs.save(&path).expect("saved");
    let mut other = VarStore::new(tch::Device::Cpu);
    let copy = lltm(other.root() / "lltm", 5, 8, LltmConfig::default());
    other.load(&path).expect("loaded");
    assert!(copy.weights.equal(&original.weights) && copy.bias.equal(&original.bias));
}

#[test]
fn bad_input_is_an_error_or_a_panic_that_names_it() {
    let (_vs, layer) = layer(tch::Device::Cpu, Kind::Float, LltmOp::Fused);
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Float, tch::Device::Cpu));
    let error =
        layer.f_step(&zeros(&[2, 4]), &layer.zero_state(2)).expect_err("4 features").to_string();
    assert!(
        error.contains("weight: expected shape [3H, H + F] = [24, 12], got [24, 13]"),
        "{error}"
    );
    let error =
        layer.f_seq_init(&zeros(&[2, 4]), &layer.zero_state(2)).expect_err("no time").to_string();
    assert!(error.contains("nn::Lltm: input: expected 3 dimensions [B, T, F]"), "{error}");
    let error =
        layer.f_step(&zeros(&[3, 5]), &layer.zero_state(2)).expect_err("another batch").to_string();
    assert!(error.contains("lltm_cell: h: expected shape [B, H] = [3, 8], got [2, 8]"), "{error}");
    for steps in [0, 2] {
        let (input, other) = (zeros(&[2, steps, 5]), zeros(&[2, steps, 4]));
        let error =
            layer.f_seq_init(&other, &layer.zero_state(2)).expect_err("4 features").to_string();
        assert!(
            error.contains(&format!("input: expected shape [B, T, F] = [2, {steps}, 5]")),
            "{error}"
        );
        let state = LltmState((zeros(&[2, 8]), Tensor::new()));
        let error = layer.f_seq_init(&input, &state).expect_err("no c").to_string();
        assert!(error.contains("nn::Lltm: c: expected a tensor"), "{error}");
        let integers = input.to_kind(Kind::Int64);
        let error =
            layer.f_seq_init(&integers, &layer.zero_state(2)).expect_err("integers").to_string();
        assert!(error.contains("input: expected kind Float, as weights, got Int64"), "{error}");
    }
    let vs = VarStore::new(tch::Device::Cpu);
    let make = || lltm(vs.root(), -1, 8, LltmConfig::default());
    let panic =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).expect_err("no such size");
    let text = panic.downcast::<String>().expect("a text");
    assert!(text.contains("in_dim: expected at least 0, got -1"), "{text}");
    for hidden in [0, -3] {
        let vs = VarStore::new(tch::Device::Cpu);
        let make = || lltm(vs.root(), 5, hidden, LltmConfig::default());
        let panic =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(make)).expect_err("no such size");
        let text = panic.downcast::<String>().expect("a text");
        assert!(text.contains("hidden_dim: expected at least 1"), "{text}");
    }
}

#[test]
fn the_configuration_chooses_the_cell() {
    // Only the fused cell checks its arguments itself; the composite one leaves that to libtorch.
    for (op, checks) in [(LltmOp::Fused, true), (LltmOp::Composite, false)] {
        let (_vs, layer) = layer(tch::Device::Cpu, Kind::Float, op);
        let input = Tensor::zeros([2, 4], (Kind::Float, tch::Device::Cpu));
        let error = layer.f_step(&input, &layer.zero_state(2)).expect_err("4 features").to_string();
        assert_eq!(error.starts_with("lltm_cell: "), checks, "{op:?}: {error}");
    }
}

#[test]
fn an_undefined_sequence_is_named() {
    let (_vs, layer) = layer(tch::Device::Cpu, Kind::Float, LltmOp::Fused);
    let error =
        layer.f_seq_init(&Tensor::new(), &layer.zero_state(2)).expect_err("undefined").to_string();
    assert!(
        error.starts_with("nn::Lltm: input: expected a tensor, got an undefined one"),
        "{error}"
    );
}
