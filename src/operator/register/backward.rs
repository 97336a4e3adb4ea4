//! The registered operator `x_backward`.

use super::dispatched::Dispatched;
use super::forward::{ABSENT, check_kinds, first, read_needs};
use super::{differentiable, give, name_of_grad, read, refer, with_gradient};
use crate::ffi::define::{Borrowed, Call as Frame};
use crate::ffi::tensor::{has_shape, plain};
use crate::library::{SymInt, empty};
use crate::operator::node::known;
use crate::operator::traced::{self, Needs, empty_like, is_needed, kernel, returned};
use crate::operator::{
    Again, Meta, Metas, Operator, Slots, constants, known_metas, with_constants,
};
use crate::{Error, Result};
use tch::Tensor;

/// The arguments of `x_backward` before those of `x`: incoming gradients, and what is kept.
struct First<'c> {
    grads: Vec<Option<Borrowed<'c>>>,
    kept: Vec<Option<Borrowed<'c>>>,
}

impl<'c> First<'c> {
    fn read<O: Operator>(frame: &'c Frame<'_>, index: &mut usize) -> Result<Self> {
        let mut tensors = |count: usize| {
            let range = *index..*index + count;
            *index = range.end;
            range.map(|index| frame.argument(index).tensor_or_none()).collect::<Result<Vec<_>>>()
        };
        let grads = tensors(O::Out::NAMES.len())?;
        let mut kept = tensors(traced::kept::<O>().count())?;
        // Outputs that are read come first. They are never absent.
        let outputs = O::READS_OUTPUTS.count_ones() as usize;
        for kept in &mut kept[outputs..] {
            let _ = kept.take_if(|kept| kept.dim() == ABSENT && kept.numel() == 0);
        }
        Ok(First { grads, kept })
    }
}

/// Reads all arguments of `x_backward`, and runs `body`.
fn read_all<O: Operator, T>(
    frame: &Frame<'_>,
    body: impl FnOnce(O, &First<'_>, &[Option<&Tensor>], Needs) -> Result<T>,
) -> Result<T> {
    let mut index = 0;
    let before = First::read::<O>(frame, &mut index)?;
    read::<O, _>(frame, &mut index, |operator, tensors, index| {
        body(operator, &before, tensors, read_needs(frame, index)?)
    })
}

pub(super) fn backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let gradients = read_all::<O, _>(frame, |operator, before, tensors, needs| {
        let like = first(tensors)?;
        kernel(|| {
            let found = gradients(&operator, before, tensors, needs)?;
            let (grads, kept) = (refer(&before.grads), refer(&before.kept));
            let others = tensors.iter().chain(&grads).chain(&kept).flatten().copied();
            let found = found.into_iter().zip(grads_like::<O>(&grads));
            let found = returned(found, &others.collect::<Vec<_>>())?;
            let nothing = || traced::nothing(like);
            found
                .into_iter()
                .map(|gradient| gradient.map_or_else(nothing, Ok))
                .collect::<Result<Vec<_>>>()
        })
    })?;
    give(frame, gradients.into_iter().map(Some))
}

/// For each argument with a gradient, the incoming gradient that it is laid out like.
fn grads_like<'a, O: Operator>(
    grads: &[Option<&'a Tensor>],
) -> impl Iterator<Item = Option<&'a Tensor>> {
    differentiable::<O>().map(|argument| {
        let found = O::LAID_OUT_LIKE.iter().find(|(_, place)| *place == argument);
        found.and_then(|(output, _)| grads[*output])
    })
}

/// Checks that incoming gradients are like the outputs, and what was kept as the rule says: kernels read
/// them by address, and anybody may call the registered operator. Returns which of what was kept the rule
/// knows, for these gradients or, since the forward pass may have been asked for more, for all.
fn fits<O: Operator>(
    operator: &O,
    before: &First<'_>,
    metas: &Metas<O, i64>,
    needs: &crate::operator::Needs<O>,
) -> Result<Vec<bool>> {
    let described = |needs: &crate::operator::Needs<O>| -> Result<Vec<Option<Meta<i64>>>> {
        let said = operator.rule(metas, needs)?;
        let outputs = O::Out::descriptions(said.outputs).into_iter();
        Ok(outputs.chain(O::Kept::items(said.kept)).collect())
    };
    let mut said = described(needs)?;
    let kept = refer(&before.kept);
    let is_unsaid = |place: usize, kept: &Option<&Tensor>| kept.is_some() && said[place].is_none();
    if traced::kept::<O>().zip(&kept).any(|(place, kept)| is_unsaid(place, kept)) {
        let all = described(&O::In::each(|_| true))?;
        said = said.into_iter().zip(all).map(|(needed, all)| needed.or(all)).collect();
    }
    for (place, grad) in refer(&before.grads).into_iter().enumerate() {
        like::<O>(grad, said[place].as_ref(), || name_of_grad::<O>(place))?;
    }
    let name = |place: usize| O::Out::NAMES.iter().chain(O::Kept::NAMES).nth(place);
    let mut is_known = Vec::with_capacity(kept.len());
    for (place, kept) in traced::kept::<O>().zip(kept) {
        let name = || format!("kept_{}", name(place).unwrap_or(&""));
        like::<O>(kept, said[place].as_ref(), name)?;
        is_known.push(said[place].is_some());
    }
    Ok(is_known)
}

