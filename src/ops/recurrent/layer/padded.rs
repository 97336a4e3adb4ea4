//! The two directions of a layer, also for sequences of different lengths in one batch, padded to the longest.
//!
//! What the kernels compute for a padded step must not matter. Its input becomes zero, whatever it
//! was, and its output is replaced by zero, so no gradient reaches it. The last h of a sequence is
//! the output of its last step; the last c needs gates that keep it ([`Cell::KEEPS_STATE`]).

use super::functions::{self, Kept, Operands};
use super::{Arguments, Cell, Gradients, Needs, Plan, RnnWeights, State, absent, cell, place};
use crate::ffi::tensor::from_slice;
use crate::ops::recurrent::kernels::Outputs;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Checks that there is a length for each sequence, from 1 to the number of steps.
///
/// # Errors
/// When there is not; it names the operator and the argument.
pub fn check_lengths(op: &str, lengths: &[i64], steps: i64, batch: i64) -> Result<()> {
    if lengths.len() as i64 != batch {
        return Err(Error::argument(
            op,
            "lengths",
            format!("B = {batch} lengths, one for each sequence"),
            format!("{}", lengths.len()),
            "",
        ));
    }
    let Some(place) = lengths.iter().position(|length| !(1..=steps).contains(length)) else {
        return Ok(());
    };
    Err(Error::argument(
        op,
        "lengths",
        format!("lengths from 1 to T = {steps}"),
        format!("{} at {place}", lengths[place]),
        "leave out sequences without steps",
    ))
}

/// The number of steps of the longest sequence.
pub(super) fn longest(lengths: &[i64], steps: i64) -> i64 {
    lengths.iter().copied().max().unwrap_or(steps)
}

pub(super) fn are_equal(lengths: &[i64]) -> bool {
    lengths.iter().all(|length| *length == lengths[0])
}

/// Computes all steps, of sequences of these lengths if they are given.
pub(super) fn forward<C: Cell>(
    arguments: &Arguments<'_>,
    lengths: Option<&[i64]>,
    plan: Plan,
    keep: bool,
) -> Result<Outputs> {
    let Some(lengths) = lengths else {
        return functions::forward::<C>(&Operands::new::<C>(arguments)?, plan, keep);
    };
    let input = arguments[place::INPUT].ok_or_else(absent::<C>)?;
    let (steps, batch, _) = input.size3()?;
    // No sequence reads the steps after the longest one.
    let longest = longest(lengths, steps);
    let shorter = Shorter::new(&input.f_narrow(0, 0, longest)?, lengths)?;
    let mut made = functions::forward::<C>(&shorter.operands::<C>(arguments)?, plan, keep)?;
    if let Some(Different { padding, last_rows }) = &shorter.different {
        let hidden = made.output.size3()?.2;
        let rows = made.output.f_reshape([longest * batch, hidden])?;
        made.last_h = rows.f_index_select(0, last_rows)?;
        let _ = made.output.f_masked_fill_(padding, 0.0)?;
    }
    if longest < steps {
        made.output = with_zeros(&made.output, steps - longest)?;
    }
    Ok(made)
}

/// Steps of zeros after those of a tensor.
fn with_zeros(tensor: &Tensor, steps: i64) -> Result<Tensor> {
    Ok(tensor.f_constant_pad_nd([0, 0, 0, 0, 0, steps])?)
}

/// An input without the steps that no sequence has.
struct Shorter {
    /// With zeros in the steps that are padding.
    input: Tensor,
    different: Option<Different>,
}

/// What follows from lengths that differ.
struct Different {
    /// Which steps are padding, `[T, B, 1]`
    padding: Tensor,
    /// The last step of each sequence, among the rows of all steps, `[T·B, …]`
    last_rows: Tensor,
}

impl Shorter {
    fn new(input: &Tensor, lengths: &[i64]) -> Result<Shorter> {
        if are_equal(lengths) {
            return Ok(Shorter { input: input.shallow_clone(), different: None });
        }
        let (steps, batch, _) = input.size3()?;
        let lengths = on_device(lengths, input.device())?;
        let padding = padding(&lengths, steps)?;
        let rows = Tensor::f_arange(batch, (Kind::Int64, input.device()))?;
        let last_rows = lengths.f_sub_scalar(1)?.f_mul_scalar(batch)?.f_add(&rows)?;
        let input = input.f_masked_fill(&padding, 0.0)?;
        Ok(Shorter { input, different: Some(Different { padding, last_rows }) })
    }

