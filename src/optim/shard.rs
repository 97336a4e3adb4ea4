//! What `distributed::ShardedOptimizer` needs of an optimizer: one that has parts of the parameters
//! only, and whose steps agree with those of other ranks.

use super::gradients::{self, AllGathered, Gradients};
use super::kernels;
use super::optimizer::{FusedOptimizer, Parameter, lock};
use super::state::Needs;
use super::state_dict::{Part, Writer};
use super::step::Scaling;
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use tch::nn::Variables;
use tch::{Device, Kind, Tensor};

/// The other ranks, as a step sees them.
pub(crate) trait AcrossRanks {
    /// The device of the parts, also of a rank that has none.
    fn device(&self) -> Device;

    /// Adds `[2]` numbers of kind `Double` up over all ranks, in place: the sum of the squares of
    /// the gradients, and how many places have one that is infinite or NaN.
    fn add_up(&mut self, totals: &Tensor) -> Result<()>;

    /// Parts that are updated together, one after the other.
    fn batches(&self) -> Vec<Range<usize>>;

    /// Is called when the update of a batch was given to the device.
    fn updated(&mut self, batch: usize) -> Result<()>;
}

/// The number of tensors of a state that have a value for each value of the parameter.
pub(crate) const PARTS: usize = Part::TENSORS.len();

/// How many variables of a store have joined an optimizer.
pub(crate) struct Joined {
    store: Option<Arc<Mutex<Variables>>>,
    count: usize,
}

impl Joined {
    /// The number of variables that were added since.
    pub fn missing(&self) -> usize {
        let all = self.store.as_ref().map_or(0, |store| lock(store).trainable_variables.len());
        all.saturating_sub(self.count)
    }
}

/// A part of a parameter.
pub(crate) struct NewPart {
    /// The parameter's place in the optimizer.
    pub index: usize,
    pub tensor: Tensor,
    /// Its master weights at first, of kind `Float`, if they are not the part's own values.
    pub master: Option<Tensor>,
}

impl FusedOptimizer {
    /// The parameters that have joined, with their names.
    pub(crate) fn named_parameters(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.parameters.iter().map(|parameter| (parameter.name.as_str(), &parameter.tensor))
    }

    /// The master weights of a parameter that the caller keeps.
    pub(crate) fn master_of_caller(&self, index: usize) -> Option<&Tensor> {
        self.parameters[index].shared_master.as_ref()
    }

    /// Whether it updates matrices as wholes.
    pub(crate) fn is_of_muon(&self) -> bool {
        self.muon.is_some()
    }

    /// How often a state was loaded.
    pub(crate) fn loads(&self) -> u64 {
        self.loads
    }

    /// The index of a parameter's group.
    pub(crate) fn group_of(&self, index: usize) -> usize {
        self.parameters[index].group
    }

    /// Whether a parameter had a step, or its state was loaded.
    pub(crate) fn has_state(&self) -> bool {
        self.parameters.iter().any(|parameter| parameter.state.is_some())
    }

    /// Lets new variables of the store join, and checks all parameters and the caller's master
    /// weights as a step would.
    pub(crate) fn join(&mut self, op: &str) -> Result<()> {
        self.add_missing_variables()?;
        gradients::parameter_facts(op, &self.parameters)?;
        gradients::check_parameters(op, &self.named_parameters().collect::<Vec<_>>())
    }

    /// The store, to notice variables that were added later.
    pub(crate) fn joined(&self) -> Joined {
        Joined { store: self.store.clone(), count: self.joined }
    }

    /// The same optimizer of parts of the parameters only, without a state. No variables join it.
    /// It keeps the groups that have no parts.
    pub(crate) fn into_parts(mut self, parts: Vec<NewPart>) -> Result<FusedOptimizer> {
        let whole = std::mem::take(&mut self.parameters);
        let mut masters = Vec::new();
        for NewPart { index, tensor, master } in parts {
            let Parameter { name, group, .. } = &whole[index];
            masters.extend(master.map(|master| (self.parameters.len(), master)));
            self.parameters.push(Parameter {
                name: name.clone(),
                tensor,
                group: *group,
                state: None,
                shared_master: None,
                matrices: None,
            });
        }
        self.store = None;
        if !masters.is_empty() {
            let _no_grad = tch::no_grad_guard();
            let op = "ShardedOptimizer::new";
            let mut needs: Vec<Needs> = gradients::parameter_facts(op, &self.parameters)?;
            needs.retain(|need| masters.iter().any(|(index, _)| *index == need.index));
            // Those of the caller are used even if the optimizer makes none of its own.
            let makes_masters = std::mem::replace(&mut self.has_master_weights, true);
            let made = self.make_states(op, &needs);
            self.has_master_weights = makes_masters;
            made?;
            for (index, values) in &masters {
                let state = self.parameters[*index].state.as_ref();
                if let Some(master) = state.and_then(|state| state.master.as_ref()) {
                    master.tensor().shallow_clone().f_copy_(values)?;
                }
            }
        }
        Ok(self)
    }

