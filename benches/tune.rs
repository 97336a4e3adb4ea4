//! `cargo xtask tune [SEED] [OPERATOR…] [240s]`: measures the GPU time of each way of each operator,
//! forced, at random sizes, and fits the costs by which plans choose. `tune.csv` has the times, and
//! `tune fit FILE` fits those of an earlier run, also on another machine.

use crate::clock::{self, OnTheGpu};
use crate::common::{Case, Direction, Runner};
use crate::draw::Draw;
use crate::random::{Drawn, Point};
use crate::table::Captured;
use crate::{add_layer_norm, rms_norm, rnn, table};
use crate::{gelu_mlp, gru, layer_norm, linear, lltm, lltm_cell, lstm, machine, matmul_add_relu};
use std::io::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::cuda::{Stream, synchronize};
use tch_extension::ops::tune::{Measured, fit as fitted, head, operators as fitted_operators};
use tch_extension::ops::{LltmCellWay, MlpWay, NormWay, ProductWay, RnnWay, force};

/// Runs something with a way that is forced.
type Forced = fn(&mut dyn FnMut());
/// A way by its name.
type Named = (&'static str, Forced);

macro_rules! ways {
    ($way:ident: $($name:ident)*) => {
        &[$((stringify!($name), |body: &mut dyn FnMut()| force($way::$name, body))),*]
    };
}

const LAYER: &[Named] = ways!(RnnWay: Automatic Cudnn Step Block Cluster Grid WideGrid);
const LLTM: &[Named] =
    ways!(RnnWay: Automatic Cells Step Fused TensorCores Cluster Grid PlainGrid WideGrid);
const CELL: &[Named] = ways!(LltmCellWay: Automatic Product Fused TensorCores);
const PRODUCT: &[Named] =
    ways!(ProductWay: Automatic Plan Small Hopper Skinny Padded Pass Composite);
const NORM: &[Named] =
    ways!(NormWay: Automatic Registers Cluster Ring InPlace Few Passes FewPasses);
const MLP: &[Named] = ways!(MlpWay: Automatic Pass Activation);

const OPERATORS: [(&str, Drawn, &[Named]); 10] = [
    ("lstm", of_lstm, LAYER),
    ("gru", of_gru, LAYER),
    ("lltm", lltm::drawn, LLTM),
    ("lltm_cell", lltm_cell::drawn, CELL),
    ("linear", linear::drawn, PRODUCT),
    ("matmul_add_relu", matmul_add_relu::drawn, PRODUCT),
    ("layer_norm", layer_norm::drawn, NORM),
    ("rms_norm", rms_norm::drawn, NORM),
    ("add_layer_norm", add_layer_norm::drawn, NORM),
    ("gelu_mlp", gelu_mlp::drawn, MLP),
];

fn of_lstm(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    sequences(lstm::LAYER, draw, kind, device)
}

fn of_gru(draw: &mut Draw, kind: Kind, device: Device) -> Case {
    sequences(gru::LAYER, draw, kind, device)
}

/// Half of the calls are large, and some take milliseconds: what only they tell apart, such as the rate of
/// products and the rows of a step, is needed for larger ones yet.
fn sequences(layer: rnn::Layer, draw: &mut Draw, kind: Kind, device: Device) -> Case {
    const MOST: [i64; 2] = [1 << 33, 1 << 37];
    let most_products = MOST[usize::from(draw.one_in(8))];
    loop {
        let step = draw.step();
        let [least, most] = if draw.one_in(2) { [1, 1] } else { [8, 48] };
        let (t, b, h) = (draw.size(512, 1), draw.size(1024, 1), draw.size(2048, step));
        if t * b * h * h <= most_products && t >= least && b >= least && h >= most {
            return layer.case(kind, device, (t, b, h));
        }
    }
}

/// Measures for the given time, shared evenly by the operators, and writes the table where plans look
/// for it.
///
/// # Errors
/// If there is no GPU, or a file cannot be written.
pub fn run(words: &[String]) -> Result<()> {
    if let [first, file] = words
        && first == "fit"
    {
        return fit(file);
    }
    if !tch::Cuda::is_available() {
        return Err(Error::other(
            "tune measures a GPU, and there is none here; `cargo xtask bundle` makes dist/, whose `run.sh tune` runs where there is one",
        ));
    }
    let seconds = |word: &String| word.strip_suffix('s').and_then(|number| number.parse().ok());
    let limit = words.iter().find_map(seconds).unwrap_or(300);
    let seed = words.iter().find_map(|word| word.parse().ok()).unwrap_or(1);
    // Those whose costs are fitted. Others are measured if they are named.
    let mut names: Vec<&str> = fitted_operators().collect();
    let is_number = |word: &str| word.trim_end_matches('s').parse::<u64>().is_ok();
    let named: Vec<&str> =
        words.iter().map(String::as_str).filter(|word| !is_number(word)).collect();
    if !named.is_empty() {
        names = named;
    }
    let mut operators = Vec::new();
    for name in names {
        let operator = OPERATORS.iter().find(|(of, ..)| *of == name);
        operators.push(operator.ok_or_else(|| {
            let all = OPERATORS.map(|(name, ..)| name).join(", ");
            Error::other(format!("there is no operator {name} to tune, only {all}"))
        })?);
    }
    println!("{}", machine::describe());
    let share = Duration::from_secs(limit) / operators.len() as u32;
    let mut measured = Vec::new();
    let mut speed = Speed::new()?;
    for (name, drawn, ways) in operators {
        let (start, before) = (Instant::now(), measured.len());
        for number in 0.. {
            if start.elapsed() > share {
                break;
            }
            measured.extend(points(*drawn, ways, seed, number));
        }
        println!("{name}: {} times", measured.len() - before);
        speed.check();
    }
    let head = head(Device::Cuda(0)).map_err(|error| Error::other(error.to_string()))?;
    let lines: String = measured.iter().map(|measured| measured.line() + "\n").collect();
    let text = head + &lines;
    std::fs::write(table::output_folder().join("tune.csv"), &text)?;
    speed.summary();
    write(&text)
}

/// Notices a card that other programs use, or whose clock is throttled.
struct Speed {
    product: OnTheGpu,
    times: Vec<f64>,
    _tensors: [Tensor; 2],
}

impl Speed {
    fn new() -> Result<Self> {
        const SIZE: i64 = 4096;
        let matrix = || Tensor::randn([SIZE, SIZE], (Kind::BFloat16, Device::Cuda(0)));
        let tensors = [matrix(), matrix()];
        // cuBLAS cannot be initialised in a capture.
        drop(tensors[0].mm(&tensors[1]));
        let captured = Stream::new(Device::Cuda(0)).and_then(|stream| {
            synchronize(Device::Cuda(0))?;
            OnTheGpu::capture_calls(&stream, 0, 10, &mut || drop(tensors[0].mm(&tensors[1])))
        });
        let product = captured.map_err(|error| Error::other(error.to_string()))?;
        let mut speed = Speed { product, times: Vec::new(), _tensors: tensors };
        speed.check();
        Ok(speed)
    }

    fn check(&mut self) {
        self.times.push(self.product.time());
    }

    fn summary(&self) {
        const ALIKE: f64 = 1.05;
        let [fastest, slowest] =
            [f64::min, f64::max].map(|of| self.times.iter().copied().reduce(of).unwrap_or(0.0));
        if slowest > ALIKE * fastest {
            println!(
                "WARNING: the same product took from {fastest:.0} to {slowest:.0} µs: another program uses the GPU, or its \
                 clock is throttled. Measure again"
            );
        }
    }
}

fn points(drawn: Drawn, ways: &[Named], seed: u64, number: u64) -> Vec<Measured> {
    let mut measured = Vec::new();
    for direction in [Direction::Forward, Direction::Both] {
        let point = Point::new(drawn, seed, number, direction);
        if point.is_wanted() {
            let mut of = || point.case.in_its_precision(|| measure(&point, ways));
            match catch_unwind(AssertUnwindSafe(&mut of)) {
                Ok(of_point) => measured.extend(of_point),
                Err(_) => println!("FAILED: {}", point.title),
            }
        }
    }
    measured
}

fn fit(file: &str) -> Result<()> {
    write(&std::fs::read_to_string(file)?)
}

fn write(text: &str) -> Result<()> {
    let fitted = fitted(text).map_err(|error| Error::other(error.to_string()))?;
    println!("{}", fitted.report);
    let copy = table::output_folder().join("costs.txt");
    for path in fitted.path.iter().chain([&copy]) {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        // A process that starts meanwhile reads the former table or this one.
        let partial = path.with_extension("part");
        std::fs::write(&partial, &fitted.text)?;
        std::fs::rename(&partial, path)?;
        println!("written to {}", path.display());
    }
    Ok(())
}

/// Measures the ways of a point that differ in their kernels, and what its plan chooses.
fn measure(point: &Point, ways: &[Named]) -> Vec<Measured> {
    let case = &point.case;
    let runners = case.unchecked_runners(point.direction, point.offset);
    let Some(runner) = runners.last() else { return Vec::new() };
    let mut seen: Vec<(Vec<String>, f64)> = Vec::new();
    let mut measured = Vec::new();
    for (name, forced) in ways {
        let mut captured = None;
        forced(&mut || captured = capture(case, runner, point.direction));
        let Some(Captured { mut graph, tensors: _tensors }) = captured else { continue };
        let kernels = graph.all_kernel_names();
        // The first is the plan's choice, which is one of the others.
        let known = seen.iter().position(|(names, _)| *names == kernels);
        let is_plan = seen.first().is_some_and(|(names, _)| *names == kernels)
            && seen.iter().filter(|(names, _)| *names == kernels).count() == 1;
        let micros = known.map_or_else(|| graph.time(), |known| seen[known].1);
        seen.push((kernels, micros));
        if known.is_none() || is_plan {
            measured.push(Measured {
                operator: case.operator.to_string(),
                both: point.direction == Direction::Both,
                kind: case.kind,
                tf32: case.tf32,
                inputs: case.inputs.iter().map(|(size, _)| size.clone()).collect(),
                offset: point.offset,
                way: (*name).to_string(),
                micros,
            });
        }
    }
    measured
}

fn capture<'a>(case: &Case, runner: &Runner<'a>, direction: Direction) -> Option<Captured<'a>> {
    const SLOW: f64 = 2e4;
    let one = clock::per_call(case.device, 1, &mut || runner.run(direction));
    if one > SLOW {
        return None;
    }
    table::capture_calls(case, runner, direction, Some(((500.0 / one) as usize).clamp(1, 20)))
}
