//! One training step: forward and backward passes of its batches, clipping, AdamW. On a GPU all of
//! it is captured as CUDA graphs.

use crate::adamw::AdamW;
use crate::data::{Loader, mix};
use crate::model::Gpt;
use crate::settings::Settings;
use anyhow::Result;
use std::rc::Rc;
use tch::Tensor;
use tch_extension::train::{Step, StepOptions, StepStats};

type Closure = Box<dyn FnMut(&[Tensor]) -> tch_extension::Result<Tensor>>;

/// A model in training.
pub struct Trainer {
    step: Step<AdamW, Closure>,
    accumulate: u64,
    /// The seed of dropout, if there is any.
    seed: Option<u64>,
}

impl Trainer {
    /// A GPU's steps are captured if `capture` is true.
    pub fn new(model: Rc<Gpt>, settings: &Settings, capture: bool) -> Result<Trainer> {
        let optimizer = AdamW::new(model.named_variables(), settings.weight_decay, settings.clip)?;
        let half = settings.precision.half();
        let closure: Closure = Box::new(move |batch: &[Tensor]| match batch {
            [inputs, targets] => model.loss(inputs, targets, half, true),
            _ => Err(tch_extension::Error::msg("a batch is its inputs and its targets")),
        });
        let accumulate = settings.accumulate as usize;
        let options = StepOptions { capture, accumulate, ..Default::default() };
        Ok(Trainer {
            step: Step::new(options, optimizer, closure)?,
            accumulate: settings.accumulate as u64,
            seed: (settings.model.dropout > 0.0).then_some(settings.seed as u64),
        })
    }

    /// Trains the step after `done` steps and returns its loss, which is still on the device.
    pub fn step(&mut self, loader: &mut Loader, done: i64, rate: f64) -> Result<Tensor> {
        self.step.optimizer_mut().set_rate(rate)?;
        let first = done as u64 * self.accumulate;
        let mut losses = Vec::new();
        for index in first..first + self.accumulate {
            if let Some(seed) = self.seed {
                // So that the step decides the random numbers, also in a run that resumed.
                tch::manual_seed((mix(seed ^ mix(index)) >> 1) as i64);
            }
            let (inputs, targets) = loader.batch(index)?;
            losses.push(self.step.step(&[&inputs, &targets])?);
        }
        match losses.len() {
            1 => Ok(losses.remove(0)),
            _ => Ok(Tensor::f_stack(&losses, 0)?.f_mean(None)?),
        }
    }

    /// The tensors in use that a step changes, apart from the weights.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        self.step.optimizer().state()
    }

    /// What was captured.
    pub fn stats(&self) -> StepStats {
        self.step.stats()
    }
}
