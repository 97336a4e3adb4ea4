//! To and from models in Hugging Face's format, with adapters in their weights.

use crate::checkpoint;
use crate::device;
use crate::family;
use crate::files::{read_text, take_folder, write_json};
use crate::lora;
use crate::model::{Model, ModelConfig};
use crate::options::Size;
use crate::origin::{Origin, model_tensors};
use crate::progress::say;
use crate::settings::{DataId, Settings};
use crate::tokenizer::{self, Tokenizer};
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use tch::Device;
use tch::nn::VarStore;
use tch_extension::nn::state_dict::{self, StateDictOptions};

const CONFIG: &str = "config.json";
/// The weight of an output layer.
const HEAD: &str = "lm_head.weight";
const GENERATION: &str = "generation_config.json";

#[derive(Debug, clap::Args)]
pub struct ExportOptions {
    /// The folder of a run, the --out of `train`, or of a model in Hugging Face's format
    #[arg(long, value_name = "FOLDER", default_value = "runs/llm")]
    pub from: PathBuf,
    /// A folder with an adapter in PEFT's format, which becomes a part of the weights
    #[arg(long, value_name = "FOLDER")]
    pub adapter: Option<PathBuf>,
    /// Write the whole model of a run that trained an adapter, in place of the adapter for PEFT
    #[arg(long)]
    pub merge: bool,
    /// Folder for the model: `AutoModelForCausalLM.from_pretrained` reads it
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
    /// The most MiB of weights in a file; more of them are several files
    #[arg(long, value_name = "MIB", default_value_t = 5000)]
    pub shard_mb: u64,
}

#[derive(Debug, clap::Args)]
pub struct ImportOptions {
    /// A folder with config.json, tokenizer.json and safetensors of a GPT-2, Llama, Mistral or Qwen
    #[arg(long, value_name = "FOLDER")]
    pub from: PathBuf,
    /// Folder for a run with these weights, for `sample`, `export` and `train --init`
    #[arg(long, value_name = "FOLDER")]
    pub to: PathBuf,
}

/// Linear layers whose weights GPT-2 keeps transposed, as `Conv1D`.
pub fn is_transposed(name: &str) -> bool {
    ["c_attn.weight", "c_proj.weight", "c_fc.weight"].iter().any(|end| name.ends_with(end))
}

/// Writes the newest checkpoint of a run in Hugging Face's format, or its adapter in PEFT's.
pub fn export(options: &ExportOptions) -> Result<()> {
    let origin = Origin::open("--from", &options.from, options.adapter.as_deref())?;
    let is_whole = options.merge || options.adapter.is_some();
    if let Some(adapter) = origin.adapter.as_ref().filter(|_| !is_whole) {
        let _to = take_folder("--to", &options.to)?;
        adapter.write(&options.to, &origin.config, &origin.base()?.folder)?;
        return say(&format!("{}, in PEFT's format in {}", origin.name, options.to.display()));
    }
    let (model, tokenizer) = (origin.model(Device::Cpu)?, &origin.tokenizer);
    let _to = take_folder("--to", &options.to)?;
    let (begin, end) = (tokenizer.begin_of_text()?, tokenizer.end_of_text());
    let begin = begin.first().copied().or(end);
    let config = family::to_json(&model.config, begin, end)?;
    refuse_another(&options.to, CONFIG, &config)?;
    let names = StateDictOptions {
        name: Some(&|name| name_in_files(&model.config, name)),
        transposed: Some(&is_transposed),
        ..Default::default()
    };
    state_dict::save_sharded(
        &model.variables,
        &options.to,
        options.shard_mb.saturating_mul(1 << 20),
        &names,
    )?;
    let generation = json!({"eos_token_id": config["eos_token_id"]});
    for (name, value) in [(CONFIG, config), (GENERATION, generation)] {
        write_json(&options.to.join(name), &value)?;
    }
    tokenizer.save(&options.to)?;
    let of_tokenizer = json!({
        "bos_token": begin.and_then(|token| tokenizer.name(token)),
        "eos_token": end.and_then(|token| tokenizer.name(token)),
        "clean_up_tokenization_spaces": false,
        "model_max_length": model.config.context,
        "tokenizer_class": "PreTrainedTokenizerFast"
    });
    write_json(&options.to.join("tokenizer_config.json"), &of_tokenizer)?;
    say(&format!("{}, in Hugging Face's format in {}", origin.name, options.to.display()))
}

