//! The LLTM cell of PyTorch's extension tutorial: an LSTM without a forget gate, and with ELU as
//! the activation of its candidate.

pub(super) mod functions;
pub(super) mod kernels;
pub(super) mod plan;

use super::gemm;
use super::way::forced;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::check;
use crate::dispatch::promote;
use crate::ffi::facts::{Facts, facts};
use crate::ffi::tensor::kind;
use crate::operator::{
    Again, Args, Call, Dim, Each, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Slots, call,
};
use crate::{Error, Result};
use functions::{Saved, Shapes};
pub(super) use functions::{bias_gradient, of_one_step};
pub(super) use kernels::fused::Operands;
#[doc(hidden)]
pub use plan::Way;
use tch::{Kind, Tensor};

pub(super) const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// One step of an LLTM. Returns the new hidden state and the new cell state.
///
/// ```text
/// [i | o | g] = [h, x] Wᵀ + b
/// c' = c + elu(g) σ(i)
/// h' = tanh(c') σ(o)
/// ```
///
/// * `input`: x, `[B, F]`
/// * `weight`: W, `[3H, H + F]`. Its rows are for i, o and g, and its columns for h and x
/// * `bias`: b, `[3H]` or, as PyTorch's extension-cpp has it, `[1, 3H]`; `None` for zeros
/// * `state`: (h, c), each `[B, H]`
///
/// Returns (h', c'), each `[B, H]`. The tensors are of kind `Float`, `Double`, `Half` or
/// `BFloat16`, on one CPU or CUDA device. Strides and sizes are arbitrary, and tensors may be
/// empty. For the half kinds, everything after the product is computed in `Float` and rounded once.
/// There are first and second derivatives with respect to each tensor.
///
/// Mixed kinds are accepted where the composite below accepts them: h and x are promoted to one
/// kind, which weight and bias must have; the outputs have that kind promoted with c's. Under
/// autocast the product runs in autocast's kind. On CUDA the operator works on libtorch's current
/// stream and never waits for the GPU. It is deterministic.
///
/// At large sizes a step is one matrix product, done by libtorch under its precision switches, and
/// one kernel for everything else. At small sizes, where calls and launches cost more than the
/// arithmetic, one kernel computes everything (the CPU's backward takes two), with products in the
/// kind's full precision; this holds on CUDA, and on the CPU for `Float` and `Double`. In the half
/// kinds, on GPUs of compute capability 9.0, the forward of large sizes is one kernel, too, if H is
/// a multiple of 64 and rows begin at multiples of 16 bytes. The backward keeps `3·B·H` numbers in
/// addition to inputs and outputs.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::lltm_cell;
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w, b) = (Tensor::randn([2, 4], options), Tensor::randn([9, 7], options), Tensor::randn([9], options));
/// # let (h, c) = (Tensor::randn([2, 3], options), Tensor::randn([2, 3], options));
/// let gates = Tensor::cat(&[&h, &x], 1).linear(&w, Some(&b)).chunk(3, 1);
/// let new_c = &c + gates[2].elu() * gates[0].sigmoid();
/// let new_h = new_c.tanh() * gates[1].sigmoid();
///
/// let fused = lltm_cell(&x, &w, Some(&b), (&h, &c));
/// assert!(fused.0.allclose(&new_h, 1e-12, 1e-12, false) && fused.1.allclose(&new_c, 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://pytorch.org/tutorials/advanced/cpp_extension.html>.
///
/// # Panics
/// If [`f_lltm_cell`] returns an error.
pub fn lltm_cell(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> (Tensor, Tensor) {
    super::unwrap(f_lltm_cell(input, weight, bias, state))
}

/// [`lltm_cell`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_lltm_cell(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    let (h, c) = state;
    let LltmCellOut { h, c } = call(LltmCell {}, &LltmCellIn { input, weight, bias, h, c })?;
    Ok((h, c))
}

/// [`lltm_cell`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn lltm_cell_reference(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, Tensor)> {
    let (h, c) = state;
    let bias = bias.map(|bias| bias.f_reshape([-1])).transpose()?;
    let gates = Tensor::f_cat(&[h, input], 1)?.f_linear(weight, bias.as_ref())?;
    let [i, o, g] = &gates.f_chunk(3, 1)?[..] else {
        return Err(check!("lltm_cell", weight).refuse(
            "3H rows",
            format!("{:?}", weight.size()),
            "",
        ));
    };
    let new_c = c.f_add(&g.f_elu()?.f_mul(&i.f_sigmoid()?)?)?;
    let new_h = new_c.f_tanh()?.f_mul(&o.f_sigmoid()?)?;
    Ok((new_h, new_c))
}

