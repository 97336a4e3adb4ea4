//! The numbers of groups: learning rates, weight decays, momenta. They are on the host and on each
//! device.

use super::config;
use super::kernels::{self, Hyper, Rule};
use super::optimizer::{Optimizer, refuse_capture, unwrap};
use crate::{Error, Result};
use std::collections::BTreeSet;
use tch::Tensor;

impl Optimizer {
    /// Sets the learning rate of all groups.
    pub fn set_lr(&mut self, lr: f64) {
        unwrap(self.f_set_lr(lr));
    }

    /// [`set_lr`](Self::set_lr), with an error instead of a panic.
    ///
    /// # Errors
    /// When `lr` is negative or not finite; while the current stream is being captured, because a
    /// graph would set it in every replay; errors of CUDA.
    pub fn f_set_lr(&mut self, lr: f64) -> Result<()> {
        let op = "Optimizer::set_lr";
        config::check_lr(op, lr)?;
        self.change(op, None, |hyper, _| hyper.lr = lr)
    }

    /// Sets the learning rate of a group.
    pub fn set_lr_group(&mut self, group: usize, lr: f64) {
        unwrap(self.f_set_lr_group(group, lr));
    }

    /// [`set_lr_group`](Self::set_lr_group), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr`](Self::f_set_lr), and when there is no such group.
    pub fn f_set_lr_group(&mut self, group: usize, lr: f64) -> Result<()> {
        let op = "Optimizer::set_lr_group";
        config::check_lr(op, lr)?;
        self.change(op, Some(group), |hyper, _| hyper.lr = lr)
    }

    /// The learning rate of a group, if there is one.
    pub fn lr_of_group(&self, group: usize) -> Option<f64> {
        self.groups.iter().find(|known| known.id == group).map(|known| known.hyper.lr)
    }

    /// Sets SGD's momentum, or AdamW's β₁, of all groups.
    pub fn set_momentum(&mut self, momentum: f64) {
        unwrap(self.f_set_momentum(momentum));
    }

    /// [`set_momentum`](Self::set_momentum), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr`](Self::f_set_lr).
    pub fn f_set_momentum(&mut self, momentum: f64) -> Result<()> {
        let op = "Optimizer::set_momentum";
        self.check_momentum(op, momentum)?;
        self.change(op, None, |hyper, _| hyper.first = momentum)
    }

    /// Sets SGD's momentum, or AdamW's β₁, of a group.
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) {
        unwrap(self.f_set_momentum_group(group, momentum));
    }

    /// [`set_momentum_group`](Self::set_momentum_group), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr_group`](Self::f_set_lr_group).
    pub fn f_set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        let op = "Optimizer::set_momentum_group";
        self.check_momentum(op, momentum)?;
        self.change(op, Some(group), |hyper, _| hyper.first = momentum)
    }

    fn check_momentum(&self, op: &str, momentum: f64) -> Result<()> {
        match self.rule {
            Rule::AdamW => config::check_beta(op, "momentum", momentum),
            Rule::Sgd => config::check_momentum(op, momentum),
        }
    }

    /// Sets AdamW's β₁ and β₂ of a group.
    pub fn set_betas_group(&mut self, group: usize, beta1: f64, beta2: f64) {
        unwrap(self.f_set_betas_group(group, beta1, beta2));
    }

    /// [`set_betas_group`](Self::set_betas_group), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr_group`](Self::f_set_lr_group), and for an optimizer other than AdamW.
    pub fn f_set_betas_group(&mut self, group: usize, beta1: f64, beta2: f64) -> Result<()> {
        let op = "Optimizer::set_betas_group";
        if self.rule != Rule::AdamW {
            return Err(Error::argument(
                op,
                "self",
                "AdamW",
                "Sgd",
                "set_momentum_group is for both",
            ));
        }
        config::check_beta(op, "beta1", beta1)?;
        config::check_beta(op, "beta2", beta2)?;
        self.change(op, Some(group), |hyper, _| (hyper.first, hyper.second) = (beta1, beta2))
    }

    /// Sets the weight decay of all groups, except for parameters that
    /// [`no_weight_decay`](Self::no_weight_decay) exempts.
    pub fn set_weight_decay(&mut self, weight_decay: f64) {
        unwrap(self.f_set_weight_decay(weight_decay));
    }

    /// [`set_weight_decay`](Self::set_weight_decay), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr`](Self::f_set_lr).
    pub fn f_set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        let op = "Optimizer::set_weight_decay";
        config::check_weight_decay(op, weight_decay)?;
        self.change(op, None, decay(weight_decay))
    }

    /// Sets the weight decay of a group, with the same exception.
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) {
        unwrap(self.f_set_weight_decay_group(group, weight_decay));
    }

    /// [`set_weight_decay_group`](Self::set_weight_decay_group), with an error instead of a panic.
    ///
    /// # Errors
    /// As for [`f_set_lr_group`](Self::f_set_lr_group).
    pub fn f_set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        let op = "Optimizer::set_weight_decay_group";
        config::check_weight_decay(op, weight_decay)?;
        self.change(op, Some(group), decay(weight_decay))
    }

    /// Exempts parameters from the weight decay: those for whose name and tensor `is_exempt` is
    /// true. They keep their group's other numbers. Variables that join later are not exempt. Call
    /// it before a step is captured. The usual choice exempts biases and the weights of norms:
    ///
    /// ```
    /// # use tch::{Device, nn};
    /// # use tch_extension::optim::{AdamW, OptimizerConfig};
    /// # let vs = nn::VarStore::new(Device::Cpu);
    /// # let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
    /// optimizer.no_weight_decay(|_, tensor| tensor.dim() < 2);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn no_weight_decay(&mut self, mut is_exempt: impl FnMut(&str, &Tensor) -> bool) {
        for place in 0..self.parameters.len() {
            let parameter = &self.parameters[place];
            if is_exempt(&parameter.name, &parameter.tensor) {
                let id = self.groups[parameter.group].id;
                self.parameters[place].group = self.group_index(id, true);
            }
        }
    }

    /// Changes the numbers of a group, or of all groups and of groups to come, here and on each
    /// device.
    pub(super) fn change(
        &mut self,
        op: &str,
        id: Option<usize>,
        change: impl Fn(&mut Hyper, bool),
    ) -> Result<()> {
        let known: BTreeSet<usize> = self.groups.iter().map(|group| group.id).collect();
        if let Some(id) = id.filter(|id| !known.contains(id)) {
            let expected = format!("one of the groups {known:?}");
            let hint = "Path::set_group puts new variables into a group";
            return Err(Error::argument(op, "group", expected, format!("{id}"), hint));
        }
        refuse_capture(op, self.places.iter().map(|place| place.device))?;
        for group in self.groups.iter_mut().filter(|group| id.is_none_or(|id| group.id == id)) {
            let mut hyper = group.hyper;
            change(&mut hyper, group.is_exempt);
            if hyper == group.hyper {
                continue;
            }
            for (device, numbers) in &group.on {
                kernels::store_hyper(&hyper, numbers, *device)?;
            }
            group.hyper = hyper;
        }
        if id.is_none() {
            change(&mut self.defaults, false);
        }
        self.make_buffers()
    }
}

fn decay(weight_decay: f64) -> impl Fn(&mut Hyper, bool) {
    move |hyper, is_exempt| {
        if !is_exempt {
            hyper.weight_decay = weight_decay;
        }
    }
}
