//! Runs the program in the way that its users do: on files, with good and bad input.

mod apart;
mod cuda;
mod kills;
mod lora;
mod muon;
mod place;
#[path = "../families/python.rs"]
mod python;
#[cfg(feature = "distributed")]
mod ranks;

use place::*;
use std::fs;

#[test]
fn trains_evaluates_saves_and_samples() {
    let place = Place::new();
    let printed = succeeded(&place.train(&["--steps", "60", "--lr", "0.01"]));
    for expected in ["tokens to train on", "M parameters", "sample at temperature", "held out"] {
        assert!(printed.contains(expected), "no {expected:?} in:\n{printed}");
    }
    let losses = place.losses("out");
    assert_eq!(losses.len(), 60);
    assert!(losses[59] < losses[0] - 1.0, "from {} to {}", losses[0], losses[59]);
    let names = names(&place.path("out"));
    assert_eq!(names, ["checkpoints", "data", "losses.jsonl", "losses.svg", "tokenizer.json"]);
    assert_eq!(place.checkpoints("out").len(), 2);
    let picture = fs::read_to_string(place.path("out/losses.svg")).unwrap();
    assert!(picture.contains("training") && picture.contains("held out"));

    let out = text(&place.path("out"));
    let sample = |seed| {
        let line = ["sample", "--from", &out, "--prompt", "the", "--length", "40", "--seed", seed];
        succeeded(&place.run(&[&line[..], &["--device", "cpu"]].concat()))
    };
    assert_eq!(sample("1"), sample("1"));
    assert_ne!(sample("1"), sample("2"));
    assert!(sample("1").starts_with("the"));
}

#[test]
fn the_seed_decides_everything() {
    let place = Place::new();
    let curve = |out: &str, options: &[&str]| {
        let out = text(&place.path(out));
        succeeded(&place.train(&[&["--out", &out, "--dropout", "0.1"], options].concat()));
        fs::read(place.path(&out).join("losses.jsonl")).unwrap()
    };
    assert_eq!(curve("a", &[]), curve("b", &[]));
    assert_ne!(curve("a2", &["--seed", "2"]), curve("b2", &[]));
}

/// The second run of a layer drops what the first one did.
#[test]
fn layers_may_be_computed_again_from_any_step_on() {
    let place = Place::new();
    let train = |out: &str, options: &[&str]| {
        let out = text(&place.path(out));
        let sizes = ["--dropout", "0.1", "--layers", "2", "--out", &out];
        let printed = succeeded(&place.train(&[&sizes[..], options].concat()));
        (printed.contains("layers computed again"), place.losses(&out))
    };
    let (is_again, kept) = train("kept", &[]);
    assert!(!is_again);
    let (is_again, found) = train("again", &["--recompute-layers"]);
    assert!(is_again && found == kept);
    for (out, option) in [("kept", &["--recompute-layers"][..]), ("again", &[])] {
        let newest = place.checkpoints(out).pop().unwrap();
        fs::remove_file(place.path(out).join("checkpoints").join(newest)).unwrap();
        let (is_again, found) = train(out, &[&["--resume"], option].concat());
        assert_eq!(is_again, !option.is_empty());
        assert_eq!(found, kept);
    }
}

/// Two batches of half the rows see the same windows as one batch of all of them.
#[test]
fn accumulated_batches_are_one_large_batch() {
    let place = Place::new();
    let losses = |out: &str, options: &[&str]| {
        let folder = text(&place.path(out));
        succeeded(&place.train(&[&["--out", &folder], options].concat()));
        place.losses(out)
    };
    let whole = losses("whole", &["--batch", "4"]);
    let halves = losses("halves", &["--batch", "2", "--accumulate", "2"]);
    for (step, (whole, halves)) in whole.iter().zip(&halves).enumerate() {
        assert!((whole - halves).abs() < 1e-3, "step {step}: {whole} and {halves}");
    }
}

