//! `bench OPERATOR random SEED [WORD…]`: measures random sizes in each kind on the GPU alone. It
//! prints how often the fused operator is slower than a rival, and where it is worst. Words select
//! cases by title: `forward`, `Half`, `tf32`.

use crate::clock::{OnTheGpu, median};
use crate::common::{Case, Direction, Runner};
use crate::{draw, layer_norm, linear, lltm_cell, machine, matmul_add_relu, table};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use tch::{Device, Kind, Tensor};

/// The number of shapes for each kind.
const SHAPES: usize = 300;
/// The number of rounds of a first measurement, and of a second one where ours was slower.
const ROUNDS: usize = 3;
const MORE_ROUNDS: usize = 9;

/// The kinds on CUDA, and for each whether `Float` products may use tf32.
const KINDS: [(Kind, bool); 4] =
    [(Kind::Half, false), (Kind::BFloat16, false), (Kind::Float, true), (Kind::Float, false)];

/// The cases of the named operator; `None` if its sizes cannot be drawn.
fn cases(operator: &str, seed: u64, device: Device) -> Option<Vec<Case>> {
    let in_each_kind = |of: &dyn Fn(Kind) -> Vec<Case>| {
        let cases = KINDS
            .iter()
            .flat_map(|&(kind, tf32)| of(kind).into_iter().map(move |case| Case { tf32, ..case }));
        // tf32 makes a difference only to products.
        cases.filter(|case| !case.tf32 || case.operator != "layer_norm").collect()
    };
    Some(match operator {
        "matmul_add_relu" => in_each_kind(&|kind| {
            let of = |product| matmul_add_relu::drawn(product, kind, device);
            draw::products(seed, SHAPES).into_iter().map(of).collect()
        }),
        "linear" => in_each_kind(&|kind| {
            let of = |product| linear::drawn(product, kind, device);
            draw::products(seed, SHAPES).into_iter().map(of).collect()
        }),
        "layer_norm" => in_each_kind(&|kind| {
            let of = |size| layer_norm::drawn(size, kind, device);
            draw::rows_and_columns(seed, SHAPES).into_iter().map(of).collect()
        }),
        "lltm_cell" => in_each_kind(&|kind| {
            let of = |size| lltm_cell::drawn(size, kind, device);
            draw::cells(seed, SHAPES).into_iter().map(of).collect()
        }),
        _ => return None,
    })
}

/// Our time and one rival's, in microseconds.
struct Comparison {
    title: String,
    arithmetic: String,
    direction: Direction,
    rival: &'static str,
    theirs: f64,
    ours: f64,
    /// Whether the rival turns NaN into numbers.
    loses_nan: bool,
}

impl Comparison {
    fn ratio(&self) -> f64 {
        self.theirs / self.ours
    }

    /// Whether ours is too slow: slower than the composite by more than 3 % and another 0.3 µs, or
    /// slower than libtorch's fused operator by more than half a microsecond, with a speed below
    /// 0.93 of it.
    fn is_a_miss(&self) -> bool {
        match self.rival {
            "composite" => self.ours > 1.03 * self.theirs + 0.3,
            _ => self.ratio() < 0.93 && self.ours - self.theirs > 0.5,
        }
    }

    fn line(&self) -> String {
        let nan = if self.loses_nan { ", which loses NaN" } else { "" };
        format!(
            "{:.3}  {:.2} for {:.2} of {}{nan}: {}",
            self.ratio(),
            self.ours,
            self.theirs,
            self.rival,
            self.title
        )
    }
}

/// Draws the sizes, measures them and prints a summary.
///
/// # Errors
/// If there is no GPU, if this operator's sizes cannot be drawn, or if the file with all figures
/// cannot be written.
pub fn run(operator: &str, seed: &str, words: &[String]) -> std::io::Result<()> {
    let device = Device::Cuda(0);
    let seed =
        seed.parse().map_err(|_| std::io::Error::other(format!("the seed {seed} is no number")))?;
    if !device.is_cuda() || !tch::Cuda::is_available() {
        return Err(std::io::Error::other("random sizes are measured on a GPU, and there is none"));
    }
    let cases = cases(operator, seed, device)
        .ok_or_else(|| std::io::Error::other(format!("there is no drawing for {operator}")))?;
    println!("{}", machine::describe());
    println!(
        "{SHAPES} random shapes of each kind, seed {seed}; GPU time, medians of {ROUNDS} rounds, of {MORE_ROUNDS} where slower"
    );
    let mut found = Vec::new();
    for case in &cases {
        for direction in [Direction::Forward, Direction::Backward] {
            let title = case.title(direction);
            if words.iter().all(|word| title.contains(word.as_str())) && case.has(direction) {
                let measure = || case.in_its_precision(|| compare(case, direction));
                match catch_unwind(AssertUnwindSafe(measure)) {
                    Ok(comparisons) => found.extend(comparisons),
                    Err(panic) => {
                        println!("FAILED: {title}");
                        resume_unwind(panic);
                    }
                }
            }
        }
    }
    summary(&found);
    write(operator, &found)
}