    /// Whether steps clip, and so ask for the norm.
    pub(crate) fn clips(&self) -> bool {
        self.max_norm.is_some()
    }

    /// A step over all parts, of which each has a gradient. The result, if gradients are scaled, is
    /// a `Float` that is not 0 if one of any rank was infinite or NaN.
    pub(crate) fn step_across(
        &mut self,
        gradients: &[Option<&Tensor>],
        grad_scale: Option<&Tensor>,
        across: &mut dyn AcrossRanks,
    ) -> Result<Option<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let scaling = grad_scale.map_or(Scaling::None, Scaling::Scaled);
        let all = self.ready(Gradients::Given(gradients))?;
        let gathered = AllGathered { all, parameters: &self.parameters };
        let device = across.device();
        if gathered.all.len() != self.parameters.len() || gathered.devices().len() > 1 {
            return Err(Error::msg("internal error: parts without gradients"));
        }
        let mut batch = None;
        if !gathered.all.is_empty() {
            batch = Some(self.batch(&gathered, device, scaling)?);
        }
        let mut found_inf = None;
        let scans = self.clips() || grad_scale.is_some();
        if scans {
            let totals = match &batch {
                Some(batch) => {
                    self.call(batch).scan(device, &batch.scratch, false)?;
                    batch.scratch.totals.shallow_clone()
                }
                None => Tensor::f_zeros([2], (Kind::Double, device))?,
            };
            across.add_up(&totals)?;
            if grad_scale.is_some() {
                let infinite = totals.f_select(0, 1)?.f_ne(0.0)?;
                found_inf = Some(infinite.f_to_kind(Kind::Float)?);
            }
        }
        if let Some(batch) = &batch {
            self.call(batch).prepare(device, &batch.scratch, scans)?;
        }
        for (index, range) in across.batches().into_iter().enumerate() {
            if let Some(batch) = &batch {
                self.call(batch).update_some(device, &batch.scratch, range)?;
            }
            across.updated(index)?;
        }
        drop(batch);
        gathered.bump_versions()?;
        Ok(found_inf)
    }

    /// What the moments and the master weights of parts are called, in files, too.
    pub(crate) fn state_words(&self) -> [&'static str; PARTS] {
        Part::TENSORS.map(|part| part.word(self.rule))
    }

    /// The moments and the master weights of a part, in the order of
    /// [`state_words`](Self::state_words), and the number of steps. Nobody may change them.
    pub(crate) fn state_of(&self, index: usize) -> Option<([Option<&Tensor>; PARTS], &Tensor)> {
        let state = self.parameters[index].state.as_ref()?;
        let of = |part: Part| part.of(state).map(kernels::Owned::tensor);
        Some((Part::TENSORS.map(of), state.step.tensor()))
    }

    /// The kinds of the moments and the master weights of a parameter of this kind, of which it has some.
    pub(crate) fn state_kinds(&self, kind: Kind, has: [bool; PARTS]) -> [Kind; PARTS] {
        let has_master =
            Part::TENSORS.into_iter().zip(has).any(|(part, has)| has && part == Part::Master);
        let moments = self.moment_kind(self.rule, kind, has_master);
        Part::TENSORS.map(|part| if part == Part::Master { Kind::Float } else { moments })
    }

    /// The numbers of groups as tensors, with their names in files.
    pub(crate) fn numbers_of_groups(&self) -> Result<Vec<(String, Tensor)>> {
        self.numbers()
    }

    /// Loads the state of the parts, by this crate's names, or torch's if there are some. `checked`
    /// runs after all checks, before anything is changed.
    pub(crate) fn load_parts(
        &mut self,
        op: &str,
        tensors: &BTreeMap<String, Tensor>,
        torch: Option<&[&str]>,
        checked: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        self.load_from(op, tensors, torch.map_or(Writer::Us, Writer::Torch), checked)
    }
}

/// Tells autograd that the values of these tensors have changed.
pub(crate) fn bump_versions<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    kernels::bump_versions(tensors)
}

/// Makes the gradients of these tensors undefined.
pub(crate) fn forget_gradients<'a>(tensors: impl Iterator<Item = &'a Tensor>) -> Result<()> {
    kernels::forget_gradients(tensors)
}
