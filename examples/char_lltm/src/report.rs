//! Everything that the program prints: results on stdout, progress and errors on stderr.

use crate::data::Corpus;
use crate::options::{Op, Options};
use crate::train::{self, Learner};
use anyhow::Result;
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// A model has learnt more than letter frequencies if its loss ends at least this far below the
/// unigram baseline.
const CLEARLY_BELOW: f64 = 0.5;
/// Over these first steps, the curves differ only by rounding; later, training amplifies the
/// difference.
const FIRST_STEPS: usize = 50;
/// The columns of a terminal.
const WIDTH: usize = 80;
/// The number of progress lines if there is no terminal on which one line could be rewritten.
const PLAIN_LINES: i64 = 10;

/// Whether this process prints errors only.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Lets this process print errors only: it is not the first of several.
pub fn silence() {
    SILENT.store(true, Ordering::Relaxed);
}

fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed)
}

/// Prints results. Training goes on if the reader (`| head`, say) has closed the pipe.
pub fn say(text: &str) -> Result<()> {
    if is_silent() {
        return Ok(());
    }
    match writeln!(stdout().lock(), "{text}") {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints an error with its causes on one line. A closed stderr is not treated as a failure.
pub fn error(error: &anyhow::Error) {
    let line = format!("{error:#}").replace('\n', " ");
    let _ = writeln!(stderr().lock(), "error: {line}");
}

/// The result of training with one operator.
pub struct Run {
    pub op: Op,
    /// The loss of each step, in nats per character.
    pub losses: Vec<f64>,
    pub held_out: f64,
    pub characters_per_second: f64,
}

impl Run {
    pub fn of(learner: &Learner, options: &Options, corpus: &Corpus) -> Result<Run> {
        Ok(Run {
            op: learner.op,
            losses: learner.losses.clone(),
            held_out: train::held_out_loss(&learner.model, corpus, options.seq_len)?,
            characters_per_second: learner.characters_per_second(),
        })
    }
}

/// The losses as a table: a heading `step,<op>,…` and one line for each step. `cargo xtask demo` draws
/// a curve of each column, of which the last is always the same number.
pub fn csv(runs: &[Run], unigram: f64) -> String {
    let names: String = runs.iter().map(|run| format!("{},", run.op.name())).collect();
    let steps = runs.first().map_or(0, |run| run.losses.len());
    let line = |step: usize| -> String {
        let losses: String = runs.iter().map(|run| format!("{},", run.losses[step])).collect();
        format!("{},{losses}{unigram}\n", step + 1)
    };
    format!("step,{names}unigram baseline\n") + &(0..steps).map(line).collect::<String>()
}

/// Breaks lines that are longer than a terminal is wide, at blanks.
pub fn wrapped(text: &str) -> String {
    let mut lines = Vec::new();
    for mut line in text.lines() {
        while let Some((most, _)) = line.char_indices().nth(WIDTH) {
            let first = line[..most].rsplit_once(' ').map_or("", |(first, _)| first);
            if first.trim().is_empty() {
                break;
            }
            lines.push(first);
            line = &line[first.len() + 1..];
        }
        lines.push(line);
    }
    lines.join("\n")
}

/// One line that is rewritten on a terminal, and a few plain lines elsewhere.
pub struct Progress {
    begun: Instant,
    steps: i64,
    is_rewritten: bool,
    /// Whether the cursor is still in the line that is rewritten.
    is_in_line: bool,
    lines: i64,
}

impl Progress {
    pub fn new(steps: i64) -> Progress {
        let is_rewritten =
            stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Progress { begun: Instant::now(), steps, is_rewritten, is_in_line: false, lines: 0 }
    }

    pub fn update(&mut self, step: i64, learners: &[Learner]) {
        let lines_due = step * PLAIN_LINES / self.steps;
        if is_silent() || !(self.is_rewritten || lines_due > self.lines) {
            return;
        }
        self.lines = lines_due;
        let left = self.begun.elapsed().as_secs_f64() / step as f64 * (self.steps - step) as f64;
        let line = format!("step {step}/{}: {}, {left:.0}s left", self.steps, standing(learners));
        // Between the last two codes, a terminal cuts a line that is too long. It would otherwise
        // continue the line in the next row, which could not be rewritten.
        let text = match self.is_rewritten {
            true => format!("\r\x1b[K\x1b[?7l{line}\x1b[?7h"),
            false => line + "\n",
        };
        self.is_in_line = self.is_rewritten;
        let _ = stderr().lock().write_all(text.as_bytes());
    }
}

impl Drop for Progress {
    /// Leaves the line as it is, finished or not, so that later output appears below it.
    fn drop(&mut self) {
        if self.is_in_line {
            let _ = stderr().lock().write_all(b"\n");
        }
    }
}

/// The loss and the speed of each learner, short enough for one line of a terminal.
fn standing(learners: &[Learner]) -> String {
    let each = |value: &dyn Fn(&Learner) -> String| {
        learners.iter().map(value).collect::<Vec<_>>().join("/")
    };
    let names = each(&|learner| learner.op.name().to_string());
    let losses = each(&|learner| format!("{:.3}", learner.losses.last().unwrap_or(&f64::NAN)));
    let speeds = each(&|learner| format!("{:.0}", learner.speed_now()));
    format!("{names} loss {losses}, {speeds} characters/s")
}

/// The comparison at the end: one column for each run.
pub fn table(runs: &[Run], unigram: f64, seed: i64) -> String {
    let column = |value: &dyn Fn(&Run) -> String| runs.iter().map(value).collect::<Vec<_>>();
    let steps = runs.first().map_or(0, |run| run.losses.len());
    let mut rows = vec![
        (format!("seed {seed}, {steps} steps"), column(&|run| run.op.name().to_string())),
        ("last training loss, nats per character".into(), column(&|run| nats(run.losses.last()))),
        ("held-out loss".into(), column(&|run| nats(Some(&run.held_out)))),
        ("unigram baseline".into(), column(&|_| nats(Some(&unigram)))),
        ("below the baseline by".into(), column(&|run| nats(Some(&(unigram - run.held_out))))),
        (
            format!("at least {CLEARLY_BELOW} below"),
            column(&|run| yes(unigram - run.held_out >= CLEARLY_BELOW)),
        ),
        ("characters/s".into(), column(&|run| format!("{:.0}", run.characters_per_second))),
    ];
    if let Some((last, others)) = runs.split_last() {
        rows.extend(others.iter().flat_map(|run| comparison(run, last)));
    }
    let mut lines: Vec<String> = rows.iter().map(|(label, cells)| row(label, cells)).collect();
    if runs.len() > 1 {
        lines.push(
            "(All start from the same weights. They round differently, and training amplifies that.)".into(),
        );
    }
    lines.join("\n")
}

fn comparison(first: &Run, second: &Run) -> Vec<(String, Vec<String>)> {
    let ratio = first.characters_per_second / second.characters_per_second;
    let mut rows = vec![(
        format!("speed, {} / {}", first.op.name(), second.op.name()),
        vec![format!("{ratio:.2}")],
    )];
    let all = first.losses.len();
    let early = all.min(FIRST_STEPS);
    for steps in if early < all { vec![early, all] } else { vec![all] } {
        let label = format!("largest difference of the losses, steps 1 to {steps}");
        rows.push((label, vec![format!("{:.1e}", largest_difference(first, second, steps))]));
    }
    rows
}

fn largest_difference(first: &Run, second: &Run, steps: usize) -> f64 {
    let pairs = first.losses.iter().zip(&second.losses);
    pairs.take(steps).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

fn row(label: &str, cells: &[String]) -> String {
    let cells: String = cells.iter().map(|cell| format!("{cell:>12}")).collect();
    format!("{label:<52}{cells}")
}

fn nats(value: Option<&f64>) -> String {
    value.map_or_else(String::new, |value| format!("{value:.4}"))
}

fn yes(truth: bool) -> String {
    if truth { "yes" } else { "no" }.to_string()
}
