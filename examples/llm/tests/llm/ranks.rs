//! Several processes, which tch-run starts: the same curve as of one process, files of rank 0 only,
//! and a run that survives kills.

use crate::place::*;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A test of several processes ends by then, or fails.
const DEADLINE: Duration = Duration::from_secs(120);

/// tch-run, or `None` with a line that says that the test is skipped.
fn tch_run(test: &str) -> Option<Command> {
    let folder = match std::env::var_os("TCH_EXTENSION_EXAMPLES") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(env!("CARGO_BIN_EXE_llm")).parent().unwrap().to_path_buf(),
    };
    let path = folder.join("tch-run");
    if path.exists() {
        return Some(Command::new(path));
    }
    // Not by eprintln!, which the harness hides if a test passes.
    let line =
        format!("SKIPPED {test}: no {}; `cargo build -p tch-run` makes it\n", path.display());
    let _ = std::io::stderr().write_all(line.as_bytes());
    None
}

/// `llm train` on some processes.
fn command(place: &Place, tch_run: Command, processes: &str, options: &[&str]) -> Command {
    on_ranks(tch_run, processes, &place.train_command(options))
}

fn on_ranks(tch_run: Command, processes: &str, train: &Command) -> Command {
    let mut command = tch_run;
    command.args(["-n", processes, "--max-restarts", "20", "--grace", "2", "--"]);
    command.arg(train.get_program()).args(train.get_args()).args(["--timeout", "30"]);
    command.env("OMP_NUM_THREADS", "1");
    command
}

