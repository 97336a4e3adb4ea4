//! The optimizer itself: its parameters, their groups, and what a user calls.

use super::Muon;
use super::config::{self, Algorithm};
use super::gradients::{self, Gradients};
use super::kernels::{self, Hyper, Rule};
use super::state::{Place, State, is_half};
use super::step::Scaling;
use crate::amp::ScaledGradients;
use crate::ffi::amp::identity;
use crate::{Error, Result, check};
use std::collections::{BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::nn::{VarStore, Variables};
use tch::{Device, Kind, Tensor};

/// A tensor to be optimized.
#[derive(Debug)]
pub struct NamedTensor {
    /// Its name in error messages and in files of the optimizer's state.
    pub name: String,
    /// The tensor itself, not a copy: the optimizer writes to its memory.
    pub tensor: Tensor,
    /// The group whose learning rate, weight decay and other numbers it has.
    pub group: usize,
}

/// An optimizer that updates all its parameters in two kernels (up to 368 on one device; more take
/// further launches). [`AdamW`](super::AdamW), [`Sgd`](super::Sgd) and [`Muon`](super::Muon) build it,
/// and the last one takes more kernels. It has the functions of tch's [`Optimizer`](tch::nn::Optimizer), with a `Result` where they can fail.
///
/// **Parameters** are dense tensors of kind `Float`, `Double`, `Half` or `BFloat16` on the CPU or on
/// CUDA, also on several devices. Their values fill their memory without gaps, in any order of
/// strides. Gradients have the parameter's kind or, for a half kind, `Float`; one whose strides
/// differ from its parameter's is copied. Parameters without a gradient are skipped. No two
/// parameters that a step updates may share memory, nor may a gradient lie in that of parameters,
/// unless it is exactly its own.
/// Half kinds are computed in `Float`; see [`set_master_weights`](Self::set_master_weights).
///
/// **On the device** are the learning rate and the other numbers of each group, the number of steps
/// of each parameter and the norm of the gradients. No step waits for a GPU, unless its parameters
/// are on several devices. A step that was captured in a [`cuda::Graph`](crate::cuda::Graph) counts
/// its replays, and reads what [`set_lr`](Self::set_lr) and the like have written since. Before the
/// capture, a first step must have made the state. Call such functions, and replay, on one stream.
///
/// **Determinism**: equal values give equal bits on one device, whatever ran before. On CUDA the order
/// in which a gradient's squares are added depends on whether its address is a multiple of 16.
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::optim::{AdamW, OptimizerConfig}; // instead of tch::nn's
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut optimizer = AdamW::default().build(&vs, 1e-2)?;
/// optimizer.set_clip_norm(Some(1.0))?;
/// optimizer.no_weight_decay(|name, _| name.ends_with("bias"));
/// let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
/// for _ in 0..3 {
///     let loss = model.forward(&x).square().mean(Kind::Float);
///     optimizer.backward_step(&loss)?;
/// }
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct FusedOptimizer {
    /// That of no other optimizer of the process: a captured graph has the addresses of one.
    id: u64,
    /// That of all parameters, or of those that Muon leaves to it.
    pub(super) rule: Rule,
    /// The numbers of a group that does not exist yet.
    pub(super) defaults: Hyper,
    /// How Muon updates matrices, and the numbers of a group of them that does not exist yet.
    pub(super) muon: Option<(Muon, Hyper)>,
    pub(super) store: Option<Arc<Mutex<Variables>>>,
    /// The number of variables of the store that have joined.
    pub(super) joined: usize,
    pub(super) parameters: Vec<Parameter>,
    pub(super) groups: Vec<Group>,
    pub(super) places: Vec<Place>,
    pub(super) has_master_weights: bool,
    pub(super) has_half_moments: bool,
    pub(super) max_norm: Option<f64>,
    /// The first device of the last step that has measured a norm since `max_norm` was set.
    pub(super) norm_on: Option<Device>,
    /// How often a state was loaded.
    pub(super) loads: u64,
}

#[derive(Debug)]
pub(super) struct Parameter {
    pub name: String,
    pub tensor: Tensor,
    /// An index into `FusedOptimizer::groups`.
    pub group: usize,
    /// `None` before the first step with a gradient.
    pub state: Option<State>,
    /// Master weights that the caller keeps: the caller's tensor itself, whose data may be replaced.
    pub shared_master: Option<Tensor>,
    /// The rows of the matrices that Muon updates; without rows, the parameter is one matrix. `None`
    /// for a parameter that Muon does not update.
    pub matrices: Option<Vec<i64>>,
}

/// What tells groups apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// What the user calls the group.
    pub id: usize,
    /// Whether it keeps a weight decay of 0.
    pub is_exempt: bool,
    pub rule: Rule,
}

