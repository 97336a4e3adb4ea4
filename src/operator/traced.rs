//! How an operator that is two registered operators, one for each direction, becomes differentiable.
//!
//! In eager mode `torch.ops.tch_extension.x` is the crate's function `f_x`, with its own graph node.
//! That node reads memory, which tensors do not have while torch.compile, vmap or torch.func trace a
//! program. The node is then `Node`: it calls the operators `x_forward` and `x_backward` through
//! the dispatcher, which knows their fake kernels.
//!
//! Each level of torch.func has a graph of its own. What an operator calls below autograd at one level
//! is an operator of the next level outside. So `x_forward` and `x_backward` are differentiable, too:
//! the former with the same node (`forwarded`), the latter (`gradients`) by the operator's reference or,
//! if it is linear, by the operator itself.

use super::node::reference;
use super::register::Dispatched;
use super::{Operator, Second, Slots};
use crate::amp::Autocast;
use crate::autograd::{Context, Function, GradOptions, Inputs, Saver, Tensors, apply, grad};
use crate::library::{below_autograd, empty, is_traced};
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// Which inputs need a gradient: one bit for each, the first one lowest.
pub type Needs = i64;

/// The results that gradients read.
pub(super) fn kept<O: Operator>() -> impl Iterator<Item = usize> {
    (0..u64::BITS as usize).filter(|place| Dispatched::<O>::KEPT >> place & 1 == 1)
}

/// Calls the registered operators, as a part of the graph if there is one.
pub(super) fn traced<O: Operator>(
    operator: O,
    inputs: &[Option<&Tensor>],
) -> Result<Vec<Option<Tensor>>> {
    let results = apply(Node { operator, asked: None }, inputs)?.into_vec();
    // What is saved comes after the outputs.
    Ok(results.into_iter().take(Dispatched::<O>::OUTPUTS).collect())
}

/// Calls the operator that computes the outputs and what the gradients that `asked` names read, as a
/// part of the graph if there is one. What is saved are constants there: it follows from the inputs.
pub(super) fn forwarded<O: Operator>(
    operator: O,
    inputs: &[Option<&Tensor>],
    asked: Needs,
) -> Result<Vec<Option<Tensor>>> {
    Ok(apply(Node { operator, asked: Some(asked) }, inputs)?.into_vec())
}

/// Calls the operator that computes the gradients, as a part of the graph if there is one.
pub(super) fn gradients<O: Operator>(
    operator: O,
    grads: &[Option<&Tensor>],
    kept: &[Option<&Tensor>],
    inputs: &[Option<&Tensor>],
    needs: Needs,
) -> Result<Vec<Option<Tensor>>> {
    let all: Vec<Option<&Tensor>> = [grads, kept, inputs].concat();
    Ok(apply(Gradients { operator, needs }, &all)?.into_vec())
}

/// An operator that is traced.
struct Node<O> {
    operator: O,
    /// The gradients that another level of torch.func computes, if it is the caller.
    asked: Option<Needs>,
}

impl<O: Operator> Node<O> {
    /// Whether no derivative reads the values of this argument.
    fn is_never_read(&self, place: usize) -> bool {
        let reads = || O::In::items(self.operator.reads_in_trace(&O::In::each(|_| true)));
        O::SECOND == Second::Linear && !reads().as_ref()[place]
    }
}

