//! What autocast casts of a layer.

use super::KINDS;
use crate::Result;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::dispatch::promote;
use std::ops::Range;
use tch::{Kind, Tensor};

/// A layer's tensors as libtorch's layer has them in an autocast region, or `None` outside. At `state` are
/// h and, for an LSTM, c. `has_lengths` says whether it is a layer of padded sequences.
///
/// On libtorch's lists are cuDNN's layers and, of oneDNN's, the LSTM: all their tensors are cast. What it
/// computes in another way on the CPU, a GRU and packed sequences, consists of products, whose operands are
/// cast, and of operations that promote: the outputs have the state's kind. The kernels here take tensors
/// of one kind, and multiply half kinds as `Float`, so the operands are rounded to autocast's kind and then
/// have the state's.
///
/// # Errors
/// An error of libtorch.
pub(super) fn cast(
    tensors: &[Option<&Tensor>],
    state: Range<usize>,
    has_lengths: bool,
) -> Result<Option<Vec<Option<Tensor>>>> {
    let Some(mut cast) = autocast_inputs(CastPolicy::LowerPrecision, tensors)? else {
        return Ok(None);
    };
    let states: Vec<&Tensor> = tensors[state.clone()].iter().copied().flatten().collect();
    let (Some(operand), Some(last)) = (cast.iter().flatten().next(), states.last()) else {
        return Ok(Some(cast));
    };
    let is_on_a_list = last.device().is_cuda() || (states.len() == 2 && !has_lengths);
    let operand = operand.f_kind()?;
    let is_half = matches!(operand, Kind::Half | Kind::BFloat16);
    // Autocast casts no `Double`. What does not fit together is refused later.
    let is_foreign = tensors.iter().flatten().any(|tensor| !KINDS.contains(&tensor.kind()));
    if is_on_a_list
        || !is_half
        || is_foreign
        || states.iter().any(|state| state.kind() == Kind::Double)
    {
        return Ok(Some(cast));
    }
    let kind = promote(operand, last.f_kind()?);
    for (place, tensor) in cast.iter_mut().enumerate() {
        let given = if state.contains(&place) { tensors[place] } else { tensor.as_ref() };
        *tensor = given.map(|given| given.f_to_kind(kind)).transpose()?;
    }
    Ok(Some(cast))
}