/// Weights and description, which is in this file, are several files: a kill in between would leave those of
/// two models. transformers would add an adapter that is next to a model.
pub fn refuse_another(folder: &Path, file: &str, description: &Value) -> Result<()> {
    for name in [CONFIG, lora::CONFIG] {
        let found = folder.join(name);
        ensure!(
            !found.exists() || name == file && read_json(&found)? == *description,
            "--to {} has another model: give a new folder",
            folder.display()
        );
    }
    Ok(())
}

/// Makes a run of a model in Hugging Face's format.
pub fn import(options: &ImportOptions) -> Result<()> {
    let (config, tokenizer) = read(&options.from)?;
    device::check_memory(Device::Cpu, 8 * config.parameters() as u64)?;
    let model = Model::zeros(&config, Device::Cpu)?;
    load(&options.from, &model)?;
    let _to = take_folder("--to", &options.to)?;
    let run = options.to.join(checkpoint::FOLDER);
    ensure!(
        !checkpoint::any(&run)?,
        "--to {} has a run already: give another folder",
        options.to.display()
    );
    tokenizer.save(&options.to)?;
    let settings = settings_of(config, &tokenizer);
    let path = checkpoint::save(&run, 0, &settings, &model_tensors(&model))?;
    say(&format!("{} as {}", options.from.display(), path.display()))
}

/// The settings of a run that was imported: those of no training.
fn settings_of(model: ModelConfig, tokenizer: &Tokenizer) -> Settings {
    let data = DataId { vocabulary: tokenizer.hash_in_hex(), ..Default::default() };
    Settings { model, steps: 1, warm_up: 0, ..Size::Mini.settings(Device::Cpu, 0, data) }
}

/// Whether a folder has a model in Hugging Face's format.
pub fn is_model(folder: &Path) -> bool {
    folder.join(CONFIG).exists()
}

/// The description and the vocabulary of a model in Hugging Face's format.
pub fn read(folder: &Path) -> Result<(ModelConfig, Tokenizer)> {
    let generation = match folder.join(GENERATION).exists() {
        true => read_json(&folder.join(GENERATION))?,
        false => Value::Null,
    };
    let config =
        family::read(&read_json(&folder.join(CONFIG))?, &generation).with_context(|| {
            format!("{} is of a model that this program lacks", folder.join(CONFIG).display())
        })?;
    let tokenizer = Tokenizer::load(folder)?;
    ensure!(
        tokenizer.len() as i64 <= config.vocabulary,
        "{} has {} tokens, and the model {}: give files that belong together",
        folder.join(tokenizer::FILE).display(),
        tokenizer.len(),
        config.vocabulary
    );
    Ok((config, tokenizer))
}

pub fn read_json(file: &Path) -> Result<Value> {
    ensure!(!file.exists() || file.is_file(), "{} is no file", file.display());
    let text = read_text(file, "give a folder that save_pretrained wrote")?;
    serde_json::from_str(&text).with_context(|| format!("{} is no JSON", file.display()))
}

/// What stands before the names of all weights but those of an output layer.
fn prefix(config: &ModelConfig) -> &'static str {
    if config.llama.is_some() { "model." } else { "transformer." }
}

fn with_prefix(prefix: &str, variable: &str) -> String {
    match variable.starts_with("lm_head.") {
        true => variable.to_string(),
        false => format!("{prefix}{variable}"),
    }
}

/// What the files call a variable.
pub fn name_in_files(config: &ModelConfig, variable: &str) -> String {
    with_prefix(prefix(config), variable)
}

/// The checksum of the weights of a folder in Hugging Face's format.
pub fn checksum(folder: &Path) -> Result<String> {
    let mut hasher = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    for path in state_dict::files(folder)? {
        let cannot = || format!("cannot read {}", path.display());
        let mut file = File::open(&path).with_context(cannot)?;
        loop {
            match file.read(&mut buffer).with_context(cannot)? {
                0 => break,
                count => hasher.update(&buffer[..count]),
            }
        }
    }
    Ok(format!("{:08x}", hasher.finalize()))
}

