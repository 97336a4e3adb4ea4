//! `cargo xtask bench lstm|gru sweep [WORD…]`: each way that a GPU has for a layer, forced, and
//! libtorch's layer, at many sizes. The plans' tables of costs come from it.

use crate::clock::{in_a_row, median};
use crate::rnn::{Call, Layer, Sizes};
use std::io::Write;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{RnnWay, force};
use tch_extension::testing::devices;
use tch_extension::{Error, Result};

/// The time, in microseconds, for which one provider's calls are measured in one round.
const ROUND: f64 = 10e3;
const ROUNDS: usize = 3;

/// Other numbers of steps are measured with the word for their beginning, as `(4,`.
const STEPS: [i64; 4] = [256, 1, 4, 32];
const ROWS: [i64; 6] = [8, 16, 64, 128, 256, 1024];
const COLUMNS: [i64; 7] = [64, 128, 256, 512, 768, 1024, 1536];
const KINDS: [Kind; 3] = [Kind::BFloat16, Kind::Half, Kind::Float];
const WAYS: [(&str, Option<RnnWay>); 6] = [
    ("libtorch", None),
    ("fused", Some(RnnWay::Automatic)),
    ("cluster", Some(RnnWay::Cluster)),
    ("grid", Some(RnnWay::Grid)),
    ("wide grid", Some(RnnWay::WideGrid)),
    ("step", Some(RnnWay::Step)),
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

    /// The time of a call in microseconds per step, forward and forward with backward.
    fn measure(&self, way: Option<RnnWay>, device: Device, steps: i64) -> Result<[f64; 2]> {
        let call: Call = if way.is_none() { self.layer.libtorch } else { self.layer.fused };
        let way = way.unwrap_or_default();
        let mut times = [0.0; 2];
        for (time, wanted) in times.iter_mut().zip([false, true]) {
            let inputs: Vec<Tensor> =
                self.inputs.iter().map(|input| input.set_requires_grad(wanted)).collect();
            let leaves: Vec<&Tensor> = inputs.iter().collect();
            let run = || -> Result<()> {
                let outputs = force(way, || call(&inputs))?;
                if wanted {
                    let options =
                        GradOptions { grad_outputs: &[Some(&self.vector)], ..Default::default() };
                    grad(&[&outputs[0]], &leaves, &options)?;
                }
                Ok(())
            };
            let mut failed = None;
            let mut call = || failed = run().err().or(failed.take());
            let mut of =
                |calls: u64| in_a_row(device, calls, &mut call).as_secs_f64() * 1e6 / calls as f64;
            of(1);
            let one = of(1);
            let calls = ((ROUND / one) as u64).max(1);
            *time = median((0..ROUNDS).map(|_| of(calls)).collect()) / steps as f64;
            failed.map_or(Ok(()), Err)?;
        }
        Ok(times)
    }
}

pub fn run(layer: Layer, words: &[String]) -> Result<()> {
    let mut out = std::io::stdout().lock();
    for device in devices().into_iter().filter(|device| device.is_cuda()) {
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
                let mut line = format!("{title:32}");
                for (name, way) in WAYS {
                    let [forward, both] = runner.measure(way, device, sizes.0)?;
                    line += &format!("  {name} {forward:.2} / {both:.2}");
                }
                writeln!(out, "{line}").map_err(|error| Error::msg(error.to_string()))?;
            }
        }
    }
    Ok(())
}