/// The positions of the inputs, which are also their slots among the saved tensors, here and in
/// [`lltm`](super::lltm).
pub(super) mod place {
    pub const INPUT: usize = 0;
    pub const WEIGHT: usize = 1;
    pub const BIAS: usize = 2;
    pub const H: usize = 3;
    pub const C: usize = 4;
    pub const LEN: usize = 5;
}

crate::signature! {
    /// One step of the LLTM of PyTorch's tutorial on C++ extensions; returns (h, c).
    ///
    /// input `[B, F]`, weight `[3H, H + F]`, bias `[3H]`, h and c `[B, H]`.
    pub LltmCell: LltmCellIn -> LltmCellOut = "lltm_cell"(input, weight, bias?, h, c) -> (h, c)
}

crate::slots! {
    /// What the cell keeps: σ(i), σ(o) and g, `[B, 3H]`.
    pub struct LltmCellKept { activations }
}

/// What a call decides for both of its passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct LltmCellPlan {
    way: Way,
    /// Of arguments that fit.
    shapes: Option<Shapes>,
}

/// The output that the backward pass reads: c.
const NEW_C: u64 = 1 << 1;

impl Operator for LltmCell {
    type Kept = LltmCellKept;
    type Plan = LltmCellPlan;

    const READS_OUTPUTS: u64 = NEW_C;

    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        let LltmCellIn { input, weight, bias, h, c } = *of;
        in_matching_kinds([Some(input), Some(weight), bias, Some(h), Some(c)])
    }

    fn plan(&self, of: &Args<'_, Self>, _: &Needs<Self>) -> Result<LltmCellPlan> {
        let LltmCellIn { input, weight, bias, h, c } = *of;
        let known = facts([Some(input), Some(weight), bias, Some(h), Some(c)])?;
        let shapes = Shapes::that_fit(&known, bias.is_some(), false);
        Ok(LltmCellPlan { way: forced(), shapes })
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let LltmCellIn { input, weight, bias, h, c } = of;
        input.kind_in(&KINDS)?.supported_device()?.dim(2, "[B, F]")?;
        let [batch, features] = [0, 1].map(|dim| input.sizes()[dim].clone());
        let kind = arguments_fit(input, [&batch, &features], (weight, bias.as_ref()), (h, c))?;
        let is_kept = needed(needs).contains(&true);
        let activations = || h.of_kind(kind).with_last(weight.sizes()[0].clone());
        Ok(Made {
            outputs: LltmCellOut { h: h.of_kind(kind), c: c.of_kind(kind) },
            kept: LltmCellKept { activations: is_kept.then(activations) },
        })
    }

    fn reads(&self, needs: &Needs<Self>) -> LltmCellIn<Each<bool>> {
        let LltmCellIn { input, weight, h, .. } = *needs;
        LltmCellIn { input: weight, weight: input || h, bias: false, h: weight, c: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let LltmCellIn { input, weight, bias, h, c } = call.of;
        let known = facts([Some(input), Some(weight), bias, Some(h), Some(c)])?;
        let LltmCellPlan { way, shapes } = call.plan;
        let shapes = match shapes.filter(|_| are_alike(&known, bias.is_some())) {
            Some(shapes) => shapes,
            None => {
                call.check()?;
                Shapes::of(&known, bias.is_some(), false)?
            }
        };
        let operands = Operands { input, weight, bias, h, c };
        let keep = needed(call.needs).contains(&true);
        let made = functions::forward(&operands, &known, &shapes, way, keep)?;
        Ok(Made {
            outputs: LltmCellOut { h: made.new_h, c: made.new_c },
            kept: LltmCellKept { activations: made.activations },
        })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let grads = [grads.h.as_ref(), grads.c.as_ref()];
        if grads.iter().all(Option::is_none) {
            // Nothing depends on this call.
            return Ok(LltmCellIn::none());
        }
        let needs = needed(&again.needs);
        let LltmCellPlan { way, shapes } = again.plan;
        let (Some(new_c), Some(activations), Some(shapes)) =
            (again.outputs.c, again.kept.activations, shapes)
        else {
            let text = "lltm_cell: what the forward pass keeps is absent: call lltm_cell_forward with these needs";
            return Err(Error::msg(text));
        };
        let LltmCellIn { input, weight, h, .. } = again.of;
        let saved = Saved { input, weight, h, new_c, activations };
        let [input, weight, bias, h, c] = functions::backward(grads, &saved, &shapes, &needs, way)?;
        Ok(LltmCellIn { input, weight, bias, h, c })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let LltmCellIn { input, weight, bias, h, c } = *of;
        let (h, c) = lltm_cell_reference(input, weight, bias, (h, c))?;
        Ok(LltmCellOut { h, c })
    }
}