    fn operands<'a, C: Cell>(&'a self, arguments: &Arguments<'a>) -> Result<Operands<'a>> {
        let mut operands = Operands::new::<C>(arguments)?;
        operands.input = &self.input;
        let padding = self.different.as_ref().map(|of| &of.padding);
        operands.padding = padding.filter(|_| !C::KEEPS_STATE.is_empty());
        Ok(operands)
    }

    /// The tensor with zeros in the steps that are padding.
    fn masked(&self, tensor: Tensor) -> Result<Tensor> {
        match &self.different {
            Some(Different { padding, .. }) => Ok(tensor.f_masked_fill(padding, 0.0)?),
            None => Ok(tensor),
        }
    }
}

/// The gradients that are needed, from those for the output, the last h and the last c. An absent one is zero.
pub(super) fn backward<C: Cell>(
    grads: [Option<&Tensor>; 3],
    arguments: &Arguments<'_>,
    lengths: Option<&[i64]>,
    kept: &Kept<'_>,
    needs: &Needs,
    plan: Plan,
) -> Result<Gradients> {
    let Some(lengths) = lengths else {
        let operands = Operands::new::<C>(arguments)?;
        return functions::backward::<C>(grads, &operands, kept, needs, plan);
    };
    let input = arguments[place::INPUT].ok_or_else(absent::<C>)?;
    let (steps, batch, _) = input.size3()?;
    let longest = longest(lengths, steps);
    let narrow = |tensor: &Tensor| tensor.f_narrow(0, 0, longest);
    let shorter = Shorter::new(&narrow(input)?, lengths)?;
    let output = kept.output.map(narrow).transpose()?;
    let kept = Kept { output: output.as_ref(), ..*kept };
    let [grad_output, grad_h, grad_c] = grads;
    let mut grad_output = grad_output.map(|grad| shorter.masked(narrow(grad)?)).transpose()?;
    let mut grad_h = grad_h;
    if let Some(Different { last_rows, .. }) = &shorter.different
        && let Some(of_last) = grad_h.take()
    {
        // The last h of a sequence is the output of its last step.
        let (_, hidden) = of_last.size2()?;
        let size = [longest, batch, hidden];
        let like = (of_last.f_kind()?, of_last.device());
        let sum = grad_output.map_or_else(|| Tensor::f_zeros(size, like), Ok)?;
        let rows = sum.f_reshape([longest * batch, hidden])?;
        grad_output = Some(rows.f_index_add(0, last_rows, of_last)?.f_reshape(size)?);
    }
    let operands = shorter.operands::<C>(arguments)?;
    let grads = [grad_output.as_ref(), grad_h, grad_c];
    let mut gradients = functions::backward::<C>(grads, &operands, &kept, needs, plan)?;
    if let Some(of_input) = gradients[place::INPUT].take() {
        let masked = shorter.masked(of_input)?;
        let is_whole = longest == steps;
        gradients[place::INPUT] =
            Some(if is_whole { masked } else { with_zeros(&masked, steps - longest)? });
    }
    Ok(gradients)
}

/// A copy of numbers on a device, for which the host does not wait.
fn on_device(numbers: &[i64], device: Device) -> Result<Tensor> {
    Ok(from_slice(numbers)?.f_to_device_(device, Kind::Int64, true, false)?)
}

/// Which steps are padding, `[T, B, 1]`.
fn padding(lengths: &Tensor, steps: i64) -> Result<Tensor> {
    let step = Tensor::f_arange(steps, (Kind::Int64, lengths.device()))?;
    Ok(step.f_unsqueeze(1)?.f_ge_tensor(lengths)?.f_unsqueeze(2)?)
}

/// All steps in plain tch operations: (h of all steps, the last state).
///
/// # Errors
/// If an operation of libtorch fails.
pub(in crate::ops) fn reference<C: Cell>(
    input: &Tensor,
    lengths: Option<&[i64]>,
    weights: &RnnWeights<'_>,
    state: State,
) -> Result<(Tensor, State)> {
    let Some(lengths) = lengths else {
        return cell::reference::<C>(input, weights, state, None);
    };
    let steps = input.size3()?.0;
    let longest = longest(lengths, steps);
    let padding = match are_equal(lengths) {
        true => None,
        false => Some(padding(&on_device(lengths, input.device())?, longest)?),
    };
    let input = input.f_narrow(0, 0, longest)?;
    let (output, state) = cell::reference::<C>(&input, weights, state, padding.as_ref())?;
    Ok((if longest < steps { with_zeros(&output, steps - longest)? } else { output }, state))
}
