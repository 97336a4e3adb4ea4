//! Tests of `nn::LayerNorm` in the way that a tch user uses it.

use super::*;
use tch::nn::{Init, LinearConfig, Module, OptimizerConfig, Sgd, VarStore, linear};
use tch_extension::nn::{LayerNormConfig, LayerNormOp, layer_norm};

#[test]
fn parameters_have_the_usual_names_and_values() {
    for device in devices() {
        let vs = VarStore::new(device);
        let layer = layer_norm(vs.root() / "norm", &[2, 3], LayerNormConfig::default());
        let variables = vs.variables();
        let options = (Kind::Float, device);
        assert_eq!(variables["norm.weight"], Tensor::ones([2, 3], options));
        assert_eq!(variables["norm.bias"], Tensor::zeros([2, 3], options));
        assert!(vs.trainable_variables().len() == 2 && layer.normalized_shape() == [2, 3]);

        // tch's own layer has the same names and values.
        let theirs = VarStore::new(device);
        let other = tch::nn::layer_norm(theirs.root() / "norm", vec![2, 3], Default::default());
        let x = Tensor::randn([4, 2, 3], options);
        assert_close(&layer.forward(&x).detach(), &other.forward(&x).detach(), 1e-5, 1e-5);
        let mut names =
            [vs.variables(), theirs.variables()].map(|all| all.into_keys().collect::<Vec<_>>());
        names.iter_mut().for_each(|names| names.sort());
        assert_eq!(names[0], names[1]);
    }
}

#[test]
fn the_configuration_counts() {
    let build = |config| {
        let vs = VarStore::new(Device::Cpu);
        let layer = layer_norm(vs.root(), &[4], config);
        (vs.trainable_variables().len(), layer)
    };
    let x = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 5.0]);
    let (count, layer) = build(LayerNormConfig { elementwise_affine: false, ..Default::default() });
    assert!(count == 0 && layer.weight.is_none() && layer.bias.is_none());
    let plain = layer.forward(&x);
    let (count, layer) =
        build(LayerNormConfig { bias: false, ws_init: Init::Const(2.0), ..Default::default() });
    assert!(count == 1 && layer.bias.is_none());
    assert_close(&layer.forward(&x).detach(), &(&plain * 2.0), 1e-6, 1e-6);
    let (_, layer) = build(LayerNormConfig { bs_init: Init::Const(3.0), ..Default::default() });
    assert_close(&layer.forward(&x).detach(), &(&plain + 3.0), 1e-6, 1e-6);
    let (_, layer) = build(LayerNormConfig { eps: 1e6, ..Default::default() });
    assert!(layer.forward(&x).abs().max().double_value(&[]) < 1e-2);
}

#[test]
fn bad_input_is_an_error_or_a_panic_that_names_it() {
    let vs = VarStore::new(Device::Cpu);
    let layer = layer_norm(vs.root(), &[4], LayerNormConfig::default());
    let x = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    let error = layer.f_forward(&x).expect_err("3 features").to_string();
    assert!(error.starts_with("layer_norm: input: expected shape [*, 4]"), "{error}");
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| layer.forward(&x)));
    assert_eq!(*panic.expect_err("3 features").downcast::<String>().expect("a text"), error);
    for shape in [&[][..], &[3, -1]] {
        let vs = VarStore::new(Device::Cpu);
        let make = || layer_norm(vs.root(), shape, LayerNormConfig::default());
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(make))
            .expect_err("no such shape");
        let text = panic.downcast::<String>().expect("a text");
        assert!(text.contains("normalized_shape: expected one size or more"), "{text}");
    }
    // Only the fused layer checks its arguments itself; the composite one leaves that to libtorch.
    let vs = VarStore::new(Device::Cpu);
    let config = LayerNormConfig { op: LayerNormOp::Composite, ..Default::default() };
    let error =
        layer_norm(vs.root(), &[4], config).f_forward(&x).expect_err("3 features").to_string();
    assert!(!error.starts_with("layer_norm: "), "{error}");
}

/// The losses of a small network that is trained from a fixed seed.
fn curve(op: LayerNormOp, kind: Kind, device: Device, steps: usize) -> Vec<f64> {
    tch::manual_seed(3);
    let mut vs = VarStore::new(Device::Cpu);
    let config = LayerNormConfig { op, ..Default::default() };
    let first = linear(vs.root() / "first", 6, 33, LinearConfig::default());
    let norm = layer_norm(vs.root() / "norm", &[33], config);
    let second = linear(vs.root() / "second", 33, 3, LinearConfig::default());
    let (x, target) =
        (Tensor::randn([64, 6], (kind, Device::Cpu)), Tensor::randn([64, 3], (kind, Device::Cpu)));
    // The numbers are drawn on the CPU, so that they are the same for each device.
    let (x, target) = (x.to_device(device), target.to_device(device));
    vs.set_kind(kind);
    vs.set_device(device);
    let mut optimizer =
        Sgd { momentum: 0.9, ..Default::default() }.build(&vs, 0.05).expect("an optimizer");
    let step = |_| {
        let hidden = norm.forward(&first.forward(&x)).tanh();
        let loss = (second.forward(&hidden) - &target).square().mean(kind);
        optimizer.backward_step(&loss);
        loss.double_value(&[])
    };
    (0..steps).map(step).collect()
}

#[test]
fn fused_and_composite_train_alike() {
    for device in devices() {
        for (kind, steps, allowed) in [(Kind::Double, 200, 1e-9), (Kind::Float, 50, 1e-3)] {
            let [fused, composite] = [LayerNormOp::Fused, LayerNormOp::Composite]
                .map(|op| curve(op, kind, device, steps));
            assert!(
                fused[steps - 1] < 0.9 * fused[0],
                "it learns: {} to {}",
                fused[0],
                fused[steps - 1]
            );
            for (step, (fused, composite)) in fused.iter().zip(&composite).enumerate() {
                assert!(
                    (fused - composite).abs() < allowed,
                    "{kind:?} {step}: {fused} and {composite}"
                );
            }
        }
    }
}
