//! Tests of adapters of `nn::Linear`.

use super::*;
use tch::nn::{LinearConfig, Module, VarStore};
use tch_extension::amp::Autocast;
use tch_extension::nn::{Linear, Lora, linear};

const SCALE: f64 = 1.5;

/// A frozen layer of 5 features to 8 with an adapter that is not zero.
fn layer(kind: Kind, adapter: Kind, device: Device, bias: bool) -> [VarStore; 2] {
    tch::manual_seed(3);
    let [mut base, mut adapters] = [VarStore::new(device), VarStore::new(device)];
    let config = LinearConfig { bias, ..Default::default() };
    let mut layer = linear(base.root(), 5, 8, config);
    layer.add_lora(adapters.root(), 3, SCALE);
    tch::no_grad(|| _ = adapters.variables()["lora_B.weight"].shallow_clone().normal_(0.0, 0.5));
    base.freeze();
    base.set_kind(kind);
    adapters.set_kind(adapter);
    [base, adapters]
}

fn of([base, adapters]: &[VarStore; 2]) -> Linear {
    let (base, adapters) = (base.variables(), adapters.variables());
    let [a, b] = ["lora_A.weight", "lora_B.weight"].map(|name| adapters[name].shallow_clone());
    Linear {
        ws: base["weight"].shallow_clone(),
        bs: base.get("bias").map(Tensor::shallow_clone),
        lora: Some(Lora { a, b, scale: SCALE }),
    }
}

#[test]
fn parameters_have_peft_s_names_and_initial_values() {
    let vs = VarStore::new(Device::Cpu);
    let mut layer = linear(vs.root(), 400, 30, Default::default());
    let adapters = VarStore::new(Device::Cpu);
    layer.add_lora(adapters.root() / "q_proj", 20, 2.0);
    let all = adapters.variables();
    let (a, b) = (&all["q_proj.lora_A.weight"], &all["q_proj.lora_B.weight"]);
    assert_eq!((a.size(), b.size()), (vec![20, 400], vec![30, 20]));
    // torch.nn.init.kaiming_uniform_(a, sqrt(5)): within ±1/20.
    let (largest, deviation) = (a.abs().max().double_value(&[]), a.std(false).double_value(&[]));
    assert!(largest <= 0.05 && largest > 0.0499, "{largest}");
    assert!((deviation - 0.05 / 3.0_f64.sqrt()).abs() < 1e-3, "{deviation}");
    let x = Tensor::randn([2, 400], (Kind::Float, Device::Cpu));
    assert!(layer.forward(&x).equal(&ops_linear(&x, &layer)), "B is zero");
}

fn ops_linear(x: &Tensor, layer: &Linear) -> Tensor {
    f_linear(x, &layer.ws, layer.bs.as_ref()).unwrap()
}

#[test]
fn values_and_gradients_are_those_of_the_formula() {
    for device in devices() {
        for (size, bias) in
            [(&[2, 7, 5][..], true), (&[7, 5], false), (&[5], true), (&[0, 5], true)]
        {
            let layer = of(&layer(Kind::Double, Kind::Double, device, bias));
            let Some(Lora { a, b, .. }) = &layer.lora else { panic!("no adapter") };
            let x = Tensor::randn(size, (Kind::Double, device)).set_requires_grad(true);
            let expected = ops_linear(&x, &layer) + x.matmul(&a.tr()).matmul(&b.tr()) * SCALE;
            let found = layer.forward(&x);
            assert_close(&found, &expected, 1e-12, 1e-12);
            // The gradients of the squares, and those of the squares of these.
            let again = GradOptions { create_graph: true, ..Default::default() };
            let squares = |all: &[Tensor]| {
                let zero = Tensor::zeros([], (Kind::Double, device));
                all.iter().fold(zero, |sum, tensor| sum + tensor.square().sum(Kind::Double))
            };
            let gradients = |value: &Tensor| -> Vec<Tensor> {
                let all = grad(&[value], &[&x, a, b], &again).expect("gradients").into_vec();
                all.into_iter().map(|gradient| gradient.expect("one")).collect()
            };
            let of = |output: Tensor| {
                let mut all = gradients(&squares(&[output]));
                all.extend(gradients(&squares(&all)));
                all
            };
            for (found, expected) in of(found).iter().zip(&of(expected)) {
                assert_close(found, expected, 1e-9, 1e-9);
            }
            assert!(!layer.ws.requires_grad());
        }
    }
}

/// A frozen weight in BFloat16 next to an adapter in Float.
#[test]
fn autocast_gives_the_adapter_float_gradients() {
    for device in devices() {
        let parts = layer(Kind::BFloat16, Kind::Float, device, true);
        let (layer, reference) =
            (of(&parts), of(&self::layer(Kind::Float, Kind::Float, device, true)));
        let x = Tensor::randn([3, 7, 5], (Kind::Float, device));
        let output = {
            let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
            layer.forward(&x)
        };
        assert_eq!((output.kind(), output.size()), (Kind::BFloat16, vec![3, 7, 8]));
        assert_close(&output.to_kind(Kind::Float), &reference.forward(&x), 3e-2, 3e-2);
        output.to_kind(Kind::Float).square().sum(Kind::Float).backward();
        reference.forward(&x).square().sum(Kind::Float).backward();
        let [found, expected] = [&layer, &reference].map(|layer| {
            let Some(Lora { a, b, .. }) = &layer.lora else { panic!("no adapter") };
            [a.grad(), b.grad()]
        });
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(found.kind(), Kind::Float);
            let bound = 0.05 * expected.abs().max().double_value(&[]);
            assert_close(found, expected, 0.05, bound);
        }
    }
}

#[test]
fn a_merged_weight_is_rounded_once() {
    for device in devices() {
        for kind in [Kind::Float, Kind::BFloat16, Kind::Double] {
            let mut layer = of(&layer(kind, Kind::Float, device, false));
            let Some(Lora { a, b, .. }) = &layer.lora else { panic!("no adapter") };
            let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
            let exact = wide(&layer.ws) + wide(b).matmul(&wide(a)) * SCALE;
            let address = layer.ws.data_ptr();
            layer.f_merge_lora().expect("merged");
            assert!(layer.lora.is_none() && layer.ws.data_ptr() == address);
            // Half of the last of 8 bits, and the rounding of a sum in Float.
            let bound = if kind == Kind::BFloat16 { 1.01 / 256.0 } else { 1e-6 };
            assert_close(&wide(&layer.ws), &exact, bound, 1e-6);
        }
    }
}

#[test]
fn bad_input_is_an_error_that_names_it() {
    let layer = of(&layer(Kind::Float, Kind::Float, Device::Cpu, true));
    let refused = |x: &Tensor| layer.f_forward(x).expect_err("bad input").to_string();
    let error = refused(&Tensor::zeros([2, 3, 4], (Kind::Float, Device::Cpu)));
    assert_eq!(error, "linear: weight: expected shape [out, in] = [8, 4], got [8, 5]");
    assert!(refused(&Tensor::new()).contains("input"), "{}", refused(&Tensor::new()));
    assert!(refused(&Tensor::from(1.0)).contains("linear"), "{}", refused(&Tensor::from(1.0)));
}
