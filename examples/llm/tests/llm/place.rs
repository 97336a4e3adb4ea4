//! A folder in which a test runs the program, and checks of what the program prints.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use tempfile::TempDir;

/// Options so small that a step takes about a millisecond. The first two are those of the text.
pub const TINY: &[&str] = &[
    "--held-out",
    "0.2",
    "--device",
    "cpu",
    "--layers",
    "1",
    "--heads",
    "2",
    "--dim",
    "8",
    "--context",
    "16",
    "--batch",
    "4",
    "--steps",
    "8",
    "--warm-up",
    "2",
    "--eval-windows",
    "8",
    "--sample",
    "20",
];

/// A folder with a text and a place for results.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        let place = Place(TempDir::new().unwrap());
        let text = "the cat sat on the mat, and the dog sat on the cat.\n".repeat(80);
        fs::write(place.path("text.txt"), text).unwrap();
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The command `train` with tiny sizes on the text, to `out`, unless the options say otherwise.
    pub fn train_command(&self, options: &[&str]) -> Command {
        let mut command = program();
        command.arg("train").args(TINY);
        command.arg("--text").arg(self.path("text.txt")).arg("--out").arg(self.path("out"));
        command.args(options);
        command
    }

    pub fn train(&self, options: &[&str]) -> Output {
        self.train_command(options).output().unwrap()
    }

    pub fn run(&self, line: &[&str]) -> Output {
        program().args(line).current_dir(self.0.path()).output().unwrap()
    }

    pub fn run_with(&self, line: &[&str], input: &str) -> Output {
        let mut command = program();
        command.args(line).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child: Child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    /// The folder with what `bench` trains on: 6 steps of size mini.
    pub fn bench_inputs(&self) -> String {
        let (texts, data) = (text(&self.path("text.txt")), text(&self.path("data")));
        succeeded(&self.run(&["prepare", "--text", &texts, "--out", &data]));
        let inputs = text(&self.path("inputs"));
        let write = ["bench", "--inputs", &inputs, "--write", &data, "--size", "mini"];
        succeeded(&self.run(&[&write[..], &["--steps", "6"]].concat()));
        inputs
    }

    /// The training losses of a run.
    pub fn losses(&self, out: &str) -> Vec<f64> {
        self.values(out, "loss")
    }

    /// What a run has written under a name.
    pub fn values(&self, out: &str, name: &str) -> Vec<f64> {
        let text = fs::read_to_string(self.path(out).join("losses.jsonl")).unwrap();
        let lines =
            text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        lines.filter_map(|line| line[name].as_f64()).collect()
    }

    pub fn checkpoints(&self, out: &str) -> Vec<String> {
        let folder = self.path(out).join("checkpoints");
        if folder.exists() { names(&folder) } else { vec![] }
    }
}

pub fn program() -> Command {
    // The bundle's script sets the variable where there is no cargo.
    let path = match std::env::var_os("TCH_EXTENSION_EXAMPLES") {
        Some(folder) => PathBuf::from(folder).join("llm"),
        None => env!("CARGO_BIN_EXE_llm").into(),
    };
    Command::new(path)
}

/// The names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> =
        entries.map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

pub fn text(path: &Path) -> String {
    path.to_str().unwrap().to_string()
}

/// What a program that succeeded printed.
pub fn succeeded(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {said}", output.status);
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The one line of error of a program that failed.
pub fn failed(output: &Output) -> String {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "it succeeded: {said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
    let errors: Vec<&str> = said.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{said}");
    assert!(!said.contains("panicked"), "{said}");
    errors[0].to_string()
}
