//! The registered operators `x` and `x_forward`.

use super::{VMAP_MODE, dispatched::Dispatched, give, read, refer_own};
use crate::autograd::Inputs;
use crate::ffi::define::Call as Frame;
use crate::ffi::tensor::kind;
use crate::library::{SymInt, empty, without_key};
use crate::operator::node::known;
use crate::operator::traced::{
    self, Needs, below, empty_like, is_eager, is_needed, kernel, laid_out_like, returned,
    with_casts,
};
use crate::operator::{Args, Call, Meta, Metas, Operator, Slots, call, constants, with_constants};
use crate::{Error, Result};
use tch::Tensor;

fn eager<O: Operator>(operator: O, tensors: &[Option<&Tensor>]) -> Result<Vec<Option<Tensor>>> {
    let outputs = call(operator, &O::In::borrowed(O::NAME, tensors)?)?;
    laid_out::<O>(O::Out::owned(outputs), tensors)
}

/// The outputs as a fake kernel describes them: contiguous, or like an argument.
fn laid_out<O: Operator>(
    outputs: impl IntoIterator<Item = Option<Tensor>>,
    tensors: &[Option<&Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let one = |(place, output): (usize, Option<Tensor>)| {
        output.map(|output| laid_out_like(output, argument_like::<O>(place, tensors))).transpose()
    };
    outputs.into_iter().enumerate().map(one).collect()
}

/// The argument that an output is laid out like.
fn argument_like<'a, O: Operator>(
    output: usize,
    tensors: &[Option<&'a Tensor>],
) -> Option<&'a Tensor> {
    let found = O::LAID_OUT_LIKE.iter().find(|(place, _)| *place == output);
    found.and_then(|(_, argument)| tensors[*argument])
}

/// `x` for a device.
pub(super) fn own<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs =
        read::<O, _>(frame, &mut 0, |operator, tensors, _| below(|| eager(operator, tensors)))?;
    give(frame, outputs)
}

/// `x` where there may be a graph: the operator with its own node, or the registered operators.
pub(super) fn autograd<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if is_eager(tensors) {
            return eager(operator, tensors);
        }
        if let Some(outputs) = composed(&operator, tensors)? {
            return Ok(outputs);
        }
        // Autocast is off here, or has made its casts: these are the operator's own.
        let cast = operator.cast(&O::In::borrowed(O::NAME, tensors)?)?;
        let cast = cast.as_deref().map(refer_own);
        let tensors = cast.as_deref().unwrap_or(tensors);
        let constants = constants::<O>(tensors)?;
        traced::traced(operator, &with_constants(tensors, &constants))
    })?;
    give(frame, outputs)
}

fn composed<O: Operator>(
    operator: &O,
    tensors: &[Option<&Tensor>],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let outputs = operator.composed(&O::In::borrowed(O::NAME, tensors)?, true)?;
    outputs.map(|outputs| laid_out::<O>(O::Out::owned(outputs), tensors)).transpose()
}

/// `x` within vmap if it draws random numbers: its composition, whose operators draw them by the rules
/// of vmap.
pub(super) fn seeded<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if let Some(outputs) = composed(&operator, tensors)? {
            return Ok(outputs);
        }
        let call = || Dispatched(&operator).call(Inputs::new(tensors));
        Ok(without_key(VMAP_MODE, call)?.into_iter().map(Some).collect())
    })?;
    give(frame, outputs)
}

/// `x` under autocast: the operator with casts of its arguments.
pub(super) fn autocast<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs: Vec<Tensor> = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        let cast = operator.cast(&O::In::borrowed(O::NAME, tensors)?)?;
        with_casts(tensors, cast, |tensors| Dispatched(&operator).call(tensors))
    })?;
    give(frame, outputs.into_iter().map(Some))
}

/// `x` while a program is traced: tensors with kinds and sizes alone.
pub(super) fn fake<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let outputs = read::<O, _>(frame, &mut 0, |operator, tensors, _| {
        if !O::IS_SEEDED
            && let Some(outputs) = composed(&operator, tensors)?
        {
            return Ok(outputs);
        }
        let made = made::<O>(&operator, tensors, 0, O::Out::NAMES.len())?;
        Ok(made.into_iter().map(Some).collect())
    })?;
    give(frame, outputs)
}

