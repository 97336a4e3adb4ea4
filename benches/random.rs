//! `bench OPERATOR random SEED [WORD…]`: measures random sizes in each kind on the GPU alone, without
//! gradients and with them. The rival is libtorch's own operator or, where it has none, the composite.
//! It prints how often the fused operator is slower, and where it is worst.
//!
//! Words select cases by the words of their titles: `forward`, `Half`, `tf32`. `50` draws so many sizes
//! for each kind instead of 300, `2/4` measures every fourth size, from the second one on, and `240s`
//! stops after so many seconds. Each point is written to a file at once, and the same command goes on
//! where it stopped, unless sources were changed after the commit.

use crate::clock::{OnTheGpu, median};
use crate::common::{Case, Direction, Runner};
use crate::draw::Draw;
use crate::floor::Floors;
use crate::{machine, nn, optim, table};
use std::collections::HashSet;
use std::fs::{File, OpenOptions};
use std::io::{Error, Result, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};

/// The number of rounds in which ours and the rival take turns.
const ROUNDS: usize = 5;
/// How often a point is timed again if ours was slower than allowed. The median counts.
const AGAIN: usize = 2;

/// The kinds on CUDA, and for each whether `Float` products may use tf32.
const KINDS: [(Kind, bool); 5] = [
    (Kind::Half, false),
    (Kind::BFloat16, false),
    (Kind::Float, true),
    (Kind::Float, false),
    (Kind::Double, false),
];

/// Draws a case of an operator.
pub type Drawn = fn(&mut Draw, Kind, Device) -> Case;

macro_rules! drawn {
    ($($operator:ident of $family:literal { $($rest:tt)* })*) => {
        &[$((stringify!($operator), crate::$operator::drawn)),*]
    };
}
const OPERATORS: &[(&str, Drawn)] = operators!(drawn);
const OTHERS: [(&str, Drawn); 3] =
    [("optim", optim::drawn), ("embedding", nn::embedding), ("attention", nn::attention)];

/// What the command line asks for.
struct Options<'a> {
    words: Vec<&'a str>,
    sizes: u64,
    /// The lane, from 1 on, and the number of lanes.
    lane: (u64, u64),
    limit: Duration,
}

impl<'a> Options<'a> {
    fn new(words: &'a [String]) -> Self {
        let mut options =
            Options { words: Vec::new(), sizes: 300, lane: (1, 1), limit: Duration::MAX };
        for word in words {
            let lane = word
                .split_once('/')
                .and_then(|(at, of)| Some((at.parse().ok()?, of.parse().ok()?)))
                .filter(|(at, of): &(u64, u64)| (1..=*of).contains(at));
            let seconds = word.strip_suffix('s').and_then(|number| number.parse().ok());
            match (lane, seconds, word.parse()) {
                (Some(lane), _, _) => options.lane = lane,
                (_, Some(seconds), _) => options.limit = Duration::from_secs(seconds),
                (_, _, Ok(sizes)) => options.sizes = sizes,
                _ => options.words.push(word),
            }
        }
        options
    }
}

impl Options<'_> {
    /// Whether a title has all the words.
    fn select(&self, title: &str) -> bool {
        self.words.iter().all(|word| title.split(' ').any(|of_title| of_title == *word))
    }
}

/// One point of the sweep: a drawn case, and whether gradients are computed.
pub struct Point {
    pub case: Case,
    /// The kind that was asked for.
    kind: Kind,
    pub direction: Direction,
    pub offset: i64,
    pub title: String,
}

impl Point {
    /// `number` counts through the kinds first.
    pub fn new(drawn: Drawn, seed: u64, number: u64, direction: Direction) -> Self {
        let (kind, tf32) = KINDS[(number % KINDS.len() as u64) as usize];
        let mut draw = Draw::of(seed, number);
        let offset = draw.offset();
        let case = Case { tf32, ..drawn(&mut draw, kind, Device::Cuda(0)) };
        // The rival, libtorch's fused attention, fails at an address that is no multiple of 16 bytes,
        // after which the process cannot use CUDA. Ours copies such a tensor.
        let offset = if case.operator == "attention" { 0 } else { offset };
        let title = format!("{} +{offset}", case.title(direction));
        Point { case, kind, direction, offset, title }
    }

