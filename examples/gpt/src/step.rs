//! One training step: forward and backward passes of its batches, clipping, AdamW. On a GPU all of
//! it is captured as CUDA graphs.

use crate::data::{Loader, mix};
use crate::model::Gpt;
use crate::settings::Settings;
use anyhow::Result;
use std::collections::BTreeMap;
use std::rc::Rc;
use tch::Tensor;
use tch_extension::optim::{AdamW, Optimizer, OptimizerConfig};
use tch_extension::train::{Step, StepOptions, StepStats};

type Closure = Box<dyn FnMut(&[Tensor]) -> tch_extension::Result<Tensor>>;

/// A model in training.
pub struct Trainer {
    step: Step<Optimizer, Closure>,
    accumulate: u64,
    /// The seed of dropout, if there is any.
    seed: Option<u64>,
}

impl Trainer {
    /// A GPU's steps are captured if `capture` is true.
    pub fn new(model: Rc<Gpt>, settings: &Settings, capture: bool) -> Result<Trainer> {
        let config = AdamW { beta2: 0.95, wd: settings.weight_decay, ..Default::default() };
        let mut optimizer = config.build(&model.variables, settings.lr)?;
        // As in GPT-2: biases and norms do not decay.
        optimizer.no_weight_decay(|_, weight| weight.dim() < 2);
        optimizer.f_set_clip_norm(Some(settings.clip))?;
        optimizer.f_set_masters(&model.masters())?;
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
        self.step.optimizer_mut().f_set_lr(rate)?;
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

    /// The optimizer's state.
    pub fn state(&self) -> Result<BTreeMap<String, Tensor>> {
        Ok(self.step.optimizer().f_state_dict()?)
    }

    /// Takes over a state of [`Trainer::state`]. The weights come first.
    pub fn load_state(&mut self, state: &BTreeMap<String, Tensor>) -> Result<()> {
        Ok(self.step.optimizer_mut().f_load_state_dict(state)?)
    }

    /// What was captured.
    pub fn stats(&self) -> StepStats {
        self.step.stats()
    }
}