/// The first of the outputs and of what is kept, as the rule says.
fn made<O: Operator>(
    operator: &O,
    tensors: &[Option<&Tensor>],
    needs: Needs,
    count: usize,
) -> Result<Vec<Tensor>> {
    let like = first(tensors)?;
    let needs = O::In::each(|place| is_needed(needs, place));
    let made = operator.rule(&symbols::<O>(tensors)?, &needs)?;
    let outputs = O::Out::descriptions(made.outputs).into_iter();
    let all = outputs.chain(O::Kept::items(made.kept)).take(count);
    all.enumerate()
        .map(|(place, meta): (usize, Option<Meta<SymInt>>)| {
            match (meta, argument_like::<O>(place, tensors)) {
                (Some(meta), Some(argument)) => empty_like(argument, meta.kind()),
                (Some(meta), None) => meta.fake(like),
                (None, _) => empty(&[const { 0 }; ABSENT].map(SymInt::from), like.f_kind()?, like),
            }
        })
        .collect()
}

fn symbols<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Metas<O, SymInt>> {
    O::In::described(O::NAME, |index| {
        let tensor = tensors.get(index).copied().flatten();
        tensor.map(|tensor| Meta::of(O::NAME, O::In::NAMES[index], tensor)).transpose()
    })
}

/// The number of dimensions of an empty tensor in the place of one that was not kept. No operator
/// keeps an empty tensor with so many.
pub(super) const ABSENT: usize = 16;

pub(super) fn first<'a>(tensors: &[Option<&'a Tensor>]) -> Result<&'a Tensor> {
    let none = || Error::msg("internal error: an operator without tensors");
    tensors.iter().flatten().next().copied().ok_or_else(none)
}

/// Refuses arguments that the operator would cast first: `x` casts, and the others follow its rule.
pub(super) fn check_kinds<O: Operator>(name: &str, operator: &O, of: &Args<'_, O>) -> Result<()> {
    let cast = operator.cast(of)?.unwrap_or_default();
    let tensors = O::In::tensors(of);
    let is_changed = |(cast, tensor): (&Option<Tensor>, &Option<&Tensor>)| {
        cast.as_ref().zip(*tensor).is_some_and(|(cast, tensor)| kind(cast) != kind(tensor))
    };
    match cast.iter().zip(tensors.as_ref()).any(is_changed) {
        false => Ok(()),
        true => Err(Error::msg(format!(
            "{name}: expected the dtypes to which {} casts its arguments; call {}",
            O::NAME,
            O::NAME
        ))),
    }
}

/// Which gradients are needed: the next argument.
pub(super) fn read_needs(frame: &Frame<'_>, index: &mut usize) -> Result<Needs> {
    *index += 1;
    frame.argument(*index - 1).int()
}

pub(super) fn forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let asked = read_needs(frame, index)?;
        let needs = O::In::each(|place| is_needed(asked, place));
        let like = first(tensors)?;
        kernel(|| {
            // The rule runs here and in the operator, on facts that are looked up once.
            let known = known::<O>(tensors)?;
            let of = O::In::borrowed(O::NAME, tensors)?;
            check_kinds(O::FORWARD, &operator, &of)?;
            let plan = operator.plan(&of, &needs)?;
            let (operator, needs, known) = (&operator, &needs, Some(&known[..]));
            let call = Call { operator, of, needs, plan, is_traced: true, known };
            let said = O::Kept::items(call.check()?.kept);
            let made = operator.forward(&call)?;
            let mut results = laid_out::<O>(O::Out::descriptions(made.outputs), tensors)?;
            let others: Vec<&Tensor> =
                tensors.iter().chain(&refer_own(&results)).flatten().copied().collect();
            let kept =
                returned(O::Kept::items(made.kept).into_iter().map(|kept| (kept, None)), &others)?;
            for ((kept, said), name) in kept.into_iter().zip(said).zip(O::Kept::NAMES) {
                if kept.is_some() && said.is_none() {
                    return Err(Error::msg(format!(
                        "{}: {name} is kept, of which a program that is traced knows nothing; call {}",
                        O::FORWARD,
                        O::NAME
                    )));
                }
                results.push(Some(match kept {
                    Some(kept) => kept,
                    None => Tensor::f_empty([0; ABSENT], (like.f_kind()?, like.device()))?,
                }));
            }
            Ok(results)
        })
    })?;
    give(frame, results)
}

pub(super) fn fake_forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        made::<O>(&operator, tensors, needs, O::Out::NAMES.len() + O::Kept::NAMES.len())
    })?;
    give(frame, results.into_iter().map(Some))
}

pub(super) fn autograd_of_forward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let results = read::<O, _>(frame, &mut 0, |operator, tensors, index| {
        let needs = read_needs(frame, index)?;
        let constants = constants::<O>(tensors)?;
        traced::forwarded(operator, &with_constants(tensors, &constants), needs)
    })?;
    give(frame, results)
}
