//! Runs the demo in the way that its users do: as a program, on files, with good and
//! bad input.

mod place;
#[cfg(feature = "distributed")]
mod ranks;
mod refusals;

use place::*;
use std::collections::BTreeSet;
use std::fs::{self};
use std::process::Command;
use std::time::Duration;

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
        ["composite.safetensors", "fused.safetensors", "loss.csv", "sequence.safetensors"]
    );
    let table = fs::read_to_string(place.out().join("loss.csv")).unwrap();
    assert_eq!(table.lines().next().unwrap(), "step,sequence,fused,composite,unigram baseline");
    let last: Vec<f64> =
        table.lines().last().unwrap().split(',').map(|cell| cell.parse().unwrap()).collect();
    assert_eq!((table.lines().count(), last.len(), last[0]), (121, 5, 120.0));
    assert!((last[4] - baseline[0]).abs() < 1e-4, "{last:?}");
}

#[test]
fn trains_the_lstm_and_the_gru_next_to_libtorch_s() {
    for [ours, libtorch] in [["lstm", "tch_lstm"], ["gru", "tch_gru"]] {
        let place = Place::new();
        let printed = succeeded(&place.run(&["--op", ours, "--steps", "60", "--lr", "0.01"]));
        assert_eq!(cells(&printed, "seed 1, 60 steps"), [ours, libtorch]);
        assert_eq!(numbers(&printed, &format!("speed, {ours} / {libtorch}")).len(), 1);
        let early = numbers(&printed, "largest difference of the losses, steps 1 to 50");
        assert!(early[0] < 1e-3, "{ours} and {libtorch} differ by {early:?} in the first steps");
        let before = place.losses();
        assert!(before[59] < before[0] - 0.5, "{ours}: from {} to {}", before[0], before[59]);

        // The weights of either are weights of both.
        for op in [ours, libtorch] {
            let weights = place.path("kept.safetensors");
            fs::copy(place.weights(op), &weights).unwrap();
            succeeded(&place.run(&["--op", ours, "--steps", "1", "--resume", str(&weights)]));
            let after = place.losses();
            assert!(after[0] < before[0] - 0.5, "{op}: {} then, {} now", before[0], after[0]);
        }
    }
}

#[test]
fn the_sequence_is_trained_if_nothing_else_is_said() {
    let place = Place::new();
    let printed = succeeded(&place.run(&["--steps", "2"]));
    assert_eq!(cells(&printed, "seed 1, 2 steps"), ["sequence"]);
    assert!(!printed.contains("speed,"), "nothing to compare with:\n{printed}");
    assert_eq!(place.result_names(), ["loss.csv", "sequence.safetensors"]);
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

/// A model of code would learn to indent, and its sample would be blanks.
#[test]
fn by_default_reads_the_prose_of_this_repository() {
    let place = Place::new();
    let root = place.path("repository");
    fs::create_dir_all(root.join("src/deep")).unwrap();
    fs::create_dir_all(root.join("examples/target")).unwrap();
    fs::create_dir_all(root.join("csrc")).unwrap();
    let page = "# ¢\n\nAbc\n[d](¢)e `f`.\n\n```rust\n¢¢¢.\n```\n| ¢ |\n\n- Ab cde f.\n- ¢¢\n";
    fs::write(root.join("README.md"), page.repeat(30)).unwrap();
    let source = "    /// Ab\n    /// cde.\n    fn ¢() {} // ¢.\n// F:\n//! ```\n//! ¢.\n//! ```\n";
    fs::write(root.join("src/deep/x.rs"), source.repeat(30)).unwrap();
    fs::write(root.join("src/deep/x.txt"), "not a source: ©").unwrap();
    fs::write(root.join("examples/target/made.rs"), "// Built: ©.").unwrap();
    let mut command = Command::new(program());
    command.args(TINY).arg("--out").arg(place.out());
    let all = "Abc de f.\nAb cde f.\n".repeat(30) + &"Ab cde.\nF:\n".repeat(30);
    let characters = all.len();
    let expected = format!(
        "text: the prose of this repository (2 files)\n{characters} characters, vocabulary of 11"
    );
    // Cargo names this package's folder, and a bundle's script names the root.
    for folder in ["examples/char_lltm", ""] {
        let run = command.env("CARGO_MANIFEST_DIR", root.join(folder)).output().unwrap();
        let printed = succeeded(&run);
        assert!(printed.contains(&expected), "{printed}");
    }
}

#[test]
fn a_sample_fits_a_terminal() {
    let place = Place::new();
    let text = place.write("words.txt", "äbc déf ".repeat(300));
    let arguments = ["--text", str(&text), "--steps", "150", "--lr", "0.01", "--sample", "900"];
    let printed = succeeded(&place.run(&arguments));
    let sample = printed.split("---\n").nth(1).unwrap();
    let lengths: Vec<usize> = sample.lines().map(|line| line.chars().count()).collect();
    assert!(lengths.len() > 9 && lengths.iter().all(|len| *len <= 80), "{sample}");
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
fn help_names_every_option_and_its_default() {
    let done = Command::new(program()).arg("--help").output().unwrap();
    let help = succeeded(&done);
    for expected in ["[default: 128]", "[default: 0.005]", "runs/char_lltm]", "composite  The"] {
        assert!(help.contains(expected), "no {expected:?} in:\n{help}");
    }
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

/// `script` runs a program on a terminal of its own.
#[test]
fn progress_is_one_line_on_a_terminal() {
    let place = Place::new();
    let words: Vec<String> = [program()].iter().map(|path| str(path).to_string()).collect();
    let arguments = place.command(&["--op", "fused", "--steps", "30", "--save-every", "10"]);
    let arguments = arguments.get_args().map(|word| word.to_str().unwrap().to_string());
    let line: Vec<String> = words.into_iter().chain(arguments).collect();
    let mut script = Command::new("script");
    script.args(["-qec", &line.join(" "), "/dev/null"]).env("TERM", "xterm");
    let Ok(done) = script.output() else {
        eprintln!("skipped: there is no `script`, which makes a terminal");
        return;
    };
    let screen = succeeded(&done);
    let drawn: Vec<&str> = screen.split("\r\u{1b}[K\u{1b}[?7l").skip(1).collect();
    assert!(drawn.len() >= 3, "three saves end three turns: {screen:?}");
    let (last, earlier) = drawn.split_last().unwrap();
    for text in earlier {
        assert!(text.starts_with("step ") && text.ends_with("s left\u{1b}[?7h"), "{text:?}");
    }
    assert!(last.starts_with("step 30/30: fused loss ") && last.contains("\u{1b}[?7h\r\n"));
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
    assert_eq!(place.result_names(), ["fused.safetensors", "loss.csv"]);
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
