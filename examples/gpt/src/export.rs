//! To and from the files of Hugging Face's GPT2LMHeadModel.

use crate::checkpoint;
use crate::device::Precision;
use crate::files::{lock, make_folder, prepare_folder, write_bytes};
use crate::model::{Gpt, ModelConfig};
use crate::progress::{say, warn};
use crate::sample::{load_model, model_tensors};
use crate::settings::{DataId, Settings};
use crate::tokenizer::{self, Tokenizer};
use anyhow::{Context, Result, anyhow, bail, ensure};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tch::Device;
use tch_extension::nn::state_dict::{self, StateDictOptions};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
/// What stands before the names of all weights but the output layer's, which is tied.
const PREFIX: &str = "transformer.";

#[derive(Debug, clap::Args)]
pub struct ExportOptions {
    /// The folder of a run: the --out of `train`
    #[arg(long, value_name = "FOLDER", default_value = "runs/gpt")]
    pub from: PathBuf,
    /// Folder for the model: `GPT2LMHeadModel.from_pretrained` reads it
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct ImportOptions {
    /// A folder with config.json, model.safetensors and tokenizer.json of a GPT-2
    #[arg(long, value_name = "FOLDER")]
    pub from: PathBuf,
    /// Folder for a run with these weights, for `sample`, `export` and `train --init`
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
}

/// Linear layers whose weights GPT-2 keeps transposed, as `Conv1D`.
fn is_transposed(name: &str) -> bool {
    ["c_attn.weight", "c_proj.weight", "c_fc.weight"].iter().any(|end| name.ends_with(end))
}

/// Writes the newest checkpoint of a run in Hugging Face's format.
pub fn export(options: &ExportOptions) -> Result<()> {
    let checkpoint = checkpoint::of_run("--from", &options.from, warn)?;
    let tokenizer = Tokenizer::load(&options.from)?;
    let model = load_model(&checkpoint, Device::Cpu)?;
    make_folder("--to", &options.to)?;
    let _lock = lock("--to", &options.to)?;
    prepare_folder("--to", &options.to)?;
    let names = StateDictOptions {
        name: Some(&|name| format!("{PREFIX}{name}")),
        transposed: Some(&is_transposed),
        ..Default::default()
    };
    state_dict::save(&model.variables, options.to.join(WEIGHTS), &names)?;
    let end = tokenizer.end_of_text();
    let config = serde_json::to_string_pretty(&to_json(&model.config, end))?;
    write_bytes(&options.to.join(CONFIG), config)?;
    tokenizer.save(&options.to)?;
    let of_tokenizer = serde_json::to_string_pretty(&tokenizer_config(&model.config, &tokenizer))?;
    write_bytes(&options.to.join("tokenizer_config.json"), of_tokenizer)?;
    say(&format!(
        "step {} of {}, as GPT2LMHeadModel in {}",
        checkpoint.state.step,
        options.from.display(),
        options.to.display()
    ))
}

fn to_json(config: &ModelConfig, end_of_text: Option<u32>) -> Value {
    json!({
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": config.dropout,
        "bos_token_id": end_of_text,
        "embd_pdrop": config.dropout,
        "eos_token_id": end_of_text,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-5,
        "model_type": "gpt2",
        "n_embd": config.dim,
        "n_head": config.heads,
        "n_inner": null,
        "n_layer": config.layers,
        "n_positions": config.context,
        "resid_pdrop": config.dropout,
        "scale_attn_weights": true,
        "tie_word_embeddings": true,
        "torch_dtype": "float32",
        "vocab_size": config.vocabulary
    })
}

fn tokenizer_config(config: &ModelConfig, tokenizer: &Tokenizer) -> Value {
    let end = tokenizer.end_of_text().map(|_| tokenizer::END_OF_TEXT);
    json!({
        "bos_token": end,
        "eos_token": end,
        "clean_up_tokenization_spaces": false,
        "model_max_length": config.context,
        "tokenizer_class": "PreTrainedTokenizerFast"
    })
}

/// Makes a run of a GPT-2 in Hugging Face's format.
pub fn import(options: &ImportOptions) -> Result<()> {
    let config = read_config(&options.from.join(CONFIG))?;
    let tokenizer = Tokenizer::load(&options.from)?;
    ensure!(
        tokenizer.len() as i64 <= config.vocabulary,
        "{} has {} tokens, and the model {}: give files that belong together",
        options.from.join(tokenizer::FILE).display(),
        tokenizer.len(),
        config.vocabulary
    );
    let model = Gpt::zeros(&config, Device::Cpu)?;
    load_weights(&model, &options.from.join(WEIGHTS))?;
    make_folder("--to", &options.to)?;
    let _lock = lock("--to", &options.to)?;
    let run = options.to.join(checkpoint::FOLDER);
    ensure!(
        !checkpoint::any(&run)?,
        "--to {} has a run already: give another folder",
        options.to.display()
    );
    prepare_folder("--to", &options.to)?;
    tokenizer.save(&options.to)?;
    let settings = settings_of(config, &tokenizer);
    let path = checkpoint::save(&run, 0, &settings, &model_tensors(&model))?;
    say(&format!("{} as {}", options.from.display(), path.display()))
}

/// The settings of a run that was imported: those of no training.
fn settings_of(model: ModelConfig, tokenizer: &Tokenizer) -> Settings {
    let data = DataId { vocabulary: tokenizer.hash_in_hex(), tokens: 0, checksum: 0 };
    Settings {
        model,
        precision: Precision::F32,
        batch: 1,
        accumulate: 1,
        steps: 1,
        lr: 1e-4,
        warm_up: 0,
        weight_decay: 0.0,
        clip: 1.0,
        seed: 1,
        data,
        source: Default::default(),
    }
}

fn load_weights(model: &Gpt, file: &Path) -> Result<()> {
    let prefix = if has_prefix(file)? { PREFIX } else { "" };
    let options = StateDictOptions {
        strict: false,
        name: Some(&|name| format!("{prefix}{name}")),
        transposed: Some(&is_transposed),
    };
    let report = state_dict::load(&model.variables, &[file], &options)?;
    if let Some(name) = report.missing.first() {
        bail!("{} lacks {name}: give the weights of a GPT-2", file.display());
    }
    // Buffers of old files, and the output layer, which is the embedding.
    let is_known = |name: &String| {
        name == "lm_head.weight"
            || name.ends_with(".attn.bias")
            || name.ends_with(".attn.masked_bias")
    };
    match report.unexpected.iter().find(|name| !is_known(name)) {
        Some(name) => {
            bail!("{} has the unknown {name}: give the weights of a GPT-2", file.display())
        }
        None => Ok(()),
    }
}

/// Whether the names of the weights begin with [`PREFIX`], which older files lack.
fn has_prefix(file: &Path) -> Result<bool> {
    let cannot = || format!("cannot read the weights {}", file.display());
    let bytes = std::fs::read(file).with_context(cannot)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|error| anyhow!("{error:?}"));
    Ok(tensors.with_context(cannot)?.names().iter().any(|name| name.starts_with(PREFIX)))
}

