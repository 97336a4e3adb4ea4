//! The parameters and gradients of a step: what they are, and whether they can be used. All are
//! checked before anything is changed.

use super::kernels::{self, Fact, Facts, Readiness, Spans};
use super::optimizer::{KINDS, Parameter, check_master};
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
    /// The master weights that the caller keeps.
    pub master: Option<Fact>,
    /// The gradient, if it has another layout than the parameter, or a kind that Muon does not read.
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
    let masters = shared_masters(parameters)?;
    let mut all = Vec::with_capacity(facts.len());
    for (index, (mut facts, parameter)) in facts.into_iter().zip(parameters).enumerate() {
        if facts.gradient.readiness == Readiness::Absent {
            continue;
        }
        let device = check_parameter(op, &parameter.name, &facts.parameter)?;
        check_state(op, parameter, &facts.parameter, device)?;
        let master = masters[index];
        check_shared_master(op, parameter, &facts.parameter, master.as_ref())?;
        check_gradient(op, parameter, &facts)?;
        let (mut copied, mut copy) = (None, None);
        let is_to_be_float = parameter.matrices.is_some() && facts.gradient.is_of(Kind::Half);
        if facts.gradient.readiness == Readiness::OtherLayout || is_to_be_float {
            let gradient = match given.and_then(|given| given[index]) {
                Some(gradient) => gradient.shallow_clone(),
                None => parameter.tensor.f_grad()?,
            };
            let kind = if is_to_be_float { Kind::Float } else { gradient.f_kind()? };
            let new = copy.insert(copy_like(&gradient, &parameter.tensor, kind)?);
            let of_copy = kernels::facts(&[&parameter.tensor], Some(&[Some(&*new)]))?;
            facts = *of_copy.first().ok_or_else(|| Error::msg("internal error: no facts"))?;
            copied = Some(gradient);
        }
        all.push(Gathered { index, device, facts, master, copied, _copy: copy });
    }
    Ok(AllGathered { all, parameters })
}

