//! Tests of `nn::Linear`, compared with tch's own layer.

use super::*;
use tch::nn::{self, Module, OptimizerConfig, Sgd, VarStore};
use tch_extension::nn::linear;

#[test]
fn parameters_are_tchs_own() {
    for device in devices() {
        for bias in [true, false] {
            let config = nn::LinearConfig { bias, ..Default::default() };
            tch::manual_seed(3);
            let ours = VarStore::new(device);
            let layer = linear(ours.root() / "a", 30, 20, config);
            tch::manual_seed(3);
            let theirs = VarStore::new(device);
            let expected = nn::linear(theirs.root() / "a", 30, 20, config);
            assert!(layer.ws.equal(&expected.ws) && layer.bs.is_some() == bias);
            let names = |vs: &VarStore| {
                let mut names: Vec<String> = vs.variables().into_keys().collect();
                names.sort();
                names
            };
            assert_eq!(names(&ours), names(&theirs));
            for (name, value) in theirs.variables() {
                assert!(ours.variables()[&name].equal(&value), "{name}");
            }
        }
    }
}

#[test]
fn weights_of_tchs_layer_load() {
    let theirs = VarStore::new(Device::Cpu);
    let original = nn::linear(theirs.root() / "a", 5, 8, Default::default());
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights.safetensors");
    theirs.save(&path).expect("saved");
    let mut ours = VarStore::new(Device::Cpu);
    let layer = linear(ours.root() / "a", 5, 8, Default::default());
    ours.load(&path).expect("loaded");
    let x = Tensor::randn([3, 5], (Kind::Float, Device::Cpu));
    assert!(layer.forward(&x).equal(&original.forward(&x)));
}

#[test]
fn bad_input_is_an_error_or_a_panic_that_names_it() {
    let vs = VarStore::new(Device::Cpu);
    let layer = linear(vs.root(), 5, 8, Default::default());
    let bad = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
    let error = layer.f_forward(&bad).expect_err("4 features").to_string();
    assert_eq!(error, "linear: weight: expected shape [out, in] = [8, 4], got [8, 5]");
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| layer.forward(&bad)));
    assert_eq!(panic.expect_err("a panic").downcast_ref::<String>(), Some(&error));
}

/// The losses of a small network, step by step.
fn curve(device: Device, kind: Kind, steps: usize, fused: bool) -> Vec<f64> {
    tch::manual_seed(3);
    let mut vs = VarStore::new(device);
    let layer = |name: &str, inputs, outputs| -> Box<dyn Fn(&Tensor) -> Tensor> {
        let path = vs.root() / name;
        if fused {
            let layer = linear(path, inputs, outputs, Default::default());
            return Box::new(move |x| layer.forward(x));
        }
        let layer = nn::linear(path, inputs, outputs, Default::default());
        Box::new(move |x| layer.forward(x))
    };
    let (first, second) = (layer("first", 5, 33), layer("second", 33, 3));
    vs.set_kind(kind);
    tch::manual_seed(4);
    let input = Tensor::randn([4, 10, 5], (kind, device));
    let target = Tensor::randn([4, 10, 3], (kind, device));
    let mut optimizer =
        Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.1).expect("an optimizer");
    let step = |_| {
        let loss = (second(&first(&input).tanh()) - &target).square().mean(kind);
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };
    (0..steps).map(step).collect()
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        for (kind, steps, bound) in [(Kind::Double, 200, 1e-9), (Kind::Float, 50, 1e-3)] {
            let (fused, composite) =
                (curve(device, kind, steps, true), curve(device, kind, steps, false));
            assert!(
                fused[steps - 1] < 0.9 * fused[0],
                "it learns: {} to {}",
                fused[0],
                fused[steps - 1]
            );
            for (step, (fused, composite)) in fused.iter().zip(&composite).enumerate() {
                assert!((fused - composite).abs() < bound, "step {step}: {fused} and {composite}");
            }
        }
    }
}
