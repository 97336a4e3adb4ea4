//! How a call of an operator becomes a node of the graph.

use super::{Again, Call, Meta, Operator, Second, Slots, describe};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, differentiate_reference};
use crate::ffi::tensor::{is_plain, plain};
use crate::{Error, Result};
use std::sync::atomic::AtomicBool;
use tch::Tensor;

/// A call of an operator. Its saved tensors are its arguments, what it keeps, and its outputs, in this
/// order; what the backward pass does not read is absent.
pub(super) struct Node<O: Operator> {
    operator: O,
    plan: O::Plan,
    /// What is known of the arguments, if there is a graph.
    known: Vec<Option<Meta<i64>>>,
    /// Whether a backward pass was allowed to overwrite what was saved.
    is_spent: AtomicBool,
}

impl<O: Operator> Node<O> {
    pub fn new(operator: O) -> Self {
        const {
            let (inputs, kept, outputs) =
                (O::In::NAMES.len(), O::Kept::NAMES.len(), O::Out::NAMES.len());
            assert!(
                inputs < 64 && outputs + kept < 64 && O::READS_OUTPUTS >> outputs == 0,
                "Operator: fewer than 64 arguments, and fewer than 64 outputs and kept tensors; READS_OUTPUTS has a bit for each output"
            );
        }
        Node { operator, plan: O::Plan::default(), known: Vec::new(), is_spent: false.into() }
    }

    const KEPT: usize = O::In::NAMES.len();
    const OUTPUTS: usize = Self::KEPT + O::Kept::NAMES.len();
}

/// Kinds and sizes of all arguments.
pub(super) fn known<O: Operator>(tensors: &[Option<&Tensor>]) -> Result<Vec<Option<Meta<i64>>>> {
    let describe = describe::<O>(tensors)?;
    let mut known = Vec::with_capacity(tensors.len());
    for index in 0..tensors.len() {
        known.push(describe(index)?);
    }
    Ok(known)
}