fn compare(case: &Case, direction: Direction) -> Vec<Comparison> {
    let runners = case.unchecked_runners(direction);
    let Some((ours, rivals)) = runners.split_last() else { return Vec::new() };
    if let Some(apart) = rivals.iter().find_map(|rival| ours.is_far_from(rival)) {
        println!("DIFFERENT by {apart:.1e}: {}", case.title(direction));
    }
    let captured: Option<Vec<_>> =
        runners.iter().map(|runner| table::capture(case, runner, direction)).collect();
    let Some(mut captured) = captured else {
        println!("not captured: {}", case.title(direction));
        return Vec::new();
    };
    let mut graphs: Vec<&mut OnTheGpu> = captured.iter_mut().map(|each| &mut each.graph).collect();
    let comparisons = |times: &[f64]| -> Vec<Comparison> {
        let of = |(rival, &theirs): (&Runner<'_>, &f64)| Comparison {
            title: case.title(direction),
            arithmetic: case.arithmetic(),
            direction,
            rival: rival.name(),
            theirs,
            ours: times[rivals.len()],
            loses_nan: direction == Direction::Forward && loses_nan(rival),
        };
        rivals.iter().zip(times).map(of).collect()
    };
    let first = comparisons(&rounds(&mut graphs, ROUNDS));
    if first.iter().any(Comparison::is_a_miss) {
        comparisons(&rounds(&mut graphs, MORE_ROUNDS))
    } else {
        first
    }
}

/// Times all graphs in turn, and returns the median for each.
fn rounds(graphs: &mut [&mut OnTheGpu], count: usize) -> Vec<f64> {
    let mut times = vec![Vec::new(); graphs.len()];
    for _ in 0..count {
        for (graph, times) in graphs.iter_mut().zip(&mut times) {
            times.push(graph.time());
        }
    }
    times.into_iter().map(median).collect()
}

/// Whether libtorch's operator loses NaN in the last input, the bias, of which the output should
/// show it.
fn loses_nan(rival: &Runner<'_>) -> bool {
    rival.name() == "libtorch" && rival.with_last_input_nan().is_some_and(|out| !is_any_nan(&out))
}

fn is_any_nan(tensor: &Tensor) -> bool {
    tensor.isnan().any().int64_value(&[]) != 0
}

fn summary(found: &[Comparison]) {
    let mut groups: Vec<(&str, Direction, &str)> = Vec::new();
    for each in found {
        let group = (each.rival, each.direction, each.arithmetic.as_str());
        if !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups.sort_by_key(|group| (group.0, group.1.name()));
    println!(
        "\nrival: cases, geometric mean of its time over ours, worst, slower beyond what is allowed"
    );
    for (rival, direction, arithmetic) in groups {
        let of = |nan: bool| -> Vec<&Comparison> {
            let is_of = |each: &&Comparison| {
                (each.rival, each.direction, each.arithmetic.as_str(), each.loses_nan)
                    == (rival, direction, arithmetic, nan)
            };
            found.iter().filter(is_of).collect()
        };
        for (nan, group) in [(false, of(false)), (true, of(true))] {
            if group.is_empty() {
                continue;
            }
            let mean = group.iter().map(|each| each.ratio().ln()).sum::<f64>() / group.len() as f64;
            let worst = group.iter().map(|each| each.ratio()).fold(f64::INFINITY, f64::min);
            let misses = group.iter().filter(|each| each.is_a_miss()).count();
            let lost = if nan { ", where it loses NaN" } else { "" };
            println!(
                "{rival:<10} {:<9} {arithmetic:<9} {:>4} cases, {:.3}, worst {worst:.3}, {misses} slower{lost}",
                direction.name(),
                group.len(),
                mean.exp()
            );
        }
    }
    let mut worst: Vec<&Comparison> = found.iter().filter(|each| !each.loses_nan).collect();
    worst.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
    println!("\nthe worst ten");
    worst.iter().take(10).for_each(|each| println!("{}", each.line()));
    println!("\nslower beyond what is allowed");
    worst.iter().filter(|each| each.is_a_miss()).for_each(|each| println!("{}", each.line()));
}

/// Writes all figures to a file, for plots and later comparisons.
fn write(operator: &str, found: &[Comparison]) -> std::io::Result<()> {
    let path = table::output_folder().join(format!("random-{operator}.csv"));
    let mut file = std::fs::File::create(&path)?;
    writeln!(file, "title;rival;theirs_us;ours_us;loses_nan")?;
    for each in found {
        writeln!(
            file,
            "{};{};{:.3};{:.3};{}",
            each.title, each.rival, each.theirs, each.ours, each.loses_nan
        )?;
    }
    println!("written to {}", path.display());
    Ok(())
}