fn read_config(file: &Path) -> Result<ModelConfig> {
    let name = file.display();
    let text = std::fs::read_to_string(file).with_context(|| {
        format!("cannot read {name} (give a folder that GPT2LMHeadModel.save_pretrained wrote)")
    })?;
    let config: Value =
        serde_json::from_str(&text).with_context(|| format!("{name} is no JSON"))?;
    check_variant(&config)
        .with_context(|| format!("{name} is of a model that this program lacks"))?;
    let size = |key: &str| {
        config[key].as_i64().with_context(|| format!("{name} lacks the number {key:?}"))
    };
    let config = ModelConfig {
        vocabulary: size("vocab_size")?,
        context: size("n_positions")?,
        layers: size("n_layer")?,
        heads: size("n_head")?,
        dim: size("n_embd")?,
        dropout: config["resid_pdrop"].as_f64().unwrap_or(0.0),
        recompute: false,
    };
    config.check().with_context(|| format!("{name} has impossible sizes"))?;
    Ok(config)
}

/// Refuses variants of GPT-2 that would give other logits. What is absent is as in GPT-2.
fn check_variant(config: &Value) -> Result<()> {
    let dim = config["n_embd"].as_i64().unwrap_or(0);
    let expected: [(&str, &[Value]); 7] = [
        ("model_type", &[json!("gpt2")]),
        ("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")]),
        ("n_inner", &[json!(4 * dim)]),
        ("layer_norm_epsilon", &[json!(1e-5)]),
        ("scale_attn_weights", &[json!(true)]),
        ("scale_attn_by_inverse_layer_idx", &[json!(false)]),
        ("tie_word_embeddings", &[json!(true)]),
    ];
    for (key, values) in expected {
        let found = &config[key];
        ensure!(
            found.is_null() || values.contains(found),
            "{key} is {found}, not {}",
            values.iter().map(Value::to_string).collect::<Vec<_>>().join(" or ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    /// A run with a checkpoint, whose weights are all different.
    fn run(folder: &Path) -> Gpt {
        let config = ModelConfig {
            vocabulary: 256,
            context: 8,
            layers: 2,
            heads: 2,
            dim: 8,
            dropout: 0.0,
            recompute: false,
        };
        let model = Gpt::new(&config, Device::Cpu, 5).unwrap();
        let bytes = Tokenizer::bytes();
        let settings = settings_of(config, &bytes);
        bytes.save(folder).unwrap();
        checkpoint::save(&folder.join(checkpoint::FOLDER), 7, &settings, &model_tensors(&model))
            .unwrap();
        model
    }

    fn folders() -> [tempfile::TempDir; 3] {
        std::array::from_fn(|_| tempfile::tempdir().unwrap())
    }

    #[test]
    fn names_and_layouts_are_those_of_transformers() {
        let [from, to, _] = folders();
        let model = run(from.path());
        export(&ExportOptions { from: from.path().into(), to: to.path().into() }).unwrap();
        let found = Tensor::read_safetensors(to.path().join(WEIGHTS)).unwrap();
        let of_block = [
            ("ln_1.weight", vec![8]),
            ("ln_1.bias", vec![8]),
            ("attn.c_attn.weight", vec![8, 24]),
            ("attn.c_attn.bias", vec![24]),
            ("attn.c_proj.weight", vec![8, 8]),
            ("attn.c_proj.bias", vec![8]),
            ("ln_2.weight", vec![8]),
            ("ln_2.bias", vec![8]),
            ("mlp.c_fc.weight", vec![8, 32]),
            ("mlp.c_fc.bias", vec![32]),
            ("mlp.c_proj.weight", vec![32, 8]),
            ("mlp.c_proj.bias", vec![8]),
        ];
        let mut expected = vec![
            ("transformer.wte.weight".to_string(), vec![256, 8]),
            ("transformer.wpe.weight".to_string(), vec![8, 8]),
            ("transformer.ln_f.weight".to_string(), vec![8]),
            ("transformer.ln_f.bias".to_string(), vec![8]),
        ];
        for layer in 0..2 {
            let named = of_block.iter();
            expected.extend(
                named.map(|(name, shape)| (format!("transformer.h.{layer}.{name}"), shape.clone())),
            );
        }
        expected.sort();
        let mut shapes: Vec<_> =
            found.iter().map(|(name, tensor)| (name.clone(), tensor.size())).collect();
        shapes.sort();
        assert_eq!(shapes, expected);

        let conv =
            found.iter().find(|(name, _)| name == "transformer.h.1.mlp.c_fc.weight").unwrap();
        assert_eq!(conv.1, model.variables.variables()["h.1.mlp.c_fc.weight"].tr());
        let config: Value =
            serde_json::from_slice(&std::fs::read(to.path().join(CONFIG)).unwrap()).unwrap();
        assert_eq!(config["n_positions"], 8);
        assert_eq!(read_config(&to.path().join(CONFIG)).unwrap(), model.config);
    }

    #[test]
    fn an_exported_model_comes_back_with_and_without_the_prefix() {
        let [from, to, _] = folders();
        let model = run(from.path());
        export(&ExportOptions { from: from.path().into(), to: to.path().into() }).unwrap();
        for is_old in [false, true] {
            let [back, ..] = folders();
            if is_old {
                // As OpenAI's files are: no prefix, a buffer for each layer, and half kinds.
                let tensors = Tensor::read_safetensors(to.path().join(WEIGHTS)).unwrap();
                let mut tensors: Vec<(String, Tensor)> = tensors
                    .into_iter()
                    .map(|(name, tensor)| (name.replace(PREFIX, ""), tensor))
                    .collect();
                tensors.push((
                    "h.0.attn.bias".into(),
                    Tensor::ones([1, 1, 8, 8], (Kind::Float, Device::Cpu)),
                ));
                Tensor::write_safetensors(&tensors, to.path().join(WEIGHTS)).unwrap();
            }
            import(&ImportOptions { from: to.path().into(), to: back.path().into() }).unwrap();
            let checkpoint = checkpoint::of_run("--from", back.path(), |_| ()).unwrap();
            let found = load_model(&checkpoint, Device::Cpu).unwrap();
            assert_eq!(found.named_variables(), model.named_variables());
        }
    }

    #[test]
    fn other_models_are_refused_by_name() {
        let config = |key: &str, value: Value| {
            let mut config = json!({"model_type": "gpt2", "n_embd": 8, "layer_norm_epsilon": 1e-5});
            config[key] = value;
            check_variant(&config)
        };
        assert!(config("n_inner", Value::Null).is_ok());
        assert!(config("n_inner", json!(32)).is_ok());
        for (key, value) in [
            ("model_type", json!("llama")),
            ("activation_function", json!("relu")),
            ("n_inner", json!(31)),
            ("tie_word_embeddings", json!(false)),
        ] {
            assert!(config(key, value).unwrap_err().to_string().contains(key));
        }
    }
}
