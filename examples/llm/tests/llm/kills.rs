//! Kills a run again and again: the resumed run must have the curve of one that was never stopped.

use crate::place::*;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

const RUN: &[&str] = &[
    "--steps",
    "120",
    "--dropout",
    "0.1",
    "--save-every",
    "7",
    "--eval-every",
    "20",
    "--log-every",
    "5",
    "--resume",
];

/// The losses as they stand in the file, so that the comparison is bit by bit.
fn curve(place: &Place, out: &str) -> String {
    fs::read_to_string(place.path(out).join("losses.jsonl")).unwrap()
}

fn options(out: &str) -> Vec<&str> {
    [RUN, &["--out", out]].concat()
}

#[test]
fn a_run_killed_ten_times_has_the_same_curve() {
    let place = Place::new();
    let (whole, killed) = (text(&place.path("whole")), text(&place.path("killed")));
    let begun = std::time::Instant::now();
    succeeded(&place.train(&options(&whole)));
    let time = begun.elapsed();
    let mut kills = 0;
    // From before the first step to just before the end, so that each part of a step and of a
    // checkpoint is hit in some run of the test. The order is arbitrary.
    for part in [11, 35, 62, 80, 95, 48, 71, 22, 55, 88, 40, 66] {
        let mut child = place
            .train_command(&options(&killed))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_secs_f64(time.as_secs_f64() * f64::from(part) / 100.0));
        // SIGKILL, after which nothing of the process runs.
        child.kill().unwrap();
        kills += usize::from(!child.wait().unwrap().success());
    }
    assert!(kills > 0, "every run was done before it was killed");
    succeeded(&place.train(&options(&killed)));
    assert_eq!(curve(&place, "killed"), curve(&place, "whole"));
    let last = "checkpoints/step-0000000120.safetensors";
    // Nothing half-written is left.
    assert_eq!(place.checkpoints("killed"), place.checkpoints("whole"));
    let weights = |out: &str| fs::read(place.path(out).join(last)).unwrap();
    assert!(weights("killed") == weights("whole"), "the last checkpoints differ");
}

#[test]
fn a_damaged_checkpoint_falls_back_to_the_one_before() {
    let place = Place::new();
    let (whole, damaged) = (text(&place.path("whole")), text(&place.path("damaged")));
    succeeded(&place.train(&options(&whole)));
    succeeded(&place.train(&options(&damaged)));
    let folder = place.path("damaged/checkpoints");
    let newest = folder.join(place.checkpoints("damaged").pop().unwrap());
    let bytes = fs::read(&newest).unwrap();
    for length in [0, 1, 100, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&newest, &bytes[..length]).unwrap();
        let output = place.train(&options(&damaged));
        succeeded(&output);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("warning: the checkpoint") && said.contains("is damaged"), "{said}");
        assert_eq!(curve(&place, "damaged"), curve(&place, "whole"), "cut at {length}");
        assert!(fs::read(&newest).unwrap() == bytes, "cut at {length}");
    }
}