    /// Whether it is measured. tf32 makes a difference only to products, and the optimizer has one
    /// kind.
    pub fn is_wanted(&self) -> bool {
        let has_products = self.case.work(self.direction).operations > 0;
        let is_of_kind = self.case.kind == self.kind && (has_products || !self.case.tf32);
        self.case.has(self.direction) && is_of_kind
    }

    fn group(&self) -> String {
        let grad =
            if self.direction == Direction::Forward { "forward, no grad" } else { "both, grad" };
        format!("{grad:<16} {}", self.case.arithmetic())
    }
}

/// Our time and the rival's, in microseconds.
struct Found {
    number: u64,
    direction: Direction,
    group: String,
    title: String,
    rival: String,
    theirs: f64,
    ours: f64,
    /// Whether the rival turns NaN into numbers.
    loses_nan: bool,
}

impl Found {
    fn ratio(&self) -> f64 {
        self.theirs / self.ours
    }

    /// Whether ours takes 3 % longer and half a microsecond.
    fn is_a_miss(&self) -> bool {
        self.ratio() < 0.97 && self.ours - self.theirs > 0.5
    }

    fn line(&self) -> String {
        let nan = if self.loses_nan { ", which loses NaN" } else { "" };
        let (ratio, ours, theirs) = (self.ratio(), self.ours, self.theirs);
        format!("{ratio:.3}  {ours:.2} for {theirs:.2} of {}{nan}: {}", self.rival, self.title)
    }

    fn record(&self) -> String {
        let direction = if self.direction == Direction::Forward { "forward" } else { "both" };
        format!(
            "{};{direction};{};{};{};{:.3};{:.3};{}",
            self.number, self.group, self.title, self.rival, self.theirs, self.ours, self.loses_nan
        )
    }

    fn read(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split(';').collect();
        let [number, direction, group, title, rival, theirs, ours, loses_nan] = fields[..] else {
            return None;
        };
        Some(Found {
            number: number.parse().ok()?,
            direction: if direction == "forward" { Direction::Forward } else { Direction::Both },
            group: group.to_string(),
            title: title.to_string(),
            rival: rival.to_string(),
            theirs: theirs.parse().ok()?,
            ours: ours.parse().ok()?,
            loses_nan: loses_nan.parse().ok()?,
        })
    }
}

/// Draws the sizes, measures them and prints a summary.
///
/// # Errors
/// If there is no GPU, if there is no such operator, if the file with all figures cannot be written,
/// or if a point failed.
pub fn run(operator: &str, seed: &str, words: &[String]) -> Result<()> {
    let seed = seed.parse().map_err(|_| Error::other(format!("the seed {seed} is no number")))?;
    if !tch::Cuda::is_available() {
        return Err(Error::other("random sizes are measured on a GPU, and there is none"));
    }
    let mut all = OPERATORS.iter().chain(&OTHERS);
    let (_, drawn) = all
        .find(|(name, _)| *name == operator)
        .ok_or_else(|| Error::other(format!("there is no operator {operator}")))?;
    let options = Options::new(words);
    let machine = machine::describe().to_string();
    println!("{machine}");
    println!(
        "{} random sizes of each kind, seed {seed}; GPU time, medians of {ROUNDS} rounds",
        options.sizes
    );
    let (lane, lanes) = options.lane;
    let lane = if lanes == 1 { String::new() } else { format!("-{lane}-of-{lanes}") };
    let path = table::output_folder().join(format!("random-{operator}-{seed}{lane}.csv"));
    let (mut found, mut file) = open(&path, &machine)?;
    let failed = measure(*drawn, seed, &options, &mut found, &mut file)?;
    found.retain(|found| options.select(&found.title));
    summary(&found, *drawn, seed);
    match failed {
        0 => Ok(()),
        _ => Err(Error::other(format!("{failed} points failed"))),
    }
}