impl<O: Operator> Function for Node<O> {
    const NAME: &'static str = O::NAME;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        if !saver.needs_graph() && self.asked.is_none() {
            return Ok(below_autograd(|| Dispatched(&self.operator).call(inputs))?.into());
        }
        let own = bits((0..Dispatched::<O>::INPUTS).map(|place| saver.needs_input_grad(place)));
        // What is saved for more gradients serves each of them.
        let needs = own | self.asked.unwrap_or(0);
        let results = below_autograd(|| Dispatched(&self.operator).forward(inputs, needs))?;
        for (place, input) in inputs.iter().enumerate() {
            match input.filter(|_| self.is_never_read(place)) {
                Some(input) => saver.save(&stand_in(input)?),
                None => saver.save_optional(*input),
            }
        }
        kept::<O>().for_each(|place| saver.save_optional(results.get(place)));
        // The graph has what is saved as an output, so that gradients of a higher order may read it.
        (Dispatched::<O>::OUTPUTS..results.len())
            .for_each(|place| saver.mark_non_differentiable(place));
        // An output without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok(results.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if grads.iter().take(Dispatched::<O>::OUTPUTS).all(Option::is_none) {
            // A second derivative comes here from an output that was kept, which is a constant there.
            return Ok((0..Dispatched::<O>::INPUTS).map(|_| None).collect::<Vec<_>>().into());
        }
        let saved = (0..Dispatched::<O>::INPUTS + kept::<O>().count())
            .map(|slot| {
                // Stand-ins are no part of a graph.
                let is_stand_in = slot < Dispatched::<O>::INPUTS && self.is_never_read(slot);
                let _no_grad = is_stand_in.then(tch::no_grad_guard);
                ctx.saved_optional(slot)
            })
            .collect::<Result<Vec<_>>>()?;
        let saved: Vec<Option<&Tensor>> = saved.iter().map(Option::as_ref).collect();
        let (inputs, kept) = saved.split_at(Dispatched::<O>::INPUTS);
        let grads: Vec<Option<&Tensor>> =
            (0..Dispatched::<O>::OUTPUTS).map(|place| grads.optional(place)).collect();
        let needs = bits((0..Dispatched::<O>::INPUTS).map(|place| ctx.needs_input_grad(place)));
        let [grads, kept, inputs] = [&grads, kept, inputs].map(Inputs::new);
        let shared = self.operator.shared_gradients(&O::In::borrowed(O::NAME, &inputs)?);
        let shared = || shared.iter().filter(|(place, _)| is_needed(needs, *place));
        let asked = shared().fold(needs, |bits, (place, of)| bits & !(1 << place) | 1 << of);
        let mut gradients = Dispatched(&self.operator).backward(grads, kept, inputs, asked)?;
        for (place, of) in shared() {
            gradients[*place] = gradients[*of].as_ref().map(Tensor::shallow_clone);
        }
        for (place, gradient) in gradients.iter_mut().enumerate() {
            gradient.take_if(|_| !is_needed(needs, place));
        }
        Ok(gradients.into())
    }
}

/// The gradients of an operator, as functions of the incoming ones and the inputs. What was kept are
/// constants here: it follows from the inputs.
struct Gradients<O> {
    operator: O,
    needs: Needs,
}

impl<O: Operator> Function for Gradients<O> {
    const NAME: &'static str = O::BACKWARD;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, all: Inputs<'_>) -> Result<Tensors> {
        let (grads, others) = all.split_at(Dispatched::<O>::OUTPUTS);
        let (kept, inputs) = others.split_at(kept::<O>().count());
        let [grads_, kept, inputs_] = [grads, kept, inputs].map(Inputs::new);
        let gradients = below_autograd(|| {
            Dispatched(&self.operator).backward(grads_, kept, inputs_, self.needs)
        })?;
        grads.iter().chain(inputs).for_each(|tensor| saver.save_optional(*tensor));
        let is_constant = |place: &usize| !is_needed(self.needs, *place);
        (0..gradients.len()).filter(is_constant).for_each(|place| {
            saver.mark_non_differentiable(place);
        });
        saver.set_materialize_grads(false);
        Ok(gradients.into())
    }

    fn backward(&self, ctx: &Context<'_>, vectors: &Tensors) -> Result<Tensors> {
        let saved = (0..Dispatched::<O>::OUTPUTS + Dispatched::<O>::INPUTS)
            .map(|slot| ctx.saved_optional(slot))
            .collect::<Result<Vec<_>>>()?;
        // The inputs of this node, without what was kept.
        let place_of = |slot: usize| {
            if slot < Dispatched::<O>::OUTPUTS { slot } else { slot + kept::<O>().count() }
        };
        let wanted: Vec<bool> =
            (0..saved.len()).map(|slot| ctx.needs_input_grad(place_of(slot))).collect();
        let create_graph = ctx.create_graph();
        let found = match O::SECOND {
            Second::Linear => with_grad(|| self.transposed(&saved, vectors))?,
            _ => with_grad(|| self.differentiate(&saved, &wanted, vectors, create_graph))?,
        };
        let mut all: Vec<Option<Tensor>> =
            (0..Dispatched::<O>::OUTPUTS + kept::<O>().count() + Dispatched::<O>::INPUTS)
                .map(|_| None)
                .collect();
        for (slot, gradient) in found.into_iter().enumerate() {
            all[place_of(slot)] = gradient;
        }
        Ok(all.into())
    }
}

