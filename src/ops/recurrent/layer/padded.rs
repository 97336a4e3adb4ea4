//! Sequences of different lengths in one batch, padded to the longest.
//!
//! What the kernels compute for a padded step must not matter. Its input becomes zero, whatever it
//! was, and its output is replaced by zero, so no gradient reaches it. The last h of a sequence is
//! the output of its last step; the last c needs gates that keep it ([`Cell::KEEPS_STATE`]).

use super::{Cell, RnnWeights, State, apply_layer, arguments_of, check_arguments, reference};
use crate::ffi::tensor::from_slice;
use crate::{Error, Result};
use tch::{Device, Tensor};

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

/// A layer over sequences of different lengths: (h of all steps, the last h, the last c).
///
/// # Errors
/// See the operators.
pub(in crate::ops) fn f_padded<C: Cell>(
    input: &Tensor,
    lengths: &[i64],
    weights: &RnnWeights<'_>,
    h: &Tensor,
    c: Option<&Tensor>,
) -> Result<(Tensor, State)> {
    check_arguments::<C>(&arguments_of(input, weights, h, c))?;
    let (steps, batch, _) = input.size3()?;
    check_lengths(C::OP, lengths, steps, batch)?;
    // No sequence reads the steps after the longest one.
    let longest = lengths.iter().copied().max().unwrap_or(steps);
    let input = input.f_narrow(0, 0, longest)?;
    let (output, state) = if lengths.iter().all(|&length| length == longest) {
        apply_layer::<C>(&arguments_of(&input, weights, h, c), None, true)?
    } else {
        of_different_lengths::<C>(&input, lengths, weights, h, c)?
    };
    if longest == steps {
        return Ok((output, state));
    }
    Ok((output.f_constant_pad_nd([0, 0, 0, 0, 0, steps - longest])?, state))
}

fn of_different_lengths<C: Cell>(
    input: &Tensor,
    lengths: &[i64],
    weights: &RnnWeights<'_>,
    h: &Tensor,
    c: Option<&Tensor>,
) -> Result<(Tensor, State)> {
    let device = input.device();
    if device.is_cuda() && C::CUDA.is_none() {
        // cuDNN's kernels, the only ones in such a build, have no gates that keep c.
        return padded_reference::<C>(
            input,
            lengths,
            weights,
            (h.shallow_clone(), c.map(Tensor::shallow_clone)),
        );
    }
    let (steps, batch, _) = input.size3()?;
    let padding = padding(lengths, steps, device)?;
    let zeroed = input.f_masked_fill(&padding, 0.0)?;
    let arguments = arguments_of(&zeroed, weights, h, c);
    let of_cell = Some(&padding).filter(|_| !C::KEEPS_STATE.is_empty());
    let (output, (_, last_c)) = apply_layer::<C>(&arguments, of_cell, true)?;
    let hidden = output.size3()?.2;
    let last = last_rows(lengths, batch, device)?;
    let last_h = output.f_reshape([steps * batch, hidden])?.f_index_select(0, &last)?;
    Ok((output.f_masked_fill(&padding, 0.0)?, (last_h, last_c)))
}

/// The last step of each sequence, among the rows of all steps, `[T·B, …]`.
pub(super) fn last_rows(lengths: &[i64], batch: i64, device: Device) -> Result<Tensor> {
    let last: Vec<i64> =
        lengths.iter().zip(0..).map(|(length, row)| (length - 1) * batch + row).collect();
    Ok(from_slice(&last)?.f_to_device(device)?)
}

/// Which steps are padding, `[T, B, 1]`.
pub(super) fn padding(lengths: &[i64], steps: i64, device: Device) -> Result<Tensor> {
    let lengths = from_slice(lengths)?.f_to_device(device)?;
    let step = Tensor::f_arange(steps, (tch::Kind::Int64, device))?;
    Ok(step.f_unsqueeze(1)?.f_ge_tensor(&lengths)?.f_unsqueeze(2)?)
}

/// [`f_padded`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub(in crate::ops) fn padded_reference<C: Cell>(
    input: &Tensor,
    lengths: &[i64],
    weights: &RnnWeights<'_>,
    state: State,
) -> Result<(Tensor, State)> {
    let padding = padding(lengths, input.size3()?.0, input.device())?;
    reference::<C>(input, weights, state, Some(&padding))
}
