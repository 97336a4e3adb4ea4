//! The LLTM cell of PyTorch's extension tutorial: an LSTM without a forget gate, and with ELU as
//! the activation of its candidate.

pub(super) mod functions;
pub(super) mod kernels;
pub(super) mod parts;
pub(super) mod plan;

use super::gemm;
use super::way::forced;
use crate::amp::{Autocast, CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::Check;
use crate::dispatch::promote;
use crate::ffi::facts::{Facts, facts};
use crate::{Error, Result, check};
use functions::{Saved, Shapes};
pub(super) use functions::{bias_gradient, of_one_step};
pub(super) use kernels::fused::Operands;
use kernels::fused::Outputs;
#[doc(hidden)]
pub use plan::Way;
use tch::{Kind, Tensor};

const OP: &str = "lltm_cell";
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
    let arguments = [Some(input), Some(weight), bias, Some(h), Some(c)];
    let known = facts(arguments)?;
    let outputs = if is_ordinary(&known, bias.is_some()) {
        apply(LltmCell { way: forced(), known: Some(known), shapes: None }, &arguments)?
    } else {
        // These checks report what is wrong, if anything is; mixed kinds, for example, are allowed.
        let input =
            check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(2, "[B, F]")?;
        check_the_others(OP, &input, input.tensor().size2()?, weight, bias, state)?;
        let matched = in_matching_kinds(OP, &arguments)?;
        applied(LltmCell { way: forced(), known: None, shapes: None }, &arguments, matched)?
    };
    let [new_h, new_c] = outputs.exactly()?;
    Ok((new_h, new_c))
}

/// Whether all checks would pass and nothing has to be cast. That is the common case; it is known
/// from the facts, without further queries of each tensor.
pub(super) fn is_ordinary(facts: &[Facts; place::LEN], has_bias: bool) -> bool {
    let [input, weight, bias, h, c] = facts;
    let (Some(device), Some(_)) = (input.device(), input.kind()) else { return false };
    [weight, h, c].iter().all(|tensor| tensor.is_like(input))
        && (!has_bias || bias.is_like(input))
        && Shapes::that_fit(facts, has_bias, false).is_some()
        && Autocast::kind(device).is_none()
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
        return Err(check!(OP, weight).refuse("3H rows", format!("{:?}", weight.size()), ""));
    };
    let new_c = c.f_add(&g.f_elu()?.f_mul(&i.f_sigmoid()?)?)?;
    let new_h = new_c.f_tanh()?.f_mul(&o.f_sigmoid()?)?;
    Ok((new_h, new_c))
}

/// Checks the arguments other than x, which has been checked and whose last two sizes are `[B, F]`,
/// for this operator and for [`lltm`](super::lltm).
pub(super) fn check_the_others(
    op: &str,
    input: &Check<'_>,
    (batch, features): (i64, i64),
    weight: &Tensor,
    bias: Option<&Tensor>,
    (h, c): (&Tensor, &Tensor),
) -> Result<()> {
    let check_argument = |argument: Check<'_>| -> Result<()> {
        argument.defined()?.same_device_as(input)?.kind_in(&KINDS).map(|_| ())
    };
    check_argument(check!(op, weight))?;
    check_argument(check!(op, h))?;
    check_argument(check!(op, c))?;
    bias.map(|bias| check_argument(check!(op, bias))).transpose()?;

    check!(op, h).dim(2, "[B, H]")?;
    let hidden = h.size2()?.1;
    check!(op, h).shape("[B, H]", &[batch, hidden])?;
    check!(op, c).shape("[B, H]", &[batch, hidden])?;
    let sizes = hidden.checked_mul(3).zip(hidden.checked_add(features));
    let (gates, columns) = sizes.ok_or_else(|| {
        check!(op, h).refuse("sizes whose sums fit 64 bits", format!("H = {hidden}"), "")
    })?;
    check!(op, weight).shape("[3H, H + F]", &[gates, columns])?;
    if let Some(bias) = bias
        && bias.size() != [1, gates]
    {
        check!(op, bias).shape("[3H] (or [1, 3H])", &[gates])?;
    }
    Ok(())
}

/// The arguments after casting: one kind for the products' operands, and one for c.
pub(super) struct Matched {
    tensors: Vec<Option<Tensor>>,
    pub product: Kind,
    /// The kind of c and of the outputs.
    pub state: Kind,
    /// Whether autocast gave the operands their kind.
    pub autocast: bool,
}

