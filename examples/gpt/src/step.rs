//! One training step: forward and backward passes of its batches, clipping, AdamW.

use crate::data::{Loader, mix};
use crate::model::Gpt;
use crate::settings::Settings;
use anyhow::Result;
use std::rc::Rc;
use tch::{Kind, Tensor};
use tch_extension::args;
use tch_extension::library::Operator;

const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;

/// A model in training.
pub struct Trainer {
    model: Rc<Gpt>,
    half: Option<Kind>,
    accumulate: u64,
    clip: f64,
    seed: u64,
    groups: [Group; 2],
    updates: Tensor,
    kernel: Operator,
}

/// Weights with the same decay.
struct Group {
    decay: f64,
    names: Vec<String>,
    weights: Vec<Tensor>,
    means: Vec<Tensor>,
    squares: Vec<Tensor>,
}

impl Group {
    fn new(decay: f64, weights: Vec<(String, Tensor)>) -> Group {
        let zeros = |(_, weight): &(String, Tensor)| weight.detach().zeros_like();
        let (means, squares) =
            (weights.iter().map(zeros).collect(), weights.iter().map(zeros).collect());
        let (names, weights) = weights.into_iter().unzip();
        Group { decay, names, weights, means, squares }
    }
}

impl Trainer {
    /// Decay is for matrices only, as in GPT-2.
    pub fn new(model: Rc<Gpt>, settings: &Settings) -> Result<Trainer> {
        let (matrices, others): (Vec<_>, Vec<_>) =
            model.named_variables().into_iter().partition(|(_, weight)| weight.dim() >= 2);
        let updates = Tensor::f_zeros([1], (Kind::Float, model.device()))?;
        Ok(Trainer {
            half: settings.precision.half(),
            accumulate: settings.accumulate as u64,
            clip: settings.clip,
            seed: settings.seed as u64,
            groups: [Group::new(settings.weight_decay, matrices), Group::new(0.0, others)],
            updates,
            kernel: Operator::find("aten::_fused_adamw_")?.no_grad(),
            model,
        })
    }

    /// Trains the step after `done` steps and returns its loss, which is still on the device.
    pub fn step(&mut self, loader: &mut Loader, done: i64, lr: f64) -> Result<Tensor> {
        let first = done as u64 * self.accumulate;
        let mut total: Option<Tensor> = None;
        for index in first..first + self.accumulate {
            if self.model.config.dropout > 0.0 {
                // So that the step decides the random numbers, also in a run that resumed.
                tch::manual_seed((mix(self.seed ^ mix(index)) >> 1) as i64);
            }
            let (inputs, targets) = loader.batch(index)?;
            let loss = self.model.loss(&inputs, &targets, self.half, true)?;
            let loss = loss.f_div_scalar(self.accumulate as f64)?;
            loss.f_backward()?;
            let loss = loss.detach();
            total = Some(match total {
                Some(total) => total.f_add(&loss)?,
                None => loss,
            });
        }
        self.update(lr)?;
        Ok(total.unwrap_or_default())
    }

    fn update(&mut self, lr: f64) -> Result<()> {
        self.clip_gradients()?;
        self.updates += 1.0;
        for group in &mut self.groups {
            if group.weights.is_empty() {
                continue;
            }
            let gradients: Vec<Tensor> = group.weights.iter().map(Tensor::grad).collect();
            let () = self.kernel.call(args![
                &group.weights,
                &gradients,
                &group.means,
                &group.squares,
                Vec::<Tensor>::new().as_slice(),
                vec![&self.updates; gradients.len()],
                lr = lr,
                beta1 = BETAS.0,
                beta2 = BETAS.1,
                weight_decay = group.decay,
                eps = EPS,
                amsgrad = false,
                maximize = false
            ])?;
            group.weights.iter_mut().for_each(Tensor::zero_grad);
        }
        Ok(())
    }

    fn clip_gradients(&self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let weights = self.groups.iter().flat_map(|group| &group.weights);
        let gradients: Vec<Tensor> = weights.map(Tensor::grad).collect();
        let norms: Vec<Tensor> = gradients.iter().map(Tensor::norm).collect();
        let scale = (self.clip / (Tensor::f_stack(&norms, 0)?.norm() + 1e-6)).clamp_max(1.0);
        for mut gradient in gradients {
            let _ = gradient.f_mul_(&scale)?;
        }
        Ok(())
    }

    /// The tensors in use that a step changes, apart from the weights.
    pub fn state(&self) -> Vec<(String, Tensor)> {
        let mut state = vec![("updates".to_string(), self.updates.shallow_clone())];
        for group in &self.groups {
            for (index, name) in group.names.iter().enumerate() {
                state.push((format!("exp_avg.{name}"), group.means[index].shallow_clone()));
                state.push((format!("exp_avg_sq.{name}"), group.squares[index].shallow_clone()));
            }
        }
        state
    }
}