fn start(command: &mut Command) -> Child {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// Waits for the end of a run, which prints too little to fill a pipe.
fn finish(mut child: Child) -> Output {
    let begun = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if begun.elapsed() > DEADLINE {
            child.kill().unwrap();
            let output = child.wait_with_output().unwrap();
            panic!("not within {DEADLINE:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().unwrap()
}

fn run(place: &Place, test: &str, processes: &str, options: &[&str]) -> Option<Output> {
    Some(finish(start(&mut command(place, tch_run(test)?, processes, options))))
}

fn curve(place: &Place, out: &str) -> String {
    fs::read_to_string(place.path(out).join("losses.jsonl")).unwrap()
}

fn assert_alike(found: &[f64], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!((found - expected).abs() < 2e-3, "step {}: {found} and {expected}", step + 1);
    }
}

#[test]
fn several_processes_have_the_curve_of_one() {
    let test = "several_processes_have_the_curve_of_one";
    let place = Place::new();
    // Rows are divided by four processes, batches by three, and both by two.
    for (processes, sizes) in [
        ("2", ["--batch", "4", "--accumulate", "1"]),
        ("4", ["--batch", "4", "--accumulate", "1"]),
        ("3", ["--batch", "2", "--accumulate", "3"]),
        ("2", ["--batch", "2", "--accumulate", "6"]),
    ] {
        let options = [&sizes[..], &["--steps", "20", "--overwrite"]].concat();
        succeeded(&place.train(&options));
        let (expected, files) = (place.losses("out"), names(&place.path("out")));
        let Some(output) = run(&place, test, processes, &options) else { return };
        let printed = succeeded(&output);
        assert!(printed.contains(&format!("{processes} processes")), "{printed}");
        let others = printed.lines().filter(|line| !line.starts_with("[rank 0] ")).count();
        assert_eq!(others, 0, "only rank 0 prints: {printed}");
        assert_alike(&place.losses("out"), &expected);
        assert_eq!(names(&place.path("out")), files);
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_processes() {
    let test = "a_run_goes_on_with_another_number_of_processes";
    let place = Place::new();
    let folder = text(&place.path("out"));
    succeeded(&place.train(&["--steps", "30", "--out", &text(&place.path("whole"))]));
    // The schedule is that of 30 steps, so each part is stopped by a kill after its checkpoint.
    let options = ["--steps", "30", "--save-every", "10", "--resume"];
    for (stop, processes) in [(10, "2"), (20, "4"), (30, "1")] {
        let Some(tch_run) = tch_run(test) else { return };
        let mut child = start(&mut command(&place, tch_run, processes, &options));
        let checkpoint =
            PathBuf::from(&folder).join(format!("checkpoints/step-{stop:010}.safetensors"));
        let begun = Instant::now();
        while stop < 30 && !checkpoint.exists() && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < DEADLINE, "no checkpoint of step {stop}");
            std::thread::sleep(Duration::from_millis(1));
        }
        if stop < 30 {
            child.kill().unwrap();
            child.wait().unwrap();
        } else {
            succeeded(&finish(child));
        }
    }
    assert_alike(&place.losses("out"), &place.losses("whole"));
}

/// With the optimizer's state on all processes together: the same curve, and a checkpoint that any
/// number of them continues, each with a part of the state or with all of it.
#[test]
fn a_sharded_run_goes_on_with_another_number_of_processes() {
    let test = "a_sharded_run_goes_on_with_another_number_of_processes";
    let place = Place::new();
    let folder = |name: &str| text(&place.path(name));
    for precision in ["f32", "bf16", "bf16-true"] {
        let train = |processes: &str, out: &str, options: &[&str]| -> Option<Output> {
            let common = ["--precision", precision, "--save-every", "10", "--out", &folder(out)];
            run(&place, test, processes, &[&common[..], options].concat())
        };
        let whole = format!("whole-{precision}");
        let Some(output) = train("1", &whole, &["--steps", "30"]) else { return };
        succeeded(&output);
        let sharded = format!("sharded-{precision}");
        succeeded(&train("2", &sharded, &["--steps", "30", "--sharded"]).unwrap());
        assert_alike(&place.losses(&sharded), &place.losses(&whole));
        assert_eq!(names(&place.path(&sharded)), names(&place.path(&whole)));
        let tensors = |out: &str, step: i64| {
            let file = format!("checkpoints/step-{step:010}.safetensors");
            tch::Tensor::read_safetensors(place.path(out).join(file)).unwrap()
        };
        let shapes = |out: &str| {
            let of = |(name, tensor): (String, tch::Tensor)| (name, tensor.size(), tensor.kind());
            let mut all: Vec<_> = tensors(out, 30).into_iter().map(of).collect();
            all.sort_by(|a, b| a.0.cmp(&b.0));
            format!("{all:?}")
        };
        assert_eq!(shapes(&sharded), shapes(&whole), "the files have the same tensors");
        // From the checkpoint of step 20 on, which is as if the one of step 30 did not exist yet.
        for (processes, options) in [("2", &["--sharded"][..]), ("4", &["--sharded"]), ("1", &[])] {
            let part = format!("part-{precision}-{processes}");
            copy_run(&place.path(&sharded), &place.path(&part));
            fs::remove_file(place.path(&part).join("checkpoints/step-0000000030.safetensors"))
                .unwrap();
            let options = [&["--steps", "30", "--resume"][..], options].concat();
            succeeded(&train(processes, &part, &options).unwrap());
            assert_alike(&place.losses(&part), &place.losses(&whole));
            if processes == "2" {
                assert_eq!(curve(&place, &part), curve(&place, &sharded));
                let sorted = |out: &str| {
                    let mut all = tensors(out, 30);
                    all.sort_by(|a, b| a.0.cmp(&b.0));
                    all
                };
                assert!(sorted(&part) == sorted(&sharded), "the last checkpoints differ");
            }
        }
        // Other weights to begin with, which the ranks must have before they divide them.
        let options = ["--steps", "10", "--init", &folder(&whole)];
        let begin = |processes: &str, out: &str, more: &[&str]| {
            let options = [&options[..], more].concat();
            succeeded(&train(processes, out, &options).unwrap());
        };
        let (one, two) = (format!("one-{precision}"), format!("two-{precision}"));
        begin("1", &one, &[]);
        begin("2", &two, &["--sharded"]);
        assert_alike(&place.losses(&two), &place.losses(&one));
    }
}

/// Only adapters are sent and divided; all processes have the base of rank 0.
#[test]
fn adapters_are_trained_by_several_processes() {
    let test = "adapters_are_trained_by_several_processes";
    let place = Place::new();
    let base = text(&place.path("base"));
    succeeded(&place.train(&["--size", "llama-mini", "--steps", "40", "--out", &base]));
    for precision in ["f32", "bf16", "bf16-true"] {
        let options = ["--init", &base, "--lora", "2", "--steps", "20", "--lr", "0.01"];
        let options = [&options[..], &["--precision", precision, "--overwrite"]].concat();
        succeeded(&place.train(&options));
        let expected = place.losses("out");
        for more in [&[][..], &["--sharded"]] {
            let options = [&options[..], more].concat();
            let Some(output) = run(&place, test, "2", &options) else { return };
            succeeded(&output);
            assert_alike(&place.losses("out"), &expected);
        }
    }
}

/// Processes have batches with different numbers of targets.
#[test]
fn documents_apart_have_the_curve_of_one_process() {
    let test = "documents_apart_have_the_curve_of_one_process";
    let place = crate::apart::with_lines();
    for sizes in [["--batch", "4", "--accumulate", "1"], ["--batch", "2", "--accumulate", "4"]] {
        let options = [&sizes[..], &["--steps", "20", "--overwrite"]].concat();
        let line = crate::apart::line("out", &options);
        succeeded(&place.run(&line));
        let expected = place.losses("out");
        let Some(tch_run) = tch_run(test) else { return };
        let mut command = on_ranks(tch_run, "2", program().args(&line));
        succeeded(&finish(start(command.current_dir(place.path("")))));
        assert_alike(&place.losses("out"), &expected);
    }
}

/// Muon needs the mean gradient of whole matrices, which DDP gives.
#[test]
fn muon_has_the_curve_of_one_process() {
    let test = "muon_has_the_curve_of_one_process";
    let place = Place::new();
    let options = ["--optimizer", "muon", "--steps", "20", "--recompute-layers", "--overwrite"];
    succeeded(&place.train(&options));
    let expected = place.losses("out");
    let Some(output) = run(&place, test, "2", &options) else { return };
    assert!(succeeded(&output).contains("layers computed again"));
    assert_alike(&place.losses("out"), &expected);
}

fn copy_run(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_run(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// Kills one rank again and again, with SIGKILL: during the start, and at some point of a step or of a
/// checkpoint after each of several checkpoints.
#[test]
fn a_killed_rank_comes_back_and_ends_on_the_same_curve() {
    let test = "a_killed_rank_comes_back_and_ends_on_the_same_curve";
    let place = Place::new();
    let (whole, killed) = (text(&place.path("whole")), text(&place.path("killed")));
    let options = |out| {
        let often = ["--save-every", "6", "--eval-every", "20"];
        [&["--steps", "150", "--dropout", "0.1", "--resume", "--out", out][..], &often].concat()
    };
    let Some(output) = run(&place, test, "2", &options(&whole)) else { return };
    succeeded(&output);
    let mut child = start(&mut command(&place, tch_run(test).unwrap(), "2", &options(&killed)));
    let mut kills = 0;
    // The step after which a rank is killed, and how many milliseconds after its checkpoint.
    for (step, delay) in [(0, 100), (6, 0), (24, 3), (48, 1), (66, 7), (96, 2), (120, 5)] {
        let checkpoint = format!("step-{step:010}.safetensors");
        let is_there = || {
            let newest = place.checkpoints("killed").pop();
            newest.is_some_and(|newest| newest >= checkpoint)
        };
        let begun = Instant::now();
        while step > 0 && !is_there() && child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < DEADLINE, "no {checkpoint}");
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(delay));
        let Some(rank) = rank_of(child.id(), kills % 2) else { continue };
        let status = Command::new("kill").args(["-KILL", &rank]).status().unwrap();
        kills += usize::from(status.success());
    }
    let output = finish(child);
    succeeded(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(kills > 2 && said.contains("was killed by SIGKILL"), "{kills} kills: {said}");
    assert!(said.contains("tch-run: restart 2 of 20"), "{said}");
    assert_eq!(curve(&place, "killed"), curve(&place, "whole"));
    let weights = |out: &str| {
        fs::read(place.path(out).join("checkpoints/step-0000000150.safetensors")).unwrap()
    };
    assert!(weights("killed") == weights("whole"), "the last checkpoints differ");
}

/// The process number of a rank that a tch-run has started: the n-th of its children.
fn rank_of(tch_run: u32, rank: usize) -> Option<String> {
    let children = fs::read_to_string(format!("/proc/{tch_run}/task/{tch_run}/children")).ok()?;
    children.split_whitespace().nth(rank).map(String::from)
}

#[test]
fn what_rank_0_refuses_is_said_once() {
    let test = "what_rank_0_refuses_is_said_once";
    let place = Place::new();
    for (options, expected) in [
        (&["--text", "/no/such"][..], "--text /no/such does not exist"),
        (&["--batch", "3"], "give an --accumulate or a --batch that is a multiple of 2"),
        (&["--lr", "1e30", "--steps", "50"], "lower --lr"),
    ] {
        let Some(tch_run) = tch_run(test) else { return };
        let mut command = command(&place, tch_run, "2", options);
        command.args(["--overwrite"]);
        // A failure is not repeated here.
        let line: Vec<_> = command.get_args().map(|arg| arg.to_owned()).collect();
        let mut once = Command::new(command.get_program());
        once.args(line.iter().map(|arg| if arg == "20" { "0".into() } else { arg.clone() }));
        once.env("OMP_NUM_THREADS", "1");
        let output = finish(start(&mut once));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let errors: Vec<&str> = said.lines().filter(|line| line.contains("error: ")).collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(
            errors[0].starts_with("[rank 0] error: ") && errors[0].contains(expected),
            "{said}"
        );
        // The last one had begun.
        assert_eq!(place.path("out").exists(), expected == "lower --lr", "{said}");
    }
}

#[test]
fn bench_trains_other_batches_on_each_process() {
    let test = "bench_trains_other_batches_on_each_process";
    let place = Place::new();
    let inputs = place.bench_inputs();
    let bench = |processes, options: &[&str]| -> Option<serde_json::Value> {
        let mut command = tch_run(test)?;
        command.args(["-n", processes, "--no-prefix", "--"]).arg(program().get_program());
        command.args(["bench", "--inputs", &inputs, "--device", "cpu"]).args(options);
        Some(serde_json::from_str(&succeeded(&finish(start(&mut command)))).unwrap())
    };
    let Some(one) = bench("1", &[]) else { return };
    let two = bench("2", &["--half-gradients", "--bucket-mb", "0.5"]).unwrap();
    assert_eq!((&one["world"], &two["world"]), (&1.into(), &2.into()));
    assert!(one["ddp"].is_null() && two["ddp"]["bucket_bytes"].as_array().unwrap().len() > 1);
    let each = two["tokens_per_s_each"].as_f64().unwrap();
    assert!((two["tokens_per_s"].as_f64().unwrap() / each - 2.0).abs() < 1e-9);
    let sharded = bench("2", &["--sharded"]).unwrap();
    let losses = |result: &serde_json::Value| -> Vec<f64> {
        result["losses"].as_array().unwrap().iter().map(|loss| loss.as_f64().unwrap()).collect()
    };
    assert_alike(&losses(&sharded), &losses(&bench("2", &[]).unwrap()));
    let first = |result: &serde_json::Value| result["losses"][0].as_f64().unwrap();
    assert!(first(&one) != first(&two) && (first(&one) - first(&two)).abs() < 0.5);
}
