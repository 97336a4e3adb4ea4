//! Learning rates, clipping and the like. Every rank must set the same.

use super::ShardedOptimizer;
use crate::Result;
use std::collections::HashSet;
use tch::Tensor;

impl ShardedOptimizer {
    /// Sets the learning rate of all groups, as [`FusedOptimizer::set_lr`](crate::optim::FusedOptimizer::set_lr)
    /// does.
    ///
    /// # Errors
    /// When `lr` is negative or not finite; while the current stream is being captured; errors of
    /// CUDA.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.inner.set_lr(lr)
    }

    /// Sets the learning rate of a group.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr), and when there is no such group.
    pub fn set_lr_group(&mut self, group: usize, lr: f64) -> Result<()> {
        self.inner.set_lr_group(group, lr)
    }

    /// The learning rate of a group, if there is one.
    pub fn lr_of_group(&self, group: usize) -> Option<f64> {
        self.inner.lr_of_group(group)
    }

    /// Sets SGD's momentum, or AdamW's β₁, of all groups.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr).
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.inner.set_momentum(momentum)
    }

    /// Sets SGD's momentum, or AdamW's β₁, of a group.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group).
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        self.inner.set_momentum_group(group, momentum)
    }

    /// Sets AdamW's β₁ and β₂ of a group.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group), and for an optimizer other than AdamW.
    pub fn set_betas_group(&mut self, group: usize, beta1: f64, beta2: f64) -> Result<()> {
        self.inner.set_betas_group(group, beta1, beta2)
    }

    /// Sets the weight decay of all groups, except for parameters that
    /// [`no_weight_decay`](Self::no_weight_decay) exempts.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr).
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        self.inner.set_weight_decay(weight_decay)
    }

    /// Sets the weight decay of a group, with the same exception.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group).
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.inner.set_weight_decay_group(group, weight_decay)
    }

    /// Exempts parameters from the weight decay: those for whose name and tensor `is_exempt` is
    /// true. See [`FusedOptimizer::no_weight_decay`](crate::optim::FusedOptimizer::no_weight_decay), which can
    /// also be called before the optimizer is distributed.
    pub fn no_weight_decay(&mut self, mut is_exempt: impl FnMut(&str, &Tensor) -> bool) {
        let parameters = self.weights.parameters.iter();
        let exempt = parameters.filter(|parameter| is_exempt(&parameter.name, &parameter.tensor));
        let exempt: HashSet<&str> = exempt.map(|parameter| parameter.name.as_str()).collect();
        self.inner.no_weight_decay(|name, _| exempt.contains(name));
        self.exempt.extend(exempt.into_iter().map(str::to_string));
    }

    /// Lets every step clip the norm of the mean gradients of all parameters to `max`. Each rank adds
    /// up the squares of its part, and the sums of all ranks are added up on the device. `None`, the
    /// default, ends it. An infinite `max` only measures the norm.
    ///
    /// # Errors
    /// When `max` is negative or NaN; while the current stream is being captured; errors of CUDA.
    pub fn set_clip_norm(&mut self, max: Option<f64>) -> Result<()> {
        self.inner.set_clip_norm(max)?;
        self.has_norm &= max.is_some();
        Ok(())
    }

    /// The norm of the mean gradients in the last step that clipped them, before the clipping: of
    /// kind `Double`, with no dimensions, and the same on all ranks. It is a copy, made after the
    /// work of the current stream so far. `None` for an optimizer that does not clip, and before its
    /// first step.
    ///
    /// # Errors
    /// Errors of CUDA.
    pub fn grad_norm(&self) -> Result<Option<Tensor>> {
        if !self.has_norm {
            return Ok(None);
        }
        let _no_grad = tch::no_grad_guard();
        Ok(Some(self.totals.f_select(0, 0)?.f_sqrt()?))
    }
}