/// Loads the weights of a folder in Hugging Face's format, straight to the model's device.
pub fn load(folder: &Path, model: &Model) -> Result<()> {
    let config = &model.config;
    let files = state_dict::files(folder)?;
    let load = |prefix: &str| {
        let options = StateDictOptions {
            strict: false,
            name: Some(&|name| with_prefix(prefix, name)),
            transposed: Some(&is_transposed),
        };
        state_dict::load(&model.variables, &files, &options)
    };
    let mut report = load(prefix(config))?;
    if report.missing.len() + 1 >= model.variables.len() {
        // The names of the model without its output layer, as those of the oldest files are.
        report = load("")?;
    }
    if let Some(name) = report.missing.first() {
        bail!("{} lacks {name}: give the weights of this config.json", folder.display());
    }
    // Buffers of old files, and an output layer that is the embedding.
    let is_tied = config.llama.as_ref().is_none_or(|llama| llama.tied);
    let is_known = |name: &String| {
        let buffers = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
        is_tied && name == HEAD || buffers.iter().any(|end| name.ends_with(end))
    };
    if let Some(name) = report.unexpected.iter().find(|name| !is_known(name)) {
        let folder = folder.display();
        bail!("{folder} has the unknown {name}: give the weights of this config.json");
    }
    if report.unexpected.iter().any(|name| name == HEAD) {
        // transformers would take it for the output layer if it differed.
        let head = VarStore::new(model.device());
        let weight = (head.root() / "lm_head").zeros("weight", &model.embedding().size());
        state_dict::load(&head, &files, &StateDictOptions { strict: false, ..Default::default() })?;
        ensure!(
            weight == *model.embedding(),
            "{}: {HEAD} is not the embedding, which tie_word_embeddings promises: correct config.json",
            folder.display()
        );
    }
    Ok(())
}

#[cfg(test)]
impl ExportOptions {
    pub fn new(from: &Path, to: &Path) -> ExportOptions {
        let (from, to) = (from.into(), to.into());
        ExportOptions { from, to, adapter: None, merge: false, shard_mb: 1 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::{Kind, Tensor};

    /// A run with a checkpoint, whose weights are all different.
    fn run(folder: &Path) -> Model {
        let config = ModelConfig {
            vocabulary: 256,
            context: 8,
            layers: 2,
            heads: 2,
            dim: 8,
            ..Default::default()
        };
        let _alone = crate::sample::tests::alone();
        let model = Model::new(&config, Device::Cpu, 5).unwrap();
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
    fn an_exported_model_comes_back_with_and_without_the_prefix() {
        let [from, to, _] = folders();
        let model = run(from.path());
        export(&ExportOptions::new(from.path(), to.path())).unwrap();
        for is_old in [false, true] {
            let [back, ..] = folders();
            if is_old {
                // As OpenAI's files are: no prefix, a buffer for each layer, and half kinds.
                let tensors =
                    Tensor::read_safetensors(to.path().join("model.safetensors")).unwrap();
                let mut tensors: Vec<(String, Tensor)> = tensors
                    .into_iter()
                    .map(|(name, tensor)| (name.replace("transformer.", ""), tensor))
                    .collect();
                tensors.push((
                    "h.0.attn.bias".into(),
                    Tensor::ones([1, 1, 8, 8], (Kind::Float, Device::Cpu)),
                ));
                // The output layer, which is the embedding, or promises to be.
                tensors.push((HEAD.into(), model.embedding() + 1.0));
                let file = to.path().join("model.safetensors");
                Tensor::write_safetensors(&tensors, &file).unwrap();
                let error = load(to.path(), &model).unwrap_err().to_string();
                assert!(error.contains("lm_head.weight is not the embedding"), "{error}");
                tensors.pop();
                tensors.push((HEAD.into(), model.embedding().shallow_clone()));
                Tensor::write_safetensors(&tensors, &file).unwrap();
            }
            import(&ImportOptions { from: to.path().into(), to: back.path().into() }).unwrap();
            let found =
                Origin::open("--from", back.path(), None).unwrap().model(Device::Cpu).unwrap();
            assert_eq!(found.named_variables(), model.named_variables());
        }
    }
}
