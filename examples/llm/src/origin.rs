//! Where a model comes from: the checkpoint of a run, or a folder in Hugging Face's format, perhaps with an
//! adapter.

use crate::apart::Documents;
use crate::checkpoint::{self, Checkpoint};
use crate::device::{self, Precision};
use crate::export;
use crate::files;
use crate::lora::{self, Adapter, Base};
use crate::model::{Model, ModelConfig};
use crate::progress::warn;
use crate::tokenizer::Tokenizer;
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};

/// What stands before the names of the model's tensors in a checkpoint.
pub const MODEL: &str = "model.";

/// A model that can be loaded, with its vocabulary.
pub struct Origin {
    pub config: ModelConfig,
    pub tokenizer: Tokenizer,
    /// What is added to the weights.
    pub adapter: Option<Adapter>,
    /// Where the weights are.
    folder: PathBuf,
    weights: Weights,
    /// That of the run.
    precision: Option<Precision>,
    /// How a run saw the documents of a window.
    pub documents: Documents,
    /// What was done with it, in words.
    pub name: String,
}

/// Weights without an adapter.
enum Weights {
    Run(Box<Checkpoint>),
    Folder,
    /// Of the model on which a run trained an adapter.
    Base(Base),
}

impl Origin {
    /// What `option` names: a run, or a folder that has a `config.json`; perhaps with an adapter in
    /// PEFT's format.
    pub fn open(option: &str, folder: &Path, adapter: Option<&Path>) -> Result<Origin> {
        let mut origin = Origin::of(option, folder)?;
        if let Some(adapter) = adapter {
            ensure!(
                origin.adapter.is_none(),
                "{option} {} has an adapter already: give its base with --adapter",
                folder.display()
            );
            origin.adapter = Some(Adapter::read(adapter, &origin.config)?);
            origin.name = format!("{} with {}", origin.name, adapter.display());
        }
        Ok(origin)
    }

    fn of(option: &str, folder: &Path) -> Result<Origin> {
        let name = folder.display().to_string();
        let is_run = checkpoint::any(&folder.join(checkpoint::FOLDER))?;
        // A run may have been exported into its own folder, and trained on.
        if export::is_model(folder) && !is_run {
            let (config, tokenizer) = export::read(folder)?;
            return Ok(Origin {
                config,
                tokenizer,
                adapter: None,
                folder: files::absolute(folder),
                weights: Weights::Folder,
                precision: None,
                documents: Documents::Together,
                name,
            });
        }
        ensure!(
            is_run || !folder.join(lora::CONFIG).exists(),
            "{option} {name} is an adapter: give the model that it was trained on, and --adapter {name}"
        );
        let checkpoint = checkpoint::of_run(option, folder, warn)?;
        let (settings, path) = (&checkpoint.state.settings, checkpoint.path.display());
        let adapted = settings.lora.as_ref().zip(settings.source.base.clone());
        Ok(Origin {
            config: settings.model.clone(),
            tokenizer: Tokenizer::load(folder)?,
            precision: Some(settings.precision),
            documents: settings.documents,
            name: format!("step {} of {path}", checkpoint.state.step),
            adapter: adapted.as_ref().map(|(lora, _)| Adapter::of_run(lora, &checkpoint)),
            folder: files::absolute(folder),
            weights: match adapted {
                Some((_, base)) => Weights::Base(base),
                None => Weights::Run(Box::new(checkpoint)),
            },
        })
    }

    /// The same, to generate text: on a GPU in the kind of the run's products, weights and all.
    pub fn model_for_text(&self, device: Device) -> Result<Model> {
        let mut model = self.model(device)?;
        if device.is_cuda() && self.precision != Some(Precision::F32) {
            model.set_precision(Precision::Bf16True)?;
        }
        Ok(model)
    }

    /// The model on a device. An adapter becomes a part of its weights.
    pub fn model(&self, device: Device) -> Result<Model> {
        device::check_memory(device, 4 * self.config.parameters() as u64)?;
        let mut model = Model::zeros(&self.config, device)?;
        self.copy_into(&model)?;
        if let Some(adapter) = &self.adapter {
            model.adapt(&adapter.lora, 0)?;
            adapter.copy_into(&model)?;
            model.merge()?;
        }
        Ok(model)
    }

    /// Gives a model of the same sizes these weights, without the adapter.
    pub fn copy_into(&self, model: &Model) -> Result<()> {
        match &self.weights {
            Weights::Run(checkpoint) => checkpoint.copy_into(&model_tensors(model)),
            Weights::Folder => export::load(&self.folder, model),
            Weights::Base(base) => {
                let cannot =
                    "the base cannot be opened: `export` the adapter, and give it by --adapter";
                base.open("--from").context(cannot)?.copy_into(model)
            }
        }
    }

    /// The weights on which an adapter can be trained.
    pub fn base(&self) -> Result<Base> {
        let checksum = match &self.weights {
            Weights::Run(checkpoint) => checkpoint.checksum(MODEL),
            Weights::Folder => export::checksum(&self.folder)?,
            Weights::Base(base) => return Ok(base.clone()),
        };
        Ok(Base { folder: self.folder.clone(), checksum })
    }
}

/// The model's variables under their names in a checkpoint.
pub fn model_tensors(model: &Model) -> Vec<(String, Tensor)> {
    let named = model.named_variables().into_iter();
    named.map(|(name, tensor)| (format!("{MODEL}{name}"), tensor)).collect()
}
