//! Low-rank adapters: trained, killed, resumed, and moved between runs and PEFT's files.

use crate::place::*;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// What is drawn is the likeliest token.
const GREEDY: &[&str] = &["--prompt", "the", "--temperature", "1e-4"];

/// A place with a small Llama that knows its text, in Hugging Face's format and in a run, and with other
/// lines to learn. Returns the folders of both.
fn with_base() -> (Place, String, String) {
    let place = Place::new();
    let (out, base) = (text(&place.path("out")), text(&place.path("base")));
    let llama = ["--size", "llama-mini", "--layers", "2", "--dim", "16", "--steps", "60"];
    succeeded(&place.train(&[&llama[..], &["--lr", "0.01", "--sample", "0"]].concat()));
    succeeded(&place.run(&["export", "--from", &out, "--to", &base]));
    let line = r#"{"prompt": "the bell: ", "completion": "rings 1234 times"}"#;
    fs::write(place.path("lines.jsonl"), [line; 200].join("\n")).unwrap();
    (place, base, out)
}

fn line<'a>(out: &'a str, texts: &'a str, options: &[&'a str]) -> Vec<&'a str> {
    let common = ["train", "--text", texts, "--out", out, "--device", "cpu", "--batch", "4"];
    let short = ["--steps", "40", "--lr", "0.03", "--warm-up", "2", "--eval-windows", "8"];
    [&common, &short[..], &["--sample", "30", "--log-every", "1"], GREEDY, options].concat()
}

/// The last held-out loss of a run.
fn held_out(place: &Place, out: &str) -> f64 {
    place.values(out, "held_out").pop().unwrap()
}

