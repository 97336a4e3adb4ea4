//! What the program prints: results on stdout, progress, warnings and errors on stderr.

use crate::settings::Settings;
use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{ErrorKind, IsTerminal, Write, stderr, stdout};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The number of progress lines if there is no terminal on which a bar could be redrawn.
const PLAIN_LINES: i64 = 20;

/// Whether this process prints errors only.
static SILENT: AtomicBool = AtomicBool::new(false);

/// Lets this process print errors only: it is not the first of several.
#[cfg_attr(not(feature = "distributed"), allow(dead_code))]
pub fn silence() {
    SILENT.store(true, Ordering::Relaxed);
}

fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed)
}

/// Prints results. Work goes on if the reader (`| head`, say) has closed the pipe.
pub fn say(text: &str) -> Result<()> {
    show(&format!("{text}\n"))
}

/// Prints a part of a line, now.
pub fn show(text: &str) -> Result<()> {
    if is_silent() {
        return Ok(());
    }
    let mut out = stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// Prints a warning on one line.
pub fn warn(text: String) {
    if !is_silent() {
        let _ = writeln!(stderr().lock(), "warning: {}", text.replace('\n', " "));
    }
}

/// Prints an error with its causes on one line. A closed stderr is not treated as a failure.
pub fn error(error: &anyhow::Error) {
    let line = format!("{error:#}").replace('\n', " ");
    let _ = writeln!(stderr().lock(), "error: {line}");
}

/// A progress bar on a terminal, and a few plain lines elsewhere.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: i64,
    /// The step from which this process trains, and when that began.
    begun: (i64, Instant),
    /// Time that was not spent on steps.
    other: Duration,
    last: (i64, Instant),
    tokens_per_step: f64,
    flops_per_step: f64,
    /// The device's peak rate in TFLOP/s, if it is known.
    peak: Option<f64>,
    lines: i64,
    speeds: Vec<f64>,
}

impl Progress {
    pub fn new(settings: &Settings, done: i64, peak: Option<f64>) -> Progress {
        let tokens_per_step = settings.tokens_per_step() as f64;
        let flops_per_token = settings.model.flops_per_token(settings.lora.is_some());
        let now = Instant::now();
        Progress {
            bar: (stderr().is_terminal() && !is_silent()).then(|| bar(settings.steps)),
            steps: settings.steps,
            begun: (done, now),
            other: Duration::ZERO,
            last: (done, now),
            tokens_per_step,
            flops_per_step: tokens_per_step * flops_per_token,
            peak,
            lines: done * PLAIN_LINES / settings.steps,
            speeds: Vec::new(),
        }
    }

    /// Shows the state after `step`, whose loss the host has just read.
    pub fn update(&mut self, step: i64, loss: f64) {
        let now = Instant::now();
        let each = (now - self.last.1).as_secs_f64() / (step - self.last.0).max(1) as f64;
        self.last = (step, now);
        self.speeds.push(self.tokens_per_step / each);
        let done = (step - self.begun.0).max(1) as f64;
        let spent = (now - self.begun.1).saturating_sub(self.other).as_secs_f64();
        let left = spent / done * (self.steps - step) as f64;
        let message = format!("{}, {left:.0}s left", self.standing(loss, each));
        let due = step * PLAIN_LINES / self.steps;
        if let Some(bar) = &self.bar {
            bar.set_message(message);
            bar.set_position(step as u64);
        } else if due > self.lines && !is_silent() {
            self.lines = due;
            let _ = writeln!(stderr().lock(), "step {step}/{}: {message}", self.steps);
        }
    }

    /// Runs something that is no step, whose time does not count.
    pub fn pause<T>(&mut self, body: impl FnOnce() -> Result<T>) -> Result<T> {
        let begun = Instant::now();
        let result = body();
        self.other += begun.elapsed();
        self.last.1 += begun.elapsed();
        result
    }

    fn standing(&self, loss: f64, each: f64) -> String {
        let rate = self.flops_per_step / each / 1e12;
        let used = match self.peak {
            Some(peak) => format!(", MFU {:.1} % of {peak:.0} TFLOP/s", 100.0 * rate / peak),
            None => String::new(),
        };
        format!("loss {loss:.3}, {:.0} tokens/s{used}", self.tokens_per_step / each)
    }

    /// The median speed in tokens per second.
    pub fn tokens_per_second(&self) -> Option<f64> {
        let mut speeds = self.speeds.clone();
        speeds.sort_by(f64::total_cmp);
        speeds.get(speeds.len() / 2).copied()
    }
}

impl Drop for Progress {
    /// Leaves the bar as it is, finished or not, so that later output appears below it.
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
            let _ = writeln!(stderr().lock());
        }
    }
}

fn bar(steps: i64) -> ProgressBar {
    let style = ProgressStyle::with_template("{wide_bar} {pos}/{len}: {msg}");
    ProgressBar::new(steps as u64)
        .with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}
