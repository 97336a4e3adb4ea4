//! The parameters and gradients of a step: what they are, and whether they can be used. All are
//! checked before anything is changed.

use super::kernels::{self, Fact, Facts, Readiness};
use super::optimizer::{KINDS, Parameter, SharedMaster, check_master};
use super::state::Needs;
use crate::{Error, Result};
use std::collections::HashSet;
use tch::{Device, Kind, Tensor};

/// Where a step gets the gradients from.
#[derive(Clone, Copy)]
pub(super) enum Gradients<'a> {
    /// Those that autograd has accumulated.
    Accumulated,
    /// One for each parameter.
    Given(&'a [Option<&'a Tensor>]),
}

/// A parameter that has a gradient.
pub(super) struct Gathered {
    /// The parameter's place in the optimizer.
    pub index: usize,
    pub device: Device,
    pub facts: Facts,
    /// The gradient, if it has another layout than the parameter.
    copied: Option<Tensor>,
    /// Its copy, which has the parameter's layout and which `facts` describes.
    _copy: Option<Tensor>,
}

/// All parameters that have a gradient.
pub(super) struct AllGathered<'a> {
    pub all: Vec<Gathered>,
    pub parameters: &'a [Parameter],
}

/// Looks up and checks the gradients.
pub(super) fn gather<'a>(
    op: &str,
    parameters: &'a [Parameter],
    gradients: Gradients<'_>,
) -> Result<AllGathered<'a>> {
    let given = match gradients {
        Gradients::Accumulated => None,
        Gradients::Given(given) => Some(given),
    };
    if let Some(given) = given.filter(|given| given.len() != parameters.len()) {
        let expected = format!("one for each of {} parameters", parameters.len());
        return Err(Error::argument(op, "gradients", expected, format!("{}", given.len()), ""));
    }
    let tensors: Vec<&Tensor> = parameters.iter().map(|parameter| &parameter.tensor).collect();
    let facts = kernels::facts(&tensors, given)?;
    let mut all = Vec::with_capacity(facts.len());
    for (index, (mut facts, parameter)) in facts.into_iter().zip(parameters).enumerate() {
        if facts.gradient.readiness == Readiness::Absent {
            continue;
        }
        let device = check_parameter(op, &parameter.name, &facts.parameter)?;
        check_state(op, parameter, &facts.parameter, device)?;
        check_shared_master(op, parameter)?;
        check_gradient(op, parameter, &facts)?;
        let (mut copied, mut copy) = (None, None);
        if facts.gradient.readiness == Readiness::OtherLayout {
            let gradient = match given.and_then(|given| given[index]) {
                Some(gradient) => gradient.shallow_clone(),
                None => parameter.tensor.f_grad()?,
            };
            let new = copy.insert(copy_like(&gradient, &parameter.tensor)?);
            let of_copy = kernels::facts(&[&parameter.tensor], Some(&[Some(&*new)]))?;
            facts = *of_copy.first().ok_or_else(|| Error::msg("internal error: no facts"))?;
            copied = Some(gradient);
        }
        all.push(Gathered { index, device, facts, copied, _copy: copy });
    }
    Ok(AllGathered { all, parameters })
}

/// A copy of a gradient with the strides of its parameter.
fn copy_like(gradient: &Tensor, parameter: &Tensor) -> Result<Tensor> {
    let options = (gradient.f_kind()?, gradient.device());
    let mut copy = Tensor::f_empty_strided(parameter.size(), parameter.stride(), options)?;
    copy.f_copy_(gradient)?;
    Ok(copy)
}

