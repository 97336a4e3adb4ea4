//! Measures the figures that claims are based on. All providers of a case take turns, so that a
//! change of the machine's speed affects all of them, and the medians over all rounds are reported:
//! as text during the run, and as JSON for plots and later comparisons.

use crate::clock::{self, OnTheGpu, median};
use crate::common::{Case, Direction, Runner};
use crate::floor::{Floor, Floors};
use crate::machine;
use serde_json::{Value, json};
use std::io::Write;
use std::path::PathBuf;
use tch::Device;
use tch_extension::Result;
use tch_extension::cuda::{Stream, StreamGuard};
use tch_extension::testing::devices;

/// The number of rounds in which the providers take turns.
const ROUNDS: usize = 9;

/// The cost of one provider's call, in microseconds.
struct Costs {
    provider: &'static str,
    /// The time in a steady loop.
    wall: f64,
    gpu: Option<Gpu>,
}

struct Gpu {
    /// The time until a call returns.
    host: f64,
    /// The time on the GPU without the host; `None` if the call cannot be captured.
    alone: Option<f64>,
    kernels: Option<usize>,
}

/// Runs the cases whose titles contain all the words, prints the table and writes the JSON file.
pub fn run(tables: &[fn(Device) -> Vec<Case>], words: &[String]) -> std::io::Result<()> {
    let machine = machine::describe();
    println!("{machine}");
    println!(
        "µs a call, medians of {ROUNDS} interleaved rounds; `wall` in a steady loop, `host` until the call returns, `gpu` as a \
         CUDA graph (L2 warm below {} MiB of data, flushed above)",
        clock::SMALL >> 20
    );
    let mut records = Vec::new();
    let mut floors = Floors::default();
    for device in devices() {
        for case in tables.iter().flat_map(|cases| cases(device)) {
            for direction in Direction::ALL {
                let title = case.title(direction);
                let wanted = words.iter().all(|word| title.contains(word.as_str()));
                if wanted && case.has(direction) {
                    let (costs, floor) = case.in_its_precision(|| {
                        (measure(&case, direction), floors.of(&case, direction))
                    });
                    print(&title, &costs, floor.as_ref());
                    records.extend(
                        costs.iter().map(|costs| record(&case, direction, costs, floor.as_ref())),
                    );
                }
            }
        }
    }
    let path = output_folder().join("bench.json");
    let mut all = machine.json();
    all.insert("rows".to_string(), records.into());
    let mut file = std::io::BufWriter::new(std::fs::File::create(&path)?);
    serde_json::to_writer_pretty(&mut file, &all)?;
    file.flush()?;
    println!("written to {}", path.display());
    Ok(())
}

/// `$OUT`, which the bundle sets, or else `target` in the current folder.
pub fn output_folder() -> PathBuf {
    let target = || concat!(env!("CARGO_MANIFEST_DIR"), "/../target").into();
    std::env::var_os("OUT").map_or_else(target, PathBuf::from)
}

fn measure(case: &Case, direction: Direction) -> Vec<Costs> {
    let runners = case.runners(direction);
    let iterations: Vec<u64> = runners
        .iter()
        .map(|runner| clock::iterations_for(case.device, &mut || runner.run(direction)))
        .collect();
    let mut graphs: Vec<Option<Captured<'_>>> =
        runners.iter().map(|runner| capture(case, runner, direction)).collect();
    let mut walls = vec![Vec::new(); runners.len()];
    let (mut hosts, mut alone) = (walls.clone(), walls.clone());
    for _ in 0..ROUNDS {
        for (index, runner) in runners.iter().enumerate() {
            let mut call = || runner.run(direction);
            walls[index].push(clock::per_call(case.device, iterations[index], &mut call));
            if case.device.is_cuda() {
                hosts[index].push(clock::host(case.device, &mut call));
            }
            if let Some(graph) = &mut graphs[index] {
                alone[index].push(graph.graph.time());
            }
        }
    }
    let costs = |(index, runner): (usize, &Runner<'_>)| Costs {
        provider: runner.name(),
        wall: median(walls[index].clone()),
        gpu: case.device.is_cuda().then(|| Gpu {
            host: median(hosts[index].clone()),
            alone: graphs[index].is_some().then(|| median(alone[index].clone())),
            kernels: graphs[index].as_ref().map(|captured| captured.graph.kernels()),
        }),
    };
    runners.iter().enumerate().map(costs).collect()
}

