//! Low-rank adapters (LoRA) of a model whose own weights are frozen, and PEFT's files of them.

use crate::checkpoint::{self, Checkpoint};
use crate::export::{self, name_in_files};
use crate::family::{given, required};
use crate::files::{self, write_json};
use crate::model::{Model, ModelConfig};
use crate::origin::{MODEL, Origin};
use crate::range;
use crate::settings::exact;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use tch::{Kind, Tensor};
use tch_extension::nn::state_dict;

/// The description of an adapter.
pub const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// What PEFT puts before the names of a model's tensors.
const PREFIX: &str = "base_model.model.";

/// Which layers have adapters, and of which kind, with the names of the options.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Lora {
    #[serde(rename = "lora")]
    pub rank: i64,
    #[serde(rename = "lora_alpha", with = "exact")]
    pub alpha: f64,
    /// The ends of the layers' names.
    #[serde(rename = "lora_targets")]
    pub targets: BTreeSet<String>,
    /// Whether alpha is divided by the square root of the rank.
    #[serde(default)]
    pub use_rslora: bool,
}

impl Lora {
    /// The usual adapters: of attention's layers, with twice the rank as alpha.
    pub fn new(rank: i64, model: &ModelConfig) -> Lora {
        let targets = match model.llama {
            None => &["c_attn"][..],
            Some(_) => &["q_proj", "k_proj", "v_proj", "o_proj"],
        };
        let targets = targets.iter().map(|name| name.to_string()).collect();
        Lora { rank, alpha: 2.0 * rank as f64, targets, use_rslora: false }
    }

    pub fn check(&self, model: &ModelConfig) -> Result<()> {
        range::check("--lora", self.rank, [1, 1 << 12])?;
        range::check_above_0("--lora-alpha", self.alpha, 1e30)?;
        let layers = match model.llama {
            None => &["c_attn", "c_proj", "c_fc"][..],
            Some(_) => {
                &["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            }
        };
        let is_known = |name: &&String| layers.contains(&name.rsplit('.').next().unwrap_or(name));
        if let Some(name) = self.targets.iter().find(|name| !is_known(name)) {
            bail!("--lora-targets {name} is unknown: give some of {}", layers.join(","));
        }
        Ok(())
    }

    /// What the product of both factors is multiplied with.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha / if self.use_rslora { rank.sqrt() } else { rank }
    }

    /// Whether the layer of this name in the files has an adapter.
    pub fn is_target(&self, layer: &str) -> bool {
        let layer = format!(".{layer}");
        self.targets.iter().any(|target| layer.ends_with(&format!(".{target}")))
    }
}

/// The model that adapters belong to.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Base {
    pub folder: PathBuf,
    /// The checksum of its weights.
    pub checksum: String,
}

impl Base {
    /// The same model, in another folder if one is given.
    pub fn moved_to(self, folder: Option<&Path>) -> Base {
        Base { folder: folder.map_or(self.folder, files::absolute), ..self }
    }

    /// The model, if it is still the same.
    pub fn open(&self, option: &str) -> Result<Origin> {
        let origin = Origin::open(option, &self.folder, None)?;
        ensure!(
            origin.adapter.is_none(),
            "{option} {} is the run of an adapter: give the model that it was trained on",
            self.folder.display()
        );
        ensure!(
            origin.base()?.checksum == self.checksum,
            "{option} {} has other weights than the model that the adapter was trained on: give that one",
            self.folder.display()
        );
        Ok(origin)
    }
}

/// An adapter in memory.
pub struct Adapter {
    pub lora: Lora,
    path: PathBuf,
    /// By the names of the model's variables.
    tensors: BTreeMap<String, Tensor>,
}

impl Adapter {
    /// That of a run.
    pub fn of_run(lora: &Lora, checkpoint: &Checkpoint) -> Adapter {
        let (path, tensors) = (checkpoint.path.clone(), checkpoint.with_prefix(MODEL));
        Adapter { lora: lora.clone(), path, tensors }
    }

