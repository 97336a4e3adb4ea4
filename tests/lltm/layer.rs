//! Tests of `nn::LltmLayer` in the way that a tch user uses it.

use super::*;
use tch::nn::{RNN, VarStore};
use tch_extension::nn::{LltmConfig, LltmLayer, LltmLayerConfig, LltmState, lltm, lltm_layer};

fn layers(device: Device, config: LltmLayerConfig) -> (VarStore, LltmLayer) {
    tch::manual_seed(3);
    let mut vs = VarStore::new(device);
    let layers = lltm_layer(vs.root() / "lltm", 5, 8, config);
    vs.set_kind(Kind::Double);
    (vs, layers)
}

fn random(size: &[i64], device: Device) -> Tensor {
    Tensor::randn(size, (Kind::Double, device))
}

#[test]
fn parameters_have_names_and_shapes() {
    let (vs, layers) = layers(Device::Cpu, LltmLayerConfig { num_layers: 2, ..Default::default() });
    let mut found: Vec<_> =
        vs.variables().iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect();
    found.sort();
    let expected = [
        ("lltm.bias", vec![24]),
        ("lltm.bias_l1", vec![24]),
        ("lltm.weights", vec![24, 13]),
        ("lltm.weights_l1", vec![24, 16]),
    ];
    assert_eq!(found, expected.map(|(name, size)| (name.to_string(), size)));
    assert_eq!((layers.hidden_dim(), vs.trainable_variables().len()), (8, 4));
}

/// The cell's own layer, which runs step by step, uses the same file of weights and gives the same
/// results.
#[test]
fn the_cell_s_weights_load_and_give_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("weights.safetensors");
    let mut cell_vs = VarStore::new(Device::Cpu);
    let cell = lltm(cell_vs.root() / "lltm", 5, 8, LltmConfig::default());
    cell_vs.set_kind(Kind::Double);
    cell_vs.save(&path).expect("saved");
    let (mut vs, layer) = layers(Device::Cpu, LltmLayerConfig::default());
    vs.load(&path).expect("loaded");

    let input = random(&[3, 6, 5], Device::Cpu);
    let (expected, expected_last) = cell.seq(&input);
    let (output, last) = layer.seq(&input);
    assert_close(&output, &expected, 1e-12, 1e-12);
    assert_close(&last.h().get(0), &expected_last.h(), 1e-12, 1e-12);
    assert_close(&last.c().get(0), &expected_last.c(), 1e-12, 1e-12);
}

#[test]
fn layers_lie_on_one_another_whichever_dimension_is_first() {
    for device in devices() {
        let config = LltmLayerConfig { num_layers: 3, ..Default::default() };
        let (_vs, layers_of) = layers(device, config);
        let (_others, time_first) =
            layers(device, LltmLayerConfig { batch_first: false, ..config });
        let input = random(&[2, 6, 5], device);
        let start = LltmState((random(&[3, 2, 8], device), random(&[3, 2, 8], device)));
        let (output, last) = layers_of.seq_init(&input, &start);

        let mut values = input.transpose(0, 1);
        for layer in 0..3 {
            let index = layer as usize;
            let state = (&start.h().get(layer), &start.c().get(layer));
            let (weight, bias) = (&layers_of.weights[index], &layers_of.biases[index]);
            let (expected, (h, c)) =
                lltm_reference(&values, weight, Some(bias), state).expect("reference");
            assert_close(&last.h().get(layer), &h, 1e-12, 1e-12);
            assert_close(&last.c().get(layer), &c, 1e-12, 1e-12);
            values = expected;
        }
        assert_close(&output, &values.transpose(0, 1), 1e-12, 1e-12);

        let (turned, turned_last) = time_first.seq_init(&input.transpose(0, 1), &start);
        assert!(turned.transpose(0, 1).equal(&output) && turned_last.c().equal(&last.c()));
        // The zero state has the right batch size for either order of dimensions.
        assert_eq!(time_first.seq(&input.transpose(0, 1)).0.size(), [6, 2, 8]);
        assert_eq!(layers_of.seq(&input).1.h().size(), [3, 2, 8]);

        let mut state = start;
        for step in 0..6 {
            state = layers_of.step(&input.select(1, step), &state);
        }
        assert_close(&state.h(), &last.h(), 1e-12, 1e-12);
        assert_close(
            &time_first.step(&input.select(1, 0), &state).h(),
            &layers_of.step(&input.select(1, 0), &state).h(),
            0.0,
            0.0,
        );
    }
}

#[test]
fn dropout_is_between_layers_and_only_while_training() {
    let run = |num_layers, train| {
        let config = LltmLayerConfig { num_layers, dropout: 0.5, ..Default::default() };
        let (_vs, mut layers) = layers(Device::Cpu, config);
        layers.set_train(train);
        let input = Tensor::ones([2, 4, 5], (Kind::Double, Device::Cpu));
        [layers.seq(&input).0, layers.seq(&input).0]
    };
    let [first, second] = run(2, true);
    assert!(!first.equal(&second), "another half each time");
    for [first, second] in [run(2, false), run(1, true)] {
        assert!(first.equal(&second));
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (_vs, layers) =
        layers(Device::Cpu, LltmLayerConfig { num_layers: 2, ..Default::default() });
    let zeros = |size: &[i64]| Tensor::zeros(size, (Kind::Double, Device::Cpu));
    let state = |size: &[i64]| LltmState((zeros(size), zeros(size)));
    let good = [2, 3, 8];
    for (input, state, expected) in [
        (zeros(&[3, 5]), state(&good), "nn::LltmLayer: input: expected 3 dimensions [B, T, F]"),
        (
            zeros(&[3, 4, 6]),
            state(&good),
            "nn::LltmLayer: input: expected shape [B, T, F] = [3, 4, 5]",
        ),
        (
            zeros(&[3, 4, 5]),
            state(&[1, 3, 8]),
            "nn::LltmLayer: h: expected shape [num_layers, B, H] = [2, 3, 8]",
        ),
        (
            zeros(&[3, 4, 5]),
            state(&[3, 8]),
            "nn::LltmLayer: h: expected shape [num_layers, B, H] = [2, 3, 8]",
        ),
    ] {
        let error = layers.f_seq_init(&input, &state).expect_err(expected).to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    let error = layers.f_step(&zeros(&[5]), &state(&good)).expect_err("one dimension").to_string();
    assert!(error.starts_with("nn::LltmLayer: input: expected 2 dimensions [B, F]"), "{error}");
    for (hidden, config) in [
        (0, LltmLayerConfig::default()),
        (8, LltmLayerConfig { num_layers: 0, ..Default::default() }),
        (8, LltmLayerConfig { dropout: 1.5, ..Default::default() }),
    ] {
        let made = std::panic::catch_unwind(|| {
            lltm_layer(VarStore::new(Device::Cpu).root(), 5, hidden, config)
        });
        assert!(made.is_err(), "{config:?}");
    }
}
