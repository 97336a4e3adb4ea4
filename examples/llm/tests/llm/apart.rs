//! Documents that do not see one another: runs that are stopped, divided and adapted.

use crate::place::*;
use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// A place with prepared lines of different lengths.
pub fn with_lines() -> Place {
    let place = Place::new();
    let lines: Vec<String> = (0..300)
        .map(|line| match line % 3 {
            0 => format!(r#"{{"prompt": "the bell: ", "completion": "rings {} times"}}"#, line % 7),
            1 => r#"{"text": "the cat sat on the mat"}"#.to_string(),
            _ => r#"{"text": "so"}"#.to_string(),
        })
        .collect();
    fs::write(place.path("lines.jsonl"), lines.join("\n")).unwrap();
    let line = ["prepare", "--text", "lines.jsonl", "--out", "data", "--vocabulary", "bpe"];
    succeeded(&place.run(&[&line[..], &["--vocabulary-size", "280"]].concat()));
    place
}

/// The options of a run on them.
pub fn line<'a>(out: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    let data = ["train", "--data", "data", "--documents", "apart", "--out", out];
    [&data[..], &TINY[2..], options].concat()
}

#[test]
fn a_killed_run_has_the_same_curve_bit_by_bit() {
    let place = with_lines();
    for size in ["mini", "llama-mini"] {
        let [whole, killed] = ["whole", "killed"].map(|name| format!("{name}-{size}"));
        let common = ["--steps", "120", "--save-every", "7", "--dropout", "0.1", "--resume"];
        let common = [&common[..], &["--accumulate", "2"]].concat();
        let options = [&common[..], &["--size", size]].concat();
        succeeded(&place.run(&line(&whole, &options)));
        let mut child = program()
            .args(line(&text(&place.path(&killed)), &options))
            .current_dir(place.path(""))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let (begun, checkpoints) = (Instant::now(), place.path(&killed).join("checkpoints"));
        // It may also have ended by then, on a machine with other work.
        while !checkpoints.join("step-0000000014.safetensors").exists()
            && child.try_wait().unwrap().is_none()
        {
            assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = child.kill();
        child.wait().unwrap();
        // The size is that of the checkpoint.
        succeeded(&place.run(&line(&killed, &common)));
        for file in ["losses.jsonl", "checkpoints/step-0000000120.safetensors"] {
            let read = |out: &str| fs::read(place.path(out).join(file)).unwrap();
            assert!(read(&killed) == read(&whole), "{size}: {file}");
        }
        let losses = place.losses(&whole);
        assert!(losses[119] < losses[0], "{losses:?}");
    }

    let other = ["--size", "mini", "--steps", "120", "--dropout", "0.1", "--accumulate", "2"];
    let other = [&other[..], &["--resume", "--documents", "together"]].concat();
    let mut options = line("whole-mini", &other);
    options.drain(3..5);
    let error = failed(&place.run(&options));
    let expected = "--documents of the run in whole-mini was apart, and is together now";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn documents_apart_are_another_curve() {
    let place = with_lines();
    let losses = |out: &str, options: &[&str]| {
        succeeded(&place.run(&line(out, options)));
        place.losses(out)
    };
    let whole = losses("whole", &["--batch", "4"]);
    let halves = losses("halves", &["--batch", "2", "--accumulate", "2"]);
    for (step, (whole, halves)) in whole.iter().zip(&halves).enumerate() {
        assert!((whole - halves).abs() < 1e-3, "step {step}: {whole} and {halves}");
    }
    let mut together = line("together", &["--batch", "4"]);
    together.drain(3..5);
    succeeded(&place.run(&together));
    assert!((place.losses("together")[0] - whole[0]).abs() > 1e-3);
}

#[test]
fn adapters_learn_documents_apart() {
    let place = with_lines();
    let base = ["--size", "llama-mini", "--steps", "40", "--lr", "0.01"];
    succeeded(&place.run(&line("base", &base)));
    let targets = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj";
    let options = ["--init", "base", "--lora", "4", "--lora-targets", targets, "--lr", "0.03"];
    let mut options = line("lora", &[&options[..], &["--steps", "40"]].concat());
    // The sizes are those of --init.
    let sizes = ["--layers", "--heads", "--dim"];
    while let Some(at) = options.iter().position(|option| sizes.contains(option)) {
        options.drain(at..at + 2);
    }
    let printed = succeeded(&place.run(&options));
    assert!(printed.contains("adapters of rank 4"), "{printed}");
    let held_out = place.values("lora", "held_out");
    assert!(held_out[9] < held_out[0] - 0.005, "{held_out:?}");
}

/// They belong to how a model reads, as its context does.
#[test]
fn another_run_s_documents_stay_apart() {
    let place = with_lines();
    succeeded(&place.run(&line("base", &[])));
    let further = |documents: &[&str]| {
        let mut options = line("further", &["--init", "base", "--overwrite"]);
        options.drain(3..5);
        succeeded(&place.run(&[&options[..], documents].concat())).contains("documents apart")
    };
    assert!(further(&[]));
    assert!(!further(&["--documents", "together"]));
}

#[test]
fn bytes_have_no_documents() {
    let place = Place::new();
    let error = failed(&place.train(&["--documents", "apart"]));
    assert!(error.contains("--documents apart needs a vocabulary"), "{error}");
    assert!(place.checkpoints("out").is_empty());
}
