//! Tests of `nn::lstm` and `nn::gru` as replacements of tch's.

use support::gpu::has_caching_allocator;
use support::packed::{Packed, is_zero_in_padding, with_padding_of_nan};
use tch::nn::{GRUState, LSTMState, RNN, RNNConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::cuda::{Graph, Stream, StreamGuard, set_rnn_allow_tf32};
use tch_extension::nn::{gru, lstm};
use tch_extension::ops::{self, RnnWay, RnnWeights, force};
use tch_extension::testing::{assert_close, cuda_or_skip, devices};

const IN: i64 = 3;
const HIDDEN: i64 = 4;

fn base() -> RNNConfig {
    RNNConfig::default()
}

fn configs() -> Vec<RNNConfig> {
    let base = base();
    vec![
        base,
        RNNConfig { num_layers: 3, ..base },
        RNNConfig { bidirectional: true, batch_first: false, ..base },
        RNNConfig { num_layers: 2, bidirectional: true, ..base },
        RNNConfig { has_biases: false, num_layers: 2, ..base },
    ]
}

fn random(size: &[i64], device: Device) -> Tensor {
    Tensor::randn(size, (Kind::Float, device))
}

/// What a layer computes, and the gradients of its input and parameters.
fn everything(output: &Tensor, states: &[Tensor], input: &Tensor, vs: &VarStore) -> Vec<Tensor> {
    let mut loss = output.square().sum(Kind::Float);
    for state in states {
        loss += state.sin().sum(Kind::Float);
    }
    let variables = vs.variables();
    let mut names: Vec<&String> = variables.keys().collect();
    names.sort();
    let mut leaves: Vec<&Tensor> = names.iter().map(|name| &variables[*name]).collect();
    leaves.push(input);
    let gradients = Tensor::run_backward(&[loss], &leaves, false, false);
    let mut all: Vec<Tensor> = states.iter().map(Tensor::detach).collect();
    all.push(output.detach());
    all.extend(gradients);
    all
}

/// Compares a layer of this crate with tch's, which has the same parameters.
macro_rules! assert_same_as_tch {
    ($layer:ident, $state:expr, $states:expr) => {
        set_rnn_allow_tf32(false).expect("a switch");
        for (device, config) in devices()
            .into_iter()
            .flat_map(|device| configs().into_iter().map(move |config| (device, config)))
        {
            // On CUDA, tch's layers without biases panic, because they count four parameters each.
            let device = if config.has_biases { device } else { Device::Cpu };
            let (mut ours, theirs) = (VarStore::new(device), VarStore::new(device));
            let layer = $layer(ours.root() / "rnn", IN, HIDDEN, config);
            let expected = tch::nn::$layer(&(theirs.root() / "rnn"), IN, HIDDEN, config);
            let names = |vs: &VarStore| {
                let mut names: Vec<String> = vs.variables().into_keys().collect();
                names.sort();
                names
            };
            assert_eq!(names(&ours), names(&theirs), "{config:?}");
            ours.copy(&theirs).expect("the same parameters");
            let input = random(&[5, 2, IN], device).set_requires_grad(true);
            let batch = if config.batch_first { 5 } else { 2 };
            let directions = if config.bidirectional { 2 } else { 1 };
            let size = [config.num_layers * directions, batch, HIDDEN];
            let state = $state(&size, device);
            let run = |result: (Tensor, _), vs: &VarStore| {
                everything(&result.0, &$states(&result.1), &input, vs)
            };
            let found = run(layer.seq_init(&input, &state), &ours);
            let expected = run(expected.seq_init(&input, &state), &theirs);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 1e-4, 1e-4);
            }
        }
    };
}

#[test]
fn lstm_is_tch_s() {
    assert_same_as_tch!(
        lstm,
        |size: &[i64], device| LSTMState((random(size, device), random(size, device))),
        |state: &LSTMState| vec![state.h(), state.c()]
    );
}

