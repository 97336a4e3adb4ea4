//! Files of PyTorch's, and ours in PyTorch.

use super::{place, store};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::Write;
use std::process::Output;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::nn::state_dict::{StateDictOptions, load, save};
use tch_extension::nn::{AttentionConfig, attention};
use tch_extension::testing::assert_close;

/// Written by `pytorch.py`.
const WRITTEN: &[u8] = include_bytes!("pytorch.safetensors");

/// Loads GPT-2's attention from a file of Hugging Face's layout, and compares its output.
#[test]
fn gpt2_s_attention_computes_what_pytorch_computed() {
    let (_folder, file) = place();
    std::fs::write(&file, WRITTEN).expect("written");
    let mut vs = VarStore::new(Device::Cpu);
    let layer = attention(vs.root() / "h" / 0 / "attn", 8, 2, AttentionConfig::gpt2());
    vs.set_kind(Kind::Double);
    let make =
        |name| vs.root().add(name, Tensor::zeros([2, 4, 8], (Kind::Double, Device::Cpu)), false);
    let (input, output) = (make("input"), make("output"));
    let conv1d = |name: &str| name.ends_with("c_attn.weight") || name.ends_with("c_proj.weight");
    let options =
        StateDictOptions { strict: false, transposed: Some(&conv1d), ..Default::default() };
    let report = load(&vs, &[&file], &options).expect("loaded");
    assert!(report.missing.is_empty());
    assert_eq!(report.unexpected, ["h.0.attn.bias"]);
    assert_close(&layer.forward_t(&input, false).detach(), &output, 1e-12, 1e-12);
}

/// What `pytorch.py` prints, if there is a python3 with this version of torch.
fn pytorch(test: &str, arguments: &[&str]) -> Option<Output> {
    let arguments: Vec<&OsStr> = arguments.iter().map(OsStr::new).collect();
    match support::python::run("tests/state_dict/pytorch.py", &arguments) {
        Ok(output) => Some(output),
        Err(why) => {
            let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
            None
        }
    }
}

#[test]
fn the_file_is_what_pytorch_writes() {
    let (_folder, file) = place();
    let path = file.display().to_string();
    let Some(_) = pytorch("the_file_is_what_pytorch_writes", &["write", &path]) else { return };
    let read = |bytes: &[u8]| -> BTreeMap<String, Tensor> {
        std::fs::write(&file, bytes).expect("written");
        Tensor::read_safetensors(&file).expect("a file").into_iter().collect()
    };
    let (fresh, kept) = (read(&std::fs::read(&file).expect("a file")), read(WRITTEN));
    assert!(fresh.keys().eq(kept.keys()), "{:?}, kept {:?}", fresh.keys(), kept.keys());
    for (name, kept) in kept {
        // The products depend on the processor.
        let bound = if name == "output" { 1e-12 } else { 0.0 };
        assert_close(&fresh[&name], &kept, bound, bound);
    }
}

#[test]
fn pytorch_reads_what_we_write() {
    let (_folder, file) = place();
    let whole = Tensor::arange(12, (Kind::Double, Device::Cpu)).view([3, 4]) - 5.0;
    let kinds = [
        ("BOOL", Kind::Bool),
        ("U8", Kind::Uint8),
        ("I8", Kind::Int8),
        ("I16", Kind::Int16),
        ("I32", Kind::Int),
        ("I64", Kind::Int64),
        ("F16", Kind::Half),
        ("BF16", Kind::BFloat16),
        ("F32", Kind::Float),
        ("F64", Kind::Double),
    ];
    let mut tensors: Vec<_> = kinds
        .iter()
        .map(|&(name, kind)| match kind {
            Kind::Bool => (name, whole.gt(0.0)),
            Kind::Uint8 => (name, whole.abs().to_kind(kind)),
            _ => (name, whole.to_kind(kind)),
        })
        .collect();
    tensors.push(("empty", whole.narrow(0, 0, 0)));
    tensors.push(("one", whole.get(2).get(3)));
    tensors.push(("é \"quoted\"", whole.get(0)));
    save(&store(Device::Cpu, &tensors), &file, &Default::default()).expect("saved");
    let path = file.display().to_string();
    let Some(output) = pytorch("pytorch_reads_what_we_write", &["read", &path]) else { return };
    let mut expected: Vec<String> = tensors
        .iter()
        .map(|(name, tensor)| {
            let kind = kinds.iter().find(|(_, kind)| *kind == tensor.kind()).expect("a kind").0;
            let sum = tensor.to_kind(Kind::Double).sum(Kind::Double).double_value(&[]);
            format!("{name} {kind} {:?} {sum:?}", tensor.size())
        })
        .collect();
    expected.sort();
    let found = String::from_utf8(output.stdout).expect("text");
    assert_eq!(found.lines().collect::<Vec<_>>(), expected);
}
