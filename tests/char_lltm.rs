//! Runs the `char_lltm` example in the way that its users do: as a program, on files, with good and
//! bad input.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant, SystemTime};
use tch::{Kind, Tensor};
use tempfile::TempDir;

/// Options so small that a step takes about a millisecond.
const TINY: &[&str] = &[
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

type Tensors = BTreeMap<String, Tensor>;
type Change<'a> = &'a dyn Fn(&mut Tensors);

// The run itself

#[test]
fn trains_all_ops_and_compares_them() {
    let place = Place::new();
    let done = place.run(&["--op", "all", "--steps", "120", "--lr", "0.01"]);
    let printed = succeeded(&done);

    for expected in
        ["characters, vocabulary of", "SHA-256", "unigram baseline", "sample of the sequence model"]
    {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    assert_eq!(cells(&printed, "seed 1, 120 steps"), ["sequence", "fused", "composite"]);
    let held_out = numbers(&printed, "held-out loss");
    let baseline = numbers(&printed, "unigram baseline");
    assert_eq!((held_out.len(), baseline.len()), (3, 3));
    assert!(held_out[0] < baseline[0] - 0.5, "held out {held_out:?}, baseline {baseline:?}");
    assert_eq!(cells(&printed, "at least 0.5 below"), ["yes", "yes", "yes"]);
    assert_eq!(numbers(&printed, "characters/s").len(), 3);
    assert_eq!(numbers(&printed, "speed, sequence / composite").len(), 1);
    assert_eq!(numbers(&printed, "speed, fused / composite").len(), 1);
    let early = numbers(&printed, "largest difference of the losses, steps 1 to 50");
    assert!(early[0] < 1e-3, "the ops differ by {early:?} in the first steps");
    assert_eq!(numbers(&printed, "largest difference of the losses, steps 1 to 120").len(), 1);

    assert_eq!(
        place.result_names(),
        [
            "composite.safetensors",
            "fused.safetensors",
            "loss.csv",
            "loss.svg",
            "sequence.safetensors"
        ]
    );
    let svg = fs::read_to_string(place.out().join("loss.svg")).unwrap();
    for expected in [
        "</svg>",
        "sequence (held out",
        "fused (held out",
        "composite (held out",
        "unigram baseline",
        "nats per character",
    ] {
        assert!(svg.contains(expected), "no {expected:?} in the plot");
    }
}

#[test]
fn the_sequence_is_trained_if_nothing_else_is_said() {
    let place = Place::new();
    let printed = succeeded(&place.run(&["--steps", "2"]));
    assert_eq!(cells(&printed, "seed 1, 2 steps"), ["sequence"]);
    assert!(!printed.contains("speed,"), "nothing to compare with:\n{printed}");
    assert_eq!(place.result_names(), ["loss.csv", "loss.svg", "sequence.safetensors"]);
}

#[test]
fn writes_every_loss_and_the_loss_falls() {
    let place = Place::new();
    succeeded(&place.run(&["--op", "fused", "--steps", "60", "--lr", "0.01"]));
    let losses = place.losses();
    assert_eq!(losses.len(), 60);
    assert!(losses[59] < losses[0] - 0.5, "from {} to {}", losses[0], losses[59]);
}

#[test]
fn the_sequence_takes_the_cell_s_course_and_its_weights() {
    let place = Place::new();
    let losses = |op| {
        succeeded(&place.run(&["--op", op, "--steps", "30", "--lr", "0.01"]));
        place.losses()
    };
    let (cell, sequence) = (losses("fused"), losses("sequence"));
    for (step, (cell, sequence)) in cell.iter().zip(&sequence).enumerate() {
        assert!((cell - sequence).abs() < 1e-3, "step {step}: {cell} and {sequence}");
    }
    let weights = place.weights("fused");
    succeeded(&place.run(&["--op", "sequence", "--steps", "2", "--resume", str(&weights)]));
    assert!(place.losses()[0] < cell[0] - 0.1);
}

#[test]
fn is_reproducible() {
    let run = |seed| {
        let place = Place::new();
        succeeded(&place.run(&["--op", "fused", "--steps", "10", "--seed", seed]));
        (place.losses(), place.tensors("fused"))
    };
    let (first, again, other) = (run("7"), run("7"), run("8"));
    assert_eq!(first.0, again.0);
    assert_eq!(first.1.len(), again.1.len());
    assert!(first.1.iter().all(|(name, tensor)| *tensor == again.1[name]));
    assert_ne!(first.0, other.0);
}

#[test]
fn the_weights_carry_their_vocabulary() {
    let place = Place::new();
    succeeded(&place.run(&["--op", "composite", "--steps", "3"]));
    let tensors = place.tensors("composite");
    let points = Vec::<i64>::try_from(&tensors["vocabulary"]).unwrap();
    let expected: BTreeSet<i64> = sample_text().chars().map(|c| i64::from(u32::from(c))).collect();
    assert_eq!(points, expected.into_iter().collect::<Vec<_>>());
    let size = |name: &str| tensors[name].size();
    let (vocabulary, embedding) = (points.len() as i64, size("embedding.weight")[1]);
    assert_eq!(size("embedding.weight"), [vocabulary, embedding]);
    assert_eq!(size("lltm.weights"), [48, 16 + embedding]);
    assert_eq!(size("lltm.bias"), [48]);
    assert_eq!(size("output.weight"), [vocabulary, 16]);
    assert_eq!(size("output.bias"), [vocabulary]);
}

#[test]
fn resuming_goes_on_from_the_weights() {
    let place = Place::new();
    succeeded(&place.run(&["--op", "fused", "--steps", "80", "--lr", "0.01"]));
    let before = place.losses();
    let weights = place.weights("fused");
    succeeded(&place.run(&["--op", "both", "--steps", "5", "--resume", str(&weights)]));
    let after = place.losses();
    assert!(after[0] < before[0] - 0.5, "started at {} then, at {} now", before[0], after[0]);
}

#[test]
fn progress_is_plain_lines_away_from_a_terminal() {
    let place = Place::new();
    let done = place.run(&["--op", "fused", "--steps", "50"]);
    let lines = text(&done.stderr);
    assert!((1..=10).contains(&lines.lines().count()), "progress:\n{lines}");
    assert!(!lines.contains(['\r', '\u{1b}']), "progress:\n{lines}");
    let last = lines.lines().last().unwrap_or_default();
    for expected in ["step 50/50: fused loss ", "characters/s", "s left"] {
        assert!(last.contains(expected), "no {expected:?} in {last:?}");
    }
}

#[test]
fn by_default_reads_this_repository() {
    let place = Place::new();
    let root = place.path("repository");
    fs::create_dir_all(root.join("src/deep")).unwrap();
    fs::create_dir_all(root.join("examples/target")).unwrap();
    fs::write(root.join("README.md"), "b".repeat(500)).unwrap();
    fs::write(root.join("src/deep/x.rs"), "ac".repeat(250)).unwrap();
    fs::write(root.join("src/deep/x.txt"), "not a source: ©").unwrap();
    fs::write(root.join("examples/target/made.rs"), "built: ©").unwrap();
    let mut command = Command::new(example());
    command.args(TINY).arg("--out").arg(place.out()).env("CARGO_MANIFEST_DIR", &root);
    let printed = succeeded(&command.output().unwrap());
    assert!(
        printed.contains("text: this repository (2 files)\n1000 characters, vocabulary of 3"),
        "{printed}"
    );
}

#[test]
fn a_sample_cannot_drive_the_terminal() {
    let place = Place::new();
    let text = place.write("escapes.txt", "\u{1b}[2J\u{7}".repeat(200));
    let arguments = ["--text", str(&text), "--op", "fused", "--steps", "1", "--sample", "200"];
    let printed = succeeded(&place.run(&arguments));
    assert!(!printed.contains(['\u{1b}', '\u{7}']) && printed.contains('\u{fffd}'));
}

#[test]
fn a_closed_pipe_does_not_stop_the_training() {
    let place = Place::new();
    let mut child = place.start(&["--op", "fused"]);
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    assert!(place.weights("fused").exists());
}

#[test]
fn help_names_every_option() {
    let done = Command::new(example()).arg("--help").output().unwrap();
    let help = succeeded(&done);
    for option in [
        "--text",
        "--device",
        "--op",
        "--hidden",
        "--seq-len",
        "--batch",
        "--steps",
        "--lr",
        "--seed",
        "--out",
        "--resume",
        "--save-every",
        "--sample",
        "--temperature",
    ] {
        assert!(help.contains(option), "no {option} in:\n{help}");
    }
}

// Interruption

#[test]
fn a_kill_at_any_time_leaves_whole_files() {
    let place = Place::new();
    for milliseconds in [0, 0, 40, 150, 300, 450] {
        let mut child = place.start(&["--op", "fused", "--steps", "1000000", "--save-every", "1"]);
        if milliseconds > 0 {
            wait_for(&place.weights("fused"));
        }
        std::thread::sleep(Duration::from_millis(milliseconds));
        assert!(child.try_wait().unwrap().is_none(), "the run ended by itself");
        child.kill().unwrap();
        child.wait().unwrap();
        if place.weights("fused").exists() {
            assert_eq!(place.tensors("fused").len(), 6);
        }
    }
    let weights = place.weights("fused");
    succeeded(&place.run(&["--op", "fused", "--steps", "2", "--resume", str(&weights)]));
    assert_eq!(place.result_names(), ["fused.safetensors", "loss.csv", "loss.svg"]);
}

#[test]
fn divergence_stops_the_run_and_keeps_the_last_good_weights() {
    let place = Place::trained();
    let diverging = ["--op", "fused", "--steps", "50", "--lr", "1e30"];
    place.refuses(
        &diverging,
        &["fused run diverged", "lower --lr (now 1e30)", "no weights were written"],
    );
}

// Bad input: one line names it and a solution, the exit code is 1, nothing is overwritten

#[test]
fn refuses_unusable_texts() {
    let place = Place::trained();
    let latin1 = [sample_text().as_bytes(), b"caf\xe9"].concat();
    let position = format!("byte {}", latin1.len() - 1);
    let cases: [(PathBuf, &[&str]); 7] = [
        (place.path("missing.txt"), &["missing.txt", "No such file", "--text"]),
        (place.out(), &["is a folder", "give a text file"]),
        (place.write("empty.txt", ""), &["empty.txt is empty", "longer"]),
        (place.write("one.txt", "x"), &["'x' only", "several characters"]),
        (place.write("same.txt", "x".repeat(5000)), &["'x' only", "several characters"]),
        (
            place.write("short.txt", "ab".repeat(30)),
            &["too short", "60 characters", "need 72", "--batch 4"],
        ),
        (place.write("latin1.txt", latin1), &["not UTF-8", &position, "iconv"]),
    ];
    for (file, expected) in cases {
        place.refuses(&["--text", str(&file)], expected);
    }
}

#[test]
fn the_shortest_text_it_asks_for_is_enough() {
    let place = Place::new();
    let enough = place.write("enough.txt", "ab".repeat(36));
    succeeded(&place.run(&["--text", str(&enough), "--op", "fused", "--steps", "2"]));
}

#[test]
fn refuses_an_unreadable_text() {
    let place = Place::trained();
    let file = place.write("secret.txt", sample_text());
    fs::set_permissions(&file, Permissions::from_mode(0o000)).unwrap();
    if File::open(&file).is_ok() {
        eprintln!("skipped: this user may read everything");
        return;
    }
    place.refuses(&["--text", str(&file)], &["secret.txt", "Permission denied", "--text"]);
}

#[test]
fn refuses_an_unusable_output_folder() {
    let place = Place::trained();
    let file = place.write("file", "kept");
    place.refuses(&["--out", str(&file)], &["file is not a folder", "give another"]);
    // In the last two, nobody can create files, not even root.
    for out in [str(&file.join("below")), "/proc/char_lltm", "/proc"] {
        place.refuses(&["--out", out], &["cannot write to --out", out, "may write"]);
    }
    assert_eq!(fs::read(file).unwrap(), b"kept");
}

#[test]
fn refuses_a_read_only_output_folder() {
    let place = Place::trained();
    fs::set_permissions(place.out(), Permissions::from_mode(0o555)).unwrap();
    if File::create(place.path("out/probe")).is_ok() {
        eprintln!("skipped: this user may write everywhere");
        return;
    }
    place.refuses(&[], &["cannot write to --out", "may write"]);
    fs::set_permissions(place.out(), Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn refuses_when_a_folder_lies_where_a_file_goes() {
    let place = Place::new();
    fs::create_dir_all(place.out().join("loss.svg")).unwrap();
    assert_message(&place.run(&[]), &["loss.svg is in the way", "--out"]);
    assert_eq!(fs::read_dir(place.out()).unwrap().count(), 1);
}

#[test]
fn refuses_senseless_sizes() {
    let place = Place::trained();
    for option in ["--hidden", "--seq-len", "--batch", "--steps", "--save-every"] {
        place.refuses(&[option, "0"], &[option, "0 is out of range", "give 1 to"]);
    }
    place.refuses(&["--batch", "-3"], &["--batch -3 is out of range", "give 1 to"]);
    place.refuses(&["--sample", "-1"], &["--sample -1 is out of range", "give 0 to"]);
    for value in ["0", "-0.5", "NaN", "1e38"] {
        place.refuses(&["--lr", value], &["--lr", "out of range", "above 0"]);
    }
    place.refuses(&["--temperature", "0"], &["--temperature", "out of range", "above 0"]);
}

#[test]
fn refuses_sizes_that_do_not_fit() {
    let place = Place::trained();
    place.refuses(&["--hidden", "1000000000"], &["--hidden 1000000000", "out of range"]);
    place.refuses(
        &["--batch", "1000000", "--seq-len", "1000000"],
        &["too short", "--batch 1000000"],
    );
    // 3 · 65536 · 65600 weights, about twelve times over, need 577 GiB. Some machines have more.
    if available_gib() < 570 {
        place.refuses(&["--hidden", "65536"], &["MiB of memory", "lower --hidden"]);
    }
}

#[test]
fn refuses_unknown_devices() {
    let place = Place::trained();
    for name in ["gpu", "cuda:x", ""] {
        place.refuses(&["--device", name], &["--device", "is unknown", "cuda:N"]);
    }
    if tch_extension::testing::devices().len() > 1 {
        place.refuses(&["--device", "cuda:99"], &["cuda:99 does not exist", "cuda:0"]);
    } else {
        place.refuses(&["--device", "cuda"], &["sees no CUDA device", "--device cpu"]);
    }
}

#[test]
fn usage_errors_exit_with_2() {
    let place = Place::trained();
    let before = place.results();
    for arguments in [["--op", "quick"], ["--hidden", "many"], ["--nonsense", "1"]] {
        let done = place.run(&arguments);
        assert_eq!(done.status.code(), Some(2));
        assert!(text(&done.stderr).contains("--help"));
    }
    assert_eq!(place.results(), before);
}

// Bad input: a resume file of another model

#[test]
fn refuses_weights_of_another_model() {
    let place = Place::trained();
    let weights = place.weights("fused");
    let resume = ["--resume", str(&weights)];
    let with = |more: [&'static str; 2]| [resume, more].concat();
    place.refuses(&with(["--hidden", "17"]), &["hidden size is 16, not 17", "--hidden 16"]);

    let more = place.write("more.txt", format!("{}é", sample_text()));
    let fewer = place.write("fewer.txt", sample_text().replace('z', "y"));
    for (file, expected) in [(more, "'é' is in the text only"), (fewer, "'z' is in the file only")]
    {
        let arguments = [resume, ["--text", str(&file)]].concat();
        place.refuses(
            &arguments,
            &["cannot resume from", "vocabulary", expected, "leave out --resume"],
        );
    }
}

#[test]
fn refuses_weights_that_do_not_hold_the_model() {
    let place = Place::trained();
    let cases: [(Change, &[&str]); 7] = [
        (&|all| drop(all.remove("output.bias")), &["no tensor \"output.bias\""]),
        (&|all| drop(all.remove("vocabulary")), &["no tensor \"vocabulary\""]),
        (
            &|all| drop(all.insert("second".into(), Tensor::from(1.0))),
            &["tensor \"second\"", "lacks"],
        ),
        (
            &|all| replace(all, "lltm.weights", |old| old.narrow(1, 1, 4).contiguous()),
            &["[48, 4]", "[48, 80]"],
        ),
        (
            &|all| replace(all, "output.weight", |old| old.to_kind(Kind::Double)),
            &["Double", "Float"],
        ),
        (&|all| replace(all, "output.bias", |old| old * f64::NAN), &["output.bias", "NaN"]),
        (
            &|all| replace(all, "vocabulary", |old| old.to_kind(Kind::Float)),
            &["no list of code points"],
        ),
    ];
    for (change, expected) in cases {
        let mut tensors = place.tensors("fused");
        change(&mut tensors);
        let file = place.path("changed.safetensors");
        Tensor::write_safetensors(&tensors.into_iter().collect::<Vec<_>>(), &file).unwrap();
        let always = ["cannot resume from", "changed.safetensors", "give"];
        place.refuses(&["--resume", str(&file)], &[&always, expected].concat());
    }
}

#[test]
fn refuses_files_that_are_no_weights() {
    let place = Place::trained();
    let whole = fs::read(place.weights("fused")).unwrap();
    let (longer, prose) = ([&whole[..], b"x"].concat(), sample_text());
    let cases: [&[u8]; 5] =
        [&whole[..whole.len() - 1], &whole[..100], b"", prose.as_bytes(), &longer];
    for content in cases {
        let file = place.write("broken", content);
        let expected = ["broken is not a whole safetensors file", "written by this example"];
        place.refuses(&["--resume", str(&file)], &expected);
    }
    place
        .refuses(&["--resume", str(&place.path("absent"))], &["absent does not exist", "--resume"]);
    place.refuses(&["--resume", str(&place.out())], &["out is not a file", ".safetensors"]);
}

// Helpers

/// A folder with a text and a place for results.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(TempDir::new().unwrap());
        place.write("text.txt", sample_text());
        place
    }

    /// A place with the results of an earlier run, which a failing run must not change.
    fn trained() -> Place {
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

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn out(&self) -> PathBuf {
        self.path("out")
    }

    fn weights(&self, op: &str) -> PathBuf {
        self.out().join(format!("{op}.safetensors"))
    }

    fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// A tiny run on this folder's text. If an option is given twice, the later one applies.
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(example());
        command.arg("--text").arg(self.path("text.txt")).arg("--out").arg(self.out());
        // The tests run at the same time, and threads of one program that have to share a core
        // would wait for one another.
        command.args(TINY).args(arguments).env("OMP_NUM_THREADS", "1");
        command
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }

    fn start(&self, arguments: &[&str]) -> Child {
        self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Runs the example with bad input, and checks that it prints one line that contains everything
    /// in `expected`, exits with code 1 and leaves the results unchanged.
    #[track_caller]
    fn refuses(&self, arguments: &[&str], expected: &[&str]) {
        let before = self.results();
        assert_message(&self.run(arguments), expected);
        assert_eq!(self.results(), before, "the earlier results were touched");
    }

    /// Every file of the output folder, hidden ones included, with its content.
    fn results(&self) -> BTreeMap<String, Vec<u8>> {
        let entries = fs::read_dir(self.out()).unwrap().map(|entry| entry.unwrap());
        entries
            .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
            .collect()
    }

    fn result_names(&self) -> Vec<String> {
        self.results().into_keys().collect()
    }

    fn tensors(&self, op: &str) -> BTreeMap<String, Tensor> {
        Tensor::read_safetensors(self.weights(op)).unwrap().into_iter().collect()
    }

    /// The losses of the first operator.
    fn losses(&self) -> Vec<f64> {
        let table = fs::read_to_string(self.out().join("loss.csv")).unwrap();
        table.lines().skip(1).map(|line| line.split(',').nth(1).unwrap().parse().unwrap()).collect()
    }
}

/// The path of the built example: in a bundle's folder, or next to the folder of this test.
fn example() -> PathBuf {
    if let Some(folder) = std::env::var_os("TCH_EXTENSION_EXAMPLES") {
        return PathBuf::from(folder).join("char_lltm");
    }
    let test = std::env::current_exe().unwrap();
    let program = test.parent().and_then(Path::parent).unwrap().join("examples/char_lltm");
    // `cargo test` also builds the examples, but `cargo test --test char_lltm` does not and would
    // test an outdated program.
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/char_lltm");
    let newest = fs::read_dir(sources).unwrap().map(|entry| modified(&entry.unwrap().path())).max();
    let fresh = program.exists() && Some(modified(&program)) >= newest;
    assert!(
        fresh,
        "{} is absent or outdated: run `cargo build --example char_lltm`",
        program.display()
    );
    program
}

fn modified(path: &Path) -> SystemTime {
    path.metadata().and_then(|metadata| metadata.modified()).unwrap()
}

/// The text is repetitive, so that a tiny model learns it in a second. It contains every letter, so
/// that the tests can detect missing ones.
fn sample_text() -> String {
    "the quick brown fox jumps over the lazy dog\n".repeat(80)
}

fn str(path: &Path) -> &str {
    path.to_str().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// The output of a program that must have succeeded.
#[track_caller]
fn succeeded(done: &Output) -> String {
    assert!(done.status.success(), "{}\n{}", done.status, text(&done.stderr));
    text(&done.stdout)
}

#[track_caller]
fn assert_message(done: &Output, expected: &[&str]) {
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
fn cells<'a>(printed: &'a str, label: &str) -> Vec<&'a str> {
    let row = printed
        .lines()
        .find_map(|line| line.strip_prefix(label).filter(|rest| rest.starts_with("  ")));
    row.unwrap_or_else(|| panic!("no row {label:?} in:\n{printed}")).split_whitespace().collect()
}

#[track_caller]
fn numbers(printed: &str, label: &str) -> Vec<f64> {
    cells(printed, label).iter().map(|cell| cell.parse().unwrap()).collect()
}

fn replace(tensors: &mut Tensors, name: &str, change: impl FnOnce(&Tensor) -> Tensor) {
    let changed = change(&tensors[name]);
    tensors.insert(name.to_string(), changed);
}

fn wait_for(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} does not appear", path.display());
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The free memory, computed as the program does.
fn available_gib() -> u64 {
    let table = fs::read_to_string("/proc/meminfo").unwrap();
    let line = table.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 20
}
