//! The LLTM cell of PyTorch's extension tutorial: an LSTM without a forget gate, and with ELU as
//! the activation of its candidate.

pub(super) mod kernels;
pub(super) mod plan;

use super::gemm;
use super::way::forced;
use crate::amp::{Autocast, CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::check::Check;
use crate::dispatch::promote;
use crate::ffi::facts::{Facts, facts};
use crate::ffi::tensor::plain;
use crate::{Error, Result, check};
use kernels::device::TensorCores;
use kernels::fused::{self, Beside};
use kernels::pointwise;
use plan::Sizes;
#[doc(hidden)]
pub use plan::Way;
use tch::{Device, Kind, Tensor};

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
        apply(LltmCell { way: forced(), known: Some(known), ..LltmCell::default() }, &arguments)?
    } else {
        // These checks report what is wrong, if anything is; mixed kinds, for example, are allowed.
        let input =
            check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(2, "[B, F]")?;
        check_beside(OP, &input, input.tensor().size2()?, weight, bias, state)?;
        let matched = in_matching_kinds(OP, &arguments)?;
        applied(LltmCell { way: forced(), ..LltmCell::default() }, &arguments, matched)?
    };
    let [new_h, new_c] = outputs.exactly()?;
    Ok((new_h, new_c))
}

/// Whether all checks would pass and nothing has to be cast. That is the common case; it is known
/// from the facts, without further queries of each tensor.
pub(super) fn is_ordinary(facts: &[Facts; place::LEN], has_bias: bool) -> bool {
    let [input, weight, bias, h, c] = facts;
    let (Some(device), Some(_)) = (input.device(), input.kind()) else { return false };
    let (Some([batch, features]), Some([_, hidden])) = (input.sizes(), h.sizes()) else {
        return false;
    };
    let (Some(gates), Some(columns)) = (hidden.checked_mul(3), hidden.checked_add(features)) else {
        return false;
    };
    let is_bias = || {
        bias.is_like(input) && (bias.sizes() == Some([gates]) || bias.sizes() == Some([1, gates]))
    };
    [weight, h, c].iter().all(|tensor| tensor.is_like(input))
        && [h, c].iter().all(|state| state.sizes() == Some([batch, hidden]))
        && weight.sizes() == Some([gates, columns])
        && (!has_bias || is_bias())
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
pub(super) fn check_beside(
    op: &str,
    input: &Check<'_>,
    (batch, features): (i64, i64),
    weight: &Tensor,
    bias: Option<&Tensor>,
    (h, c): (&Tensor, &Tensor),
) -> Result<()> {
    let beside = |argument: Check<'_>| -> Result<()> {
        argument.defined()?.beside(input)?.kind_in(&KINDS).map(|_| ())
    };
    beside(check!(op, weight))?;
    beside(check!(op, h))?;
    beside(check!(op, c))?;
    bias.map(|bias| beside(check!(op, bias))).transpose()?;

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

#[derive(Default)]
pub(super) struct LltmCell {
    way: Way,
    /// Whether this is a sequence of one step: its input is `[1, B, F]`, and an output `[1, B, H]`
    /// is asked for, too.
    is_sequence: bool,
    /// The facts of the arguments, if they have been queried already. Only the forward needs them.
    known: Option<[Facts; place::LEN]>,
    sizes: Sizes,
    /// Kept here so that the first derivative does not look at bias and weight themselves: if it
    /// does not need them, changing them in place since the forward causes no version error.
    bias: Option<BiasShape>,
    /// The kind of the product and its operands.
    product: Option<Kind>,
    /// Whether one kernel computes the backward, too.
    fused: bool,
}

#[derive(Clone, Copy)]
enum BiasShape {
    Flat,
    Row,
}

impl LltmCell {
    /// For a sequence of one step. `known` are the facts of the arguments, if they have been
    /// queried already; those of the input describe the step.
    pub fn of_one_step(known: Option<[Facts; place::LEN]>) -> Self {
        LltmCell { is_sequence: true, known, ..LltmCell::default() }
    }

    /// Computes the outputs, and saves everything that the backward reads.
    pub fn compute(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<fused::Outputs> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let (h, c) = (inputs.get(place::H)?, inputs.get(place::C)?);

        let known = match self.known.take() {
            Some(known) => known,
            None => {
                facts([Some(input), Some(weight), bias, Some(h), Some(c)])?.map(Facts::of_one_step)
            }
        };
        let (Some([batch, features]), Some([_, hidden])) =
            (known[place::INPUT].sizes(), known[place::H].sizes())
        else {
            return Err(Error::msg("internal error: the arguments of lltm_cell were not checked"));
        };
        self.sizes = Sizes { batch, features, hidden };
        self.bias = bias.map(|_| match known[place::BIAS].sizes::<1>() {
            Some(_) => BiasShape::Flat,
            None => BiasShape::Row,
        });
        self.product = known[place::WEIGHT].kind();
        let kind = self.product.filter(|_| known[place::C].is_like(&known[place::WEIGHT]));
        let by = kind.zip(known[place::INPUT].device());
        self.fused =
            by.is_some_and(|(kind, device)| self.sizes.fuse_backward(self.way, kind, device));

        let operands = fused::Operands { input, weight, bias, h, c };
        let beside = Beside { activations: saver.needs_graph(), output: self.is_sequence };
        let outputs = self.outputs(&operands, &known, by, beside)?;
        let all = [Some(input), Some(weight), bias, Some(h), Some(c)];
        for tensor in all.into_iter().chain([Some(&outputs.new_c), outputs.activations.as_ref()]) {
            saver.save_optional(tensor);
        }
        // A state without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok(outputs)
    }

    /// The first derivatives, from the gradients for h' and c'.
    pub fn gradients(
        &self,
        ctx: &Context<'_>,
        grad_new_h: Option<&Tensor>,
        grad_new_c: Option<&Tensor>,
    ) -> Result<Tensors> {
        match self.fused {
            true => first_derivative_fused(ctx, grad_new_h, grad_new_c, self),
            false => first_derivative(ctx, grad_new_h, grad_new_c, self),
        }
    }

    /// Computes the outputs. `by` is the kind and device of all operands, if they share one.
    fn outputs(
        &self,
        operands: &fused::Operands<'_>,
        known: &[Facts; place::LEN],
        by: Option<(Kind, Device)>,
        beside: Beside,
    ) -> Result<fused::Outputs> {
        let (sizes, way) = (self.sizes, self.way);
        let Some((kind, device)) = by else { return by_product(operands, beside) };
        if sizes.fuse_forward(way, kind, device) {
            return fused::forward(operands, known, sizes, beside);
        }
        if sizes.fit_tensor_cores(kind, device)
            && fused::allow_bulk_copies(known, sizes)
            && sizes.use_tensor_cores(way, TensorCores::of(device)?.processors)
            && let Some(outputs) = fused::forward_by_tensor_cores(operands, known, sizes, beside)?
        {
            return Ok(outputs);
        }
        by_product(operands, beside)
    }

    fn input_size(&self) -> Vec<i64> {
        let Sizes { batch, features, .. } = self.sizes;
        if self.is_sequence { vec![1, batch, features] } else { vec![batch, features] }
    }

    fn bias_size(&self) -> Option<Vec<i64>> {
        let gates = 3 * self.sizes.hidden;
        self.bias.map(|shape| match shape {
            BiasShape::Flat => vec![gates],
            BiasShape::Row => vec![1, gates],
        })
    }
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

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let fused::Outputs { new_h, new_c, .. } = self.compute(saver, inputs)?;
        Ok([new_h, new_c].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, reference);
        }
        self.gradients(ctx, grads.optional(0), grads.optional(1))
    }
}