#[test]
fn prepared_byte_pairs_are_trained_on() {
    let place = Place::new();
    let (texts, data) = (text(&place.path("text.txt")), text(&place.path("data")));
    let line = ["prepare", "--text", &texts, "--out", &data, "--vocabulary", "bpe"];
    let printed = succeeded(&place.run(&[&line[..], &["--vocabulary-size", "300"]].concat()));
    assert!(printed.contains("tokens to train on"), "{printed}");
    assert_eq!(names(&place.path("data")), ["tokenizer.json", "tokens.bin"]);
    let mut options = vec!["train", "--data", &data];
    options.extend(&TINY[2..]);
    let out = text(&place.path("out"));
    options.extend(["--out", &out]);
    let printed = succeeded(&place.run(&options));
    assert!(printed.contains("vocabulary 320"), "{printed}");
}

#[test]
fn another_run_s_weights_are_a_beginning() {
    let place = Place::new();
    succeeded(&place.train(&["--steps", "60", "--lr", "0.01"]));
    let (first, second) = (text(&place.path("out")), text(&place.path("second")));
    succeeded(&place.train(&["--init", &first, "--out", &second]));
    let (before, after) = (place.losses("out"), place.losses("second"));
    assert!(after[0] < before[0] - 1.0, "{} after {}", after[0], before[0]);
}

#[test]
fn a_continued_run_uses_its_data() {
    let place = Place::new();
    let (texts, data) = (text(&place.path("text.txt")), text(&place.path("data")));
    let (out, moved) = (text(&place.path("out")), text(&place.path("moved")));
    succeeded(&place.run(&["prepare", "--text", &texts, "--out", &data]));
    let line =
        |options: &[&str]| place.run(&[&["train", "--out", &out], &TINY[2..], options].concat());
    succeeded(&line(&["--data", "data"]));
    succeeded(&line(&["--resume"]));
    assert!(!place.path("out/data").exists(), "a text was prepared");
    fs::rename(&data, &moved).unwrap();
    assert!(failed(&line(&["--resume"])).contains("give --data, the folder of this run's data"));
    assert!(!place.path("out/data").exists(), "a text was prepared");
    succeeded(&line(&["--resume", "--data", &moved, "--save-every", "1"]));
}

#[test]
fn an_imported_run_is_not_continued() {
    let place = Place::new();
    succeeded(&place.train(&[]));
    let [out, exported, imported] =
        ["out", "exported", "imported"].map(|name| text(&place.path(name)));
    succeeded(&place.run(&["export", "--from", &out, "--to", &exported]));
    succeeded(&place.run(&["import", "--from", &exported, "--to", &imported]));
    let error = failed(&place.train(&["--resume", "--out", &imported]));
    assert!(error.contains("was imported") && error.contains("--init"), "{error}");
}

/// The loss of the only step is that of the weights before it.
#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let place = Place::new();
    succeeded(&place.train(&[]));
    let before = place.checkpoints("out");
    let (out, next) = (text(&place.path("out")), text(&place.path("next")));
    let ruin = ["--steps", "1", "--warm-up", "0", "--lr", "1e30", "--weight-decay", "1e30"];
    let options = [&["--init", &out, "--out", &next][..], &ruin].concat();
    let error = failed(&place.train(&options));
    assert!(error.contains("the weights after step 1 are not finite: lower --lr"), "{error}");
    assert!(place.checkpoints("next").is_empty());
    assert_eq!(place.checkpoints("out"), before);
}

#[test]
fn bench_trains_the_given_batches_from_the_given_weights() {
    let place = Place::new();
    let inputs = place.bench_inputs();
    let files = ["batches.safetensors", "settings.json", "weights.safetensors"];
    assert_eq!(names(&place.path("inputs")), files);
    let bench = ["bench", "--inputs", &inputs, "--device", "cpu"];
    let printed = succeeded(&place.run(&bench));
    let result: serde_json::Value = serde_json::from_str(&printed).unwrap();
    let losses = result["losses"].as_array().unwrap();
    assert_eq!(losses.len(), 6);
    assert!(losses[5].as_f64().unwrap() < losses[0].as_f64().unwrap());
    assert!(result["ms_per_step"].as_f64().unwrap() > 0.0);
    assert!(result["first_step_s"].as_f64().unwrap() > 0.0);

    // The same steps in lines.
    let by_line = place.run_with(&[&bench[..], &["--by-line"]].concat(), "2\n4\n");
    let printed = succeeded(&by_line);
    let lines: Vec<serde_json::Value> =
        printed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 4);
    assert!(lines[0]["ready"].as_f64().unwrap() > 0.0);
    let by_line = [&lines[1]["losses"], &lines[2]["losses"]];
    let by_line: Vec<_> = by_line.iter().flat_map(|part| part.as_array().unwrap()).collect();
    assert!(by_line.iter().copied().eq(losses));
    assert_eq!(lines[3]["steps"], 6);
}