impl AllGathered<'_> {
    /// The devices, in the order of the parameters.
    pub fn devices(&self) -> Vec<Device> {
        let mut devices = Vec::new();
        for Gathered { device, .. } in &self.all {
            if !devices.contains(device) {
                devices.push(*device);
            }
        }
        devices
    }

    pub fn on(&self, device: Device) -> impl Iterator<Item = &Gathered> {
        self.all.iter().filter(move |gathered| gathered.device == device)
    }

    /// The gradients on a device that are read where they are.
    pub fn in_place(&self, device: Device) -> Vec<Fact> {
        let in_place = self.on(device).filter(|gathered| gathered.copied.is_none());
        in_place.map(|gathered| gathered.facts.gradient).collect()
    }

    /// The gradients that were copied.
    pub fn not_in_place(&self) -> impl Iterator<Item = &Tensor> {
        self.all.iter().filter_map(|gathered| gathered.copied.as_ref())
    }

    /// Tells autograd that the parameters have changed.
    pub fn bump_versions(&self) -> Result<()> {
        let parameters = || self.all.iter().map(|gathered| &self.parameters[gathered.index]);
        let masters =
            parameters().filter_map(|parameter| Some(&parameter.shared_master.as_ref()?.tensor));
        kernels::bump_versions(parameters().map(|parameter| &parameter.tensor).chain(masters))
    }

    /// Tells autograd that kernels have changed the accumulated gradients.
    pub fn bump_versions_of_gradients(&self) -> Result<()> {
        let in_place = self.all.iter().filter(|gathered| gathered.copied.is_none());
        let gradients = in_place
            .map(|gathered| Ok(self.parameters[gathered.index].tensor.f_grad()?))
            .collect::<Result<Vec<_>>>()?;
        kernels::bump_versions(gradients.iter())
    }
}

/// Checks tensors that are to be updated together.
pub(super) fn check_parameters(op: &str, parameters: &[(&str, &Tensor)]) -> Result<()> {
    let mut names = HashSet::new();
    for (name, _) in parameters {
        if !names.insert(*name) {
            return Err(Error::argument(
                op,
                "name",
                "a name for each tensor",
                format!("{name} twice"),
                "",
            ));
        }
    }
    let tensors: Vec<&Tensor> = parameters.iter().map(|(_, tensor)| *tensor).collect();
    let none = vec![None; tensors.len()];
    let mut places = Vec::new();
    for (facts, (name, _)) in kernels::facts(&tensors, Some(&none))?.iter().zip(parameters) {
        check_parameter(op, name, &facts.parameter)?;
        let Fact { data, len, device, kind, .. } = facts.parameter;
        let size = KINDS.into_iter().find(|known| facts.parameter.is_of(*known));
        let bytes = size.map_or(0, Kind::elt_size_in_bytes) * usize::try_from(len).unwrap_or(0);
        debug_assert!(kind >= 0);
        places.push((device, data.addr(), bytes, name));
    }
    places.retain(|place| place.2 > 0);
    places.sort();
    for pair in places.windows(2) {
        let (first, second) = (&pair[0], &pair[1]);
        if first.0 == second.0 && first.1 + first.2 > second.1 {
            let got = format!("memory that it shares with {}", first.3);
            let hint = "give each tensor to an optimizer once";
            return Err(Error::argument(op, second.3, "memory of its own", got, hint));
        }
    }
    Ok(())
}

/// What is known about the parameters, after the checks of a step.
pub(super) fn parameter_facts(op: &str, parameters: &[Parameter]) -> Result<Vec<Needs>> {
    let tensors: Vec<&Tensor> = parameters.iter().map(|parameter| &parameter.tensor).collect();
    let facts = kernels::facts(&tensors, Some(&vec![None; tensors.len()]))?;
    let needs = facts.iter().zip(parameters).enumerate().map(|(index, (facts, parameter))| {
        let fact = facts.parameter;
        let device = check_parameter(op, &parameter.name, &fact)?;
        check_state(op, parameter, &fact, device)?;
        check_shared_master(op, parameter)?;
        Ok(Needs { index, fact, has_buffer: false })
    });
    needs.collect()
}