/// Parameters with the same numbers.
#[derive(Debug)]
pub(super) struct Group {
    pub key: Key,
    pub hyper: Hyper,
    /// What the learning rate is multiplied by.
    pub lr_ratio: f64,
    /// The same on each device that has parameters of the group.
    pub on: Vec<(Device, kernels::Owned)>,
}

pub(super) fn lock(variables: &Mutex<Variables>) -> MutexGuard<'_, Variables> {
    variables.lock().unwrap_or_else(PoisonError::into_inner)
}

impl FusedOptimizer {
    /// Lines that are the same for all optimizers that do the same, given the same parameters, or, with
    /// `of_parts`, any parts of them: an exempt group exists where it has parts.
    pub(crate) fn settings(&self, of_parts: bool) -> String {
        let clips = self.max_norm;
        let mut text = format!(
            "{:?}, norms up to {clips:?}, master weights: {}, half moments: {}",
            self.rule, self.has_master_weights, self.has_half_moments
        );
        for Group { key, hyper, lr_ratio, .. } in &self.groups {
            if of_parts && self.stands_for_another(*key) {
                continue;
            }
            let exempt = if key.is_exempt { ", exempt from weight decay" } else { "" };
            text.push_str(&format!("\ngroup {}{exempt}: {hyper:?}", key.id));
            if self.muon.is_some() {
                text.push_str(&format!(", {:?}, learning rate times {lr_ratio}", key.rule));
            }
        }
        if let Some((muon, _)) = &self.muon {
            let matrices: Vec<_> = self.parameters.iter().map(|known| &known.matrices).collect();
            text.push_str(&format!("\n{}, of rows {matrices:?}", muon.settings()));
        }
        text
    }