#[test]
fn a_llama_goes_to_files_and_is_trained_further() {
    let place = Place::new();
    let pairs = ["--vocabulary", "bpe", "--vocabulary-size", "300"];
    let llama = ["--size", "llama-mini", "--layers", "2", "--steps", "30", "--sample", "0"];
    succeeded(&place.train(&[&pairs[..], &llama[..]].concat()));
    let [out, files, tuned] = ["out", "files", "tuned"].map(|name| text(&place.path(name)));
    let export = ["export", "--from", &out, "--to", &files, "--shard-mb", "0"];
    succeeded(&place.run(&export));
    let shard = "files/model-00002-of-00020.safetensors";
    assert!(place.path(shard).exists());
    let sample = |from: &str| {
        let line = ["sample", "--from", from, "--prompt", "the", "--length", "30"];
        succeeded(&place.run(&[&line[..], &["--device", "cpu"]].concat()))
    };
    assert_eq!(sample(&files), sample(&out));

    // It has the vocabulary of the model, and begins with its loss.
    let further =
        ["--init", &files, "--out", &tuned, "--lr", "1e-9", "--steps", "3", "--log-every", "1"];
    let texts = text(&place.path("text.txt"));
    let line =
        [&["train", "--text", &texts, "--device", "cpu", "--batch", "4"][..], &further].concat();
    succeeded(&place.run(&line));
    let after = place.losses("tuned")[0];
    assert!((place.losses("out")[29] - after).abs() < 0.3, "{after}");
    succeeded(&place.run(&[&line[..], &["--overwrite", "--precision", "bf16"]].concat()));
    assert!((place.losses("tuned")[0] - after).abs() < 0.02, "{after}");

    // What is trained on in its own folder is the run, and not what was exported there.
    succeeded(&place.run(&["export", "--from", &tuned, "--to", &tuned]));
    let printed =
        succeeded(&place.run(&["export", "--from", &tuned, "--to", &text(&place.path("b"))]));
    assert!(printed.contains("step 3 of"), "{printed}");
    fs::write(place.path("b/config.json"), "{}").unwrap();
    let error = failed(&place.run(&["export", "--from", &out, "--to", &text(&place.path("b"))]));
    assert!(error.contains("has another model: give a new folder"), "{error}");

    for (change, expected) in [
        ("--context", "--context 65 is out of range"),
        ("--vocabulary", "another vocabulary than --init"),
    ] {
        let value = if change == "--context" { "65" } else { "bytes" };
        let error = failed(&place.run(&[&line[..], &["--overwrite", change, value]].concat()));
        assert!(error.contains(expected), "{error}");
    }
    fs::remove_file(place.path(shard)).unwrap();
    let error = failed(&place.run(&["sample", "--from", &files]));
    assert!(error.contains(shard), "{error}");
}

