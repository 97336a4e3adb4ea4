//! A layer as an [`Operator`]: its rule, its plan, and its two directions.

use super::functions::Kept;
use super::libtorch::are_flat_for_cudnn;
use super::plan::{Choice, Library, cpu_library, is_step_cheapest, library};
use super::{Arguments, Cell, KINDS, Needs, absent, autocast, padded, place};
use crate::Result;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Operator, Outputs, Slots,
};
use crate::ops::kinds;
use crate::ops::recurrent::RnnWeights;
use crate::ops::recurrent::operands::copied;
use crate::ops::recurrent::plan::{Sizes, is_half};
use tch::Tensor;

crate::slots! {
    /// What a layer keeps. Our kernels keep the same in every way: c of all steps, `[T, B, H]`, if
    /// there is one, and the values that the cell saves, `[T, B, V·H]`. A library keeps what it asks for.
    pub struct States { c, activations }
}

/// What a call decides for both of its passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plan {
    pub(super) choice: Choice,
    pub(super) library: Library,
}

/// A cell whose layer is an operator.
pub(in crate::ops) trait Layer: Cell + Operator<Kept = States, Plan = Plan> {
    /// The lengths of the sequences, if the caller named them.
    fn lengths(&self) -> Option<&[i64]>;
}

/// Implements [`Operator`] for a cell whose arguments, with or without c, and results have these names.
macro_rules! operator {
    ($cell:ident: $in:ident -> $out:ident, $($c:ident)?) => {
        impl layer::Layer for $cell {
            fn lengths(&self) -> Option<&[i64]> {
                self.lengths.as_deref()
            }
        }

        impl Operator for $cell {
            type Kept = layer::States;
            type Plan = layer::Plan;

            const READS_OUTPUTS: u64 = 1;

            fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
                layer::cast(self, of)
            }

            fn plan(&self, of: &Args<'_, Self>, needs: &Needs<Self>) -> Result<layer::Plan> {
                layer::plan(self, of, Self::needs(needs).contains(&true))
            }

            fn rule<D: Dim>(
                &self,
                of: &Metas<Self, D>,
                needs: &Needs<Self>,
            ) -> Result<Made<Self, Meta<D>>> {
                let $in { input, h, $($c,)? w_ih, w_hh, b_ih, b_hh } = of;
                let c = None$(.or(Some($c)))?;
                let is_kept = Self::needs(needs).contains(&true);
                layer::rule(self, input, (h, c), [w_ih, w_hh], [b_ih, b_hh], is_kept)
            }

            fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
                layer::forward(self, call)
            }

            fn backward(
                &self,
                grads: Incoming<Self>,
                again: Again<'_, Self>,
            ) -> Result<Gradients<Self>> {
                let $in { input, h, $($c,)? w_ih, w_hh, b_ih, b_hh } = &again.of;
                let c = None$(.or($c.as_ref()))?;
                let [input, h, w_ih, w_hh, b_ih, b_hh] =
                    [input, h, w_ih, w_hh, b_ih, b_hh].map(Option::as_ref);
                let (arguments, needs) =
                    ([input, h, c, w_ih, w_hh, b_ih, b_hh], Self::needs(&again.needs));
                let output = again.outputs.output.as_ref();
                layer::backward(self, grads, &arguments, &needs, output, &again)
            }

            fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
                layer::reference_of(self, of)
            }
        }

        impl $cell {
            fn needs(needs: &Needs<Self>) -> layer::Needs {
                let $in { input, h, $($c,)? w_ih, w_hh, b_ih, b_hh } = *needs;
                let c = false $(|| $c)?;
                [input, h, c, w_ih, w_hh, b_ih, b_hh]
            }
        }
    };
}
pub(in crate::ops) use operator;

/// The places of the arguments that a cell's layer has.
fn places<C: Cell>() -> impl Iterator<Item = usize> {
    (0..place::LEN).filter(|place| !C::STATE_IS_H || *place != place::C)
}

fn arguments<'a, C: Layer>(of: &Args<'a, C>) -> Arguments<'a> {
    let mut arguments = [None; place::LEN];
    for (place, tensor) in places::<C>().zip(C::In::tensors(of)) {
        arguments[place] = tensor;
    }
    arguments
}

pub(in crate::ops) fn cast<C: Layer>(
    cell: &C,
    of: &Args<'_, C>,
) -> Result<Option<Vec<Option<Tensor>>>> {
    let states = place::H..if C::STATE_IS_H { place::C } else { place::C + 1 };
    autocast::cast(C::In::tensors(of).as_ref(), states, cell.lengths().is_some())
}

