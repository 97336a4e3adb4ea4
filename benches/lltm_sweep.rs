//! `cargo xtask bench lltm sweep [WORD…]`: sequences with various numbers of steps and rows,
//! compared with loops over the composite and over the cell, and with libtorch's LSTM. The LSTM has
//! a fourth gate, so its time is for the same size, not for the same arithmetic. One sweep with
//! many rows also forces each way that a GPU has for them.

use crate::clock::{OnTheGpu, in_a_row, median};
use crate::lltm::loop_of_cells;
use std::io::Write;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{Stream, StreamGuard, matmul_allow_tf32, set_matmul_allow_tf32};
use tch_extension::ops::{RnnWay, f_lltm, force, lltm_reference};
use tch_extension::testing::devices;
use tch_extension::{Error, Result};

/// The time, in microseconds, for which one provider's calls are measured in one round.
const ROUND: f64 = 15e3;
const ROUNDS: usize = 5;
/// If a call takes longer than this, in microseconds, one call is enough.
const SLOW: f64 = 60e3;
/// With at least this many steps, one call is enough to warm up.
const FEW_STEPS: i64 = 256;
/// Capturing a graph of more steps takes longer than it is worth.
const MOST_STEPS_OF_A_GRAPH: i64 = 64;

/// (T, B, H), with F = H.
type Sizes = (i64, i64, i64);

/// Long sequences on a GPU, with hidden sizes that use different kernels.
const LONG: [Sizes; 9] = [
    (512, 16, 256),
    (512, 16, 512),
    (512, 16, 768),
    (512, 64, 128),
    (512, 64, 512),
    (512, 64, 768),
    (512, 64, 1024),
    (512, 256, 512),
    (512, 256, 1024),
];

/// H, and numbers of rows around which different ways are the fastest.
const WAYS: [(i64, &[i64]); 9] = [
    (64, &[2048, 3120, 4096, 16384]),
    (128, &[1024, 2048, 2560, 3600, 4096]),
    (256, &[1200, 1680, 1920, 4096, 12288]),
    (512, &[512, 768, 1024, 2048, 4096, 8192]),
    (768, &[640, 768, 2048, 4096]),
    (1024, &[512, 640, 1024, 2048, 4096]),
    (1536, &[256, 512, 704, 1024, 2048]),
    (2048, &[256, 384, 512, 2048]),
    (4096, &[128, 256, 1024]),
];

fn points(device: Device) -> Vec<(&'static str, Sizes)> {
    let (steps, rows): (&[i64], &[i64]) = if device.is_cuda() {
        (&[1, 2, 4, 16, 64, 512, 4096], &[1, 4, 16, 64, 256, 1024, 4096])
    } else {
        (&[1, 4, 16, 64, 256, 1024, 4096], &[1, 4, 16, 64, 256])
    };
    let of_steps = steps.iter().map(|&t| ("steps", (t, 16, 128)));
    let of_rows = rows.iter().map(|&b| ("rows", (32, b, 512)));
    let long: &[Sizes] = if device.is_cuda() { &LONG } else { &[] };
    let ways: &[(i64, &[i64])] = if device.is_cuda() { &WAYS } else { &[] };
    let of_ways =
        ways.iter().flat_map(|&(h, rows)| rows.iter().map(move |&b| (OF_WAYS, (16, b, h))));
    of_steps
        .chain(of_rows)
        .chain(long.iter().map(|&sizes| ("long", sizes)))
        .chain(of_ways)
        .collect()
}

/// The kinds to measure, and for each whether products use tf32.
fn arithmetics(device: Device) -> &'static [(Kind, bool)] {
    const ALL: [(Kind, bool); 4] =
        [(Kind::Float, false), (Kind::Float, true), (Kind::BFloat16, false), (Kind::Half, false)];
    if device.is_cuda() { &ALL } else { &ALL[..1] }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Who {
    Composite,
    Cells,
    Lstm,
    Ours(RnnWay),
}

/// The name of the sweep in which each way is forced.
const OF_WAYS: &str = "ways";

