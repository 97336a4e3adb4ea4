//! A folder in which a test runs the program, and checks of what the program prints.

use std::collections::BTreeMap;
use std::fs::{self};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use tch::Tensor;
use tempfile::TempDir;

/// Options so small that a step takes about a millisecond.
pub const TINY: &[&str] = &[
    "--device",
    "cpu",
    "--hidden",
    "16",
    "--seq-len",
    "16",
    "--batch",
    "4",
    "--steps",
    "5",
    "--sample",
    "20",
];

pub type Tensors = BTreeMap<String, Tensor>;
pub type Change<'a> = &'a dyn Fn(&mut Tensors);

/// A folder with a text and a place for results.
pub struct Place(TempDir);

impl Place {
    pub fn new() -> Place {
        let place = Place(TempDir::new().unwrap());
        place.write("text.txt", sample_text());
        place
    }

    /// A place with the results of an earlier run, which a failing run must not change.
    pub fn trained() -> Place {
        static TRAINED: LazyLock<Place> = LazyLock::new(|| {
            let place = Place::new();
            succeeded(&place.run(&["--op", "fused", "--steps", "2"]));
            place
        });
        let place = Place::new();
        fs::create_dir(place.out()).unwrap();
        for (name, content) in TRAINED.results() {
            fs::write(place.out().join(name), content).unwrap();
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn out(&self) -> PathBuf {
        self.path("out")
    }

    pub fn weights(&self, op: &str) -> PathBuf {
        self.out().join(format!("{op}.safetensors"))
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// A tiny run on this folder's text. If an option is given twice, the later one applies.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(program());
        command.arg("--text").arg(self.path("text.txt")).arg("--out").arg(self.out());
        // The tests run at the same time, and threads of one program that have to share a core
        // would wait for one another.
        command.args(TINY).args(arguments).env("OMP_NUM_THREADS", "1");
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    pub fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Runs the program with bad input, and checks that it prints one line that contains everything
    /// in `expected`, exits with code 1 and leaves the results unchanged.
    #[track_caller]
    pub fn refuses(&self, arguments: &[&str], expected: &[&str]) {
        let before = self.results();
        assert_message(&self.run(arguments), expected);
        assert_eq!(self.results(), before, "the earlier results were touched");
    }

    /// Every file of the output folder, hidden ones included, with its content.
    pub fn results(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(self.out()).unwrap().map(|entry| entry.unwrap());
        entries
            .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
            .collect()
    }

    pub fn result_names(&self) -> Vec<String> {
        self.results().into_keys().collect()
    }

    pub fn tensors(&self, op: &str) -> BTreeMap<String, Tensor> {
        Tensor::read_safetensors(self.weights(op)).unwrap().into_iter().collect()
    }

    /// The losses of the first operator.
    pub fn losses(&self) -> Vec<f64> {
        let table = fs::read_to_string(self.out().join("loss.csv")).unwrap();
        table.lines().skip(1).map(|line| line.split(',').nth(1).unwrap().parse().unwrap()).collect()
    }
}

/// The program to test: in a bundle's folder, or the one that cargo built for this test.
pub fn program() -> PathBuf {
    match std::env::var_os("TCH_EXTENSION_EXAMPLES") {
        Some(folder) => PathBuf::from(folder).join("char_lltm"),
        None => env!("CARGO_BIN_EXE_char_lltm").into(),
    }
}

/// The text is repetitive, so that a tiny model learns it in a second. It contains every letter, so
/// that the tests can detect missing ones.
pub fn sample_text() -> String {
    "the quick brown fox jumps over the lazy dog\n".repeat(80)
}

pub fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

pub fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The output of a program that must have succeeded.
#[track_caller]
pub fn succeeded(done: &Output) -> String {
    assert!(done.status.success(), "{}\n{}", done.status, text(&done.stderr));
    text(&done.stdout)
}

#[track_caller]
pub fn assert_message(done: &Output, expected: &[&str]) {
    let message = text(&done.stderr);
    assert_eq!(done.status.code(), Some(1), "{message}");
    let errors: Vec<&str> = message.lines().filter(|line| !line.starts_with("step ")).collect();
    assert!(
        errors.len() == 1 && errors[0].starts_with("error: "),
        "not one line of error:\n{message}"
    );
    for part in expected {
        assert!(message.contains(part), "no {part:?} in {message}");
    }
}

/// The cells in the row of the table that has this label.
#[track_caller]
pub fn cells<'a>(printed: &'a str, label: &str) -> Vec<&'a str> {
    let row = printed
        .lines()
        .find_map(|line| line.strip_prefix(label).filter(|rest| rest.starts_with("  ")));
    row.unwrap_or_else(|| panic!("no row {label:?} in:\n{printed}")).split_whitespace().collect()
}

#[track_caller]
pub fn numbers(printed: &str, label: &str) -> Vec<f64> {
    cells(printed, label).iter().map(|cell| cell.parse().unwrap()).collect()
}

pub fn replace(tensors: &mut Tensors, name: &str, change: impl FnOnce(&Tensor) -> Tensor) {
    let changed = change(&tensors[name]);
    tensors.insert(name.to_string(), changed);
}

pub fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The free memory, computed as the program does.
pub fn available_gib() -> u64 {
    let table = fs::read_to_string("/proc/meminfo").unwrap();
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 20
}