/// A provider's call as a graph, with the tensors that it reads.
pub struct Captured<'a> {
    pub graph: OnTheGpu,
    pub tensors: Runner<'a>,
}

pub fn capture<'a>(case: &Case, runner: &Runner<'a>, direction: Direction) -> Option<Captured<'a>> {
    capture_calls(case, runner, direction, None)
}

/// The same with this many calls in the graph.
pub fn capture_calls<'a>(
    case: &Case,
    runner: &Runner<'a>,
    direction: Direction,
    calls: Option<usize>,
) -> Option<Captured<'a>> {
    if !case.device.is_cuda() {
        return None;
    }
    let stream = side_stream(case.device).ok()?;
    let tensors = {
        let _guard = StreamGuard::new(&stream).ok()?;
        runner.on_this_stream(direction)
    };
    let (bytes, mut call) = (runner.bytes(), || tensors.run(direction));
    let graph = match calls {
        Some(calls) => OnTheGpu::capture_calls(&stream, bytes, calls, &mut call),
        None => OnTheGpu::capture(&stream, bytes, &mut call),
    };
    graph.ok().map(|graph| Captured { graph, tensors })
}

/// A new stream that waits for everything that the current stream has queued.
fn side_stream(device: Device) -> Result<Stream> {
    let stream = Stream::new(device)?;
    stream.wait_stream(&Stream::current(device)?)?;
    Ok(stream)
}

/// Prints one case. Our provider is the last.
fn print(title: &str, costs: &[Costs], floor: Option<&Floor>) {
    let Some(ours) = costs.last() else { return };
    println!("\n{title}");
    for each in costs {
        let ratio = |theirs: f64, ours: f64| format!("{:>5.2}×", theirs / ours);
        let mut line = format!(
            "  {:<10} wall {:>9.2} {}",
            each.provider,
            each.wall,
            ratio(each.wall, ours.wall)
        );
        if let (Some(gpu), Some(our_gpu)) = (&each.gpu, &ours.gpu) {
            line += &format!("   host {:>8.2} {}", gpu.host, ratio(gpu.host, our_gpu.host));
            if let (Some(alone), Some(ours), Some(kernels)) =
                (gpu.alone, our_gpu.alone, gpu.kernels)
            {
                line += &format!("   gpu {alone:>8.2} {} in {kernels} kernels", ratio(alone, ours));
            }
        }
        println!("{line}");
    }
    let alone = ours.gpu.as_ref().and_then(|gpu| gpu.alone);
    if let (Some(floor), Some(alone)) = (floor, alone) {
        let share = 100.0 * floor.micros / alone;
        println!("  floor: {} in {:.2} on the gpu, {share:.0} %", floor.bound, floor.micros);
    }
}

fn record(case: &Case, direction: Direction, costs: &Costs, floor: Option<&Floor>) -> Value {
    // Nanoseconds are enough.
    let rounded = |micros: f64| (micros * 1000.0).round() / 1000.0;
    let work = case.work(direction);
    let gpu = costs.gpu.as_ref();
    json!({
        "operator": case.operator,
        "direction": direction.name(),
        "point": case.point,
        "kind": case.arithmetic(),
        "device": case.place(),
        "provider": costs.provider,
        "wall_us": rounded(costs.wall),
        "host_us": gpu.map(|gpu| rounded(gpu.host)),
        "gpu_us": gpu.and_then(|gpu| gpu.alone).map(rounded),
        "kernels": gpu.and_then(|gpu| gpu.kernels),
        "bytes": work.bytes,
        "operations": work.operations,
        "floor_us": floor.map(|floor| rounded(floor.micros)),
    })
}
