//! What an optimizer keeps on a device: moments and counters of each parameter, and the numbers of
//! groups.

use super::kernels::{self, Fact, HYPERS, Hyper, Owned, Rule};
use super::optimizer::{FusedOptimizer, Group, KINDS, refuse_capture};
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// The state of one parameter. All tensors are on its device, in the order of its values.
#[derive(Debug)]
pub(super) struct State {
    pub device: Device,
    /// Of the parameter.
    pub kind: Kind,
    pub len: i64,
    /// The order of the parameter's elements in memory, as in [`Fact`]; the state has the same.
    pub layout: i32,
    /// The kind of the moments.
    pub moments: Kind,
    /// Of kind `Float`: for a parameter of a half kind, unless the caller keeps them.
    pub master: Option<Owned>,
    /// AdamW's mean of gradients, SGD's or Muon's buffer.
    pub first: Option<Owned>,
    /// AdamW's mean of squared gradients.
    pub second: Option<Owned>,
    /// AMSGrad's largest `second` so far.
    pub largest: Option<Owned>,
    /// `[1]`, `Int64`: the number of steps, or of updates of SGD's buffer.
    pub step: Owned,
}

/// What all parameters on a device share.
#[derive(Debug)]
pub(super) struct Place {
    pub device: Device,
    /// `[1]`, `Double`
    pub max_norm: Owned,
    /// `[1]`, `Double`: the last norm of the gradients.
    pub norm: Owned,
    /// `[1]`, `Int`: counts blocks during a kernel.
    pub ticket: Owned,
}

impl Place {
    fn new(device: Device, max_norm: Option<f64>) -> Result<Self> {
        let zero = |kind| Tensor::f_zeros([1], (kind, device)).map(Owned::new);
        let place = Place {
            device,
            max_norm: zero(Kind::Double)?,
            norm: zero(Kind::Double)?,
            ticket: zero(Kind::Int)?,
        };
        kernels::store(&[max_norm.unwrap_or(f64::INFINITY)], &place.max_norm, device)?;
        Ok(place)
    }
}

/// The kind in which values of this kind are computed.
pub(super) fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

pub(super) fn is_half(kind: Kind) -> bool {
    matches!(kind, Kind::Half | Kind::BFloat16)
}

/// Zeros with the sizes and strides of a parameter.
fn zeros_like(parameter: &Tensor, kind: Kind) -> Result<Owned> {
    let options = (kind, parameter.device());
    let mut zeros = Tensor::f_empty_strided(parameter.size(), parameter.stride(), options)?;
    let _ = zeros.f_zero_()?;
    Ok(Owned::new(zeros))
}

/// The values of a parameter of a half kind, in kind `Float`.
fn master_of(parameter: &Tensor) -> Result<Owned> {
    let options = (Kind::Float, parameter.device());
    let mut master = Tensor::f_empty_strided(parameter.size(), parameter.stride(), options)?;
    master.f_copy_(parameter)?;
    Ok(Owned::new(master))
}

/// A parameter that must have a state.
pub(super) struct Needs {
    /// Its place in the optimizer.
    pub index: usize,
    pub fact: Fact,
    /// Whether SGD must have a buffer, even without momentum.
    pub has_buffer: bool,
}

impl FusedOptimizer {
    /// Makes what is missing for a step over these parameters. What exists keeps its memory, because
    /// captured graphs use it.
    pub(super) fn make_states(&mut self, op: &str, needs: &[Needs]) -> Result<()> {
        for Needs { index, fact, has_buffer } in needs {
            let Some(device) = fact.device() else { continue };
            let parameter = &self.parameters[*index];
            let group = &self.groups[parameter.group];
            let has_momentum = group.key.rule != Rule::Sgd || group.hyper.first != 0.0;
            let has_buffer = *has_buffer || has_momentum;
            let is_whole =
                parameter.state.as_ref().is_some_and(|state| state.first.is_some() || !has_buffer);
            let has_numbers = group.on.iter().any(|(known, _)| *known == device);
            let has_place = self.places.iter().any(|place| place.device == device);
            if is_whole && has_numbers && has_place {
                continue;
            }
            if refuse_capture(op, std::iter::once(device)).is_err() {
                let reason = format!(
                    "the state of {} would be made in a capture; run a step before it",
                    parameter.name
                );
                return Err(Error::Cuda { op: op.to_string(), reason });
            }
            if !has_place {
                self.places.push(Place::new(device, self.max_norm)?);
            }
            if !has_numbers {
                let group = parameter.group;
                self.groups[group].add_device(device)?;
            }
            if !is_whole {
                self.make_state(*index, fact, device, has_buffer)?;
            }
        }
        Ok(())
    }