/// A copy of a gradient with the strides of its parameter.
fn copy_like(gradient: &Tensor, parameter: &Tensor, kind: Kind) -> Result<Tensor> {
    let options = (kind, gradient.device());
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

    /// The memory on each device of the gradients that are read where they are, each value once:
    /// autograd may give two parameters one gradient, or parts of one.
    pub fn in_place(&self, op: &str) -> Result<Vec<(Device, Spans)>> {
        let on = |device| Ok((device, Spans::of_gradients(&self.memory_on(op, device)?, device)?));
        self.devices().into_iter().map(on).collect()
    }

    fn memory_on(&self, op: &str, device: Device) -> Result<Vec<Fact>> {
        let in_place = self.on(device).filter(|gathered| gathered.copied.is_none());
        let mut facts: Vec<Fact> = in_place.map(|gathered| gathered.facts.gradient).collect();
        facts.retain(|fact| fact.len > 0);
        facts.sort_unstable_by_key(|fact| fact.data.addr());
        let mut merged: Vec<Fact> = Vec::with_capacity(facts.len());
        for fact in facts {
            let (begin, end) = range_of(&fact);
            let Some(last) = merged.last_mut().filter(|last| range_of(last).1 > begin) else {
                merged.push(fact);
                continue;
            };
            if last.kind != fact.kind {
                let (expected, got) = ("memory of one kind", "views of one memory in two kinds");
                return Err(Error::argument(op, "gradients", expected, got, "copy the gradients"));
            }
            let (first, last_end) = range_of(last);
            last.len = ((end.max(last_end) - first) / size_of_kind(last)) as i64;
        }
        Ok(merged)
    }

    /// Refuses memory that a step would write and use for something else, too. A gradient may lie
    /// exactly where its own parameter or master weights do.
    pub fn refuse_shared_memory(&self, op: &str) -> Result<()> {
        let mut all = Vec::with_capacity(2 * self.all.len());
        for Gathered { index, facts, master, .. } in &self.all {
            let of = |fact: &Fact, role| Memory::of(fact, *index, role);
            let parameter = of(&facts.parameter, Role::Parameter);
            let master = master.as_ref().map(|fact| of(fact, Role::Master));
            let gradient = of(&facts.gradient, Role::Gradient);
            all.push(parameter);
            all.extend(master);
            if !gradient.is_at(&parameter) && !master.is_some_and(|own| gradient.is_at(&own)) {
                all.push(gradient);
            }
        }
        refuse_shared(op, all, |memory| {
            let name = &self.parameters[memory.index].name;
            match memory.role {
                Role::Parameter => name.clone(),
                Role::Master => format!("the master of {name}"),
                Role::Gradient => format!("the gradient of {name}"),
            }
        })
    }

    /// The gradients that were copied.
    pub fn not_in_place(&self) -> impl Iterator<Item = &Tensor> {
        self.all.iter().filter_map(|gathered| gathered.copied.as_ref())
    }

    /// Tells autograd that the parameters have changed.
    pub fn bump_versions(&self) -> Result<()> {
        let parameters = || self.all.iter().map(|gathered| &self.parameters[gathered.index]);
        let masters = parameters().filter_map(|parameter| parameter.shared_master.as_ref());
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

#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    Parameter,
    Master,
    Gradient,
}

/// Where values lie, and whose they are. All devices share one space of addresses.
#[derive(Clone, Copy)]
struct Memory {
    begin: usize,
    end: usize,
    index: usize,
    role: Role,
}

fn size_of_kind(fact: &Fact) -> usize {
    let kind = KINDS.into_iter().find(|kind| fact.is_of(*kind));
    kind.map_or(0, Kind::elt_size_in_bytes)
}

/// The first byte of a dense tensor, and the one after its last.
fn range_of(fact: &Fact) -> (usize, usize) {
    let begin = fact.data.addr();
    (begin, begin + size_of_kind(fact) * usize::try_from(fact.len).unwrap_or(0))
}

impl Memory {
    fn of(fact: &Fact, index: usize, role: Role) -> Memory {
        let (begin, end) = range_of(fact);
        Memory { begin, end, index, role }
    }

    fn is_at(&self, other: &Memory) -> bool {
        (self.begin, self.end) == (other.begin, other.end)
    }
}

/// Refuses memory that is written and overlaps with other memory of the list. Gradients are read.
fn refuse_shared(op: &str, mut all: Vec<Memory>, name: impl Fn(&Memory) -> String) -> Result<()> {
    all.retain(|memory| memory.begin < memory.end);
    all.sort_by_key(|memory| memory.begin);
    // What reaches furthest of all memory so far, and of what is written.
    let (mut furthest, mut written): (Option<&Memory>, Option<&Memory>) = (None, None);
    for memory in &all {
        let is_read = memory.role == Role::Gradient;
        let before = if is_read { written } else { furthest };
        if let Some(before) = before.filter(|before| before.end > memory.begin) {
            let got = format!("memory that it shares with {}", name(before));
            let hint = match is_read || before.role == Role::Gradient {
                true => "copy the gradient",
                false => "give each tensor to an optimizer once",
            };
            return Err(Error::argument(op, &name(memory), "memory of its own", got, hint));
        }
        let is_further = |known: &Memory| memory.end > known.end;
        if furthest.is_none_or(is_further) {
            furthest = Some(memory);
        }
        if !is_read && written.is_none_or(is_further) {
            written = Some(memory);
        }
    }
    Ok(())
}

fn facts_of(tensors: &[&Tensor]) -> Result<Vec<Fact>> {
    let facts = kernels::facts(tensors, Some(&vec![None; tensors.len()]))?;
    Ok(facts.into_iter().map(|facts| facts.parameter).collect())
}

/// The master weights of each parameter that the caller keeps, as they are now.
fn shared_masters(parameters: &[Parameter]) -> Result<Vec<Option<Fact>>> {
    let masters = parameters.iter().map(|parameter| parameter.shared_master.as_ref());
    let tensors: Vec<&Tensor> = masters.clone().flatten().collect();
    let mut facts = facts_of(&tensors)?.into_iter();
    Ok(masters.map(|master| master.and_then(|_| facts.next())).collect())
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
    let mut all = Vec::new();
    for (index, (fact, (name, _))) in facts_of(&tensors)?.iter().zip(parameters).enumerate() {
        check_parameter(op, name, fact)?;
        all.push(Memory::of(fact, index, Role::Parameter));
    }
    refuse_shared(op, all, |memory| parameters[memory.index].0.to_string())
}

/// What is known about the parameters, after the checks of a step.
pub(super) fn parameter_facts(op: &str, parameters: &[Parameter]) -> Result<Vec<Needs>> {
    let tensors: Vec<&Tensor> = parameters.iter().map(|parameter| &parameter.tensor).collect();
    let masters = shared_masters(parameters)?;
    let facts = facts_of(&tensors)?.into_iter();
    let needs = facts.zip(parameters).enumerate().map(|(index, (fact, parameter))| {
        let device = check_parameter(op, &parameter.name, &fact)?;
        check_state(op, parameter, &fact, device)?;
        check_shared_master(op, parameter, &fact, masters[index].as_ref())?;
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

/// Checks that the caller's master weights still fit the parameter: either may have got other data
/// since they were shared. They may lie anywhere.
fn check_shared_master(
    op: &str,
    parameter: &Parameter,
    of_parameter: &Fact,
    master: Option<&Fact>,
) -> Result<()> {
    let (Some(tensor), Some(master)) = (&parameter.shared_master, master) else { return Ok(()) };
    let facts = |fact: &Fact| (fact.readiness, fact.device, fact.len, fact.layout);
    let is_half = [Kind::Half, Kind::BFloat16].into_iter().any(|kind| of_parameter.is_of(kind));
    if is_half && master.is_of(Kind::Float) && facts(master) == facts(of_parameter) {
        return Ok(());
    }
    // They say what does not fit.
    check_parameter(op, &format!("the master of {}", parameter.name), master)?;
    check_master(op, &parameter.name, &parameter.tensor, tensor)
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
