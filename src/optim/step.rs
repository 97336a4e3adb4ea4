//! One step: everything is checked and made first; then each device gets a kernel that prepares the
//! step and one that updates all its parameters but those of Muon, which follow in `muon.rs`.

use super::gradients::{AllGathered, Gathered, Gradients, gather};
use super::kernels::{Call, Owned, Scratch, Spans, Update};
use super::muon::{self, Matrix};
use super::optimizer::FusedOptimizer;
use super::state::{Needs, Place};
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

const OP: &str = "FusedOptimizer::step";

/// What a gradient scaler tells a step.
#[derive(Clone, Copy)]
pub(super) enum Scaling<'a> {
    None,
    /// The gradients are multiplied by this scale: a `Float` without dimensions. The step is skipped
    /// if one is infinite or NaN.
    Scaled(&'a Tensor),
    /// The gradients were unscaled. The step is skipped unless each of these is 0: `Float`s without
    /// dimensions.
    Unscaled(&'a [Tensor]),
}

/// The work of a step on one device.
pub(super) struct Batch<'a> {
    pub device: Device,
    place: &'a Place,
    spans: Spans,
    /// The number of spans that one kernel updates. Those of Muon's parameters come after them.
    fused: usize,
    pub matrices: Vec<Matrix<'a>>,
    pub scratch: Scratch,
    grad_scale: Option<Tensor>,
    pub found_inf: Option<Tensor>,
}

/// Copies a tensor to a device. The copy to a GPU does not wait.
pub(super) fn moved(tensor: &Tensor, device: Device) -> Result<Tensor> {
    Ok(tensor.f_to_device_(device, tensor.f_kind()?, device != Device::Cpu, false)?)
}

fn sum_on(tensors: &[Tensor], device: Device) -> Result<Option<Tensor>> {
    let mut sum: Option<Tensor> = None;
    for tensor in tensors {
        let tensor = moved(tensor, device)?;
        sum = Some(match sum {
            Some(sum) => sum.f_add(&tensor)?,
            None => tensor,
        });
    }
    Ok(sum)
}

impl FusedOptimizer {
    /// Steps, and returns for each device with gradients a `Float` that is not 0 if a scaled
    /// gradient was infinite or NaN; none if the gradients are not scaled.
    pub(super) fn run_step(
        &mut self,
        gradients: Gradients<'_>,
        scaling: Scaling<'_>,
    ) -> Result<Vec<Tensor>> {
        let _no_grad = tch::no_grad_guard();
        self.add_missing_variables()?;
        let all = self.ready(gradients)?;
        let gathered = AllGathered { all, parameters: &self.parameters };
        let batches = gathered
            .devices()
            .into_iter()
            .map(|device| self.batch(&gathered, device, scaling))
            .collect::<Result<Vec<_>>>()?;
        self.launch(batches.iter().map(|batch| self.call(batch)).collect(), &batches)?;
        let first = batches.first().map(|batch| batch.device);
        gathered.bump_versions()?;
        let is_scaled = matches!(scaling, Scaling::Scaled(_));
        let found = batches.into_iter().filter(|_| is_scaled).filter_map(|batch| batch.found_inf);
        let found = found.collect();
        if self.max_norm.is_some() {
            self.norm_on = first.or(self.norm_on);
        }
        Ok(found)
    }

    /// Checks what a step needs, and makes the states that are missing. The copies of gradients live
    /// as long as the result.
    pub(super) fn ready(&mut self, gradients: Gradients<'_>) -> Result<Vec<Gathered>> {
        let gathered = gather(OP, &self.parameters, gradients)?;
        gathered.refuse_shared_memory(OP)?;
        let needs = gathered.all.iter().map(|each| Needs {
            index: each.index,
            fact: each.facts.parameter,
            has_buffer: false,
        });
        let needs: Vec<Needs> = needs.collect();
        let all = gathered.all;
        self.make_states(OP, &needs)?;
        Ok(all)
    }

    pub(super) fn place(&self, device: Device) -> Result<&Place> {
        let place = self.places.iter().find(|place| place.device == device);
        place.ok_or_else(|| Error::msg("internal error: no memory on a device"))
    }

