//! `cargo xtask bench lstm|gru layers`: `nn::lstm` and `nn::gru` with one layer, two directions and two
//! layers, compared with libtorch's.

use crate::clock::{in_a_row, median};
use crate::rnn::Layer;
use std::io::Write;
use tch::nn::{GRUState, LSTMState, RNN, RNNConfig, VarStore};
use tch::{Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::nn::{gru, lstm};
use tch_extension::testing::devices;
use tch_extension::{Error, Result};

/// The time, in microseconds, for which one provider's calls are measured in one round.
const ROUND: f64 = 20e3;
const ROUNDS: usize = 5;
const STEPS: i64 = 512;
/// (B, H), with F = H.
const SIZES: [(i64, i64); 3] = [(16, 128), (32, 256), (64, 512)];
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];

/// What computes the layers: the output of an input.
type Layers = Box<dyn Fn(&Tensor) -> Tensor>;

fn layers(
    of: Layer,
    vs: &VarStore,
    (batch, hidden): (i64, i64),
    config: RNNConfig,
    is_ours: bool,
) -> Layers {
    let path = vs.root();
    let count = config.num_layers * if config.bidirectional { 2 } else { 1 };
    // A `VarStore` changes its kind after the layers are made.
    let device = vs.device();
    let state = move |like: &Tensor| Tensor::zeros([count, batch, hidden], (like.kind(), device));
    let lstm_state = move |like: &Tensor| LSTMState((state(like), state(like)));
    let gru_state = move |like: &Tensor| GRUState(state(like));
    match (of.states, is_ours) {
        (2, true) => {
            let of = lstm(path, hidden, hidden, config);
            Box::new(move |input| of.seq_init(input, &lstm_state(input)).0)
        }
        (2, false) => {
            let of = tch::nn::lstm(path, hidden, hidden, config);
            Box::new(move |input| of.seq_init(input, &lstm_state(input)).0)
        }
        (_, true) => {
            let of = gru(path, hidden, hidden, config);
            Box::new(move |input| of.seq_init(input, &gru_state(input)).0)
        }
        _ => {
            let of = tch::nn::gru(path, hidden, hidden, config);
            Box::new(move |input| of.seq_init(input, &gru_state(input)).0)
        }
    }
}

/// Moves the parameters into one piece of memory, as torch.nn's modules do: cuDNN would otherwise copy
/// them in each call.
fn flatten(of: Layer, vs: &VarStore, hidden: i64, config: RNNConfig) -> Result<()> {
    let all = vs.variables();
    let directions: &[&str] = if config.bidirectional { &["", "_reverse"] } else { &[""] };
    let mut parameters = Vec::new();
    for layer in 0..config.num_layers {
        for direction in directions {
            for what in ["weight_ih", "weight_hh", "bias_ih", "bias_hh"] {
                parameters.push(all[&format!("{what}_l{layer}{direction}")].shallow_clone());
            }
        }
    }
    let (of_a_layer, no_projection) = (4, 0);
    let _ = tch::no_grad(|| {
        Tensor::f_internal_cudnn_rnn_flatten_weight(
            &parameters,
            of_a_layer,
            hidden,
            of.mode,
            hidden,
            no_projection,
            config.num_layers,
            false,
            config.bidirectional,
        )
    })?;
    Ok(())
}

/// The time of a call in microseconds per step, forward and forward with backward.
fn measure(run: &Layers, vs: &VarStore, size: (i64, i64), kind: Kind) -> Result<[f64; 2]> {
    let device = vs.device();
    let input = Tensor::randn([STEPS, size.0, size.1], (kind, device));
    let mut times = [0.0; 2];
    for (time, wanted) in times.iter_mut().zip([false, true]) {
        let input = input.set_requires_grad(wanted);
        let variables: Vec<Tensor> = vs.variables().into_values().collect();
        let leaves: Vec<&Tensor> = variables.iter().chain([&input]).collect();
        let vector = tch::no_grad(|| run(&input)).ones_like();
        let call = || -> Result<()> {
            if !wanted {
                let _ = tch::no_grad(|| run(&input));
                return Ok(());
            }
            let output = run(&input);
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            grad(&[&output], &leaves, &options)?;
            Ok(())
        };
        let mut failed = None;
        let mut call = || failed = call().err().or(failed.take());
        let mut of =
            |calls: u64| in_a_row(device, calls, &mut call).as_secs_f64() * 1e6 / calls as f64;
        of(2);
        let calls = ((ROUND / of(1)) as u64).max(1);
        *time = median((0..ROUNDS).map(|_| of(calls)).collect()) / STEPS as f64;
        failed.map_or(Ok(()), Err)?;
    }
    Ok(times)
}

pub fn run(layer: Layer, words: &[String]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let base = RNNConfig { batch_first: false, ..Default::default() };
    let configs = [
        ("one", base),
        ("two directions", RNNConfig { bidirectional: true, ..base }),
        ("two layers", RNNConfig { num_layers: 2, ..base }),
    ];
    for device in devices().into_iter().filter(|device| device.is_cuda()) {
        for (kind, size) in KINDS.into_iter().flat_map(|kind| SIZES.map(|size| (kind, size))) {
            let title = format!("{} {kind:?} {size:?}", layer.operator);
            if !words.iter().all(|word| title.contains(word)) {
                continue;
            }
            let mut line = format!("{title:26}");
            for (name, config) in configs {
                line += &format!("  {name}:");
                for (who, is_ours) in [("libtorch", false), ("ours", true)] {
                    let mut vs = VarStore::new(device);
                    let run = layers(layer, &vs, size, config, is_ours);
                    vs.set_kind(kind);
                    if !is_ours {
                        flatten(layer, &vs, size.1, config)?;
                    }
                    let [forward, both] = measure(&run, &vs, size, kind)?;
                    line += &format!(" {who} {forward:.2} / {both:.2}");
                }
            }
            writeln!(out, "{line}").map_err(|error| Error::msg(error.to_string()))?;
        }
    }
    Ok(())
}