/// The points that are measured already on this machine at this commit, and the file for more. A file
/// of another machine or commit, or of sources that were changed after it, gets another name.
fn open(path: &Path, machine: &str) -> Result<(Vec<Found>, File)> {
    // A sweep may go on after midnight.
    let machine = machine.split_once("; ").map_or(machine, |(_date, rest)| rest);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let found: Option<Vec<Found>> = match text.split_once('\n') {
        Some((first, lines)) if first == machine && !machine.contains("-dirty") => {
            Some(lines.lines().filter_map(Found::read).collect())
        }
        _ => None,
    };
    if found.is_none() && !text.is_empty() {
        std::fs::rename(path, path.with_extension("before.csv"))?;
    }
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    if found.is_none() {
        writeln!(file, "{machine}")?;
    }
    let found = found.unwrap_or_default();
    println!("{} points are in {} already", found.len(), path.display());
    Ok((found, file))
}

/// Measures what is missing, and returns how many points failed.
fn measure(
    drawn: Drawn,
    seed: u64,
    options: &Options<'_>,
    found: &mut Vec<Found>,
    file: &mut File,
) -> Result<usize> {
    let known: HashSet<String> = found.iter().map(|found| found.title.clone()).collect();
    let (lane, lanes) = options.lane;
    let count = options.sizes * KINDS.len() as u64;
    let (start, mut failed, mut said) = (Instant::now(), 0, Instant::now());
    // Of this call, so that points of an earlier one do not count as quick.
    let mut measured = 0;
    let kinds = KINDS.len() as u64;
    for number in (0..count).filter(|number| number / kinds % lanes + 1 == lane) {
        for direction in [Direction::Forward, Direction::Both] {
            let point = Point::new(drawn, seed, number, direction);
            let is_asked = options.select(&point.title);
            if !is_asked || !point.is_wanted() || known.contains(&point.title) {
                continue;
            }
            if start.elapsed() > options.limit {
                println!("stopped at point {number} of {count}; the same command goes on");
                return Ok(failed);
            }
            measured += 1;
            let compare = || point.case.in_its_precision(|| compare(&point, number));
            match catch_unwind(AssertUnwindSafe(compare)) {
                Ok(Some(each)) => {
                    writeln!(file, "{}", each.record())?;
                    found.push(each);
                }
                Ok(None) => println!("not captured: {}", point.title),
                Err(_) => {
                    failed += 1;
                    println!("FAILED: {}", point.title);
                }
            }
        }
        if said.elapsed() > Duration::from_secs(30) && measured > 0 {
            let points = 2 * (count - number) / lanes;
            let left = start.elapsed().as_secs_f64() / f64::from(measured) * points as f64;
            println!("point {number} of {count}, about {left:.0} s more");
            said = Instant::now();
        }
    }
    Ok(failed)
}

/// `None` if one of the two cannot be captured.
fn compare(point: &Point, number: u64) -> Option<Found> {
    let Point { case, direction, offset, .. } = point;
    let runners = case.unchecked_runners(*direction, *offset);
    let (ours, rivals) = runners.split_last()?;
    let named = |name: &&str| rivals.iter().find(|rival| rival.name() == *name);
    let rival = ["libtorch", "composite", "fused"].iter().find_map(named)?;
    if let Some(apart) = ours.is_far_from(rival) {
        println!("DIFFERENT by {apart:.1e}: {}", point.title);
    }
    let mut captured =
        [table::capture(case, rival, *direction)?, table::capture(case, ours, *direction)?];
    let mut time = || {
        let [theirs, ours] = &mut captured;
        rounds([&mut theirs.graph, &mut ours.graph])
    };
    let of = |[theirs, ours]: [f64; 2]| Found {
        number,
        direction: *direction,
        group: point.group(),
        title: point.title.clone(),
        rival: rival.name().to_string(),
        theirs,
        ours,
        loses_nan: *direction == Direction::Forward && loses_nan(rival),
    };
    let first = of(time());
    if !first.is_a_miss() {
        return Some(first);
    }
    let mut all = vec![first];
    all.extend((0..AGAIN).map(|_| of(time())));
    all.sort_by(|a, b| a.ratio().total_cmp(&b.ratio()));
    Some(all.swap_remove(AGAIN / 2))
}