/// Checks a parameter, and returns its device.
fn check_parameter(op: &str, name: &str, fact: &Fact) -> Result<Device> {
    let refuse =
        |expected: &str, got: &str, hint: &str| Err(Error::argument(op, name, expected, got, hint));
    match fact.readiness {
        Readiness::NotStrided => return refuse("a dense tensor", "another layout, or none", ""),
        Readiness::NotDense => {
            let hint = "make it contiguous before it becomes a parameter";
            return refuse("memory without gaps and overlaps", "another layout", hint);
        }
        Readiness::Inference => {
            return refuse("a tensor that may be changed", "an inference tensor", "");
        }
        _ => {}
    }
    if !KINDS.into_iter().any(|kind| fact.is_of(kind)) {
        return refuse("kind Float, Double, Half or BFloat16", "another kind", "");
    }
    match fact.device() {
        Some(device @ Device::Cuda(_)) if !crate::cuda::is_compiled() => {
            Err(crate::kernels::no_kernel(op, device))
        }
        Some(device) => Ok(device),
        None => refuse("a CPU or CUDA tensor", "another device", ""),
    }
}

/// Checks that a parameter is still what it was when its state was made.
fn check_state(op: &str, parameter: &Parameter, fact: &Fact, device: Device) -> Result<()> {
    let Some(state) = &parameter.state else { return Ok(()) };
    if state.device == device && fact.is_of(state.kind) && state.len == fact.len {
        if state.layout == fact.layout {
            return Ok(());
        }
        let got = format!("strides {:?}", parameter.tensor.stride());
        let hint = "build the optimizer after the memory format of parameters is changed";
        return Err(Error::argument(op, &parameter.name, "the strides of before", got, hint));
    }
    let expected =
        format!("{} values {:?} on {:?}, as before", state.len, state.kind, state.device);
    let kind = parameter.tensor.f_kind()?;
    let got = format!("{} values {kind:?} on {device:?}", fact.len);
    let hint = "build the optimizer after parameters are converted or moved";
    Err(Error::argument(op, &parameter.name, expected, got, hint))
}

/// Checks that the caller's master weights are where they were. Before the first step, also that the
/// parameter is what it was.
fn check_shared_master(op: &str, parameter: &Parameter) -> Result<()> {
    let Some(SharedMaster { tensor, address }) = &parameter.shared_master else { return Ok(()) };
    if tensor.data_ptr().addr() != *address {
        let (argument, expected) = (&parameter.name, "master weights in the memory of before");
        return Err(Error::argument(op, argument, expected, "other memory", "do not resize them"));
    }
    match parameter.state {
        Some(_) => Ok(()),
        None => check_master(op, &parameter.name, &parameter.tensor, tensor),
    }
}

fn check_gradient(op: &str, parameter: &Parameter, facts: &Facts) -> Result<()> {
    let Facts { parameter: of_parameter, gradient } = facts;
    let argument = format!("the gradient of {}", parameter.name);
    let refuse = |expected: String, got: String, hint: &str| {
        Err(Error::argument(op, &argument, expected, got, hint))
    };
    match gradient.readiness {
        Readiness::NotStrided => {
            let hint = "sparse embeddings need an optimizer of their own";
            return refuse("a dense tensor".into(), "a sparse or other layout".into(), hint);
        }
        Readiness::OtherSize => {
            let expected = format!("the size {:?} of the parameter", parameter.tensor.size());
            return refuse(expected, format!("another one, of {} values", gradient.len), "");
        }
        _ => {}
    }
    if gradient.device != of_parameter.device {
        let shown = |fact: &Fact| {
            fact.device().map_or_else(|| "another one".to_string(), |device| format!("{device:?}"))
        };
        let expected = format!("device {}, as the parameter", shown(of_parameter));
        return refuse(expected, shown(gradient), "");
    }
    let is_half = [Kind::Half, Kind::BFloat16].into_iter().any(|kind| of_parameter.is_of(kind));
    if gradient.kind != of_parameter.kind && !(is_half && gradient.is_of(Kind::Float)) {
        let kind = parameter.tensor.f_kind()?;
        let expected =
            format!("kind {kind:?}, as the parameter{}", if is_half { ", or Float" } else { "" });
        return refuse(expected, "another kind".into(), "");
    }
    Ok(())
}