impl<O: Operator> Function for Node<O> {
    const NAME: &'static str = O::NAME;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let needs = O::In::each(|place| saver.needs_input_grad(place));
        let of = O::In::borrowed(O::NAME, &inputs)?;
        self.plan = self.operator.plan(&of, &needs)?;
        for (place, option) in self.operator.overwrites() {
            if saver.needs_input_grad(*place) {
                saver.check_in_place(*place, format_args!("{}: {option}", O::In::NAMES[*place]))?;
            }
        }
        if saver.needs_graph() {
            self.known = known::<O>(&inputs)?;
        }
        let known = saver.needs_graph().then_some(&self.known[..]);
        let (operator, plan) = (&self.operator, self.plan);
        let call = Call { operator, of, needs: &needs, plan, is_traced: false, known };
        let made = self.operator.forward(&call)?;
        let outputs = O::Out::descriptions(made.outputs);
        if saver.needs_graph() {
            let kept = O::Kept::items(made.kept);
            let overwritten = match kept.as_ref().iter().any(Option::is_some) {
                true => self.operator.overwrites(),
                false => &[],
            };
            let reads = O::In::items(self.operator.reads(&needs));
            for (place, (input, is_read)) in inputs.iter().zip(reads).enumerate() {
                let is_there = !overwritten.iter().any(|(overwritten, _)| *overwritten == place);
                let is_saved = is_there && (is_read || O::SECOND == Second::Reference);
                saver.save_optional(input.filter(|_| is_saved));
            }
            for kept in kept {
                saver.save_optional(kept.as_ref());
            }
            if O::READS_OUTPUTS != 0 {
                for (place, output) in outputs.as_ref().iter().enumerate() {
                    let is_read = O::READS_OUTPUTS >> place & 1 == 1;
                    saver.save_optional(output.as_ref().filter(|_| is_read));
                }
            }
            let constant = O::Out::CONSTANT | self.operator.constant_outputs(&needs);
            (0..O::Out::NAMES.len())
                .filter(|place| constant >> place & 1 == 1)
                .for_each(|place| saver.mark_non_differentiable(place));
            // Where nothing depends on an output, its gradient is absent.
            saver.set_materialize_grads(false);
        }
        let mut outputs = outputs.into_iter();
        Ok(match (outputs.next(), outputs.next()) {
            (Some(first), None) => first.into(),
            (first, second) => {
                first.into_iter().chain(second).chain(outputs).collect::<Vec<_>>().into()
            }
        })
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let is_recorded = ctx.create_graph();
        if is_recorded && O::SECOND == Second::Reference {
            let inputs =
                (0..Self::KEPT).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            for (place, option) in self.operator.overwrites() {
                if inputs[*place].is_none() && self.known[*place].is_some() {
                    return Err(overwritten::<O>(*place, option));
                }
            }
            return differentiate_reference(ctx, &inputs, grads, |inputs| {
                let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
                Ok(reference(&self.operator, &inputs)?.into())
            });
        }
        let needs = O::In::each(|place| ctx.needs_input_grad(place));
        let reads = O::In::items(self.operator.reads(&needs));
        let has_grads = O::Out::each(|place| grads.optional(place).is_some());
        let reads_for = self.operator.reads_for(&has_grads, &needs, &self.plan);
        let [is_read_argument, is_read_output, is_read_kept] =
            reads_for.map(|bits| move |place: usize| bits >> place & 1 == 1);
        let mut of = O::In::array(|_| None);
        for (place, (of, is_read)) in of.as_mut().iter_mut().zip(reads).enumerate() {
            if is_read && is_read_argument(place) {
                *of = ctx.saved_optional(place)?;
            }
        }
        let mut kept = O::Kept::array(|_| None);
        {
            // What is kept is no part of a graph: a constant where gradients are recorded.
            let _no_grad = is_recorded.then(tch::no_grad_guard);
            for (place, kept) in kept.as_mut().iter_mut().enumerate() {
                if is_read_kept(place) {
                    *kept = as_made(ctx.saved_optional(Self::KEPT + place)?)?;
                }
            }
        }
        let mut outputs = O::Out::array(|_| None);
        if O::READS_OUTPUTS != 0 {
            for (place, output) in outputs.as_mut().iter_mut().enumerate() {
                if is_read_output(place) {
                    *output = ctx.saved_optional(Self::OUTPUTS + place)?;
                }
            }
        }
        let again = Again {
            of: O::In::each(|place| of.as_mut()[place].take()),
            kept: O::Kept::each(|place| kept.as_mut()[place].take()),
            outputs: O::Out::each(|place| outputs.as_mut()[place].take()),
            known: &self.known,
            needs,
            plan: self.plan,
            is_recorded,
            is_traced: false,
            is_last: ctx.is_last_backward(),
            owned: ctx.owned_gradients(),
            is_spent: Some(&self.is_spent),
        };
        let incoming = O::Out::each(|place| grads.optional(place).map(Tensor::shallow_clone));
        let gradients = O::In::items(self.operator.backward(incoming, again)?);
        Ok(gradients.into_iter().collect::<Vec<_>>().into())
    }
}

/// What was kept, as the forward pass made it: hooks on saved tensors may lay it out in another way.
fn as_made(kept: Option<Tensor>) -> Result<Option<Tensor>> {
    kept.map(|kept| if is_plain(&kept) { Ok(kept) } else { plain(&kept) }).transpose()
}

fn overwritten<O: Operator>(place: usize, option: &str) -> Error {
    Error::Autograd(format!(
        "{}: {}: expected to be there for a second derivative, but its gradient is in its place; leave \
         {option} off",
        O::NAME,
        O::In::NAMES[place],
    ))
}

/// The outputs by the operator's reference.
pub(super) fn reference<O: Operator>(
    operator: &O,
    inputs: &[Option<&Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let outputs = operator.reference(&O::In::borrowed(O::NAME, inputs)?)?;
    Ok(O::Out::owned(outputs).into_iter().collect())
}