/// Decides who computes a layer. Arguments that do not fit are refused later.
pub(in crate::ops) fn plan<C: Layer>(cell: &C, of: &Args<'_, C>, keep: bool) -> Result<Plan> {
    let (arguments, choice) = (arguments::<C>(of), Choice::now());
    let ours = Plan { choice, library: Library::Ours };
    let Some((sizes, kind, device)) = sizes::<C>(&arguments, cell.lengths()) else {
        return Ok(ours);
    };
    let library = match cell.lengths() {
        // A library's kernels keep no state but h.
        Some(lengths) if !C::STATE_IS_H && !padded::are_equal(lengths) => Library::Ours,
        _ if device.is_cuda() => {
            let is_flat = || are_flat_for_cudnn(&arguments);
            library::<C>(choice, sizes, kind, device, keep, is_flat)?
        }
        _ => cpu_library::<C>(choice, sizes, kind, keep),
    };
    Ok(Plan { library, ..ours })
}

/// Sizes, kind and device of a layer that has anything to compute, as far as they make sense.
fn sizes<C: Cell>(
    arguments: &Arguments<'_>,
    lengths: Option<&[i64]>,
) -> Option<(Sizes, kinds::Kind, kinds::Device)> {
    let (input, h) = (arguments[place::INPUT]?, arguments[place::H]?);
    let (steps, batch, features) = input.size3().ok()?;
    let steps = lengths.map_or(steps, |lengths| padded::longest(lengths, steps));
    let (hidden, kind) = (h.size2().ok()?.1, kinds::Kind::of(h.f_kind().ok()?).ok()?);
    let count = steps.checked_mul(batch)?.checked_mul(hidden.checked_mul(C::GATES)?)?;
    let device = kinds::Device::from(h.device());
    let makes_sense = count > 0 && (device == kinds::Device::Cpu || C::CUDA.is_some());
    makes_sense.then_some((Sizes { steps, batch, features, hidden }, kind, device))
}

/// Whether a traced backward pass computes the forward pass once more. On the CPU it does in half kinds: they
/// are computed as `Float`, and so are the values that are kept; a trace does not know the device, and so not
/// their kind. On CUDA it does where we have no kernel for all steps, because cuDNN is faster even so. Both passes
/// must decide alike.
fn is_repeated<C: Layer>(cell: &C, arguments: &Arguments<'_>) -> Result<bool> {
    let Some((sizes, kind, device)) = sizes::<C>(arguments, cell.lengths()) else {
        return Ok(false);
    };
    match device {
        kinds::Device::Cpu => Ok(is_half(kind)),
        _ => is_step_cheapest::<C>(sizes, kind, device),
    }
}

/// The plan where a program may be traced, and whether the backward pass computes the forward pass once more. A trace
/// knows what our kernels keep, and nothing of what a library asks for.
fn in_trace<C: Layer>(
    cell: &C,
    arguments: &Arguments<'_>,
    plan: Plan,
    is_traced: bool,
) -> Result<(Plan, bool)> {
    let is_repeated = is_traced && is_repeated(cell, arguments)?;
    let library = if is_traced && !is_repeated { Library::Ours } else { plan.library };
    Ok((Plan { library, ..plan }, is_repeated))
}

pub(in crate::ops) fn rule<C: Layer, D: Dim>(
    cell: &C,
    input: &Meta<D>,
    (h, c): (&Meta<D>, Option<&Meta<D>>),
    [w_ih, w_hh]: [&Meta<D>; 2],
    biases: [&Option<Meta<D>>; 2],
    is_kept: bool,
) -> Result<Made<C, Meta<D>>> {
    input.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
    h.dim(2, "[B, H]")?;
    let [steps, batch, features] = [0, 1, 2].map(|dim| input.sizes()[dim].clone());
    let hidden = h.sizes()[1].clone();
    // An input without features may have any number of steps.
    let too_large = || {
        let sizes = format!("T = {steps:?}, B = {batch:?}, H = {hidden:?}");
        input.refuse("sizes whose products fit 64 bits", sizes, "")
    };
    let rows = D::product(&[hidden.clone(), D::from(C::GATES)]).ok_or_else(too_large)?;
    let of_steps = D::product(&[steps.clone(), batch.clone()]).ok_or_else(too_large)?;
    D::product(&[of_steps, rows.clone()]).ok_or_else(too_large)?;
    let state = [batch.clone(), hidden.clone()];
    let states = [Some(h), c].into_iter().flatten().map(|of| (of, "[B, H]", &state[..]));
    let [of_w_ih, of_w_hh, of_bias] = C::PARAMETERS;
    let (in_w_ih, in_w_hh) = ([rows.clone(), features], [rows.clone(), hidden.clone()]);
    let weights = [(w_ih, of_w_ih, &in_w_ih[..]), (w_hh, of_w_hh, &in_w_hh[..])];
    let in_bias = [rows];
    let biases = biases.into_iter().flatten().map(|bias| (bias, of_bias, &in_bias[..]));
    for (argument, names, shape) in states.chain(weights).chain(biases) {
        argument.like(input)?.shape(names, shape)?;
    }
    let mut kept_steps = steps.clone();
    if let Some(lengths) = cell.lengths() {
        let known = (steps.number().unwrap_or(i64::MAX), batch.number());
        padded::check_lengths(C::OP, lengths, known.0, known.1.unwrap_or(lengths.len() as i64))?;
        if !lengths.is_empty() {
            kept_steps = D::from(padded::longest(lengths, known.0));
        }
    }
    let sized = |steps: &D, columns: D| input.sized([steps.clone(), batch.clone(), columns]);
    let mut outputs = [Some(sized(&steps, hidden.clone())), Some(h.clone()), c.cloned()];
    let c = c.map(|_| sized(&kept_steps, hidden.clone()));
    let activations = sized(&kept_steps, hidden.clone() * D::from(C::CPU.shape.saved));
    let mut kept = [c, Some(activations)].map(|kept| kept.filter(|_| is_kept));
    Ok(Made {
        outputs: C::Out::described(C::OP, |index| Ok(outputs[index].take()))?,
        kept: States::each(|index| kept[index].take()),
    })
}