/// Times the rival and ours in turn, and returns the median for each.
fn rounds(mut graphs: [&mut OnTheGpu; 2]) -> [f64; 2] {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (graph, times) in graphs.iter_mut().zip(&mut times) {
            times.push(graph.time());
        }
    }
    times.map(median)
}

/// Whether libtorch's operator loses NaN in the last input, the bias, of which the output should
/// show it.
fn loses_nan(rival: &Runner<'_>) -> bool {
    rival.name() == "libtorch" && rival.with_last_input_nan().is_some_and(|out| !is_any_nan(&out))
}

fn is_any_nan(tensor: &Tensor) -> bool {
    tensor.isnan().any().int64_value(&[]) != 0
}

fn summary(found: &[Found], drawn: Drawn, seed: u64) {
    let mut groups: Vec<&str> = found.iter().map(|found| found.group.as_str()).collect();
    groups.sort_unstable();
    groups.dedup();
    println!(
        "\nthe rival's time over ours: cases, geometric mean, worst, as fast or within 0.5 µs"
    );
    for group in groups {
        let of_group: Vec<&Found> = found.iter().filter(|found| found.group == group).collect();
        let count = of_group.len() as f64;
        let mean = of_group.iter().map(|found| found.ratio().ln()).sum::<f64>() / count;
        let worst = of_group.iter().map(|found| found.ratio()).fold(f64::INFINITY, f64::min);
        let misses = of_group.iter().filter(|found| found.is_a_miss()).count();
        let share = 100.0 * (1.0 - misses as f64 / count);
        println!("{group:<28} {count:>4} cases, {:.3}, worst {worst:.3}, {share:.1} %", mean.exp());
    }
    let mut worst: Vec<&Found> = found.iter().filter(|found| !found.loses_nan).collect();
    worst.sort_by(|a, b| {
        (!a.is_a_miss(), a.ratio()).partial_cmp(&(!b.is_a_miss(), b.ratio())).expect("numbers")
    });
    let mut floors = Floors::default();
    println!("\nthe worst ten, with the floor and the kernels");
    for found in worst.iter().take(10) {
        let point = Point::new(drawn, seed, found.number, found.direction);
        let mut of = || point.case.in_its_precision(|| details(&point, found, &mut floors));
        // A failure is reported where the point is measured.
        let more = catch_unwind(AssertUnwindSafe(&mut of)).ok().flatten();
        println!("{}{}", found.line(), more.unwrap_or_default());
    }
    let misses = worst.iter().filter(|found| found.is_a_miss()).skip(10);
    println!("\nmore that are slower");
    misses.for_each(|found| println!("{}", found.line()));
}

/// The share of the floor that ours reaches, and the kernels of ours and of the rival.
fn details(point: &Point, found: &Found, floors: &mut Floors) -> Option<String> {
    let floor = floors.of(&point.case, point.direction);
    let share =
        floor.map(|floor| format!("\n         floor {:.0} %", 100.0 * floor.micros / found.ours));
    let mut text = share.unwrap_or_default();
    for runner in point.case.unchecked_runners(point.direction, point.offset) {
        let graph = table::capture(&point.case, &runner, point.direction)?.graph;
        text += &format!("\n         {}: {}", runner.name(), graph.kernel_names().join(", "));
    }
    Some(text)
}
