//! Every family against transformers and PEFT: what a folder of theirs computes here, and what they make of
//! a folder of ours.

mod python;

use crate::export::{self, ExportOptions};
use crate::lora::{Adapter, adapter_name_in_files};
use crate::model::Model;
use crate::origin::Origin;
use std::collections::BTreeMap;
use std::path::Path;
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::nn::state_dict::load_tensors;

const TEXT: &str = "the cat and the other cat, naïve — and the bell 日本 <s>\n";

fn assert_close(found: &Tensor, expected: &Tensor, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let expected = expected.to_kind(Kind::Float);
    let worst = (found - &expected).abs().max().double_value(&[]);
    assert!(found.allclose(&expected, 1e-4, 2e-5, false), "{what}: {worst:e} apart");
}

/// Loss and gradients of the batch, and the logits after its last token, also token by token.
fn assert_computes(
    name: &str,
    model: &Model,
    [inputs, targets]: [&Tensor; 2],
    expected: &BTreeMap<String, Tensor>,
) {
    let batch = [inputs, targets].map(Tensor::shallow_clone);
    let loss = model.loss(&batch, None, true, Reduction::Mean).unwrap();
    assert_close(&loss.detach(), &expected["loss"], &format!("{name}: loss"));
    loss.backward();
    let mut others = expected.keys().filter(|name| name.starts_with("grad.")).count();
    for (variable, weight) in model.trained().variables() {
        let theirs = match variable.contains(".lora_") {
            true => adapter_name_in_files(&model.config, &variable),
            false => export::name_in_files(&model.config, &variable),
        };
        let gradient = &expected[&format!("grad.{theirs}")];
        let found = match export::is_transposed(&variable) {
            true => weight.grad().tr(),
            false => weight.grad(),
        };
        assert_close(&found, gradient, &format!("{name}: gradient of {theirs}"));
        others -= 1;
    }
    assert_eq!(others, 0, "{name}: gradients that this model lacks");
    assert_logits(name, model, inputs, &expected["logits"]);
}

fn assert_logits(name: &str, model: &Model, inputs: &Tensor, expected: &Tensor) {
    let _no_grad = tch::no_grad_guard();
    let mut caches = model.caches(inputs.size()[1]);
    for place in 0..inputs.size()[1] {
        let found = model.next_logits(&inputs.narrow(1, place, 1), &mut caches).unwrap();
        assert_close(&found, &expected.select(1, place), &format!("{name}: logits at {place}"));
    }
}

#[test]
fn every_family_computes_what_transformers_do() {
    const TEST: &str = "every_family_computes_what_transformers_do";
    const SCRIPT: &str = include_str!("transformers.py");
    let place = tempfile::tempdir().unwrap();
    let run = |command| {
        let output = python::transformers(TEST, SCRIPT, &[command, place.path().to_str().unwrap()]);
        if let Some(output) = &output {
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{command}: {said}");
        }
        output.is_some()
    };
    if !run("make") {
        return;
    }
    let (mut families, mut adapters) = (0, 0);
    for entry in std::fs::read_dir(place.path()).unwrap() {
        let folder = entry.unwrap().path();
        if folder.is_dir() {
            families += 1;
            adapters += usize::from(check(&folder));
        }
    }
    assert_eq!((families, adapters), (8, 4));
    assert!(run("compare"));
}

/// Returns whether there is an adapter.
fn check(folder: &Path) -> bool {
    let name = folder.file_name().unwrap().to_str().unwrap();
    let beside = |ending: &str| folder.with_file_name(format!("{name}{ending}"));
    let expected = load_tensors(beside(".safetensors")).unwrap();
    let origin = Origin::open("--from", folder, None).unwrap();
    let model = origin.model(Device::Cpu).unwrap();
    let numbers: usize = model.named_variables().iter().map(|(_, weight)| weight.numel()).sum();
    assert_eq!(numbers as i64, model.config.parameters(), "{name}");
    let batch = [&expected["inputs"], &expected["targets"]];
    assert_computes(name, &model, batch, &expected);

    let tokens = origin.tokenizer.encode_prompt(TEXT).unwrap();
    let theirs: Vec<i64> = Vec::try_from(&expected["text"]).unwrap();
    assert_eq!(tokens.iter().map(|&token| i64::from(token)).collect::<Vec<_>>(), theirs, "{name}");
    let text = std::fs::read_to_string(beside(".txt")).unwrap();
    assert_eq!(origin.tokenizer.decode(&tokens).unwrap(), text, "{name}");
    assert_eq!(origin.tokenizer.begin_of_text().unwrap(), tokens[..1], "{name}");

    let options = ExportOptions::new(folder, &beside("-again"));
    export::export(&ExportOptions { shard_mb: 0, ..options }).unwrap();

    let adapter = folder.join("adapter");
    if adapter.exists() {
        check_adapter(
            name,
            model,
            &adapter,
            batch,
            &load_tensors(beside("-adapter.safetensors")).unwrap(),
        );
        let options = ExportOptions::new(folder, &beside("-merged"));
        export::export(&ExportOptions { adapter: Some(adapter.clone()), ..options }).unwrap();
    }
    adapter.exists()
}

fn check_adapter(
    name: &str,
    mut model: Model,
    adapter: &Path,
    batch: [&Tensor; 2],
    expected: &BTreeMap<String, Tensor>,
) {
    let read = Adapter::read(adapter, &model.config).unwrap();
    model.adapt(&read.lora, 1).unwrap();
    read.copy_into(&model).unwrap();
    let name = format!("{name} with an adapter");
    assert_computes(&name, &model, batch, expected);
    let base = adapter.parent().unwrap();
    let again = base.join("adapter-again");
    std::fs::create_dir(&again).unwrap();
    read.write(&again, &model.config, base).unwrap();
    model.merge().unwrap();
    assert_logits(&name, &model, batch[0], &expected["logits"]);
}