fn needed(needs: &Needs<LltmCell>) -> functions::Needs {
    let LltmCellIn { input, weight, bias, h, c } = *needs;
    [input, weight, bias, h, c]
}

/// Whether all arguments have one kind and one device, for which there are kernels.
pub(super) fn are_alike(known: &[Facts; place::LEN], has_bias: bool) -> bool {
    let [input, weight, bias, h, c] = known;
    input.device().is_some()
        && input.kind().is_some()
        && [weight, h, c].iter().all(|tensor| tensor.is_like(input))
        && (!has_bias || bias.is_like(input))
}

/// Checks the arguments of a step or of a sequence, of which the input is checked already, and returns the
/// kind of the outputs.
pub(super) fn arguments_fit<D: Dim>(
    input: &Meta<D>,
    [batch, features]: [&D; 2],
    (weight, bias): (&Meta<D>, Option<&Meta<D>>),
    (h, c): (&Meta<D>, &Meta<D>),
) -> Result<Kind> {
    for argument in [weight, h, c].into_iter().chain(bias) {
        argument.same_device_as(input)?.kind_in(&KINDS)?;
    }
    h.dim(2, "[B, H]")?;
    let hidden = &h.sizes()[1];
    for state in [h, c] {
        state.shape("[B, H]", &[batch.clone(), hidden.clone()])?;
    }
    let sum = hidden
        .number()
        .zip(features.number())
        .map(|(hidden, features)| hidden.checked_add(features));
    let gates = D::product(&[hidden.clone(), D::from(3)]).filter(|_| sum != Some(None));
    let gates = gates
        .ok_or_else(|| h.refuse("sizes whose sums fit 64 bits", format!("H = {hidden:?}"), ""))?;
    weight.shape("[3H, H + F]", &[gates.clone(), hidden.clone() + features.clone()])?;
    if let Some(bias) = bias
        && (bias.sizes().len() != 2 || bias.shape("[1, 3H]", &[D::from(1), gates.clone()]).is_err())
    {
        bias.shape("[3H] (or [1, 3H])", &[gates])?;
    }
    let product = promote(input.kind(), h.kind());
    for operand in [weight].into_iter().chain(bias) {
        operand.kind_as(product, "input and h")?;
    }
    Ok(promote(product, c.kind()))
}

/// The arguments in the kinds in which they are computed: under autocast, the products' operands in
/// autocast's kind, and nothing after the product is cast; x and h promoted to one kind, and c promoted
/// with that. `None` if they have these kinds already. What does not fit together is refused later.
pub(super) fn in_matching_kinds(
    arguments: [Option<&Tensor>; place::LEN],
) -> Result<Option<Vec<Option<Tensor>>>> {
    let [Some(input), weight, bias, h, Some(c)] = arguments else { return Ok(None) };
    let operands = [Some(input), weight, bias, h];
    let cast = autocast_inputs(CastPolicy::LowerPrecision, &operands)?;
    let is_alike = |tensor: &&Tensor| kind(tensor).is_some() && kind(tensor) == kind(input);
    if cast.is_none() && arguments.iter().flatten().all(is_alike) {
        return Ok(None);
    }
    let own = |tensor: Option<&Tensor>| tensor.map(Tensor::shallow_clone);
    let mut is_changed = cast.is_some();
    let mut tensors = cast.unwrap_or_else(|| operands.map(own).into());
    tensors.push(own(Some(c)));
    let is_taken = |tensor: &Tensor| kind(tensor).is_some_and(|kind| KINDS.contains(&kind));
    if !tensors.iter().flatten().all(is_taken) {
        return Ok(is_changed.then_some(tensors));
    }
    let of = |tensors: &[Option<Tensor>], place: usize| tensors[place].as_ref().map(Tensor::kind);
    let Some((input, h)) = of(&tensors, place::INPUT).zip(of(&tensors, place::H)) else {
        return Ok(is_changed.then_some(tensors));
    };
    let product = promote(input, h);
    for place in [place::INPUT, place::H, place::C] {
        let kind = if place == place::C { promote(product, c.kind()) } else { product };
        if let Some(tensor) = tensors[place].as_mut().filter(|tensor| tensor.kind() != kind) {
            *tensor = tensor.f_to_kind(kind)?;
            is_changed = true;
        }
    }
    Ok(is_changed.then_some(tensors))
}
