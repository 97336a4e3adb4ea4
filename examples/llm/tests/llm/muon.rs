//! Muon in place of AdamW for the matrices of blocks.

use crate::place::*;
use std::fs;

const MUON: &[&str] = &["--optimizer", "muon", "--steps", "40", "--lr", "0.01"];

fn train(place: &Place, out: &str, options: &[&str]) {
    let folder = text(&place.path(out));
    succeeded(&place.train(&[MUON, &["--out", &folder], options].concat()));
}

fn last(place: &Place, out: &str) -> Vec<u8> {
    fs::read(place.path(out).join("checkpoints/step-0000000040.safetensors")).unwrap()
}

/// In both kinds of weights, after accumulation and dropout, and with rates of their own.
#[test]
fn muon_learns_and_resumes_bit_by_bit() {
    let place = Place::new();
    for (name, options) in [
        ("gpt", &["--dropout", "0.1", "--accumulate", "2"][..]),
        ("llama", &["--size", "llama-mini", "--precision", "bf16"]),
        ("rates", &["--muon-lr", "0.02", "--muon-momentum", "0.9"]),
    ] {
        let options = [options, &["--save-every", "20"]].concat();
        let resumed = format!("{name}-resumed");
        train(&place, name, &options);
        train(&place, &resumed, &options);
        let losses = place.losses(name);
        assert!(losses[39] < losses[0] - 0.7, "{name}: {losses:?}");
        let newest = place.path(&resumed).join("checkpoints/step-0000000040.safetensors");
        fs::remove_file(newest).unwrap();
        train(&place, &resumed, &[&options[..], &["--resume"]].concat());
        assert_eq!(place.losses(&resumed), losses);
        assert!(
            last(&place, &resumed) == last(&place, name),
            "{name}: the last checkpoints differ"
        );
    }
    // Of the matrices of blocks only a momentum is kept, and of all else what AdamW needs.
    let saved =
        tch::Tensor::read_safetensors(place.path("gpt/checkpoints/step-0000000040.safetensors"))
            .unwrap();
    let of = |weight: &str| {
        let is_state = |name: &str| name.starts_with("optimizer.") && name.contains(weight);
        saved.iter().filter(|(name, tensor)| is_state(name) && tensor.dim() == 2).count()
    };
    assert_eq!(["h.0.attn.c_attn.weight", "wte.weight", "wpe.weight"].map(of), [1, 2, 2]);
    assert_ne!(place.losses("gpt")[1], place.losses("rates")[1]);
}

#[test]
fn muon_trains_adapters_and_other_models_further() {
    let place = Place::new();
    let base = text(&place.path("base"));
    train(&place, "base", &["--size", "llama-mini"]);
    for (out, options) in [("further", &[][..]), ("adapted", &["--lora", "2"])] {
        train(&place, out, &[&["--init", &base], options].concat());
        let (before, after) = (place.losses("base")[0], place.losses(out));
        assert!(after[0] < before - 0.5 && after[39] < after[0] + 0.1, "{out}: {after:?}");
    }
    assert_ne!(last(&place, "adapted"), last(&place, "further"));
}

#[test]
fn an_optimizer_that_does_not_fit_is_refused_by_name() {
    let place = Place::new();
    train(&place, "out", &[]);
    for (options, expected) in [
        (&["--resume", "--optimizer", "adamw"][..], "--optimizer of the run in"),
        (&["--resume", "--muon-momentum", "0.5"], "--muon-momentum of the run in"),
        (&["--resume", "--sharded"], "leave it out, or give --optimizer adamw"),
        (&["--overwrite", "--muon-lr", "0.1"], "are for --optimizer muon"),
        (
            &["--overwrite", "--optimizer", "muon", "--muon-lr", "0"],
            "--muon-lr 0.0 is out of range",
        ),
        (
            &["--overwrite", "--optimizer", "muon", "--muon-momentum", "1"],
            "--muon-momentum 1.0 is out of range",
        ),
    ] {
        let steps = ["--steps", "40", "--lr", "0.01"];
        let error = failed(&place.train(&[&steps[..], options].concat()));
        assert!(error.contains(expected), "{options:?}: {error}");
    }
    succeeded(&place.train(&["--resume", "--steps", "40"]));
    // Without a checkpoint, `--resume` begins a run.
    let empty = Place::new();
    let error = failed(&empty.train(&["--resume", "--steps", "4", "--muon-lr", "0.1"]));
    assert!(error.contains("are for --optimizer muon"), "{error}");
}

/// All of them begin with the same model.
#[test]
fn bench_trains_by_muon_adapters_and_layers_again() {
    let place = Place::new();
    place.bench_inputs();
    let [data, inputs] = ["data", "llama"].map(|name| text(&place.path(name)));
    let write = ["bench", "--inputs", &inputs, "--write", &data, "--size", "llama-mini"];
    succeeded(&place.run(&[&write[..], &["--steps", "4", "--lora", "2"]].concat()));
    let losses_of = |inputs: &str, options: &[&str]| {
        let bench = ["bench", "--inputs", inputs, "--device", "cpu"];
        let printed = succeeded(&place.run(&[&bench[..], options].concat()));
        let result: serde_json::Value = serde_json::from_str(&printed).unwrap();
        let losses = result["losses"].as_array().unwrap().iter();
        losses.map(|loss| loss.as_f64().unwrap()).collect::<Vec<_>>()
    };
    let losses = |options: &[&str]| losses_of(&inputs, options);
    let adamw = losses(&[]);
    assert_eq!(losses(&["--recompute-layers"]), adamw);
    for options in [["--optimizer", "muon"], ["--lora", "2"]] {
        let found = losses(&options);
        assert!(
            (found[0] - adamw[0]).abs() < 1e-6 && found[3] != adamw[3],
            "{options:?}: {found:?}"
        );
        assert!(found[3] < found[0], "{options:?}: {found:?}");
    }
    // Inputs that are written for Muon are trained by it, unless another one is given.
    let of_muon = text(&place.path("of-muon"));
    let write = ["bench", "--inputs", &of_muon, "--write", &data, "--size", "llama-mini"];
    succeeded(&place.run(&[&write[..], &["--steps", "4", "--optimizer", "muon"]].concat()));
    assert_eq!(losses_of(&of_muon, &[]), losses(&["--optimizer", "muon"]));
    assert_eq!(losses_of(&of_muon, &["--optimizer", "adamw"]), adamw);
}