    fn new(Algorithm { op, rule, hyper, muon }: Algorithm) -> Result<Self> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        config::check(rule, &hyper).map_err(|refused| refused.into_error(op))?;
        if let Some((muon, hyper)) = &muon {
            config::check(Rule::Muon, hyper).map_err(|refused| refused.into_error(op))?;
            muon.check(op)?;
        }
        Ok(FusedOptimizer {
            id: LAST.fetch_add(1, Ordering::Relaxed),
            rule,
            defaults: hyper,
            muon,
            store: None,
            joined: 0,
            parameters: Vec::new(),
            groups: Vec::new(),
            places: Vec::new(),
            has_master_weights: true,
            has_half_moments: false,
            max_norm: None,
            norm_on: None,
            loads: 0,
        })
    }

    pub(super) fn of_store(algorithm: Algorithm, vs: &VarStore) -> Result<Self> {
        let mut optimizer = FusedOptimizer::new(algorithm)?;
        optimizer.store = Some(Arc::clone(&vs.variables_));
        optimizer.add_missing_variables()?;
        Ok(optimizer)
    }

    pub(super) fn of_tensors(algorithm: Algorithm, tensors: Vec<NamedTensor>) -> Result<Self> {
        let mut optimizer = FusedOptimizer::new(algorithm)?;
        optimizer.add(tensors)?;
        Ok(optimizer)
    }

    /// Lets the variables join that were added to the store since.
    pub(super) fn add_missing_variables(&mut self) -> Result<()> {
        let Some(store) = self.store.clone() else { return Ok(()) };
        let variables = lock(&store);
        let all = variables.trainable_variables.len();
        if all <= self.joined {
            return Ok(());
        }
        // A tensor that was added twice has two names.
        let mut names: HashMap<usize, BTreeSet<&String>> = HashMap::new();
        for (name, tensor) in &variables.named_variables {
            names.entry(identity(tensor)).or_default().insert(name);
        }
        let all_named =
            variables.trainable_variables.iter().enumerate().map(|(place, variable)| {
                let names = names.get_mut(&identity(&variable.tensor));
                let name = names.and_then(BTreeSet::pop_first);
                NamedTensor {
                    name: name.map_or_else(|| format!("parameter {place}"), String::clone),
                    tensor: variable.tensor.shallow_clone(),
                    group: variable.group,
                }
            });
        let mut new: Vec<NamedTensor> = all_named.collect();
        drop(new.drain(..self.joined));
        self.add(new)?;
        self.joined = all;
        Ok(())
    }

    fn add(&mut self, tensors: Vec<NamedTensor>) -> Result<()> {
        let existing = self.parameters.iter().map(|known| (known.name.as_str(), &known.tensor));
        let new = tensors.iter().map(|new| (new.name.as_str(), &new.tensor));
        let all: Vec<_> = existing.chain(new).collect();
        gradients::check_parameters("OptimizerConfig::build", &all)?;
        for NamedTensor { name, tensor, group } in tensors {
            let matrices = (self.muon.is_some() && tensor.dim() == 2).then(Vec::new);
            let rule = if matrices.is_some() { Rule::Muon } else { self.rule };
            let group = self.group_index(Key { id: group, is_exempt: false, rule });
            self.parameters.push(Parameter {
                name,
                tensor,
                group,
                state: None,
                shared_master: None,
                matrices,
            });
        }
        Ok(())
    }

    /// The group of this key, which is made if there is none.
    pub(super) fn group_index(&mut self, key: Key) -> usize {
        if let Some(index) = self.groups.iter().position(|group| group.key == key) {
            return index;
        }
        let mut of_id = self.groups.iter().filter(|group| group.key.id == key.id);
        let mut hyper = self.defaults_of(key.rule);
        if let Some(other) = of_id.clone().next() {
            hyper.lr = other.hyper.lr;
        }
        if let Some(like) = of_id.find(|group| group.key == Key { is_exempt: false, ..key }) {
            hyper = like.hyper;
        }
        if key.is_exempt {
            hyper.weight_decay = 0.0;
        }
        let lr_ratio = match &self.muon {
            Some((muon, _)) if key.rule != Rule::Muon => muon.adamw_lr_ratio,
            _ => 1.0,
        };
        self.groups.push(Group { key, hyper, lr_ratio, on: Vec::new() });
        self.groups.len() - 1
    }

    /// The numbers of a group that does not exist yet.
    pub(super) fn defaults_of(&self, rule: Rule) -> Hyper {
        match &self.muon {
            Some((_, hyper)) if rule == Rule::Muon => *hyper,
            _ => self.defaults,
        }
    }

    /// The rule by which a parameter is updated.
    pub(super) fn rule_of(&self, parameter: &Parameter) -> Rule {
        if parameter.matrices.is_some() { Rule::Muon } else { self.rule }
    }

    /// Returns all tensors that this optimizer updates, in the order in which they joined, and then
    /// those that will join at the next step.
    pub fn trainable_variables(&self) -> Vec<Tensor> {
        let joined = self.parameters.iter().map(|parameter| parameter.tensor.shallow_clone());
        let mut tensors: Vec<Tensor> = joined.collect();
        if let Some(store) = &self.store {
            let variables = lock(store);
            let new = variables.trainable_variables.iter().skip(self.joined);
            tensors.extend(new.map(|variable| variable.tensor.shallow_clone()));
        }
        tensors
    }

    /// The name of each tensor that has joined.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.iter().map(|parameter| parameter.name.as_str())
    }

    // ---- steps ----

    /// Makes the gradients undefined, as torch's `zero_grad` does.
    ///
    /// # Errors
    /// For a new variable that cannot be updated.
    pub fn zero_grad(&mut self) -> Result<()> {
        self.add_missing_variables()?;
        kernels::forget_gradients(self.parameters.iter().map(|parameter| &parameter.tensor))
    }

    /// Updates all parameters that have a gradient.
    ///
    /// # Errors
    /// For a gradient that is sparse, or of another size, kind or device; for a parameter that was
    /// changed in one of these respects; for memory that is shared (see [`FusedOptimizer`]); in a capture,
    /// when the state must be made first. Then no parameter was changed. Errors of CUDA.
    pub fn step(&mut self) -> Result<()> {
        self.run_step(Gradients::Accumulated, Scaling::None).map(drop)
    }

    /// Like [`step`](Self::step), with these gradients instead of those that autograd has
    /// accumulated: one for each of [`trainable_variables`](Self::trainable_variables), or `None`
    /// for a parameter to be skipped. A parameter of a half kind may have a gradient of kind
    /// `Float`. The gradients are not changed.
    ///
    /// # Errors
    /// As for [`step`](Self::step), and when their number is another one than that of the
    /// parameters.
    pub fn step_with(&mut self, gradients: &[Option<&Tensor>]) -> Result<()> {
        self.run_step(Gradients::Given(gradients), Scaling::None).map(drop)
    }

    /// Computes new gradients of the loss, and updates the parameters.
    ///
    /// # Errors
    /// As for [`step`](Self::step), and an error of the backward pass.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<()> {
        self.zero_grad()?;
        loss.f_backward()?;
        self.step()
    }

    /// Whether parameters of a half kind have master weights: a copy of kind `Float`, which a step
    /// updates, and whose rounded values are the parameter's. Without them, updates that are smaller
    /// than half of the last digit are lost. They are on by default, cost 4 bytes per value and are
    /// made in the first step of a parameter, from its values: a parameter that is written to later
    /// gets its old values back in the next step.
    ///
    /// # Errors
    /// After the first step.
    pub fn set_master_weights(&mut self, on: bool) -> Result<()> {
        self.check_has_no_steps("FusedOptimizer::set_master_weights")?;
        self.has_master_weights = on;
        Ok(())
    }

    /// Whether moments of parameters of a half kind are of that kind, as those of `torch.optim` are,
    /// in place of `Float`: 4 bytes less per value for AdamW. An update is computed in `Float`, and its
    /// moments are then rounded. A change of less than half of the last digit is lost, so that with β₂
    /// above 0.998 the mean of squares of a `BFloat16` parameter does not fall any more. Parameters with
    /// master weights, the caller's or the optimizer's, and matrices that Muon updates keep moments in
    /// `Float`. Off by default.
    ///
    /// ```
    /// # use tch::{Device, Kind, nn, nn::Module};
    /// # use tch_extension::optim::{AdamW, OptimizerConfig};
    /// # let mut vs = nn::VarStore::new(Device::Cpu);
    /// # let layer = nn::linear(vs.root(), 4, 2, Default::default());
    /// vs.set_kind(Kind::BFloat16);
    /// let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
    /// optimizer.set_master_weights(false)?;
    /// optimizer.set_half_moments(true)?;
    /// # let x = tch::Tensor::ones([3, 4], (Kind::BFloat16, Device::Cpu));
    /// optimizer.backward_step(&layer.forward(&x).square().mean(Kind::Float))?;
    /// assert_eq!(optimizer.state_dict()?["exp_avg.weight"].kind(), Kind::BFloat16);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// After the first step.
    pub fn set_half_moments(&mut self, on: bool) -> Result<()> {
        self.check_has_no_steps("FusedOptimizer::set_half_moments")?;
        self.has_half_moments = on;
        Ok(())
    }

    fn check_has_no_steps(&self, op: &str) -> Result<()> {
        if self.parameters.iter().any(|parameter| parameter.state.is_some()) {
            let hint = "call it right after build";
            return Err(Error::argument(op, "self", "an optimizer without steps", "steps", hint));
        }
        Ok(())
    }

    /// Shares the master weights of parameters of a half kind with the caller: a step updates these
    /// tensors, and the parameters get their rounded values. So a model computes with weights of a
    /// half kind and has them in `Float`, too, as under autocast, but without a cast in each step.
    /// The parameters' values of the moment should be the rounded ones of `masters`. Master weights
    /// that are shared are not part of the optimizer's state in files: save them with the model. A
    /// replay of a graph changes them without autograd's notice.
    ///
    /// Each step updates what the caller's tensors hold then: after `set_data` with other values of
    /// kind `Float`, these. It refuses master weights that were converted, resized or moved to another
    /// device. A graph that was captured before writes to the old memory: capture anew, as
    /// `train::Step` does by itself.
    ///
    /// ```
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::optim::{AdamW, NamedTensor, OptimizerConfig};
    /// let weight = Tensor::from_slice(&[1.0_f32, 2.0]);
    /// let rounded = weight.to_kind(Kind::BFloat16).set_requires_grad(true); // what the model uses
    /// let named = NamedTensor { name: "w".into(), tensor: rounded.shallow_clone(), group: 0 };
    /// let mut optimizer = AdamW::default().build_of(vec![named], 1e-4)?;
    /// optimizer.set_masters(&[("w", &weight)])?;
    /// for _ in 0..10 {
    ///     optimizer.backward_step(&rounded.square().sum(Kind::Float))?;
    /// }
    /// assert!((weight.double_value(&[0]) - 0.999).abs() < 1e-4);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// After the first step of a parameter; for a name that no parameter has; when a parameter is not
    /// of a half kind, or its master weights are not of kind `Float` with its size, strides and
    /// device. Then nothing was changed.
    pub fn set_masters(&mut self, masters: &[(&str, &Tensor)]) -> Result<()> {
        self.add_missing_variables()?;
        let op = "FusedOptimizer::set_masters";
        let mut places = Vec::new();
        for (name, master) in masters {
            let place = self.parameters.iter().position(|parameter| parameter.name == *name);
            let Some(place) = place else {
                let expected = "the name of a parameter";
                return Err(Error::argument(op, "masters", expected, format!("{name:?}"), ""));
            };
            let Parameter { name, tensor, state, .. } = &self.parameters[place];
            if state.is_some() {
                let hint = "call it right after build";
                let expected = "a parameter without steps";
                return Err(Error::argument(op, name, expected, "steps", hint));
            }
            check_master(op, name, tensor, master)?;
            places.push(place);
        }
        let names: Vec<_> =
            masters.iter().map(|(name, _)| format!("the master of {name}")).collect();
        let new = names.iter().map(String::as_str).zip(masters.iter().map(|(_, master)| *master));
        let parameters = self.parameters.iter().map(|known| (known.name.as_str(), &known.tensor));
        gradients::check_parameters(op, &parameters.chain(new).collect::<Vec<_>>())?;
        for (place, (_, master)) in places.into_iter().zip(masters) {
            self.parameters[place].shared_master = Some(master.shallow_clone());
        }
        Ok(())
    }
}

