//! `cargo xtask bench lstm|gru sweep [WORD…]`: each way that a GPU has for a layer, forced, and
//! libtorch's layer, at many sizes. The plans' tables of costs come from it.
//!
//! `cargo xtask bench lstm|gru sizes [WORD…]`: the plan's choice and libtorch's layer at sizes that
//! users have, with few steps and with many. Where the plan's choice is slower, each way's time
//! follows.

use crate::clock::{in_a_row, median};
use crate::rnn::{Call, Layer, Sizes};
use std::io::Write;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{rnn_allow_tf32, set_rnn_allow_tf32};
use tch_extension::ops::{RnnWay, force};
use tch_extension::testing::devices;
use tch_extension::{Error, Result};

/// For how long, in microseconds, one provider's calls are measured in one round, and how often.
#[derive(Clone, Copy)]
struct Rounds {
    time: f64,
    count: usize,
}

const OF_SWEEP: Rounds = Rounds { time: 10e3, count: 3 };
const OF_SIZES: Rounds = Rounds { time: 2e3, count: 5 };
/// If a call takes longer than this, in microseconds, one round is enough.
const SLOW: f64 = 20e3;

/// Other numbers of steps are measured with the word for their beginning, as `(4,`.
const STEPS: [i64; 4] = [256, 1, 4, 32];
const ROWS: [i64; 6] = [8, 16, 64, 128, 256, 1024];
const COLUMNS: [i64; 7] = [64, 128, 256, 512, 768, 1024, 1536];
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];
/// A provider with its name: libtorch's layer, or a way of ours.
type Named = (&'static str, Option<RnnWay>);
const WAYS: [Named; 8] = [
    ("libtorch", None),
    ("fused", Some(RnnWay::Automatic)),
    ("cudnn", Some(RnnWay::Cudnn)),
    ("block", Some(RnnWay::Block)),
    ("cluster", Some(RnnWay::Cluster)),
    ("grid", Some(RnnWay::Grid)),
    ("wide grid", Some(RnnWay::WideGrid)),
    ("step", Some(RnnWay::Step)),
];

const WAYS_ON_CPU: [Named; 4] = [
    ("libtorch", None),
    ("packed", Some(RnnWay::Packed)),
    ("step", Some(RnnWay::Step)),
    ("onednn", Some(RnnWay::Onednn)),
];

/// A layer's tensors, measured by one provider after another.
struct Runner {
    layer: Layer,
    inputs: Vec<Tensor>,
    vector: Tensor,
}

impl Runner {
    fn new(layer: Layer, sizes: Sizes, kind: Kind, device: Device) -> Result<Runner> {
        let normal = |size: &[i64], scale: f64| Tensor::randn(size, (kind, device)) * scale;
        let inputs: Vec<Tensor> =
            layer.inputs(sizes).iter().map(|(size, scale)| normal(size, *scale)).collect();
        layer.flatten(&inputs)?;
        let vector = normal(&[sizes.0, sizes.1, sizes.2], 1.0);
        Ok(Runner { layer, inputs, vector })
    }

    /// One call of libtorch's layer, or of ours in a way, with gradients if the inputs require them.
    fn run(&self, way: Option<RnnWay>) -> Result<()> {
        let call: Call = if way.is_none() { self.layer.libtorch } else { self.layer.fused };
        let outputs = force(way.unwrap_or_default(), || call(&self.inputs))?;
        if self.inputs[0].requires_grad() {
            let leaves: Vec<&Tensor> = self.inputs.iter().collect();
            let options = GradOptions { grad_outputs: &[Some(&self.vector)], ..Default::default() };
            grad(&[&outputs[0]], &leaves, &options)?;
        }
        Ok(())
    }

    /// The time of a call in microseconds, measured in turns, forward and forward with backward.
    fn measure<const N: usize>(
        &self,
        ways: [Option<RnnWay>; N],
        rounds: Rounds,
    ) -> Result<[[f64; 2]; N]> {
        let device = self.vector.device();
        let mut times = [[0.0; 2]; N];
        for (direction, wanted) in [false, true].into_iter().enumerate() {
            for input in &self.inputs {
                let _ = input.set_requires_grad(wanted);
            }
            let mut failed = None;
            let mut of = |way, calls: u64| {
                let mut call = || failed = self.run(way).err().or(failed.take());
                in_a_row(device, calls, &mut call).as_secs_f64() * 1e6 / calls as f64
            };
            let one = ways.map(|way| {
                of(way, 1);
                of(way, 1)
            });
            let calls = one.map(|one| ((rounds.time / one) as u64).max(1));
            let is_slow = one.iter().any(|one| *one > SLOW);
            let measured: Vec<[f64; N]> = (0..if is_slow { 1 } else { rounds.count })
                .map(|_| std::array::from_fn(|place| of(ways[place], calls[place])))
                .collect();
            for (place, time) in times.iter_mut().enumerate() {
                time[direction] = median(measured.iter().map(|round| round[place]).collect());
            }
            failed.map_or(Ok(()), Err)?;
        }
        Ok(times)
    }

    /// The times of the ways per step, as text.
    fn of_ways<const N: usize>(
        &self,
        ways: &[Named; N],
        steps: i64,
        rounds: Rounds,
    ) -> Result<String> {
        let times = self.measure(ways.map(|(_, way)| way), rounds)?;
        let per_step = |time: f64| time / steps as f64;
        let texts = ways.iter().zip(times).map(|((name, _), [forward, both])| {
            format!("  {name} {:.2} / {:.2}", per_step(forward), per_step(both))
        });
        Ok(texts.collect())
    }
}

fn gpus() -> impl Iterator<Item = Device> {
    devices().into_iter().filter(|device| device.is_cuda())
}

pub fn sweep(layer: Layer, words: &[String]) -> Result<()> {
    for device in gpus() {
        for kind in KINDS {
            let of_steps = |steps| COLUMNS.iter().flat_map(move |h| ROWS.map(|b| (steps, b, *h)));
            for sizes in STEPS.into_iter().flat_map(of_steps) {
                let title = format!("{} {kind:?} {sizes:?}", layer.operator);
                let is_asked = words.iter().any(|word| word.starts_with('('));
                let wanted = is_asked || sizes.0 == STEPS[0];
                if !wanted || !words.iter().all(|word| title.contains(word)) {
                    continue;
                }
                let runner = Runner::new(layer, sizes, kind, device)?;
                print(format!("{title:32}{}", runner.of_ways(&WAYS, sizes.0, OF_SWEEP)?))?;
            }
        }
    }
    Ok(())
}

/// What users have: few steps and many, few rows and many, and columns of all sorts.
const USED_STEPS: [i64; 4] = [1, 4, 32, 512];
const USED_ROWS: [i64; 5] = [1, 16, 64, 256, 1024];
const USED_COLUMNS: [i64; 8] = [64, 100, 200, 512, 768, 1000, 1024, 1536];
/// The kinds, and whether tf32 is allowed.
const USED_KINDS: [(Kind, bool); 4] =
    [(Kind::BFloat16, true), (Kind::Half, true), (Kind::Float, true), (Kind::Float, false)];
/// On the CPU there is no tf32, and only `Float` is faster than a loop.
const USED_KINDS_ON_CPU: [(Kind, bool); 1] = [(Kind::Float, true)];
/// More multiplications take a CPU too long.
const MOST_ON_CPU: i64 = 4 << 30;
/// What may still be called as fast.
const NOT_SLOWER: f64 = 1.03;

pub fn sizes(layer: Layer, words: &[String]) -> Result<()> {
    for device in devices() {
        let kinds: &[_] = if device.is_cuda() { &USED_KINDS } else { &USED_KINDS_ON_CPU };
        for &(kind, tf32) in kinds {
            let of_steps = |steps| USED_COLUMNS.map(|h| USED_ROWS.map(|b| (steps, b, h)));
            for sizes in USED_STEPS.into_iter().flat_map(of_steps).flatten() {
                let (steps, rows, columns) = sizes;
                let is_quick = steps * rows * columns * columns * layer.gates * 2 <= MOST_ON_CPU;
                let strict = if tf32 { "" } else { " strict" };
                let place = if device.is_cuda() { "cuda" } else { "cpu" };
                let title = format!("{} {kind:?}{strict} {sizes:?} {place}", layer.operator);
                if words.iter().all(|word| title.contains(word)) && (device.is_cuda() || is_quick) {
                    let compared = with_tf32(device, tf32, || {
                        compare(&Runner::new(layer, sizes, kind, device)?, steps)
                    })?;
                    print(format!("{title:40}{compared}"))?;
                }
            }
        }
    }
    Ok(())
}

/// Runs `body` with libtorch's switch for recurrent layers.
fn with_tf32<T>(device: Device, allow: bool, body: impl FnOnce() -> Result<T>) -> Result<T> {
    if !device.is_cuda() {
        return body();
    }
    let before = rnn_allow_tf32()?;
    set_rnn_allow_tf32(allow)?;
    let result = body();
    set_rnn_allow_tf32(before)?;
    result
}

/// libtorch's and our time of a call in microseconds, the ratio, and each way's where it helps.
fn compare(runner: &Runner, steps: i64) -> Result<String> {
    let [libtorch, ours] = runner.measure([None, Some(RnnWay::Automatic)], OF_SIZES)?;
    let ratios = [ours[0] / libtorch[0], ours[1] / libtorch[1]];
    let mut line = format!(
        "  libtorch {:.0} / {:.0}  ours {:.0} / {:.0}  ratio {:.2} / {:.2}",
        libtorch[0], libtorch[1], ours[0], ours[1], ratios[0], ratios[1]
    );
    if ratios.iter().any(|ratio| *ratio > NOT_SLOWER) {
        line += "  SLOWER";
        line += &match runner.vector.device() {
            Device::Cpu => runner.of_ways(&WAYS_ON_CPU, steps, OF_SIZES)?,
            _ => runner.of_ways(&WAYS, steps, OF_SIZES)?,
        };
    }
    Ok(line)
}

fn print(line: String) -> Result<()> {
    writeln!(std::io::stdout().lock(), "{line}").map_err(|error| Error::msg(error.to_string()))
}
