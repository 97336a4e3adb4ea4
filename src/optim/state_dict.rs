//! The state of an optimizer in files: moments, counts of steps, master weights, and the numbers of
//! groups.

use super::config::{self, Refused};
use super::gradients::parameter_facts;
use super::kernels::{Hyper, Owned, Rule};
use super::optimizer::{FusedOptimizer, Key, Parameter, refuse_capture};
use super::state::State;
use crate::state_dict::{is_floating, listed, read_tensors, shown, write_tensors};
use crate::{Error, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use tch::{Kind, Tensor};

/// The parts of a parameter's state.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    First,
    Second,
    Largest,
    Master,
    Step,
}

impl Part {
    const MOMENTS: [Part; 3] = [Part::First, Part::Second, Part::Largest];
    /// Those with a value for each value of the parameter.
    pub(super) const TENSORS: [Part; 4] = [Part::First, Part::Second, Part::Largest, Part::Master];

    /// torch's word, where it has one.
    pub(super) fn word(self, rule: Rule) -> &'static str {
        match (self, rule) {
            (Part::First, Rule::Sgd | Rule::Muon) => "momentum_buffer",
            (Part::First, _) => "exp_avg",
            (Part::Second, _) => "exp_avg_sq",
            (Part::Largest, _) => "max_exp_avg_sq",
            (Part::Master, _) => "master",
            (Part::Step, _) => "step",
        }
    }

    pub(super) fn of(self, state: &State) -> Option<&Owned> {
        match self {
            Part::First => state.first.as_ref(),
            Part::Second => state.second.as_ref(),
            Part::Largest => state.largest.as_ref(),
            Part::Master => state.master.as_ref(),
            Part::Step => Some(&state.step),
        }
    }

    /// Whether an algorithm has it.
    fn is_of(self, rule: Rule) -> bool {
        match self {
            Part::Second => rule.is_adam(),
            Part::Largest => rule == Rule::AmsGrad,
            _ => true,
        }
    }
}

/// Who wrote a state.
#[derive(Clone, Copy)]
pub(super) enum Writer<'a> {
    /// This crate: `exp_avg.<name>`.
    Us,
    /// torch: `state.<index>.exp_avg`, where an index is a place in this list of names.
    Torch(&'a [&'a str]),
}

impl Writer<'_> {
    /// What the part of a parameter's state is called; `None` if the writer does not know the
    /// parameter.
    fn key(self, part: &str, name: &str) -> Option<String> {
        match self {
            Writer::Us => Some(format!("{part}.{name}")),
            Writer::Torch(names) => {
                let index = names.iter().position(|known| *known == name)?;
                Some(format!("state.{index}.{part}"))
            }
        }
    }
}

/// What is to be copied to a parameter's state. The state becomes that of a parameter without steps
/// if all is absent.
#[derive(Default)]
struct Found<'a> {
    parts: Vec<(Part, &'a Tensor)>,
    steps: i64,
}

impl<'a> Found<'a> {
    fn get(&self, part: Part) -> Option<&'a Tensor> {
        self.parts.iter().find(|(known, _)| *known == part).map(|(_, tensor)| *tensor)
    }
}

impl FusedOptimizer {
    /// The state as named tensors, which are copies: `exp_avg.<name>`, `exp_avg_sq.<name>` and, with
    /// AMSGrad, `max_exp_avg_sq.<name>`, or `momentum_buffer.<name>`; `master.<name>` and
    /// `step.<name>`, for each parameter that had a step; and the numbers of groups, such as
    /// `group.<group>.lr`, or `group.<group>.adamw.lr` for what Muon leaves to AdamW. Write them with
    /// [`save`](Self::save), or together with other tensors.
    ///
    /// # Errors
    /// When memory is exhausted.
    pub fn state_dict(&self) -> Result<BTreeMap<String, Tensor>> {
        let _no_grad = tch::no_grad_guard();
        let copy = |(name, tensor): (String, Tensor)| {
            let kind = tensor.f_kind()?;
            Ok((name, tensor.f_to_device_(tensor.device(), kind, true, true)?))
        };
        self.tensors()?.into_iter().map(copy).collect()
    }