pub(super) fn check_master(op: &str, name: &str, tensor: &Tensor, master: &Tensor) -> Result<()> {
    let kind = tensor.f_kind()?;
    if !is_half(kind) {
        let hint = "a parameter of kind Float is its own master weight";
        return Err(Error::argument(op, name, "kind Half or BFloat16", format!("{kind:?}"), hint));
    }
    let name = format!("the master of {name}");
    let master = check!(op, &name, master).defined()?;
    let kind = master.tensor().f_kind()?;
    let hint = "build the optimizer and share them after parameters are converted or moved";
    if kind != Kind::Float {
        return Err(master.refuse("kind Float", format!("{kind:?}"), hint));
    }
    let facts = |tensor: &Tensor| (tensor.size(), tensor.stride(), tensor.device());
    let (expected, found) = (facts(tensor), facts(master.tensor()));
    if expected != found {
        let shown = |(size, strides, device): (Vec<i64>, Vec<i64>, Device)| {
            format!("shape {size:?} with strides {strides:?} on {device:?}")
        };
        return Err(master.refuse(shown(expected), shown(found), hint));
    }
    Ok(())
}

/// An error if the current stream of one of the devices is being captured.
pub(super) fn refuse_capture(op: &str, devices: impl Iterator<Item = Device>) -> Result<()> {
    for device in devices {
        if crate::cuda::is_capturing(op, device)? {
            let reason = "a capture would repeat it in every replay; call it before";
            return Err(Error::Cuda { op: op.to_string(), reason: reason.to_string() });
        }
    }
    Ok(())
}

