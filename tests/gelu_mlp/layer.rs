//! Tests of `nn::Mlp`, compared with two layers of tch's own.

use super::*;
use tch::nn::{self, LinearConfig, Module, OptimizerConfig, Sgd, VarStore};
use tch_extension::nn::{MlpConfig, MlpOp, mlp};

fn names(vs: &VarStore) -> Vec<String> {
    let mut names: Vec<String> = vs.variables().into_keys().collect();
    names.sort();
    names
}

#[test]
fn parameters_are_those_of_two_layers() {
    for device in devices() {
        for bias in [true, false] {
            let linear = LinearConfig { bias, ..Default::default() };
            tch::manual_seed(3);
            let ours = VarStore::new(device);
            let layer = mlp(ours.root() / "mlp", 6, 20, MlpConfig { linear, ..Default::default() });
            tch::manual_seed(3);
            let theirs = VarStore::new(device);
            let path = theirs.root() / "mlp";
            let fc = nn::linear(&path / "c_fc", 6, 20, linear);
            let proj = nn::linear(&path / "c_proj", 20, 6, linear);
            assert_eq!(names(&ours), names(&theirs));
            for (name, value) in theirs.variables() {
                assert!(ours.variables()[&name].equal(&value), "{name}");
            }
            let x = Tensor::randn([2, 5, 6], (Kind::Float, device));
            let expected = proj.forward(&fc.forward(&x).gelu("tanh"));
            assert_close(&layer.forward(&x), &expected, 1e-5, 1e-5);
        }
    }
    let vs = VarStore::new(Device::Cpu);
    mlp(vs.root(), 2, 3, MlpConfig { names: ["up", "down"], ..Default::default() });
    assert_eq!(names(&vs), ["down.bias", "down.weight", "up.bias", "up.weight"]);
}

#[test]
fn bad_input_is_an_error_or_a_panic_that_names_it() {
    let vs = VarStore::new(Device::Cpu);
    let layer = mlp(vs.root(), 5, 8, Default::default());
    let bad = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
    let error = layer.f_forward(&bad).expect_err("4 features").to_string();
    assert_eq!(error, "gelu_mlp: w1: expected shape [H, D] = [8, 4], got [8, 5]");
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| layer.forward(&bad)));
    assert_eq!(panic.expect_err("a panic").downcast_ref::<String>(), Some(&error));
}

/// The losses of a small network, step by step.
fn curve(device: Device, kind: Kind, steps: usize, config: MlpConfig) -> Vec<f64> {
    tch::manual_seed(3);
    let mut vs = VarStore::new(device);
    let layer = mlp(vs.root(), 5, 33, config);
    vs.set_kind(kind);
    tch::manual_seed(4);
    let input = Tensor::randn([4, 10, 5], (kind, device));
    let target = Tensor::randn([4, 10, 5], (kind, device));
    let mut optimizer =
        Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.1).expect("an optimizer");
    let step = |_| {
        let loss = (layer.forward(&input) - &target).square().mean(kind);
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };
    (0..steps).map(step).collect()
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        for activation in ACTIVATIONS {
            let options = GeluMlpOptions { activation, ..Default::default() };
            for (kind, steps, bound) in [(Kind::Double, 100, 1e-9), (Kind::Float, 50, 1e-3)] {
                let of = |op: MlpOp| {
                    curve(device, kind, steps, MlpConfig { options, op, ..Default::default() })
                };
                let (fused, composite) = (of(MlpOp::Fused), of(MlpOp::Composite));
                let (first, last) = (fused[0], fused[steps - 1]);
                assert!(last < 0.9 * first, "{activation:?} learns: {first} to {last}");
                for (step, (fused, composite)) in fused.iter().zip(&composite).enumerate() {
                    let apart = (fused - composite).abs();
                    assert!(apart < bound, "step {step}: {fused} and {composite}");
                }
            }
        }
    }
}
