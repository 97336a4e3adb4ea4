//! Where a model comes from: the checkpoint of a run, or a folder in Hugging Face's format.

use crate::checkpoint::{self, Checkpoint};
use crate::device::{self, Precision};
use crate::export;
use crate::model::{Model, ModelConfig};
use crate::progress::warn;
use crate::tokenizer::Tokenizer;
use anyhow::Result;
use std::path::{Path, PathBuf};
use tch::{Device, Tensor};

/// A model that can be loaded, with its vocabulary.
pub struct Origin {
    pub config: ModelConfig,
    pub tokenizer: Tokenizer,
    weights: Weights,
}

enum Weights {
    Run(Box<Checkpoint>),
    Folder(PathBuf),
}

impl Origin {
    /// What `option` names: a run, or a folder that has a `config.json`.
    pub fn open(option: &str, folder: &Path) -> Result<Origin> {
        // A run may have been exported into its own folder, and trained on.
        if export::is_model(folder) && !checkpoint::any(&folder.join(checkpoint::FOLDER))? {
            let (config, tokenizer) = export::read(folder)?;
            return Ok(Origin { config, tokenizer, weights: Weights::Folder(folder.into()) });
        }
        let checkpoint = checkpoint::of_run(option, folder, warn)?;
        Ok(Origin {
            config: checkpoint.state.settings.model.clone(),
            tokenizer: Tokenizer::load(folder)?,
            weights: Weights::Run(Box::new(checkpoint)),
        })
    }

    /// The model on a device.
    pub fn model(&self, device: Device) -> Result<Model> {
        device::check_memory(device, 4 * self.config.parameters() as u64)?;
        let model = Model::zeros(&self.config, device)?;
        self.copy_into(&model)?;
        Ok(model)
    }

    /// The model on a device, to generate text: on a GPU in the kind of the run's products, weights and all.
    pub fn model_for_text(&self, device: Device) -> Result<Model> {
        device::check_memory(device, 4 * self.config.parameters() as u64)?;
        let mut model = Model::zeros(&self.config, device)?;
        if let Some(half) = self.precision(device).half().filter(|_| device.is_cuda()) {
            model.variables.set_kind(half);
        }
        self.copy_into(&model)?;
        Ok(model)
    }

    /// Gives a model of the same sizes these weights.
    pub fn copy_into(&self, model: &Model) -> Result<()> {
        match &self.weights {
            Weights::Run(checkpoint) => checkpoint.copy_into(&model_tensors(model)),
            Weights::Folder(folder) => export::load(folder, model),
        }
    }

    /// The precision to compute with: that of the run.
    pub fn precision(&self, device: Device) -> Precision {
        match &self.weights {
            Weights::Run(checkpoint) => checkpoint.state.settings.precision,
            Weights::Folder(_) => Precision::of(device),
        }
    }

    /// What was done with it, in words.
    pub fn name(&self) -> String {
        match &self.weights {
            Weights::Run(checkpoint) => {
                format!("step {} of {}", checkpoint.state.step, checkpoint.path.display())
            }
            Weights::Folder(folder) => folder.display().to_string(),
        }
    }
}

/// The model's variables under their names in a checkpoint.
pub fn model_tensors(model: &Model) -> Vec<(String, Tensor)> {
    let named = model.named_variables().into_iter();
    named.map(|(name, tensor)| (format!("model.{name}"), tensor)).collect()
}