impl crate::optim::Optimizer for FusedOptimizer {
    fn parameters(&self) -> Vec<Tensor> {
        self.trainable_variables()
    }

    fn step(&mut self) -> Result<()> {
        self.step()
    }

    fn capturable(&self) -> bool {
        true
    }

    /// What decides which kernels a step runs, and on which memory.
    fn revision(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (self.id, self.max_norm.is_some(), self.parameters.len()).hash(&mut hasher);
        for Parameter { group, state, shared_master, matrices, .. } in &self.parameters {
            let has_buffer = state.as_ref().is_some_and(|state| state.first.is_some());
            let master = shared_master.as_ref().map(|master| master.data_ptr().addr());
            (group, state.is_some(), has_buffer, master, matrices).hash(&mut hasher);
        }
        hasher.finish()
    }

    fn settings(&self) -> String {
        let states = self.parameters.iter().filter(|parameter| parameter.state.is_some());
        let (states, all) = (states.count(), self.parameters.len());
        let groups: Vec<usize> = self.parameters.iter().map(|parameter| parameter.group).collect();
        format!(
            "{}\nthe parameters' groups: {groups:?}\n{states} of {all} parameters have a state",
            FusedOptimizer::settings(self, false)
        )
    }

    fn loads(&self) -> u64 {
        self.loads
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        Ok(self.tensors()?.into_iter().collect())
    }

    fn step_on_device(&mut self, gradients: ScaledGradients<'_>) -> Option<Result<Vec<Tensor>>> {
        let scaling = match gradients {
            ScaledGradients::Scaled(scale) => Scaling::Scaled(scale),
            ScaledGradients::Unscaled(found_inf) => Scaling::Unscaled(found_inf),
        };
        Some(self.run_step(Gradients::Accumulated, scaling))
    }
}

/// The kinds of parameters that there are kernels for.
pub(super) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