    /// Not copies: nobody else may get them.
    pub(super) fn tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for parameter in &self.parameters {
            let (Parameter { name, state, .. }, rule) = (parameter, self.rule_of(parameter));
            let steps = match state {
                Some(state) => state.step.tensor().f_squeeze()?,
                None => Tensor::f_from_slice(&[0_i64])?.f_squeeze()?,
            };
            tensors.insert(format!("{}.{name}", Part::Step.word(rule)), steps);
            for part in Part::TENSORS {
                let Some(owned) = state.as_ref().and_then(|state| part.of(state)) else { continue };
                let name = format!("{}.{name}", part.word(rule));
                tensors.insert(name, owned.tensor().shallow_clone());
            }
        }
        tensors.extend(self.numbers()?);
        Ok(tensors)
    }

    /// The numbers of groups.
    pub(super) fn numbers(&self) -> Result<Vec<(String, Tensor)>> {
        let mut numbers = Vec::new();
        for group in self.groups.iter().filter(|group| !self.stands_for_another(group.key)) {
            let mut hyper = group.hyper;
            for (word, value) in config::numbers(group.key.rule, &mut hyper) {
                let value = Tensor::f_from_slice(&[*value])?.f_squeeze()?;
                numbers.push((self.number_key(group.key, word), value));
            }
        }
        Ok(numbers)
    }

    /// Whether a group only has exempt parameters of another group.
    pub(super) fn stands_for_another(&self, key: Key) -> bool {
        let other = Key { is_exempt: false, ..key };
        key.is_exempt && self.groups.iter().any(|group| group.key == other)
    }

    /// What a number of a group is called. A group of Muon may have matrices and other parameters.
    fn number_key(&self, key: Key, word: &str) -> String {
        let of_adamw = if self.muon.is_some() && key.rule.is_adam() { "adamw." } else { "" };
        format!("group.{}.{of_adamw}{word}", key.id)
    }

    /// Writes the state to a safetensors file, completely or not at all, as
    /// [`nn::state_dict::save`](crate::nn::state_dict::save) does. Weights are not part of it. Waits
    /// for the GPU.
    ///
    /// ```
    /// use tch::{Device, Kind, nn};
    /// use tch_extension::optim::{AdamW, OptimizerConfig};
    ///
    /// let file = std::env::temp_dir().join(format!("optimizer-{}.safetensors", std::process::id()));
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let w = vs.root().ones("w", &[3]);
    /// let mut optimizer = AdamW::default().build(&vs, 0.1)?;
    /// optimizer.backward_step(&w.sum(Kind::Float))?;
    /// optimizer.save(&file)?;
    /// let mut resumed = AdamW::default().build(&vs, 0.1)?;
    /// resumed.load(&file)?;
    /// assert_eq!(resumed.state_dict()?["step.w"].int64_value(&[]), 1);
    /// # std::fs::remove_file(&file)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As for [`nn::state_dict::save`](crate::nn::state_dict::save).
    pub fn save<P: AsRef<Path>>(&self, file: P) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        write_tensors("FusedOptimizer::save", &self.tensors()?, file.as_ref())
    }

    /// Loads a state that [`save`](Self::save) wrote. Everything is checked first: if names, sizes
    /// or kinds do not fit the parameters and the algorithm, nothing changes. Then everything is
    /// copied into memory that stays where it is, so that captured graphs stay valid. Load the
    /// weights first: master weights that the file lacks are made from them. The numbers of groups
    /// become those of the file.
    ///
    /// # Errors
    /// When the file cannot be read, and as for [`load_state_dict`](Self::load_state_dict).
    pub fn load<P: AsRef<Path>>(&mut self, file: P) -> Result<()> {
        let op = "FusedOptimizer::load";
        let tensors = read_tensors(op, file.as_ref())?;
        self.load_from(op, &tensors, Writer::Us, || Ok(()))
    }

    /// Loads what [`state_dict`](Self::state_dict) returned, as [`load`](Self::load) does.
    ///
    /// # Errors
    /// When tensors are missing, unexpected, or of other sizes or kinds than they should be; then
    /// nothing was changed. While the current stream is being captured. Errors of CUDA.
    pub fn load_state_dict(&mut self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        self.load_from("FusedOptimizer::load_state_dict", tensors, Writer::Us, || Ok(()))
    }

    /// Loads the state of a `torch.optim.AdamW`, `torch.optim.SGD` or `torch.optim.Muon`. Write the file in
    /// Python with
    ///
    /// ```python
    /// tensors = {
    ///     f"state.{index}.{key}": value.contiguous()
    ///     for index, state in optimizer.state_dict()["state"].items()
    ///     for key, value in state.items()
    ///     if torch.is_tensor(value)
    /// }
    /// safetensors.torch.save_file(tensors, "optimizer.safetensors")
    /// ```
    ///
    /// torch calls parameters by their place in the lists that it was given, group by group. `names`
    /// has the name of each in this crate, in that order. Numbers of groups are not loaded: they are
    /// what [`build`](super::OptimizerConfig::build) and `set_lr` say.
    ///
    /// For [`Muon`](super::Muon), write the states of torch's Muon and of its AdamW into one file: add the
    /// number of Muon's parameters to each index of AdamW's, and put Muon's names first.
    ///
    /// # Errors
    /// As for [`load`](Self::load), and when a parameter is not among the names.
    pub fn load_torch<P: AsRef<Path>>(&mut self, file: P, names: &[&str]) -> Result<()> {
        let op = "FusedOptimizer::load_torch";
        let tensors = read_tensors(op, file.as_ref())?;
        self.load_from(op, &tensors, Writer::Torch(names), || Ok(()))
    }

    /// `checked` runs after all checks and before anything is changed, which an error prevents.
    pub(super) fn load_from(
        &mut self,
        op: &str,
        tensors: &BTreeMap<String, Tensor>,
        writer: Writer<'_>,
        checked: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.add_missing_variables()?;
        let devices = self.parameters.iter().map(|parameter| parameter.tensor.device());
        refuse_capture(op, devices)?;
        let mut used = BTreeSet::new();
        let mut problems = Problems::default();
        let found: Vec<Found<'_>> = self
            .parameters
            .iter()
            .map(|parameter| self.find(parameter, tensors, writer, &mut used, &mut problems))
            .collect::<Result<_>>()?;
        let numbers = match writer {
            Writer::Us => self.find_numbers(tensors, &mut used, &mut problems)?,
            Writer::Torch(_) => Vec::new(),
        };
        let unexpected = tensors.keys().filter(|name| !used.contains(*name));
        problems.unexpected = unexpected.map(|name| shown(name)).collect();
        problems.into_result(op)?;

        let mut facts = parameter_facts(op, &self.parameters)?;
        checked()?;
        for (of, new) in numbers {
            self.change(op, Some(of.id), |hyper, key| {
                if key.rule == of.rule {
                    let decay = if key.is_exempt { hyper.weight_decay } else { new.weight_decay };
                    *hyper = Hyper { weight_decay: decay, ..new };
                }
            })?;
        }
        for (needs, found) in facts.iter_mut().zip(&found) {
            needs.has_buffer = found.get(Part::First).is_some();
        }
        self.make_states(op, &facts)?;
        for (parameter, found) in self.parameters.iter().zip(&found) {
            if let Some(state) = &parameter.state {
                apply(found, parameter, state)?;
            }
        }
        self.loads += 1;
        Ok(())
    }

    /// Finds the state of a parameter, and notes what is wrong with it.
    fn find<'a>(
        &self,
        parameter: &Parameter,
        tensors: &'a BTreeMap<String, Tensor>,
        writer: Writer<'_>,
        used: &mut BTreeSet<String>,
        problems: &mut Problems,
    ) -> Result<Found<'a>> {
        let mut found = Found::default();
        let (mut steps, rule) = (None, self.rule_of(parameter));
        for part in Part::TENSORS.into_iter().chain([Part::Step]) {
            let word = part.word(rule);
            let Some(key) = writer.key(word, &parameter.name) else {
                problems.missing.push(shown(&parameter.name));
                return Ok(found);
            };
            let has_part = match part {
                Part::Master => self.has_master_of(parameter)?,
                _ => part.is_of(rule),
            };
            let Some(tensor) = tensors.get(&key).filter(|_| has_part) else { continue };
            let kind = tensor.f_kind()?;
            let count = number(tensor)?.filter(|count| *count >= 0.0 && count.fract() == 0.0);
            let fits = match part {
                Part::Step => count.is_some(),
                _ => tensor.size() == parameter.tensor.size() && is_floating(kind),
            };
            if !fits {
                let shape = tensor.size();
                problems
                    .misfits
                    .push(format!("{} of shape {shape:?} and kind {kind:?}", shown(&key)));
            }
            match part {
                Part::Step => steps = Some(count.unwrap_or(0.0) as i64),
                _ => found.parts.push((part, tensor)),
            }
            used.insert(key);
        }
        // torch's SGD and Muon count nothing: what matters is whether there is a buffer.
        let has = |part: Part| found.get(part).is_some();
        let has_moment = Part::MOMENTS.into_iter().any(has);
        let counts = has_moment && rule.is_adam() || matches!(writer, Writer::Us);
        found.steps = steps.unwrap_or(i64::from(has(Part::First)));
        let mut lacks = |part: Part| {
            let key = writer.key(part.word(rule), &parameter.name);
            problems.missing.extend(key.map(|key| shown(&key)));
        };
        if counts && steps.is_none() {
            lacks(Part::Step);
        }
        let moments = Part::MOMENTS.into_iter().filter(|part| part.is_of(rule));
        for part in moments.filter(|part| found.steps > 0 && found.get(*part).is_none()) {
            lacks(part);
        }
        Ok(found)
    }

    fn has_master_of(&self, parameter: &Parameter) -> Result<bool> {
        let kind = parameter.tensor.f_kind()?;
        let is_ours = parameter.shared_master.is_none();
        Ok(is_ours && self.has_master_weights && super::state::is_half(kind))
    }

    /// The numbers of each group.
    fn find_numbers(
        &self,
        tensors: &BTreeMap<String, Tensor>,
        used: &mut BTreeSet<String>,
        problems: &mut Problems,
    ) -> Result<Vec<(Key, Hyper)>> {
        let mut all = Vec::new();
        let groups = self.groups.iter().map(|group| group.key);
        for of in groups.filter(|key| !self.stands_for_another(*key)) {
            let (mut hyper, mut is_whole) = (self.defaults_of(of.rule), true);
            for (word, value) in config::numbers(of.rule, &mut hyper) {
                let key = self.number_key(of, word);
                let Some(tensor) = tensors.get(&key) else {
                    problems.missing.push(key);
                    is_whole = false;
                    continue;
                };
                match number(tensor)? {
                    Some(number) => *value = number,
                    None => {
                        problems.misfits.push(format!("{key} that is no number"));
                        is_whole = false;
                    }
                }
                used.insert(key);
            }
            if let Err(Refused { word, expected, got }) = config::check(of.rule, &hyper)
                && is_whole
            {
                let key = self.number_key(of, word);
                problems.misfits.push(format!("{key} with {got} instead of {expected}"));
            }
            all.push((of, hyper));
        }
        Ok(all)
    }
}