fn tensors(file: &Path) -> Vec<(String, tch::Tensor)> {
    let mut all = tch::Tensor::read_safetensors(file).unwrap();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

#[test]
fn an_adapter_is_learned_resumed_and_moved() {
    let (place, base, run_of_base) = with_base();
    let [texts, whole, killed, peft, merged, again] =
        ["lines.jsonl", "whole", "killed", "peft", "merged", "again"]
            .map(|name| text(&place.path(name)));
    let all = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj";
    let lora = ["--init", &base, "--lora", "4", "--lora-targets", all, "--save-every", "4"];
    let train = |out: &str, options: &[&str]| place.run(&line(out, &texts, options));
    let printed = succeeded(&train(&whole, &lora));
    assert!(printed.contains("M of adapters of rank 4"), "{printed}");
    let losses = place.losses("whole");
    assert!(losses[39] < losses[0] - 2.0, "{losses:?}");
    let last = "checkpoints/step-0000000040.safetensors";
    let saved = tensors(&place.path("whole").join(last));
    assert!(
        saved
            .iter()
            .all(|(name, _)| name.contains(".lora_") || name.starts_with("optimizer.group."))
    );

    // The same after a kill, by a line that begins a run as well as it continues one.
    let options = [&lora[..], &["--resume"]].concat();
    let mut child = program()
        .args(line(&killed, &texts, &options))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let begun = Instant::now();
    // It may also have ended by then, on a machine with other work.
    while !place.path("killed/checkpoints/step-0000000008.safetensors").exists()
        && child.try_wait().unwrap().is_none()
    {
        assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint");
        std::thread::sleep(Duration::from_millis(1));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    succeeded(&train(&killed, &options));
    for file in [last, "losses.jsonl"] {
        let of = |out: &str| fs::read(place.path(out).join(file)).unwrap();
        assert!(of("killed") == of("whole"), "{file} differs");
    }

    // The same text from the adapter, next to the weights and as a part of them.
    succeeded(&place.run(&["export", "--from", &whole, "--to", &peft]));
    let files = ["adapter_config.json", "adapter_model.safetensors"];
    assert_eq!(names(&place.path("peft")), files);
    succeeded(&place.run(&["export", "--from", &whole, "--merge", "--to", &merged]));
    let sample = |from: &[&str]| {
        let line = ["sample", "--length", "30", "--device", "cpu", "--from"];
        succeeded(&place.run(&[&line[..], from, GREEDY].concat()))
    };
    let text = sample(&[&merged]);
    assert!(printed.contains(&format!("---\n{text}---")), "{text} is not in {printed}");
    assert_eq!(sample(&[&whole]), text);
    assert_eq!(sample(&[&base, "--adapter", &peft]), text);
    assert_ne!(sample(&[&base]), text);

    // What is trained further begins there, and with the base's run as well as with its files.
    for init in
        [&[whole.as_str()][..], &[&base, "--adapter", &peft], &[&run_of_base, "--adapter", &peft]]
    {
        let further = [&["--overwrite", "--lr", "1e-9", "--steps", "1", "--init"], init].concat();
        succeeded(&train(&again, &further));
        let (found, expected) = (held_out(&place, "again"), held_out(&place, "whole"));
        assert!((found - expected).abs() < 1e-3, "{found} instead of {expected}");
    }
}

#[test]
fn another_base_or_adapter_is_refused_by_name() {
    let (place, base, run_of_base) = with_base();
    let [texts, out, peft, moved, fresh] =
        ["lines.jsonl", "lora", "peft", "moved", "fresh"].map(|name| text(&place.path(name)));
    let lora = ["--init", &base, "--lora", "2"];
    let train =
        |options: &[&str]| place.run(&line(&out, &texts, &[&["--steps", "2"], options].concat()));
    succeeded(&train(&lora));
    succeeded(&place.run(&["export", "--from", &out, "--to", &peft]));
    let before = place.checkpoints("lora");
    for (options, expected) in [
        (&["--resume", "--lora", "3"][..], "--lora of the run in"),
        (&["--resume", "--lora", "2", "--lora-alpha", "5"], "--lora-alpha of the run in"),
        (&["--resume", "--init", &run_of_base], "has other weights than the model"),
        (&["--overwrite", "--lora", "2"], "--lora needs --init"),
        (&["--overwrite", "--init", &base, "--lora", "0"], "--lora 0 is out of range"),
        (
            &["--overwrite", "--init", &base, "--lora", "2", "--lora-targets", "lm_head"],
            "--lora-targets lm_head is unknown: give some of q_proj",
        ),
        (
            &["--overwrite", "--init", &base, "--lora", "2", "--lora-targets", "mlp.q_proj"],
            "no layer has an adapter",
        ),
        (&["--overwrite", "--init", &out, "--lora", "2"], "give another --out"),
        (&["--overwrite", "--init", &out, "--lora", "2", "--out", &fresh], "leave out --lora"),
        (
            &["--init", &base, "--adapter", &peft, "--lora-alpha", "4", "--out", &fresh],
            "leave out --lora, --lora-alpha",
        ),
        (&["--resume", "--init", &out], "is the run of an adapter: give the model"),
        (&["--resume", "--init", &base, "--adapter", &peft], "--adapter begins a run"),
        (&["--overwrite", "--init", &peft], "is an adapter: give the model"),
        (&["--resume", "--out", &fresh, "--init", &base], "leave one of them out"),
    ] {
        let error = failed(&train(options));
        assert!(error.contains(expected), "{options:?}: {error}");
        assert_eq!(place.checkpoints("lora"), before, "{options:?} changed the run");
    }
    // The base keeps its weights.
    let of_base = place.checkpoints("out");
    let onto = ["--overwrite", "--out", &run_of_base, "--init", &run_of_base, "--lora", "2"];
    assert!(failed(&train(&onto)).contains("give another --out"));
    assert!(!of_base.is_empty() && place.checkpoints("out") == of_base);
    for (line, expected) in [
        (&["export", "--from", &out, "--to", &base][..], "has another model: give a new folder"),
        (&["export", "--from", &out, "--merge", "--to", &peft], "has another model"),
        (&["sample", "--from", &out, "--adapter", &peft], "has an adapter already"),
    ] {
        let error = failed(&place.run(line));
        assert!(error.contains(expected), "{line:?}: {error}");
    }

    // An adapter of a larger model.
    let file = place.path("peft/adapter_model.safetensors");
    let mut wide = tensors(&file);
    let name = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight";
    let (_, tensor) = wide.iter_mut().find(|(found, _)| found == name).unwrap();
    *tensor = tch::Tensor::zeros([32, 2], (tch::Kind::Float, tch::Device::Cpu));
    tch::Tensor::write_safetensors(&wide, &file).unwrap();
    let sample = || failed(&place.run(&["sample", "--from", &base, "--adapter", &peft]));
    assert!(
        sample().contains("layers.1.self_attn.k_proj.lora_B.weight is [32, 2]"),
        "{}",
        sample()
    );
    wide.push((name.replace("layers.1", "layers.7"), tch::Tensor::from(1.0)));
    tch::Tensor::write_safetensors(&wide, &file).unwrap();
    assert!(sample().contains("layers.7.self_attn.k_proj.lora_B.weight, which this model lacks"));

    // A base that was moved, and one that was changed.
    fs::rename(&base, &moved).unwrap();
    assert!(failed(&train(&["--resume"])).contains("give --init"));
    succeeded(&train(&["--resume", "--init", &moved]));
    assert!(failed(&place.run(&["sample", "--from", &out])).contains("--adapter"));
    let weights = Path::new(&moved).join("model.safetensors");
    let mut changed = tensors(&weights);
    changed[0].1 += 1.0;
    tch::Tensor::write_safetensors(&changed, weights).unwrap();
    let error = failed(&train(&["--resume", "--init", &moved]));
    assert!(error.contains("has other weights than the model"), "{error}");
    assert_eq!(place.checkpoints("lora"), before);
}