impl<O: Operator> Gradients<O> {
    /// The gradients of the incoming gradients, for a linear operator: the operator itself, of the vectors in
    /// the places of the arguments with a gradient.
    fn transposed(
        &self,
        saved: &[Option<Tensor>],
        vectors: &Tensors,
    ) -> Result<Vec<Option<Tensor>>> {
        let (grads, inputs) = saved.split_at(Dispatched::<O>::OUTPUTS);
        let mut zeros = Vec::with_capacity(inputs.len());
        for (place, input) in inputs.iter().enumerate() {
            let is_constant = O::In::CONSTANT >> place & 1 == 1;
            let is_zero = !is_constant && vectors.optional(place).is_none();
            zeros.push(match input.as_ref().filter(|_| is_zero) {
                Some(input) => Some(input.f_zeros_like()?),
                None => None,
            });
        }
        let of_place = |place: usize| match O::In::CONSTANT >> place & 1 {
            1 => inputs[place].as_ref(),
            _ => vectors.optional(place).or(zeros[place].as_ref()),
        };
        let of: Vec<Option<&Tensor>> = (0..inputs.len()).map(of_place).collect();
        let outputs = Dispatched(&self.operator).call(Inputs::new(&of))?;
        let outputs =
            outputs.into_iter().zip(grads).map(|(output, grad)| grad.as_ref().map(|_| output));
        Ok(outputs.chain(inputs.iter().map(|_| None)).collect())
    }