pub(in crate::ops) fn forward<C: Layer>(cell: &C, call: &Call<'_, C>) -> Result<Made<C, Tensor>> {
    let States { c, activations } = call.check()?.kept;
    let (arguments, keep) = (arguments::<C>(&call.of), activations.is_some());
    let (plan, is_repeated) = in_trace(cell, &arguments, call.plan, call.is_traced)?;
    let made = padded::forward::<C>(&arguments, cell.lengths(), plan, keep && !is_repeated)?;
    let mut kept = [made.c, made.activations];
    if call.is_traced {
        // Nothing reads these.
        for (kept, said) in kept.iter_mut().zip([c, activations]) {
            if kept.is_none() {
                *kept = said.as_ref().map(Meta::allocate).transpose()?;
            }
        }
    }
    let mut outputs = [Some(made.output), Some(made.last_h), made.last_c];
    Ok(Made {
        outputs: C::Out::described(C::OP, |index| Ok(outputs[index].take()))?,
        kept: States::each(|index| kept[index].take()),
    })
}

/// `needs` says which gradients are needed, and `output` is h of all steps.
pub(in crate::ops) fn backward<C: Layer>(
    cell: &C,
    grads: Incoming<C>,
    arguments: &Arguments<'_>,
    needs: &Needs,
    output: Option<&Tensor>,
    again: &Again<'_, C>,
) -> Result<Gradients<C>> {
    let mut grads = C::Out::items(grads).into_iter();
    let grads: [Option<Tensor>; 3] = std::array::from_fn(|_| grads.next().flatten());
    let grads = grads.each_ref().map(Option::as_ref);
    if grads.iter().all(Option::is_none) {
        // Nothing depends on this call.
        return Ok(C::In::none());
    }
    let States { c, activations } = &again.kept;
    let (plan, is_repeated) = in_trace(cell, arguments, again.plan, again.is_traced)?;
    let kept = Kept {
        output: output.filter(|_| !is_repeated),
        c: c.as_ref(),
        activations: activations.as_ref(),
        may_overwrite: &|| again.may_overwrite(),
    };
    let mut gradients =
        padded::backward::<C>(grads, arguments, cell.lengths(), &kept, needs, plan)?;
    if again.is_traced && plan.library == Library::Cudnn {
        // Results of a registered operator may not be parts of one piece of memory.
        for gradient in gradients[place::W_IH..].iter_mut().flatten() {
            *gradient = copied(gradient)?;
        }
    }
    let mut places = places::<C>();
    Ok(C::In::each(|_| places.next().and_then(|place| gradients[place].take())))
}

pub(in crate::ops) fn reference_of<C: Layer>(cell: &C, of: &Args<'_, C>) -> Result<Outputs<C>> {
    let [Some(input), Some(h), c, Some(w_ih), Some(w_hh), b_ih, b_hh] = arguments::<C>(of) else {
        return Err(absent::<C>());
    };
    let weights = RnnWeights { w_ih, w_hh, b_ih, b_hh };
    let state = (h.shallow_clone(), c.map(Tensor::shallow_clone));
    let (output, (h, c)) = padded::reference::<C>(input, cell.lengths(), &weights, state)?;
    let mut outputs = [Some(output), Some(h), c];
    C::Out::own(C::OP, |index| outputs[index].take())
}
