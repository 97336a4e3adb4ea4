//! The numbers of groups: learning rates, weight decays, momenta. They are on the host and on each
//! device.

use super::config;
use super::kernels::{Hyper, Rule};
use super::optimizer::{FusedOptimizer, Group, Key, refuse_capture};
use crate::{Error, Result};
use std::collections::BTreeSet;
use tch::Tensor;

impl FusedOptimizer {
    /// Sets the learning rate of all groups.
    ///
    /// # Errors
    /// When `lr` is negative or not finite; while the current stream is being captured, because a
    /// graph would set it in every replay; errors of CUDA. Then no group has changed, unless CUDA
    /// failed.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        self.change("FusedOptimizer::set_lr", None, |hyper, _| hyper.lr = lr)
    }

    /// Sets the learning rate of a group.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr), and when there is no such group.
    pub fn set_lr_group(&mut self, group: usize, lr: f64) -> Result<()> {
        self.change("FusedOptimizer::set_lr_group", Some(group), |hyper, _| hyper.lr = lr)
    }

    /// The learning rate of a group, if there is one.
    pub fn lr_of_group(&self, group: usize) -> Option<f64> {
        self.groups.iter().find(|known| known.key.id == group).map(|known| known.hyper.lr)
    }

    /// Sets SGD's momentum, or AdamW's β₁, of all groups. For [`Muon`](super::Muon), it sets that of
    /// matrices.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr); Nesterov's momentum may not become 0.
    pub fn set_momentum(&mut self, momentum: f64) -> Result<()> {
        self.change("FusedOptimizer::set_momentum", None, self.momentum(momentum))
    }

    /// Sets SGD's momentum, or AdamW's β₁, of a group. For [`Muon`](super::Muon), it sets that of
    /// matrices.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group).
    pub fn set_momentum_group(&mut self, group: usize, momentum: f64) -> Result<()> {
        let op = "FusedOptimizer::set_momentum_group";
        self.change(op, Some(group), self.momentum(momentum))
    }

    fn momentum(&self, momentum: f64) -> impl Fn(&mut Hyper, Key) + use<> {
        let has_matrices = self.muon.is_some();
        move |hyper, key| {
            if key.rule == Rule::Muon || !has_matrices {
                hyper.first = momentum;
            }
        }
    }

    /// Sets AdamW's β₁ and β₂ of a group. For [`Muon`](super::Muon), it sets those of its AdamW.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group), and for an optimizer other than AdamW.
    pub fn set_betas_group(&mut self, group: usize, beta1: f64, beta2: f64) -> Result<()> {
        let op = "FusedOptimizer::set_betas_group";
        if self.rule == Rule::Sgd {
            let hint = "set_momentum_group is for both";
            return Err(Error::argument(op, "self", "AdamW", "Sgd", hint));
        }
        self.change(op, Some(group), |hyper, key| {
            if key.rule.is_adam() {
                (hyper.first, hyper.second) = (beta1, beta2);
            }
        })
    }

    /// Sets the weight decay of all groups, except for parameters that
    /// [`no_weight_decay`](Self::no_weight_decay) exempts.
    ///
    /// # Errors
    /// As for [`set_lr`](Self::set_lr).
    pub fn set_weight_decay(&mut self, weight_decay: f64) -> Result<()> {
        self.change("FusedOptimizer::set_weight_decay", None, decay(weight_decay))
    }

    /// Sets the weight decay of a group, with the same exception.
    ///
    /// # Errors
    /// As for [`set_lr_group`](Self::set_lr_group).
    pub fn set_weight_decay_group(&mut self, group: usize, weight_decay: f64) -> Result<()> {
        self.change("FusedOptimizer::set_weight_decay_group", Some(group), decay(weight_decay))
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
                let key = self.groups[parameter.group].key;
                self.parameters[place].group = self.group_index(Key { is_exempt: true, ..key });
            }
        }
    }

    /// Changes the numbers of a group, or of all groups and of groups to come, here and on each
    /// device, if none is refused.
    pub(super) fn change(
        &mut self,
        op: &str,
        id: Option<usize>,
        change: impl Fn(&mut Hyper, Key),
    ) -> Result<()> {
        let known: BTreeSet<usize> = self.groups.iter().map(|group| group.key.id).collect();
        if let Some(id) = id.filter(|id| !known.contains(id)) {
            let expected = format!("one of the groups {known:?}");
            let hint = "Path::set_group puts new variables into a group";
            return Err(Error::argument(op, "group", expected, format!("{id}"), hint));
        }
        let changed = |mut hyper: Hyper, key: Key| {
            change(&mut hyper, key);
            let checked = config::check(key.rule, &hyper);
            checked.map(|()| hyper).map_err(|refused| refused.into_error(op))
        };
        let of_group = |group: &Group| match id {
            Some(id) if id != group.key.id => Ok(group.hyper),
            _ => changed(group.hyper, group.key),
        };
        let new = self.groups.iter().map(of_group).collect::<Result<Vec<_>>>()?;
        let of_defaults = |hyper: Hyper, rule| match id {
            Some(_) => Ok(hyper),
            None => changed(hyper, Key { id: 0, is_exempt: false, rule }),
        };
        let defaults = of_defaults(self.defaults, self.rule)?;
        let muon = match &self.muon {
            Some((muon, hyper)) => Some((*muon, of_defaults(*hyper, Rule::Muon)?)),
            None => None,
        };
        refuse_capture(op, self.places.iter().map(|place| place.device))?;
        let groups = self.groups.iter_mut().zip(new);
        for (group, hyper) in groups.filter(|(group, hyper)| group.hyper != *hyper) {
            group.hyper = hyper;
            for (device, numbers) in &group.on {
                group.store(numbers, *device)?;
            }
        }
        (self.defaults, self.muon) = (defaults, muon);
        self.make_buffers()
    }
}

fn decay(weight_decay: f64) -> impl Fn(&mut Hyper, Key) {
    move |hyper, key| {
        if !key.is_exempt {
            hyper.weight_decay = weight_decay;
        }
    }
}