    /// The gradients of the incoming gradients and of the inputs, those that are wanted, by
    /// differentiating the operator's reference twice.
    fn differentiate(
        &self,
        saved: &[Option<Tensor>],
        wanted: &[bool],
        vectors: &Tensors,
        create_graph: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        let is_input_needed = |slot: usize| {
            slot >= Dispatched::<O>::OUTPUTS
                && is_needed(self.needs, slot - Dispatched::<O>::OUTPUTS)
        };
        let is_variable = |slot: usize| wanted[slot] || is_input_needed(slot);
        // Fresh aliases: one saved tensor may depend on another.
        let alias = |(slot, tensor): (usize, &Option<Tensor>)| -> Result<Option<Tensor>> {
            let Some(tensor) = tensor else { return Ok(None) };
            let alias = match create_graph {
                true => tensor.f_view_as(tensor)?,
                false => tensor.f_detach()?,
            };
            Ok(Some(match is_variable(slot) && !alias.requires_grad() {
                true => variable(&alias)?,
                false => alias,
            }))
        };
        let aliases = saved.iter().enumerate().map(alias).collect::<Result<Vec<_>>>()?;
        let is_constant = |(slot, alias): (usize, &Option<Tensor>)| {
            is_variable(slot) && alias.as_ref().is_some_and(|alias| !alias.requires_grad())
        };
        if aliases.iter().enumerate().any(is_constant) {
            // The tensors of a vmap cannot be variables where no level of derivatives is within it:
            // torch.func.vjp has left its own when the function runs that it returned.
            return Err(Error::msg(format!(
                "{}: no second derivative by torch.func.vjp or jacrev within torch.vmap; differentiate a sum by \
                 torch.func.grad there, or take one element at a time",
                O::NAME
            )));
        }
        let aliases: Vec<Option<&Tensor>> = aliases.iter().map(Option::as_ref).collect();
        let (grads, inputs) = aliases.split_at(Dispatched::<O>::OUTPUTS);
        let outputs: Vec<Tensor> =
            reference(&self.operator, inputs)?.into_iter().flatten().collect();
        let is_there =
            |(output, grad): &(&Tensor, &Option<&Tensor>)| grad.is_some() && output.requires_grad();
        let (of, along): (Vec<&Tensor>, Vec<Option<&Tensor>>) =
            outputs.iter().zip(grads).filter(is_there).unzip();
        let is_variable = |&place: &usize| is_needed(self.needs, place) && inputs[place].is_some();
        let needed: Vec<usize> = (0..Dispatched::<O>::INPUTS).filter(is_variable).collect();
        let variables: Vec<&Tensor> = needed.iter().filter_map(|&place| inputs[place]).collect();
        let none = || aliases.iter().map(|_| None).collect::<Vec<_>>();
        if of.is_empty() || variables.is_empty() {
            return Ok(none());
        }
        let options = GradOptions {
            grad_outputs: &along,
            create_graph: true,
            allow_unused: true,
            ..Default::default()
        };
        let first = grad(&of, &variables, &options)?.into_vec();
        let is_there = |&(place, first): &(usize, &Option<Tensor>)| {
            vectors.optional(place).is_some() && first.as_ref().is_some_and(Tensor::requires_grad)
        };
        let (of, along): (Vec<&Tensor>, Vec<Option<&Tensor>>) = needed
            .into_iter()
            .zip(&first)
            .filter(is_there)
            .filter_map(|(place, first)| Some((first.as_ref()?, vectors.optional(place))))
            .unzip();
        let slots: Vec<usize> =
            (0..aliases.len()).filter(|&slot| wanted[slot] && aliases[slot].is_some()).collect();
        let variables: Vec<&Tensor> = slots.iter().filter_map(|&slot| aliases[slot]).collect();
        if of.is_empty() || variables.is_empty() {
            return Ok(none());
        }
        let options = GradOptions {
            grad_outputs: &along,
            create_graph,
            allow_unused: true,
            ..Default::default()
        };
        let second = grad(&of, &variables, &options)?.into_vec();
        let mut gradients = none();
        for (slot, gradient) in slots.into_iter().zip(second) {
            gradients[slot] = gradient;
        }
        Ok(gradients)
    }
}

/// The same values as a variable of this level of torch.func. A detached tensor would be a constant at the
/// outer levels, too; a sum keeps its graph there.
fn variable(tensor: &Tensor) -> Result<Tensor> {
    let zero = tensor.f_detach()?.f_zeros_like()?.f_set_requires_grad(true)?;
    Ok(tensor.f_add(&zero)?)
}

/// A tensor of these sizes, kind and device that keeps no memory alive, in the place of one whose values
/// nobody reads.
fn stand_in(tensor: &Tensor) -> Result<Tensor> {
    let _no_grad = tch::no_grad_guard();
    Ok(empty(&[], tensor.f_kind()?, tensor)?.f_expand_as(tensor)?)
}

/// One bit for each.
fn bits(needs: impl Iterator<Item = bool>) -> Needs {
    needs.enumerate().fold(0, |bits, (place, needed)| bits | i64::from(needed) << place)
}

/// Whether this bit is set.
pub fn is_needed(needs: Needs, place: usize) -> bool {
    needs >> place & 1 == 1
}

/// Autocast is off on all devices until the guards are dropped: the arguments may be on several.
fn without_autocast() -> Result<[Option<Autocast>; 2]> {
    let off = |device| Autocast::kind(device).map(|_| Autocast::disabled(device)).transpose();
    Ok([off(Device::Cpu)?, off(Device::Cuda(0))?])
}