/// The providers that are measured in a sweep.
fn providers(sweep: &str) -> [(Who, &'static str); 4] {
    let ours = (Who::Ours(RnnWay::Automatic), "fused");
    if sweep == OF_WAYS {
        let ways = [RnnWay::Step, RnnWay::TensorCores, RnnWay::Resident].map(Who::Ours);
        return [(ways[0], "products"), (ways[1], "tensor cores"), (ways[2], "one kernel"), ours];
    }
    [(Who::Composite, "composite"), (Who::Cells, "cell"), (Who::Lstm, "LSTM"), ours]
}

/// One provider with its tensors.
struct Runner {
    who: Who,
    /// x, h, c and the parameters, in this order.
    inputs: Vec<Tensor>,
    vector: Tensor,
}

impl Runner {
    fn new(who: Who, (steps, batch, hidden): Sizes, kind: Kind, device: Device) -> Result<Self> {
        let normal = |size: &[i64], scale: f64| Tensor::randn(size, (kind, device)) * scale;
        let scale = 1.0 / (hidden as f64).sqrt();
        let mut inputs = vec![
            normal(&[steps, batch, hidden], 1.0),
            normal(&[batch, hidden], 1.0),
            normal(&[batch, hidden], 1.0),
        ];
        let parameters = match who {
            Who::Lstm => {
                let weights = || normal(&[4 * hidden, hidden], scale);
                vec![
                    weights(),
                    weights(),
                    normal(&[4 * hidden], scale),
                    normal(&[4 * hidden], scale),
                ]
            }
            _ => vec![normal(&[3 * hidden, 2 * hidden], scale), normal(&[3 * hidden], scale)],
        };
        if who == Who::Lstm && device.is_cuda() {
            // cuDNN wants the weights in one piece of memory, here for an LSTM (mode 2) with one
            // layer.
            let (weights_of_a_layer, lstm, no_projection) = (4, 2, 0);
            let _ = Tensor::f_internal_cudnn_rnn_flatten_weight(
                &parameters,
                weights_of_a_layer,
                hidden,
                lstm,
                hidden,
                no_projection,
                1,
                false,
                false,
            )?;
        }
        inputs.extend(parameters);
        let vector = normal(&[steps, batch, hidden], 1.0);
        Ok(Runner { who, inputs, vector })
    }

    fn with_gradients(&self, wanted: bool) -> Self {
        let inputs =
            self.inputs.iter().map(|input| input.detach().set_requires_grad(wanted)).collect();
        Runner { who: self.who, inputs, vector: self.vector.shallow_clone() }
    }

    fn forward(&self) -> Result<Tensor> {
        let [x, h, c, parameters @ ..] = &self.inputs[..] else {
            return Err(Error::msg("three tensors and the parameters"));
        };
        let (weight, bias) = (&parameters[0], Some(&parameters[1]));
        Ok(match self.who {
            Who::Composite => lltm_reference(x, weight, bias, (h, c))?.0,
            Who::Cells => loop_of_cells(x, weight, bias, (h, c))?.0,
            Who::Ours(way) => force(way, || f_lltm(x, weight, bias, (h, c)))?.0,
            Who::Lstm => {
                let state = [h, c].map(|state| state.unsqueeze(0));
                // If this were always true, cuDNN would keep what a backward pass needs.
                let train = x.requires_grad();
                x.f_lstm(&state, parameters, true, 1, 0.0, train, false, false)?.0
            }
        })
    }

    /// Runs a forward pass, and a backward pass if the inputs require grad.
    fn run(&self) -> Result<()> {
        let output = self.forward()?;
        if self.inputs[0].requires_grad() {
            let inputs: Vec<&Tensor> = self.inputs.iter().collect();
            let options = GradOptions { grad_outputs: &[Some(&self.vector)], ..Default::default() };
            grad(&[&output], &inputs, &options)?;
        }
        Ok(())
    }

    fn measure(&self, device: Device, steps: i64) -> Result<Costs> {
        let mut failed = None;
        let mut call = || failed = self.run().err().or(failed.take());
        let mut time =
            |calls: u64| in_a_row(device, calls, &mut call).as_secs_f64() * 1e6 / calls as f64;
        if steps < FEW_STEPS {
            time(3);
        }
        let one = time(1);
        let calls = ((ROUND / one) as u64).max(1);
        let wall =
            if one > SLOW { one } else { median((0..ROUNDS).map(|_| time(calls)).collect()) };
        failed.map_or(Ok(()), Err)?;
        let graph = device.is_cuda() && steps <= MOST_STEPS_OF_A_GRAPH;
        Ok(Costs { wall, gpu: if graph { self.on_the_gpu(device)? } else { None } })
    }

    /// The time on the GPU alone and the number of kernels; `None` if the call cannot be captured.
    fn on_the_gpu(&self, device: Device) -> Result<Option<(f64, usize)>> {
        let stream = Stream::new(device)?;
        stream.wait_stream(&Stream::current(device)?)?;
        let _guard = StreamGuard::new(&stream)?;
        let own = self.with_gradients(self.inputs[0].requires_grad());
        own.run()?;
        let size =
            own.inputs.iter().map(|input| input.numel() * input.kind().elt_size_in_bytes()).sum();
        let captured = OnTheGpu::capture(&stream, size, &mut || drop(own.run()));
        Ok(captured.ok().map(|mut graph| (graph.time(), graph.kernels())))
    }
}

/// The time of a call in microseconds: in a steady loop, and on the GPU alone, there with the
/// number of kernels.
struct Costs {
    wall: f64,
    gpu: Option<(f64, usize)>,
}

/// Prints a line for each point whose title contains all the words.
///
/// # Errors
/// If a CUDA call fails, or if nothing can be printed.
pub fn run(words: &[String]) -> Result<()> {
    println!(
        "µs a step: wall in a steady loop; gpu as a CUDA graph, with kernels a call, up to {MOST_STEPS_OF_A_GRAPH} steps"
    );
    for device in devices() {
        for &(kind, tf32) in arithmetics(device) {
            // One point of the sweep over steps is enough in tf32.
            let all = points(device)
                .into_iter()
                .filter(|(sweep, sizes)| !tf32 || *sweep != "steps" || sizes.0 == 512);
            for (index, (sweep, sizes)) in all.enumerate() {
                let name = if tf32 { "tf32".to_string() } else { format!("{kind:?}") };
                let place = if device.is_cuda() { "cuda" } else { "cpu" };
                for gradients in [false, true] {
                    let direction = if gradients { "forward+backward" } else { "forward" };
                    let title = format!("lltm {sweep} {direction} {sizes:?} {name} {place}");
                    if words.iter().all(|word| title.contains(word.as_str())) {
                        tch::manual_seed(index as i64);
                        line(&title, sweep, sizes, (kind, tf32), gradients, device)?;
                    }
                }
            }
        }
    }
    Ok(())
}

fn line(
    title: &str,
    sweep: &str,
    sizes: Sizes,
    (kind, tf32): (Kind, bool),
    gradients: bool,
    device: Device,
) -> Result<()> {
    let steps = sizes.0;
    let mut line = format!("{title:<56}");
    for (who, name) in providers(sweep) {
        let runner = Runner::new(who, sizes, kind, device)?.with_gradients(gradients);
        let costs = in_precision(tf32, device, || runner.measure(device, steps))?;
        line += &format!("  {name} {:>8.2}", costs.wall / steps as f64);
        if let Some((gpu, kernels)) = costs.gpu {
            line += &format!(" (gpu {:>7.2}, {kernels})", gpu / steps as f64);
        }
    }
    println!("{line}");
    std::io::stdout().flush().map_err(|error| Error::msg(error.to_string()))
}

/// Runs `body` with libtorch's tf32 switch for products. cuDNN's own switch, which lets it use
/// tf32, is not changed.
fn in_precision<T>(tf32: bool, device: Device, body: impl FnOnce() -> Result<T>) -> Result<T> {
    if !device.is_cuda() {
        return body();
    }
    let before = matmul_allow_tf32()?;
    set_matmul_allow_tf32(tf32)?;
    let result = body();
    set_matmul_allow_tf32(before)?;
    result
}