#[test]
fn gru_is_tch_s() {
    assert_same_as_tch!(
        gru,
        |size: &[i64], device| GRUState(random(size, device)),
        |state: &GRUState| vec![state.value()]
    );
}

/// A file that `torch.save` wrote: the state dict of two layers in both directions, with an input
/// and what PyTorch computed from it, in double.
fn saved(bytes: &[u8]) -> (std::path::PathBuf, impl Fn(&str) -> Tensor) {
    let folder =
        std::env::temp_dir().join(format!("tch-extension-{}-{}", std::process::id(), bytes.len()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let file = folder.join("saved.pt");
    std::fs::write(&file, bytes).expect("a file");
    let all = Tensor::loadz_multi(&file).expect("tensors");
    let find = move |name: &str| {
        let found = all.iter().find(|(of, _)| of == name);
        found.unwrap_or_else(|| panic!("no {name}")).1.shallow_clone()
    };
    (file, find)
}

fn config_of_file() -> RNNConfig {
    RNNConfig { num_layers: 2, bidirectional: true, batch_first: false, ..Default::default() }
}

#[test]
fn an_lstm_that_pytorch_saved_gives_the_same_numbers() {
    let (file, of_file) = saved(include_bytes!("pytorch_lstm.pt"));
    let mut vs = VarStore::new(Device::Cpu);
    let layers = lstm(vs.root(), IN, HIDDEN, config_of_file());
    vs.set_kind(Kind::Double);
    vs.load(&file).expect("the parameters");
    std::fs::remove_dir_all(file.parent().expect("a folder")).expect("an end");
    let state = LSTMState((of_file("h"), of_file("c")));
    let (output, state) = layers.seq_init(&of_file("input"), &state);
    assert_close(&output, &of_file("output"), 1e-12, 1e-12);
    assert_close(&state.h(), &of_file("last_h"), 1e-12, 1e-12);
    assert_close(&state.c(), &of_file("last_c"), 1e-12, 1e-12);
}

#[test]
fn a_gru_that_pytorch_saved_gives_the_same_numbers() {
    let (file, of_file) = saved(include_bytes!("pytorch_gru.pt"));
    let mut vs = VarStore::new(Device::Cpu);
    let layers = gru(vs.root(), IN, HIDDEN, config_of_file());
    vs.set_kind(Kind::Double);
    vs.load(&file).expect("the parameters");
    std::fs::remove_dir_all(file.parent().expect("a folder")).expect("an end");
    let (output, state) = layers.seq_init(&of_file("input"), &GRUState(of_file("h")));
    assert_close(&output, &of_file("output"), 1e-12, 1e-12);
    assert_close(&state.value(), &of_file("last_h"), 1e-12, 1e-12);
}

/// Layers over padded sequences are libtorch's over packed ones, also in the reverse direction, and
/// nothing of the padding is used.
#[test]
fn padded_sequences_are_libtorch_s_packed_ones() {
    set_rnn_allow_tf32(false).expect("a switch");
    for device in devices() {
        let mut vs = VarStore::new(device);
        let config = config_of_file();
        let lstm = lstm(vs.root() / "lstm", IN, HIDDEN, config);
        let gru = gru(vs.root() / "gru", IN, HIDDEN, config);
        vs.set_kind(Kind::Double);
        let of = |layer: &str| -> Vec<Tensor> {
            let names = (0..2).flat_map(|of| [format!("l{of}"), format!("l{of}_reverse")]);
            let whats = ["weight_ih", "weight_hh", "bias_ih", "bias_hh"];
            let all = vs.variables();
            let find =
                |name: &str, what: &str| all[&format!("{layer}.{what}_{name}")].shallow_clone();
            names.flat_map(|name| whats.map(|what| find(&name, what))).collect()
        };
        let lengths = [3, 7, 1, 5];
        let double = (Kind::Double, device);
        let input = Tensor::randn([7, 4, IN], double).set_requires_grad(true);
        let states = [(); 2].map(|()| Tensor::randn([4, 4, HIDDEN], double));
        let [h, c] = &states;
        let padded = with_padding_of_nan(&input.detach(), &lengths).set_requires_grad(true);
        let packed = Packed::new(&input, &lengths).expect("a packed batch");
        let sorted = states.each_ref().map(|state| packed.sorted(state).expect("a state"));
        let (data, sizes) = (&packed.data, &packed.batch_sizes);

        let found = lstm.seq_padded(&padded, &lengths, &LSTMState((h.copy(), c.copy())));
        let found = (found.0, vec![found.1.h(), found.1.c()]);
        let (output, h_n, c_n) =
            Tensor::lstm_data(data, sizes, &sorted, &of("lstm"), true, 2, 0.0, true, true);
        assert_same(&found, &(output, vec![h_n, c_n]), &packed, [&padded, &input], of("lstm"));

        let found = gru.seq_padded(&padded, &lengths, &GRUState(h.copy()));
        let (output, h_n) =
            Tensor::gru_data(data, sizes, &sorted[0], &of("gru"), true, 2, 0.0, true, true);
        let found = (found.0, vec![found.1.value()]);
        assert_same(&found, &(output, vec![h_n]), &packed, [&padded, &input], of("gru"));
        assert!(is_zero_in_padding(&found.0, &lengths));
    }
}

/// Compares outputs, last states and gradients with those of a packed batch.
fn assert_same(
    found: &(Tensor, Vec<Tensor>),
    expected: &(Tensor, Vec<Tensor>),
    packed: &Packed,
    inputs: [&Tensor; 2],
    parameters: Vec<Tensor>,
) {
    let states = expected.1.iter().map(|state| packed.unsorted(state).expect("a state"));
    let expected = (packed.padded(&expected.0).expect("a batch"), states.collect::<Vec<_>>());
    let everything = |(output, states): &(Tensor, Vec<Tensor>), input: &Tensor| {
        let loss = states.iter().fold(output.square().sum(Kind::Double), |loss, state| {
            loss + state.sin().sum(Kind::Double)
        });
        let leaves: Vec<&Tensor> = parameters.iter().chain([input]).collect();
        let gradients = Tensor::run_backward(&[loss], &leaves, true, false);
        states.iter().map(Tensor::detach).chain([output.detach()]).chain(gradients).collect()
    };
    let found: Vec<Tensor> = everything(found, inputs[0]);
    let expected: Vec<Tensor> = everything(&expected, inputs[1]);
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_close(found, expected, 1e-10, 1e-10);
    }
}

/// Two directions run at the same time on a GPU. They compute the same in every call, on any stream
/// and in a replayed graph, while memory is freed and used again.
#[test]
fn cuda_two_directions_at_a_time() {
    let Some(device) = cuda_or_skip("cuda_two_directions_at_a_time") else { return };
    set_rnn_allow_tf32(false).expect("a switch");
    for (size, hidden) in [([40, 24, 16], 64), ([64, 64, 128], 512)] {
        let mut vs = VarStore::new(device);
        let config = RNNConfig { num_layers: 2, bidirectional: true, batch_first: false, ..base() };
        let layers = lstm(vs.root(), size[2], hidden, config);
        vs.set_kind(Kind::BFloat16);
        let input = random(&size, device).to_kind(Kind::BFloat16);
        let state = || {
            let zeros = || Tensor::zeros([4, size[1], hidden], (Kind::BFloat16, device));
            LSTMState((zeros(), zeros()))
        };
        let run = || {
            let input = input.copy().set_requires_grad(true);
            let (output, last) = layers.seq_init(&input, &state());
            everything(&output, &[last.h(), last.c()], &input, &vs)
        };
        let expected = run();
        let one_at_a_time = one_direction_at_a_time(&vs, &input, hidden);
        assert!(expected[2].equal(&one_at_a_time), "{size:?}: one direction at a time");
        let streams = [(); 2].map(|()| Stream::new(device).expect("a stream"));
        for call in 0..12 {
            let guard = (call % 3 > 0).then(|| StreamGuard::new(&streams[call % 3 - 1]));
            for (index, (found, expected)) in run().iter().zip(&expected).enumerate() {
                assert!(found.equal(expected), "{size:?}: result {index} of call {call}");
            }
            drop(guard.map(|guard| guard.expect("a guard")));
        }
        if !has_caching_allocator() {
            continue;
        }
        let (graph, (output, _)) =
            Graph::capture(device, || tch::no_grad(|| layers.f_seq_init(&input, &state())))
                .expect("a capture");
        for _ in 0..3 {
            let _ = output.shallow_clone().fill_(f64::NAN);
            graph.replay().expect("a replay");
            assert!(output.equal(&expected[2]), "{size:?} replayed");
        }
    }
}

/// Parameters in one piece of memory, which cuDNN takes as they are, give the same numbers as others,
/// in the first call and in later ones; as does a backward pass that keeps the graph and is repeated.
#[test]
fn cuda_parameters_in_one_piece() {
    let Some(device) = cuda_or_skip("cuda_parameters_in_one_piece") else { return };
    set_rnn_allow_tf32(false).expect("a switch");
    for (has_biases, hidden) in [(true, 24), (false, 24), (true, 7), (false, 7)] {
        let vs = VarStore::new(device);
        let config = RNNConfig { has_biases, batch_first: false, ..base() };
        let layers = lstm(vs.root(), IN, hidden, config);
        let input = random(&[6, 5, IN], device);
        let zeros = || Tensor::zeros([1, 5, hidden], (Kind::Float, device));
        let state = LSTMState((zeros(), zeros()));
        let run = || {
            force(RnnWay::Cudnn, || {
                let input = input.copy().set_requires_grad(true);
                let (output, last) = layers.f_seq_init(&input, &state).expect("outputs");
                let kept = Tensor::run_backward(&[output.sum(Kind::Float)], &[&input], true, false);
                let all = everything(&output, &[last.h(), last.c()], &input, &vs);
                let again = layers.f_seq_init(&input, &state).expect("outputs").0;
                let sum = again.sum(Kind::Float);
                assert!(Tensor::run_backward(&[sum], &[&input], false, false)[0].equal(&kept[0]));
                all
            })
        };
        let first = run();
        for variable in vs.variables().values() {
            let apart = variable.copy();
            variable.shallow_clone().set_data(&apart);
        }
        let apart = run();
        layers.flatten_parameters().expect("one piece");
        for (call, found) in [first, run(), run()].iter().enumerate() {
            for (index, (found, expected)) in found.iter().zip(&apart).enumerate() {
                assert!(found.equal(expected), "{has_biases} {hidden}: {index} of call {call}");
            }
        }
    }
}

/// Two layers in both directions by the operator, one call after another.
fn one_direction_at_a_time(vs: &VarStore, input: &Tensor, hidden: i64) -> Tensor {
    tch::no_grad(|| {
        let all = vs.variables();
        let state = Tensor::zeros([input.size()[1], hidden], (input.kind(), input.device()));
        let of = |input: &Tensor, name: &str| {
            let find = |what: &str| &all[&format!("{what}_{name}")];
            let weights = RnnWeights {
                w_ih: find("weight_ih"),
                w_hh: find("weight_hh"),
                b_ih: Some(find("bias_ih")),
                b_hh: Some(find("bias_hh")),
            };
            ops::lstm(input, (&state, &state), &weights, &Default::default()).0
        };
        let layer = |input: &Tensor, name: &str| {
            let reverse = of(&input.flip([0]), &format!("{name}_reverse")).flip([0]);
            Tensor::cat(&[of(input, name), reverse], 2)
        };
        layer(&layer(input, "l0"), "l1")
    })
}

#[test]
fn steps_make_the_sequence() {
    for device in devices() {
        let vs = VarStore::new(device);
        let layers = lstm(vs.root(), IN, HIDDEN, RNNConfig { num_layers: 2, ..Default::default() });
        let input = random(&[2, 5, IN], device);
        let (output, last) = layers.seq(&input);
        let mut state = layers.zero_state(2);
        for step in 0..5 {
            state = layers.step(&input.select(1, step), &state);
            assert_close(&state.h().select(0, 1), &output.select(1, step), 1e-3, 1e-3);
        }
        assert_close(&state.c(), &last.c(), 1e-3, 1e-3);
    }
}

#[test]
fn dropout_is_between_layers_and_in_training_only() {
    let vs = VarStore::new(Device::Cpu);
    let config = RNNConfig { num_layers: 2, dropout: 1.0, ..Default::default() };
    let mut layers = gru(vs.root(), IN, HIDDEN, config);
    let input = random(&[2, 5, IN], Device::Cpu);
    let (dropped, _) = layers.seq(&input);
    // The second layer then sees zeros in each sequence.
    assert_close(&dropped.select(0, 0), &dropped.select(0, 1), 0.0, 0.0);
    layers.set_train(false);
    let (whole, _) = layers.seq(&input);
    assert!(!whole.select(0, 0).allclose(&whole.select(0, 1), 1e-3, 1e-3, false));
}

#[test]
fn either_layout_begins_with_zeros() {
    let vs = VarStore::new(Device::Cpu);
    let config = RNNConfig { batch_first: false, ..Default::default() };
    let layers =
        (lstm(vs.root() / "lstm", IN, HIDDEN, config), gru(vs.root() / "gru", IN, HIDDEN, config));
    let input = random(&[7, 2, IN], Device::Cpu);
    let (output, state) = layers.0.seq(&input);
    assert_eq!((output.size(), state.h().size()), (vec![7, 2, HIDDEN], vec![1, 2, HIDDEN]));
    let (output, state) = layers.1.seq(&input);
    assert_eq!((output.size(), state.value().size()), (vec![7, 2, HIDDEN], vec![1, 2, HIDDEN]));
}

#[test]
fn an_input_may_have_no_features() {
    let vs = VarStore::new(Device::Cpu);
    let layers = lstm(vs.root(), 0, HIDDEN, Default::default());
    let (output, _) = layers.seq(&random(&[2, 5, 0], Device::Cpu));
    assert_eq!(output.size(), [2, 5, HIDDEN]);
}

#[test]
fn what_does_not_fit_is_named() {
    let vs = VarStore::new(Device::Cpu);
    let layers = lstm(vs.root(), IN, HIDDEN, Default::default());
    let state = layers.zero_state(2);
    let of = |input: &Tensor, state: &LSTMState| {
        layers.f_seq_init(input, state).expect_err("an error").to_string()
    };
    let input = random(&[2, 5, IN], Device::Cpu);
    assert!(of(&input.select(0, 0), &state).contains("nn::Lstm: input: expected"));
    assert!(
        of(&random(&[2, 5, IN + 1], Device::Cpu), &state).contains("nn::Lstm: input: expected")
    );
    assert!(of(&input, &layers.zero_state(3)).contains("nn::Lstm: h: expected"));
    let lengths = |lengths: &[i64]| {
        layers.f_seq_padded(&input, lengths, &state).expect_err("an error").to_string()
    };
    assert!(lengths(&[5]).contains("nn::Lstm: lengths: expected B = 2"), "{}", lengths(&[5]));
    assert!(lengths(&[6, 5]).contains("nn::Lstm: lengths: expected"), "{}", lengths(&[6, 5]));
    let mixed = LSTMState((state.h(), layers.zero_state(3).c()));
    assert!(of(&input, &mixed).contains("nn::Lstm: c: expected"));
}