/// Checks that a tensor that is there has the kind, device and sizes that the rule says, if it says any.
fn like<O: Operator>(
    tensor: Option<&Tensor>,
    said: Option<&Meta<i64>>,
    name: impl Fn() -> String,
) -> Result<()> {
    let Some((tensor, said)) = tensor.zip(said) else { return Ok(()) };
    let (kind, device) = (tensor.f_kind()?, tensor.device());
    if (kind, device) == (said.kind(), said.device()) && has_shape(tensor, said.sizes()) {
        return Ok(());
    }
    let text = |kind, device, sizes: &[i64]| format!("{kind:?} {device:?} {sizes:?}");
    let expected = text(said.kind(), said.device(), said.sizes());
    let got = text(kind, device, &tensor.size());
    let hint = format!("pass what belongs to the results of {}", O::NAME);
    Err(Error::argument(O::BACKWARD, &name(), expected, got, hint))
}

/// The gradients of the arguments that have some; those that are not needed are absent.
fn gradients<O: Operator>(
    operator: &O,
    before: &First<'_>,
    tensors: &[Option<&Tensor>],
    asked: Needs,
) -> Result<Vec<Option<Tensor>>> {
    let of_call = O::In::borrowed(O::NAME, tensors)?;
    check_kinds(O::BACKWARD, operator, &of_call)?;
    let needs = O::In::each(|place| is_needed(asked, place));
    let reads = O::In::items(operator.reads_in_trace(&needs));
    let known = known::<O>(tensors)?;
    let is_known = fits(operator, before, &known_metas::<O>(&known)?, &needs)?;
    let own = |tensor: Option<&Tensor>| tensor.map(Tensor::shallow_clone);
    let mut results: Vec<Option<Tensor>> = (0..Dispatched::<O>::RESULTS).map(|_| None).collect();
    let kept = traced::kept::<O>().zip(refer(&before.kept));
    for ((place, tensor), _) in kept.zip(is_known).filter(|(_, is_known)| *is_known) {
        // As the forward pass made it, also if the caller has laid it out in another way.
        results[place] = tensor.map(plain).transpose()?;
    }
    let (outputs, kept) = results.split_at_mut(Dispatched::<O>::OUTPUTS);
    let again = Again {
        of: O::In::each(|place| own(tensors[place].filter(|_| reads.as_ref()[place]))),
        kept: O::Kept::each(|place| kept[place].take()),
        outputs: O::Out::each(|place| outputs[place].take()),
        known: &known,
        plan: operator.plan(&of_call, &needs)?,
        needs,
        is_recorded: false,
        is_traced: true,
        is_last: false,
        owned: 0,
        is_spent: None,
    };
    let grads = O::Out::each(|place| own(before.grads[place].as_deref()));
    let gradients = O::In::items(operator.backward(grads, again)?).into_iter().enumerate();
    let needed = gradients.map(|(place, gradient)| match (gradient, tensors[place]) {
        (gradient, Some(tensor)) if is_needed(asked, place) => match gradient {
            Some(gradient) => Ok(Some(gradient)),
            // An absent gradient means zero. What is traced expects its shape.
            None => Ok(Some(tensor.f_zeros_like()?)),
        },
        _ => Ok(None),
    });
    let needed = needed.collect::<Result<Vec<_>>>()?;
    Ok(with_gradient::<O>(needed).collect())
}

pub(super) fn fake_backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let gradients = read_all::<O, _>(frame, |_, before, tensors, needs| {
        let like = first(tensors)?;
        let grads = refer(&before.grads);
        differentiable::<O>()
            .zip(grads_like::<O>(&grads))
            .map(|(place, grad)| match tensors[place].filter(|_| is_needed(needs, place)) {
                Some(tensor) => match grad {
                    Some(grad) => empty_like(grad, tensor.f_kind()?),
                    None => empty(&crate::library::sizes(tensor), tensor.f_kind()?, tensor),
                },
                None => empty(&[SymInt::from(0)], like.f_kind()?, like),
            })
            .collect::<Result<Vec<_>>>()
    })?;
    give(frame, gradients.into_iter().map(Some))
}

pub(super) fn autograd_of_backward<O: Operator>(frame: &mut Frame<'_>) -> Result<()> {
    let gradients = read_all::<O, _>(frame, |operator, before, tensors, needs| {
        let (grads, kept) = (refer(&before.grads), refer(&before.kept));
        let constants = constants::<O>(tensors)?;
        let tensors = with_constants(tensors, &constants);
        let all = traced::gradients(operator, &grads, &kept, &tensors, needs)?;
        Ok(with_gradient::<O>(all).collect::<Vec<_>>())
    })?;
    give(frame, gradients)
}