/// Only completions are learned, and batches that have different numbers of them add up.
#[test]
fn completions_are_learned_and_prompts_are_not() {
    let place = Place::new();
    let lines: Vec<String> = (0..400)
        .map(|n| {
            format!(
                r#"{{"prompt": "{:05}{:05}", "completion": "!!!!"}}"#,
                n * 7919 % 99991,
                n * 613 % 99989
            )
        })
        .collect();
    let file = text(&place.path("lines.jsonl"));
    fs::write(&file, lines.join("\n")).unwrap();
    let train = |out: &str, options: &[&str]| {
        let out = text(&place.path(out));
        let line = ["--text", &file, "--out", &out, "--lr", "0.03"];
        place.run(&[&["train"], TINY, &line[..], options].concat())
    };
    let losses = |out: &str, options: &[&str]| {
        succeeded(&train(out, options));
        place.losses(out)
    };
    // Random digits cannot be learned, and what follows them can. With the digits, the loss could not
    // fall below 10 / 14 · ln 10 = 1.6.
    let learned = losses("learned", &["--steps", "200"]);
    let last = learned[180..].iter().sum::<f64>() / 20.0;
    assert!(last < 0.3, "{last} after {learned:?}");
    let whole = losses("whole", &["--batch", "4"]);
    let halves = losses("halves", &["--batch", "2", "--accumulate", "2"]);
    for (step, (whole, halves)) in whole.iter().zip(&halves).enumerate() {
        assert!((whole - halves).abs() < 1e-3, "step {step}: {whole} and {halves}");
    }
    // Without a held-out token to learn there is no loss of them.
    let prompt = format!(r#"{{"prompt": "{}", "completion": "!"}}"#, "ab".repeat(2000));
    fs::write(&file, [&lines.join("\n"), "\n", &prompt].concat()).unwrap();
    let error = failed(&train("unheard", &["--held-out", "0.05", "--eval-windows", "2"]));
    assert!(error.contains("no token that is held out is learned in the 2 windows"), "{error}");
    assert!(!place.path("unheard").exists());
    fs::write(&file, r#"{"prompt": "a", "completion": ""}"#.to_string() + "\n").unwrap();
    let error = failed(&train("none", &[]));
    assert!(error.contains("no text is learned"), "{error}");
}

#[test]
fn bad_input_is_refused_in_one_line_that_names_the_way_out() {
    let place = Place::new();
    succeeded(&place.train(&["--steps", "2"]));
    let out = text(&place.path("out"));
    let other = text(&place.path("other.txt"));
    fs::write(&other, "another text\n".repeat(1000)).unwrap();
    let data = || {
        ["tokens.bin", "tokenizer.json"].map(|n| fs::read(place.path("out/data").join(n)).unwrap())
    };
    let data_before = data();
    let cases: &[(&[&str], &str)] = &[
        (&["--steps", "2"], "--resume to continue it, --overwrite to begin again"),
        (&["--overwrite", "--batch", "0"], "--batch 0 is out of range"),
        (&["--overwrite", "--context", "100000"], "--context 100000 needs"),
        (&["--overwrite", "--dim", "65536", "--layers", "1000"], "MiB are free: lower --batch"),
        (&["--overwrite", "--heads", "3"], "--dim 8 is no multiple of --heads 3"),
        (&["--overwrite", "--lr", "nan"], "--lr NaN is out of range"),
        (&["--overwrite", "--device", "gpu"], "--device \"gpu\" is unknown"),
        (&["--overwrite", "--text", "/no/such"], "--text /no/such does not exist"),
        (&["--overwrite", "--held-out", "1"], "--held-out 1.0 is out of range"),
        (
            &["--overwrite", "--vocabulary-size", "300"],
            "--vocabulary-size 300 is for --vocabulary bpe",
        ),
        (&["--overwrite", "--temperature=-1"], "--temperature -1.0 is out of range"),
        (&["--overwrite", "--init", "/no/such"], "--init /no/such has no checkpoint"),
        (&["--overwrite", "--text", &other, "--context", "20000"], "--context 20000 needs"),
        (&["--resume", "--lr", "0.5"], "--lr of the run in"),
        (&["--resume", "--text", &other], "--text of the run in"),
        (&["--resume", "--vocabulary", "bpe"], "--vocabulary of the run in"),
        (&["--overwrite", "--lr", "1e30", "--steps", "50"], "lower --lr"),
    ];
    let before = place.checkpoints("out");
    for (index, (options, expected)) in cases.iter().enumerate() {
        let error = failed(&place.train(options));
        assert!(error.contains(expected), "{options:?}: {error}");
        let is_last = index + 1 == cases.len();
        assert!(is_last || place.checkpoints("out") == before, "{options:?} changed the run");
        assert!(is_last || data() == data_before, "{options:?} changed the run's data");
    }
    for (line, expected) in [
        (&["sample", "--from", "/no/such"][..], "--from /no/such has no checkpoint"),
        (&["sample", "--from", &out, "--top-k", "0"], "--top-k 0 is out of range"),
        (&["export", "--from", "/no/such", "--to", &out], "--from /no/such has no checkpoint"),
        (&["import", "--from", "/no/such", "--to", &out], "config.json"),
        (&["bench", "--inputs", "/no/such"], "--write"),
        (&["prepare", "--out", "/proc/x"], "--out /proc/x"),
    ] {
        let error = failed(&place.run(line));
        assert!(error.contains(expected), "{line:?}: {error}");
    }
}

#[test]
fn what_is_refused_leaves_no_folder_and_no_lock() {
    let place = Place::new();
    succeeded(&place.train(&[]));
    let [out, fresh, odd] = ["out", "fresh", "odd.txt"].map(|name| text(&place.path(name)));
    fs::write(&odd, [b'a', 0xff].repeat(1000)).unwrap();
    let deep = text(&place.path("fresh/deep"));
    let train = |options: &[&str]| failed(&place.train(options));
    let run = |line: &[&str]| failed(&place.run(line));
    for (refuse, line, expected) in [
        (&train as &dyn Fn(&[&str]) -> String, &["--context", "100000"][..], "--context 100000"),
        (&train, &["--text", "/no/such"], "does not exist"),
        (&train, &["--text", &odd, "--vocabulary", "bpe"], "is not UTF-8"),
        (&train, &["--init", "/no/such"], "has no checkpoint"),
        (&train, &["--init", &out, "--dim", "16"], "this run's sizes"),
        (&train, &["--lora", "2"], "--lora needs --init"),
        (&train, &["--dim", "65536", "--layers", "1000"], "MiB are free"),
        (&train, &["--documents", "apart"], "needs a vocabulary"),
        (&run, &["prepare", "--text", &odd, "--vocabulary", "bpe"], "is not UTF-8"),
    ] {
        for folder in [&fresh, &deep] {
            let error = refuse(&[line, &["--out", folder]].concat());
            assert!(error.contains(expected), "{line:?}: {error}");
            assert!(
                !place.path("fresh").exists(),
                "{line:?} left {:?}",
                names(&place.path("fresh"))
            );
        }
    }
    // A folder that was there stays as it was.
    let before = names(&place.path("out"));
    train(&["--overwrite", "--context", "100000"]);
    run(&["export", "--from", &out, "--to", &odd]);
    run(&["import", "--from", &out, "--to", &out]);
    assert_eq!(names(&place.path("out")), before);
    fs::create_dir(&fresh).unwrap();
    train(&["--out", &fresh, "--context", "100000"]);
    assert!(names(&place.path("fresh")).is_empty());
}

/// Loads an exported model with transformers and compares its logits with this program's.
#[test]
fn transformers_computes_the_same_logits() {
    const SCRIPT: &str = r#"
import json, sys, torch
from transformers import AutoTokenizer, GPT2LMHeadModel
folder, prompt = sys.argv[1:]
model, info = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
tokenizer = AutoTokenizer.from_pretrained(folder)
ids = tokenizer(prompt, return_tensors="pt").input_ids
assert tokenizer.decode(ids[0]) == prompt
with torch.no_grad():
    print(json.dumps(model.eval()(ids).logits[0, -1].tolist()))
"#;
    let place = Place::new();
    succeeded(&place.train(&["--steps", "20", "--lr", "0.01"]));
    let (out, to) = (text(&place.path("out")), text(&place.path("exported")));
    succeeded(&place.run(&["export", "--from", &out, "--to", &to]));
    let prompt = "the cat";
    const TEST: &str = "transformers_computes_the_same_logits";
    let Some(theirs) = python::transformers(TEST, SCRIPT, &[&to, prompt]) else { return };
    let theirs = succeeded(&theirs);
    let theirs: Vec<f64> = serde_json::from_str(theirs.trim()).unwrap();
    let line = ["sample", "--from", &out, "--prompt", prompt, "--logits", "--device", "cpu"];
    let ours: Vec<f64> = serde_json::from_str(succeeded(&place.run(&line)).trim()).unwrap();
    assert_eq!(ours.len(), theirs.len());
    for (token, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
        assert!((ours - theirs).abs() < 1e-4, "token {token}: {ours} and {theirs}");
    }
}
