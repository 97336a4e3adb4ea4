//! The losses of a run, as one JSON object a line.

use crate::files::write_bytes;
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

pub const FILE: &str = "losses.jsonl";

/// The file of losses, and what is in it.
pub struct Log {
    path: PathBuf,
    file: File,
    pub curves: Curves,
}

/// The losses by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Curves {
    pub train: Vec<(i64, f64)>,
    pub held_out: Vec<(i64, f64)>,
}

impl Log {
    /// Continues the log after `step`: what a killed run wrote about later steps, or only half, goes
    /// away.
    pub fn open(folder: &Path, step: i64) -> Result<Log> {
        let path = folder.join(FILE);
        let text = match step > 0 && path.exists() {
            true => {
                std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?
            }
            false => vec![],
        };
        let text = String::from_utf8_lossy(&text);
        let is_done = |line: &&str| entry(line).is_some_and(|(found, _, _)| found <= step);
        let kept: String = text.lines().filter(is_done).map(|line| format!("{line}\n")).collect();
        write_bytes(&path, &kept)?;
        let file = File::options().append(true).open(&path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        let mut curves = Curves::default();
        curves.add(&kept);
        Ok(Log { path, file, curves })
    }

    /// Adds the losses of the steps from `first` on.
    pub fn train(&mut self, first: i64, losses: &[f64], rate: impl Fn(i64) -> f64) -> Result<()> {
        let line =
            |(step, loss): (i64, &f64)| json!({"step": step, "loss": loss, "lr": rate(step)});
        self.write((first..).zip(losses).map(line).collect())
    }

    pub fn held_out(&mut self, step: i64, loss: f64) -> Result<()> {
        self.write(vec![json!({"step": step, "held_out": loss})])
    }

    fn write(&mut self, lines: Vec<Value>) -> Result<()> {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        let written = self.file.write_all(text.as_bytes());
        written
            .with_context(|| format!("cannot write {} (is the disk full?)", self.path.display()))?;
        self.curves.add(&text);
        Ok(())
    }

    /// Waits until the lines are on the disk.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_all().with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Curves {
    fn add(&mut self, lines: &str) {
        for (step, loss, is_held_out) in lines.lines().filter_map(entry) {
            let curve = if is_held_out { &mut self.held_out } else { &mut self.train };
            curve.push((step, loss));
        }
    }
}

/// A line's step and loss, and whether it is of the held-out text.
fn entry(line: &str) -> Option<(i64, f64, bool)> {
    let value: Value = serde_json::from_str(line).ok()?;
    let step = value["step"].as_i64()?;
    match value["loss"].as_f64() {
        Some(loss) => Some((step, loss, false)),
        None => Some((step, value["held_out"].as_f64()?, true)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resumed_log_has_no_later_and_no_half_lines() {
        let folder = tempfile::tempdir().unwrap();
        let mut log = Log::open(folder.path(), 0).unwrap();
        log.train(1, &[3.0, 2.0, 1.5], |_| 0.1).unwrap();
        log.held_out(2, 2.5).unwrap();
        log.train(4, &[1.25], |_| 0.1).unwrap();
        drop(log);
        let path = folder.path().join(FILE);
        let mut text = std::fs::read(&path).unwrap();
        text.extend(b"{\"step\":5,\"lo");
        std::fs::write(&path, text).unwrap();

        let mut log = Log::open(folder.path(), 3).unwrap();
        log.train(4, &[1.0], |_| 0.1).unwrap();
        let expected = Curves {
            train: vec![(1, 3.0), (2, 2.0), (3, 1.5), (4, 1.0)],
            held_out: vec![(2, 2.5)],
        };
        assert_eq!(log.curves, expected);
        assert_eq!(Log::open(folder.path(), 0).unwrap().curves, Curves::default());
    }
}