/// Whether no program is being traced, so that kernels can read the tensors.
pub fn is_eager(tensors: &[Option<&Tensor>]) -> bool {
    let tensors: Vec<&Tensor> = tensors.iter().copied().flatten().collect();
    // Tensors without memory are on a device that tch does not know, which it takes for this one.
    tensors.iter().all(|tensor| tensor.device() != Device::Mps) && !is_traced(&tensors)
}

/// Runs a kernel without a graph, and in the kinds that its arguments have.
///
/// # Errors
/// Those of the kernel.
pub fn kernel<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _no_grad = tch::no_grad_guard();
    let _autocast = without_autocast()?;
    body()
}

/// Runs the operator itself, below autograd.
///
/// # Errors
/// Those of the operator.
pub fn below<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    let _no_grad = tch::no_grad_guard();
    body()
}

/// Calls an operator with the casts of these tensors, or, if there are none, with the tensors.
///
/// # Errors
/// Those of the operator.
pub fn with_casts<T>(
    tensors: &[Option<&Tensor>],
    cast: Option<Vec<Option<Tensor>>>,
    body: impl FnOnce(Inputs<'_>) -> Result<T>,
) -> Result<T> {
    let cast: Option<Vec<Option<&Tensor>>> =
        cast.as_ref().map(|cast| cast.iter().map(Option::as_ref).collect());
    let _autocast = without_autocast()?;
    body(Inputs::new(cast.as_deref().unwrap_or(tensors)))
}

/// Runs `body` with grad mode on.
fn with_grad<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // tch's function does not restore grad mode after a panic, but this guard does.
    let _before = tch::no_grad_guard();
    tch::with_grad(body)
}

/// Tensors that share no memory with each other and with `others`: contiguous, or laid out like the
/// tensor next to them.
pub(super) fn returned<'a>(
    tensors: impl IntoIterator<Item = (Option<Tensor>, Option<&'a Tensor>)>,
    others: &[&Tensor],
) -> Result<Vec<Option<Tensor>>> {
    let mut taken: Vec<_> = others.iter().map(|other| other.data_ptr()).collect();
    let mut own = |tensor: Tensor, like: Option<&Tensor>| -> Result<Tensor> {
        let tensor = laid_out_like(tensor, like)?;
        let is_shared = tensor.numel() > 0 && taken.contains(&tensor.data_ptr());
        let tensor =
            if is_shared { tensor.f_to_dtype(tensor.f_kind()?, false, true)? } else { tensor };
        taken.push(tensor.data_ptr());
        Ok(tensor)
    };
    let one = |(tensor, like): (Option<Tensor>, _)| tensor.map(|it| own(it, like)).transpose();
    tensors.into_iter().map(one).collect()
}

/// A tensor in the strides that libtorch gives to a result of an elementwise operation on `like`, which a
/// fake kernel can compute; contiguous without one.
pub(super) fn laid_out_like(tensor: Tensor, like: Option<&Tensor>) -> Result<Tensor> {
    let Some(like) = like.filter(|like| !(tensor.is_contiguous() && like.is_contiguous())) else {
        return Ok(if tensor.is_contiguous() { tensor } else { tensor.f_contiguous()? });
    };
    let mut wanted = empty_like(like, tensor.f_kind()?)?;
    let strides = wanted.stride().into_iter().zip(tensor.stride());
    if wanted.size().into_iter().zip(strides).all(|(size, (a, b))| size <= 1 || a == b) {
        return Ok(tensor);
    }
    wanted.f_copy_(&tensor)?;
    Ok(wanted)
}

/// A tensor of this kind in the strides of a result of an elementwise operation on `like`.
pub(super) fn empty_like(like: &Tensor, kind: Kind) -> Result<Tensor> {
    let empty = like.f_empty_like()?;
    if empty.f_kind()? == kind { Ok(empty) } else { Ok(empty.f_to_kind(kind)?) }
}

/// In the place of a tensor that is absent.
///
/// # Errors
/// If libtorch fails.
pub fn nothing(like: &Tensor) -> Result<Tensor> {
    Ok(Tensor::f_empty([0], (like.f_kind()?, like.device()))?)
}