    /// Reads a folder in PEFT's format.
    pub fn read(folder: &Path, model: &ModelConfig) -> Result<Adapter> {
        let file = folder.join(CONFIG);
        let config = export::read_json(&file)?;
        let lora = read_config(&config).and_then(|lora| lora.check(model).map(|()| lora));
        let lora = lora.with_context(|| {
            format!("{} is of an adapter that this program lacks", file.display())
        })?;
        let path = folder.join(WEIGHTS);
        let prefix = adapter_name_in_files(model, "");
        let tensors = state_dict::load_tensors(&path)?.into_iter().map(|(name, tensor)| {
            let name = name.strip_prefix(&prefix).map_or(name.clone(), str::to_string);
            Ok((name, tensor.f_to_kind(Kind::Float)?))
        });
        let tensors = tensors.collect::<Result<_>>()?;
        Ok(Adapter { lora, path, tensors })
    }

    /// Gives the adapters of a model these values, once all names and shapes are compared.
    pub fn copy_into(&self, model: &Model) -> Result<()> {
        let targets = model.named_variables();
        let is_known = |name: &&String| targets.iter().any(|(target, _)| target == *name);
        if let Some(name) = self.tensors.keys().find(|name| !is_known(name)) {
            bail!("{} has {name}, which this model lacks: give its adapter", self.path.display());
        }
        checkpoint::copy(&self.path, &self.tensors, &targets)
    }

    /// Writes a folder in PEFT's format.
    pub fn write(&self, folder: &Path, model: &ModelConfig, base: &Path) -> Result<()> {
        let config = to_json(&self.lora, model, base);
        export::refuse_another(folder, CONFIG, &config)?;
        let named = self
            .tensors
            .iter()
            .map(|(name, tensor)| (adapter_name_in_files(model, name), tensor.shallow_clone()));
        let named = named.collect();
        state_dict::save_tensors(&named, folder.join(WEIGHTS))?;
        write_json(&folder.join(CONFIG), &config)
    }
}

/// What PEFT calls a variable of an adapter.
pub fn adapter_name_in_files(model: &ModelConfig, variable: &str) -> String {
    format!("{PREFIX}{}", name_in_files(model, variable))
}

fn to_json(lora: &Lora, model: &ModelConfig, base: &Path) -> Value {
    let whole = lora.alpha as i64;
    json!({
        "base_model_name_or_path": base,
        "bias": "none",
        // GPT-2's weights are kept transposed.
        "fan_in_fan_out": model.llama.is_none(),
        "inference_mode": true,
        "lora_alpha": if whole as f64 == lora.alpha { json!(whole) } else { json!(lora.alpha) },
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": lora.targets,
        "task_type": "CAUSAL_LM",
        "use_rslora": lora.use_rslora
    })
}

/// Reads an `adapter_config.json`. What else it switches on could change the logits, and is refused.
fn read_config(config: &Value) -> Result<Lora> {
    /// What is read, or has no influence on the logits of these models.
    const KNOWN: [&str; 13] = [
        "r",
        "lora_alpha",
        "target_modules",
        "use_rslora",
        "auto_mapping",
        "base_model_name_or_path",
        "fan_in_fan_out",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    ];
    let off = [json!(null), json!(false), json!([]), json!({})];
    for (key, value) in config.as_object().context("it is no JSON object")? {
        let is_usual = match key.as_str() {
            "bias" => *value == "none",
            "init_lora_weights" => *value == true || *value == "gaussian",
            "peft_type" => *value == "LORA",
            "task_type" => *value == "CAUSAL_LM",
            key => KNOWN.contains(&key),
        };
        ensure!(is_usual || off.contains(value), "{key} is {value}, which this program lacks");
    }
    Ok(Lora {
        rank: required(config, "r")?,
        alpha: required(config, "lora_alpha")?,
        // A string is a regular expression.
        targets: required(config, "target_modules")?,
        use_rslora: given(config, "use_rslora")?.unwrap_or(false),
    })
}

#[cfg(test)]
#[path = "../tests/unit/lora.rs"]
mod tests;