    pub(super) fn batch(
        &self,
        gathered: &AllGathered<'_>,
        device: Device,
        scaling: Scaling<'_>,
    ) -> Result<Batch<'_>> {
        let (mut updates, mut matrices) = (Vec::new(), Vec::new());
        let is_of_muon = |each: &&Gathered| self.parameters[each.index].matrices.is_some();
        let fused = gathered.on(device).filter(|each| !is_of_muon(each));
        for each in fused.chain(gathered.on(device).filter(is_of_muon)) {
            let parameter = &self.parameters[each.index];
            let state = parameter.state.as_ref();
            let state = state.ok_or_else(|| Error::msg("internal error: no state"))?;
            let update = Update {
                facts: each.facts,
                master: match each.master {
                    Some(shared) => Some(shared.data),
                    None => state.master.as_ref().map(Owned::address),
                },
                moments: state.moments,
                first: state.first.as_ref(),
                second: state.second.as_ref(),
                largest: state.largest.as_ref(),
                step: &state.step,
                hyper: self.groups[parameter.group].numbers_on(device)?,
            };
            updates.push(update);
            matrices.extend(muon::matrices_of(OP, parameter, update)?);
        }
        let fused = gathered.on(device).filter(|each| !is_of_muon(each)).count();
        let spans = Spans::of_updates(&updates, device)?;
        let scratch = Scratch::new(&spans, device)?;
        let (grad_scale, found_inf) = match scaling {
            Scaling::None => (None, None),
            Scaling::Scaled(scale) => {
                let found_inf = Tensor::f_empty([0_i64; 0], (Kind::Float, device))?;
                (Some(moved(scale, device)?), Some(found_inf))
            }
            Scaling::Unscaled(found) => (None, sum_on(found, device)?),
        };
        let place = self.place(device)?;
        Ok(Batch { device, place, spans, fused, matrices, scratch, grad_scale, found_inf })
    }

    pub(super) fn call<'a>(&self, batch: &'a Batch<'_>) -> Call<'a> {
        let clips = self.max_norm.is_some();
        Call {
            rule: self.rule,
            spans: &batch.spans,
            grad_scale: batch.grad_scale.as_ref(),
            found_inf: batch.found_inf.as_ref(),
            max_norm: clips.then_some(&batch.place.max_norm),
            norm: clips.then_some(&batch.place.norm),
            ticket: &batch.place.ticket,
        }
    }

    fn launch(&self, calls: Vec<Call<'_>>, batches: &[Batch<'_>]) -> Result<()> {
        let each = || calls.iter().zip(batches);
        let scans =
            self.max_norm.is_some() || batches.iter().any(|batch| batch.grad_scale.is_some());
        for (call, Batch { device, scratch, .. }) in each() {
            match (scans, batches.len()) {
                (false, _) => call.prepare(*device, scratch, false)?,
                (true, 1) => call.scan(*device, scratch, true)?,
                (true, _) => call.scan(*device, scratch, false)?,
            }
        }
        if scans && batches.len() > 1 {
            let totals: Vec<_> =
                batches.iter().map(|batch| batch.scratch.totals.shallow_clone()).collect();
            // One device adds up, so that all get the same.
            let sum = sum_on(&totals, batches[0].device)?;
            for (call, Batch { device, scratch, .. }) in each() {
                if let Some(sum) = &sum {
                    scratch.totals.shallow_clone().f_copy_(&moved(sum, *device)?)?;
                }
                call.prepare(*device, scratch, true)?;
            }
        }
        for (call, batch) in each() {
            call.update_some(batch.device, &batch.scratch, 0..batch.fused)?;
            self.update_matrices(batch, scans)?;
        }
        Ok(())
    }

    /// The sum of the squares of all gradients: a `Double` without dimensions, on the first
    /// gradient's device.
    pub(super) fn sum_of_squares(&self, gathered: &AllGathered<'_>) -> Result<Tensor> {
        let mut totals = Vec::new();
        for device in gathered.devices() {
            let facts: Vec<_> = gathered.on(device).map(|each| each.facts.gradient).collect();
            let spans = Spans::of_gradients(&facts, device)?;
            let scratch = Scratch::new(&spans, device)?;
            let ticket = Owned::new(Tensor::f_zeros([1], (Kind::Int, device))?);
            let call = Call {
                rule: self.rule,
                spans: &spans,
                grad_scale: None,
                found_inf: None,
                max_norm: None,
                norm: None,
                ticket: &ticket,
            };
            call.scan(device, &scratch, false)?;
            totals.push(scratch.totals.f_select(0, 0)?);
        }
        let first = gathered.devices().first().copied().unwrap_or(Device::Cpu);
        match sum_on(&totals, first)? {
            Some(sum) => Ok(sum),
            None => Ok(Tensor::f_zeros([0_i64; 0], (Kind::Double, first))?),
        }
    }
}