/// Casts the arguments to matching kinds. `None` if they already match.
pub(super) fn in_matching_kinds(
    op: &str,
    arguments: &[Option<&Tensor>; place::LEN],
) -> Result<Option<Matched>> {
    let [Some(input), Some(weight), bias, Some(h), Some(c)] = *arguments else {
        return Err(Error::msg(format!("internal error: an argument of {op} is absent")));
    };
    let operands = [Some(input), Some(weight), bias, Some(h)];
    // As in the composite, autocast casts the product's operands, but nothing after the product.
    let cast = autocast_inputs(CastPolicy::LowerPrecision, &operands)?;
    let autocast = cast.is_some();
    if !autocast && arguments.iter().flatten().all(|tensor| tensor.kind() == input.kind()) {
        return Ok(None);
    }
    let unchanged = || operands.iter().map(|tensor| tensor.map(Tensor::shallow_clone)).collect();
    let mut tensors: Vec<Option<Tensor>> = cast.unwrap_or_else(unchanged);
    let of = |tensors: &[Option<Tensor>], place: usize| tensors[place].as_ref().map(Tensor::kind);
    let kinds = of(&tensors, place::INPUT).zip(of(&tensors, place::H));
    let product = kinds.map_or(input.kind(), |(input, h)| promote(input, h));
    for (place, name) in [(place::WEIGHT, "weight"), (place::BIAS, "bias")] {
        if let Some(tensor) = &tensors[place] {
            check!(op, name, tensor).kind_as(product, "input and h")?;
        }
    }
    for place in [place::INPUT, place::H] {
        tensors[place] =
            tensors[place].as_ref().map(|operand| operand.f_to_kind(product)).transpose()?;
    }
    let state = promote(product, c.kind());
    tensors.push(Some(c.f_to_kind(state)?));
    Ok(Some(Matched { tensors, product, state, autocast }))
}

/// [`apply`] to the arguments, or to their casts if there are any.
pub(super) fn applied<F: Function>(
    function: F,
    arguments: &[Option<&Tensor>; place::LEN],
    matched: Option<Matched>,
) -> Result<Tensors> {
    match matched {
        None => apply(function, arguments),
        Some(matched) => {
            apply(function, &matched.tensors.iter().map(Option::as_ref).collect::<Vec<_>>())
        }
    }
}

struct LltmCell {
    way: Way,
    /// The facts of the arguments, if they have been queried already. Only the forward needs them.
    known: Option<[Facts; place::LEN]>,
    /// Known after the forward.
    shapes: Option<Shapes>,
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

/// Saved after the inputs: the output c', and σ(i), σ(o), g.
const NEW_C: usize = place::LEN;
const ACTIVATIONS: usize = place::LEN + 1;

impl Function for LltmCell {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let (h, c) = (inputs.get(place::H)?, inputs.get(place::C)?);
        let all = [Some(input), Some(weight), bias, Some(h), Some(c)];
        let known = match self.known.take() {
            Some(known) => known,
            None => facts(all)?,
        };
        let shapes = Shapes::of(&known, bias.is_some(), false)?;
        let operands = Operands { input, weight, bias, h, c };
        let Outputs { new_h, new_c, activations, .. } =
            functions::forward(&operands, &known, &shapes, self.way, saver.needs_graph())?;
        for tensor in all.into_iter().chain([Some(&new_c), activations.as_ref()]) {
            saver.save_optional(tensor);
        }
        self.shapes = Some(shapes);
        // A state without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok([new_h, new_c].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, reference);
        }
        let Some(shapes) = &self.shapes else {
            return Err(Error::msg("internal error: lltm_cell had no forward"));
        };
        let needs: [bool; place::LEN] = std::array::from_fn(|place| ctx.needs_input_grad(place));
        // Tensors that are not read may have been changed in place since the forward.
        let saved = |is_read: bool, slot| is_read.then(|| ctx.saved(slot)).transpose();
        let saved = Saved {
            input: saved(needs[place::WEIGHT], place::INPUT)?,
            weight: saved(needs[place::INPUT] || needs[place::H], place::WEIGHT)?,
            h: saved(needs[place::WEIGHT], place::H)?,
            new_c: ctx.saved(NEW_C)?,
            activations: ctx.saved(ACTIVATIONS)?,
        };
        let grads = [grads.optional(0), grads.optional(1)];
        Ok(functions::backward(grads, &saved, shapes, &needs, self.way)?.into())
    }
}

fn reference(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    let inputs = Inputs::new(&inputs);
    let state = (inputs.get(place::H)?, inputs.get(place::C)?);
    let (new_h, new_c) = lltm_cell_reference(
        inputs.get(place::INPUT)?,
        inputs.get(place::WEIGHT)?,
        inputs.optional(place::BIAS),
        state,
    )?;
    Ok([new_h, new_c].into())
}