/// Removes the first dimension of a sequence of one step, `[1, B, F]`; any other tensor is
/// unchanged.
pub(super) fn of_one_step(tensor: &Tensor) -> Result<Tensor> {
    Ok(if tensor.dim() == 3 { tensor.f_select(0, 0)? } else { tensor.shallow_clone() })
}

/// libtorch's product, followed by one kernel for the rest.
fn by_product(operands: &fused::Operands<'_>, beside: Beside) -> Result<fused::Outputs> {
    let fused::Operands { input, weight, bias, h, c } = *operands;
    let c = plain(c)?;
    let hx = Tensor::f_cat(&[h, &of_one_step(input)?], 1)?;
    let bias = bias.map(|bias| bias.f_reshape([-1])).transpose()?;
    // On CUDA our kernel adds the bias, because with a bias libtorch chooses a product that is up
    // to a sixth slower. For the half kinds the product adds it: if the product were rounded first,
    // and a bias of about its size cancelled it, the digits that remain would be lost.
    let is_half = matches!(hx.f_kind()?, Kind::Half | Kind::BFloat16);
    let (gates, bias) = match bias {
        Some(bias) if is_half || c.device() == Device::Cpu => {
            let planned = gemm::linear(&hx, weight, Some(&bias), gemm::Way::Automatic)?;
            let addmm = || bias.f_addmm(&hx, &weight.f_transpose(0, 1)?);
            (planned.map_or_else(addmm, Ok)?, None)
        }
        bias => (hx.f_mm(&weight.f_transpose(0, 1)?)?, bias),
    };
    // With mixed kinds, the state's kind may have more digits than the product's.
    let kind = c.f_kind()?;
    let mut gates = plain(&gates.f_to_kind(kind)?)?;
    let bias = bias.map(|bias| plain(&bias.f_to_kind(kind)?)).transpose()?;
    let (mut new_h, mut new_c) = (Tensor::f_empty_like(&c)?, Tensor::f_empty_like(&c)?);
    let (batch, hidden) = c.size2()?;
    let output = || Tensor::f_empty([1, batch, hidden], (kind, c.device()));
    let mut output = beside.output.then(output).transpose()?;
    let written =
        pointwise::Written { new_h: &mut new_h, new_c: &mut new_c, output: output.as_mut() };
    pointwise::forward(&mut gates, bias.as_ref(), &c, written, beside.activations)?;
    Ok(fused::Outputs { new_h, new_c, activations: Some(gates), output })
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

fn first_derivative(
    ctx: &Context<'_>,
    grad_new_h: Option<&Tensor>,
    grad_new_c: Option<&Tensor>,
    state: &LltmCell,
) -> Result<Tensors> {
    let values = |grad: Option<&Tensor>| grad.map(|grad| plain(&of_one_step(grad)?)).transpose();
    let (grad_new_h, grad_new_c) = (values(grad_new_h)?, values(grad_new_c)?);
    let (activations, new_c) = (ctx.saved(ACTIVATIONS)?, ctx.saved(NEW_C)?);
    let mut grad_gates = Tensor::f_empty_like(&activations)?;
    let mut grad_c =
        if ctx.needs_input_grad(place::C) { Some(Tensor::f_empty_like(&new_c)?) } else { None };
    let inputs = pointwise::BackwardInputs {
        grad_new_h: grad_new_h.as_ref(),
        grad_new_c: grad_new_c.as_ref(),
        activations: &activations,
        new_c: &new_c,
    };
    pointwise::backward(&inputs, &mut grad_gates, grad_c.as_mut())?;

    let grad_gates = grad_gates.f_to_kind(state.product.unwrap_or(new_c.f_kind()?))?;
    let (grad_h, grad_input) = input_gradients(ctx, &grad_gates)?;
    let grad_input = grad_input.map(|grad| grad.f_reshape(state.input_size())).transpose()?;
    let grad_weight = weight_gradient(ctx, &grad_gates)?;
    let grad_bias = bias_gradient(ctx, &grad_gates, state.bias_size().as_deref())?;
    Ok([grad_input, grad_weight, grad_bias, grad_h, grad_c].into())
}

/// Computes all gradients in one kernel.
fn first_derivative_fused(
    ctx: &Context<'_>,
    grad_new_h: Option<&Tensor>,
    grad_new_c: Option<&Tensor>,
    state: &LltmCell,
) -> Result<Tensors> {
    let asked = [place::INPUT, place::WEIGHT, place::BIAS, place::H, place::C]
        .map(|place| ctx.needs_input_grad(place));
    let [for_input, for_weight, for_bias, for_h, for_c] = asked;
    // Tensors that are not read may have been changed in place since the forward.
    let saved = |needed: bool, place| needed.then(|| ctx.saved(place)).transpose();
    let weight = saved(for_input || for_h, place::WEIGHT)?;
    let (input, h) = (saved(for_weight, place::INPUT)?, saved(for_weight, place::H)?);
    let (activations, new_c) = (ctx.saved(ACTIVATIONS)?, ctx.saved(NEW_C)?);
    let inputs = fused::BackwardInputs {
        grad_new_h,
        grad_new_c,
        activations: &activations,
        new_c: &new_c,
        input: input.as_ref(),
        h: h.as_ref(),
        weight: weight.as_ref(),
    };
    let input = for_input.then(|| state.input_size());
    let bias = state.bias_size().filter(|_| for_bias);
    let (input, bias) = (input.as_deref(), bias.as_deref());
    let asked = fused::Asked { input, weight: for_weight, bias, h: for_h, c: for_c };
    Ok(fused::backward(&inputs, state.sizes, asked)?.into())
}

/// The gradients of h and x: `dG W`, of which only the columns that are asked for are computed.
fn input_gradients(
    ctx: &Context<'_>,
    grad_gates: &Tensor,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (needs_h, needs_input) =
        (ctx.needs_input_grad(place::H), ctx.needs_input_grad(place::INPUT));
    if !needs_h && !needs_input {
        return Ok((None, None));
    }
    let weight = ctx.saved(place::WEIGHT)?;
    let (gates, columns) = weight.size2()?;
    let (hidden, features) = (gates / 3, columns - gates / 3);
    if needs_h && needs_input {
        let grad = grad_gates.f_mm(&weight)?;
        return Ok((Some(grad.f_narrow(1, 0, hidden)?), Some(grad.f_narrow(1, hidden, features)?)));
    }
    let product =
        |start, len| -> Result<Tensor> { Ok(grad_gates.f_mm(&weight.f_narrow(1, start, len)?)?) };
    let grad_h = needs_h.then(|| product(0, hidden)).transpose()?;
    let grad_input = needs_input.then(|| product(hidden, features)).transpose()?;
    Ok((grad_h, grad_input))
}

/// The gradient of the weight: `dGᵀ [h, x]`. The concatenation is computed again, because it would
/// be the largest tensor to keep.
fn weight_gradient(ctx: &Context<'_>, grad_gates: &Tensor) -> Result<Option<Tensor>> {
    if !ctx.needs_input_grad(place::WEIGHT) {
        return Ok(None);
    }
    let hx = Tensor::f_cat(&[ctx.saved(place::H)?, of_one_step(&ctx.saved(place::INPUT)?)?], 1)?;
    Ok(Some(grad_gates.f_transpose(0, 1)?.f_mm(&hx)?))
}

/// The gradient of the bias: `Σ dG` over the rows, in the bias' own shape.
pub(super) fn bias_gradient(
    ctx: &Context<'_>,
    grad_gates: &Tensor,
    shape: Option<&[i64]>,
) -> Result<Option<Tensor>> {
    let Some(shape) = shape.filter(|_| ctx.needs_input_grad(place::BIAS)) else { return Ok(None) };
    let sum = grad_gates.f_sum_dim_intlist([0_i64].as_slice(), false, grad_gates.f_kind()?)?;
    Ok(Some(sum.f_reshape(shape)?))
}