/// The value of a tensor with a single number.
fn number(tensor: &Tensor) -> Result<Option<f64>> {
    let kind = tensor.f_kind()?;
    if tensor.numel() != 1 || !(kind == Kind::Int64 || is_floating(kind)) {
        return Ok(None);
    }
    Ok(Some(tensor.f_view([-1])?.f_to_kind(Kind::Double)?.f_double_value(&[0])?))
}

/// Copies what was found.
fn apply(found: &Found<'_>, parameter: &Parameter, state: &State) -> Result<()> {
    let copy = |to: Option<&Owned>, from: Option<&Tensor>| -> Result<()> {
        let Some(to) = to else { return Ok(()) };
        let mut to = to.tensor().shallow_clone();
        match from {
            Some(from) => to.f_copy_(from)?,
            None => drop(to.f_zero_()?),
        }
        Ok(())
    };
    for part in Part::TENSORS {
        let from = found.get(part).or((part == Part::Master).then_some(&parameter.tensor));
        copy(part.of(state), from)?;
    }
    copy(Some(&state.step), Some(&Tensor::f_from_slice(&[found.steps])?))
}

/// What is wrong with a state.
#[derive(Default)]
struct Problems {
    missing: Vec<String>,
    unexpected: Vec<String>,
    misfits: Vec<String>,
}

impl Problems {
    fn into_result(self, op: &str) -> Result<()> {
        let all = [
            listed("no ", &self.missing),
            listed("the unexpected ", &self.unexpected),
            listed("", &self.misfits),
        ];
        let all: Vec<String> = all.into_iter().flatten().collect();
        if all.is_empty() {
            return Ok(());
        }
        Err(Error::msg(format!(
            "{op}: expected the state of this optimizer's parameters, got {}; nothing was loaded",
            all.join("; ")
        )))
    }
}