    /// Makes the buffers of SGD that a new momentum needs, before a step that is captured would.
    pub(super) fn make_buffers(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        for parameter in &mut self.parameters {
            let has_momentum = self.groups[parameter.group].hyper.first != 0.0;
            let Some(state) = parameter.state.as_mut().filter(|_| has_momentum) else { continue };
            // A step refuses parameters that were moved or converted.
            let tensor = &parameter.tensor;
            let is_as_before =
                tensor.device() == state.device && tensor.numel() as i64 == state.len;
            if state.first.is_none() && is_as_before {
                let moment = zeros_like(&parameter.tensor, state.moments)?;
                state.first = Some(moment);
            }
        }
        Ok(())
    }

    /// The kind of the moments of parameters of this kind.
    pub(super) fn moment_kind(&self, rule: Rule, kind: Kind, has_master: bool) -> Kind {
        match self.has_half_moments && rule != Rule::Muon && !has_master {
            true => kind,
            false => compute_kind(kind),
        }
    }

    fn make_state(
        &mut self,
        index: usize,
        fact: &Fact,
        device: Device,
        has_buffer: bool,
    ) -> Result<()> {
        let kind = KINDS.into_iter().find(|kind| fact.is_of(*kind));
        let kind = kind.ok_or_else(|| Error::msg("internal error: a kind without kernels"))?;
        let rule = self.rule_of(&self.parameters[index]);
        let is_shared = self.parameters[index].shared_master.is_some();
        let has_any_master = is_half(kind) && (self.has_master_weights || is_shared);
        let moments = self.moment_kind(rule, kind, has_any_master);
        let parameter = &mut self.parameters[index];
        let moment = || zeros_like(&parameter.tensor, moments);
        match &mut parameter.state {
            // SGD without momentum got some.
            Some(state) => state.first = Some(moment()?),
            none => {
                let has_master = has_any_master && !is_shared;
                *none = Some(State {
                    device,
                    kind,
                    len: fact.len,
                    layout: fact.layout,
                    moments,
                    master: has_master.then(|| master_of(&parameter.tensor)).transpose()?,
                    first: has_buffer.then(moment).transpose()?,
                    second: rule.is_adam().then(moment).transpose()?,
                    largest: (rule == Rule::AmsGrad).then(moment).transpose()?,
                    step: Owned::new(Tensor::f_zeros([1], (Kind::Int64, device))?),
                });
            }
        }
        Ok(())
    }
}

impl Group {
    fn add_device(&mut self, device: Device) -> Result<()> {
        let numbers = Owned::new(Tensor::f_empty([HYPERS], (Kind::Double, device))?);
        self.store(&numbers, device)?;
        self.on.push((device, numbers));
        Ok(())
    }

    /// Writes the numbers to memory of a device.
    pub(super) fn store(&self, numbers: &Owned, device: Device) -> Result<()> {
        let hyper = Hyper { lr: self.hyper.lr * self.lr_ratio, ..self.hyper };
        kernels::store_hyper(&hyper, numbers, device)
    }

    pub(super) fn numbers_on(&self, device: Device) -> Result<&Owned> {
        let found = self.on.iter().find(|(known, _)| *known == device);
        found.map(|(_, numbers)| numbers).ok_or_else(|| Error::msg("internal error: no numbers"))
    }
}
