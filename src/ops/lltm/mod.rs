//! Whole sequences of the LLTM cell.

mod kernels;
mod one_step;
mod plan;
mod weight;

use super::lltm_cell::{
    KINDS, Matched, applied, bias_gradient, check_beside, f_lltm_cell, in_matching_kinds,
    lltm_cell_reference, place,
};
use super::way::forced;
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::cuda::matmul_allow_tf32;
use crate::ffi::tensor::plain;
use crate::{Error, Result, check};
use one_step::OneStep;
#[doc(hidden)]
pub use plan::Way;
use plan::{Chip, Direction, Plan, Sizes};
use tch::{Device, Kind, Tensor};

const OP: &str = "lltm";

/// A sequence of LLTM steps. Returns h of each step, and the state after the last step.
///
/// ```text
/// [i | o | g] = [h[t-1], x[t]] Wᵀ + b
/// c[t] = c[t-1] + elu(g) σ(i)
/// h[t] = tanh(c[t]) σ(o)
/// ```
///
/// * `input`: x, `[T, B, F]`
/// * `weight`: W, `[3H, H + F]`. Its rows are for i, o and g and its columns for h and x, as in
///   [`lltm_cell`](super::lltm_cell)
/// * `bias`: b, `[3H]` or, as PyTorch's extension-cpp has it, `[1, 3H]`; `None` for zeros
/// * `state`: (h, c) before the first step, each `[B, H]`
///
/// Returns (h of all steps `[T, B, H]`, (h, c) after the last step, each `[B, H]`). The tensors are
/// of kind `Float`, `Double`, `Half` or `BFloat16`, on one CPU or CUDA device. Strides and sizes
/// are arbitrary; tensors may be empty, and there may be no steps at all. There are first and
/// second derivatives of each output with respect to each tensor.
///
/// The operator accepts the kinds that a loop of the cell accepts for any number of steps. x and h
/// are promoted to one kind, which weight and bias must have, and which the outputs get; c has the
/// same kind or a narrower one. Under autocast the products run in autocast's kind, and the outputs
/// get that kind promoted with c's; a c of kind `Double` then needs a product of kind `Double`. For
/// the half kinds, sums and gates are computed in `Float`. In the forward they are never rounded
/// between a product and the operations after it, except for a single step on CUDA that takes two
/// kernels of [`lltm_cell`](super::lltm_cell). The gradients for the gates are rounded to the kind
/// of the products that use them. On CUDA c and h are rounded at each step (c is not where all
/// steps are one kernel), on the CPU only when they are returned.
///
/// On CUDA the operator works on libtorch's current stream and never waits for the GPU. It is
/// deterministic: it gives the same bits each time. The product with the input is computed for all
/// steps at once. Each small step then costs one kernel, which multiplies in the kind's full
/// precision. Each larger step costs one of libtorch's products, under its precision switches, and
/// one kernel. Where steps are small and F < 256, the kernel of each step multiplies the input,
/// too.
///
/// On a GPU of compute capability 9.0, one kernel computes all steps and keeps the weights on the
/// chip, where that was measured to be faster. This needs at least eight steps. For 512 steps on an
/// H200 with F = H, it is so up to about the following numbers of rows, in both directions. With
/// few steps the limits are lower, and in tf32 they are about those of the half kinds or higher.
/// The kernels count up to 3·T·B·H = 2^31.
///
/// | H | 128 | 256 | 512 | 768 | 1024 | 2048 |
/// |---|---|---|---|---|---|---|
/// | half kinds | 3600 | 1752 | 720 | 336 | 256 | 40 |
/// | `Float` | 1280 | 384 | 192 | 64 | 64 | |
/// | `Double` | 240 | | | | | |
///
/// Above H = 768 (for `Float` above 256 in the forward and above 128 in the backward), H has to be
/// a multiple of 8. The forward of `Double` goes up to 720 rows, and at H = 256 up to 168.
///
/// For more rows than these, of one half kind, each forward step on such a GPU is computed by the
/// cell's tensor-core kernel, which multiplies the input, too. It requires H to be a multiple of 64
/// and F a multiple of 8. On an H200 with F = H it is used from about 900 rows at H = 512, 700 at
/// 768, 600 at 1024 and 300 at 2048, except for numbers of rows that leave the last round of tiles
/// almost empty.
///
/// Where libtorch's switch allows tf32 in products, the kernels of all steps multiply `Float` as
/// fp16 values that are scaled by powers of two. Like tf32 they have 11 binary digits, but a
/// smaller range. Each row of W, of h before the first step, and of the gradients for the gates has
/// its own scale. The scale for the h of the steps is fixed, because |h| < 1. Values below 2^-28 of
/// the largest in their row are off by up to 2^-39 of that largest value, and an h below 2^-29 is
/// off by up to 2^-40, where tf32 would keep 11 digits. The sigmoids and tanh of those kernels are
/// accurate to about 1e-6 in tf32 and to 4 units in the last place in `Float`.
///
/// On the CPU the weights are packed once, and libtorch's threads work together through the whole
/// sequence.
///
/// One step, as in sampling, is computed by the kernels of [`lltm_cell`](super::lltm_cell), except
/// on the CPU for half kinds and mixed kinds. Two steps are a loop of it, except for half kinds.
///
/// There is no forget gate: c is a sum over all steps, so rounding errors add up. For T = 1…4096,
/// tests check that outputs and gradients of a small size are off by at most `8·√max(T, 4)·ε` of
/// their largest value, where ε is the kind's machine epsilon.
///
/// Memory grows linearly with T. The backward keeps `4·T·B·H` numbers in addition to inputs and
/// outputs (for the half kinds on the CPU they are `Float`). Temporarily, the forward needs
/// `3·T·B·H` more numbers if the kinds of gates and outputs differ. The backward needs
/// `3·T·B·H + T·B·(H + F)` more, on the CPU up to twice as many. Where a grid of blocks computes
/// all steps, because the weights are too many for a cluster of blocks, autocast and tf32 need
/// `T·B·H` more half-precision values. In tf32 the backward also needs `3·T·B·H` half-precision
/// values and a twentieth of that for scales, where B and H are rounded up
/// to multiples of 8 and 32. [`checkpoint`](crate::autograd::checkpoint) over pieces of a sequence
/// keeps less.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{lltm, lltm_cell};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (x, w, b) = (Tensor::randn([6, 2, 4], options), Tensor::randn([9, 7], options), Tensor::randn([9], options));
/// # let (h0, c0) = (Tensor::randn([2, 3], options), Tensor::randn([2, 3], options));
/// let (mut h, mut c) = (h0.shallow_clone(), c0.shallow_clone());
/// let mut steps = Vec::new();
/// for x in x.unbind(0) {
///     (h, c) = lltm_cell(&x, &w, Some(&b), (&h, &c));
///     steps.push(h.shallow_clone());
/// }
/// let output = Tensor::stack(&steps, 0);
///
/// let fused = lltm(&x, &w, Some(&b), (&h0, &c0));
/// assert!(fused.0.allclose(&output, 1e-12, 1e-12, false));
/// assert!(fused.1.0.allclose(&h, 1e-12, 1e-12, false) && fused.1.1.allclose(&c, 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://pytorch.org/tutorials/advanced/cpp_extension.html>.
///
/// # Panics
/// If [`f_lltm`] returns an error.
pub fn lltm(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> (Tensor, (Tensor, Tensor)) {
    super::unwrap(f_lltm(input, weight, bias, state))
}

/// [`lltm`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or
/// if libtorch or CUDA fails.
pub fn f_lltm(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, (Tensor, Tensor))> {
    let way: Way = forced();
    let (h, c) = state;
    let arguments = [Some(input), Some(weight), bias, Some(h), Some(c)];
    if let Some(step) = OneStep::of_ordinary(way, &arguments)? {
        return in_order(apply(step, &arguments)?);
    }
    let input =
        check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
    let (steps, batch, features) = input.tensor().size3()?;
    check_beside(OP, &input, (batch, features), weight, bias, state)?;
    let matched = in_matching_kinds(OP, &arguments)?;
    matched.as_ref().map(|matched| check_state(c, matched)).transpose()?;
    let (kind, device) = (input.tensor().f_kind()?, input.tensor().device());
    let kinds = matched.as_ref().map_or((kind, kind), |matched| (matched.product, matched.state));
    if way.is_one_step_of_the_cell(steps, kinds, device) {
        return in_order(applied(OneStep::new(), &arguments, matched)?);
    }
    if matched.is_none() && way.calls_the_cell(steps, kind) {
        return step_by_step(f_lltm_cell, input.tensor(), weight, bias, state);
    }
    in_order(applied(Lltm { way, ..Lltm::default() }, &arguments, matched)?)
}

/// The outputs in the form in which users get them.
fn in_order(outputs: Tensors) -> Result<(Tensor, (Tensor, Tensor))> {
    let [output, last_h, last_c] = outputs.exactly()?;
    Ok((output, (last_h, last_c)))
}

/// [`lltm`] in plain tch operations: a loop of [`lltm_cell_reference`](super::lltm_cell_reference),
/// without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn lltm_reference(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, (Tensor, Tensor))> {
    if input.size3()?.0 == 0 {
        // `stack` accepts no empty list. A step whose result is discarded gives the kinds, and the
        // errors that a real step would give.
        let (h, c) = state;
        let step = input.f_sum_dim_intlist([0_i64].as_slice(), false, input.f_kind()?)?;
        let (new_h, new_c) = lltm_cell_reference(&step, weight, bias, state)?;
        let output = new_h.f_unsqueeze(0)?.f_narrow(0, 0, 0)?;
        return Ok((output, (copied(h, new_h.f_kind()?)?, copied(c, new_c.f_kind()?)?)));
    }
    step_by_step(lltm_cell_reference, input, weight, bias, state)
}

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

/// Loops over the steps, of which there is at least one.
fn step_by_step(
    cell: Cell,
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    state: (&Tensor, &Tensor),
) -> Result<(Tensor, (Tensor, Tensor))> {
    let (mut h, mut c) = (state.0.shallow_clone(), state.1.shallow_clone());
    let mut steps = Vec::new();
    for step in input.f_unbind(0)? {
        (h, c) = cell(&step, weight, bias, (&h, &c))?;
        steps.push(h.shallow_clone());
    }
    Ok((Tensor::f_stack(&steps, 0)?, (h, c)))
}

/// Refuses a c with which a second step would fail: h after the first step has the state's kind and
/// goes into the second step's product, for which autocast casts it again unless it is `Double`.
fn check_state(c: &Tensor, matched: &Matched) -> Result<()> {
    let Matched { product, state, autocast, .. } = *matched;
    if state == product || (autocast && state != Kind::Double) {
        return Ok(());
    }
    let expected = format!("kind {product:?} or a narrower one, as input and h");
    Err(check!(OP, c).refuse(&expected, format!("{:?}", c.kind()), "call to_kind"))
}

#[derive(Default)]
struct Lltm {
    way: Way,
    /// Kept here so that the first derivative does not look at the bias itself: a bias that was
    /// changed in place since the forward then causes no version error.
    bias_shape: Option<Vec<i64>>,
    /// The kind of the products' operands.
    product: Option<Kind>,
}

/// Saved after the inputs: h and c of all steps, and σ(i), σ(o), g. They are absent if there is
/// nothing to compute.
const OUTPUT: usize = place::LEN;
const NEW_C: usize = place::LEN + 1;
const ACTIVATIONS: usize = place::LEN + 2;

/// The kind in which kernels compute tensors of this kind. There are none for the half kinds on the
/// CPU.
fn worked_in(kind: Kind, device: Device) -> Kind {
    match (device, kind) {
        (Device::Cpu, Kind::Half | Kind::BFloat16) => Kind::Float,
        (_, kind) => kind,
    }
}

/// The tensor in the kind and layout that kernels read.
fn worked(tensor: &Tensor) -> Result<Tensor> {
    plain(&tensor.f_to_kind(worked_in(tensor.f_kind()?, tensor.device()))?)
}

impl Function for Lltm {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let (h, c) = (inputs.get(place::H)?, inputs.get(place::C)?);
        (self.bias_shape, self.product) = (bias.map(Tensor::size), Some(weight.f_kind()?));
        let state = c.f_kind()?;
        let all = [Some(input), Some(weight), bias, Some(h), Some(c)];

        let made = if input.size()[0] == 0 || h.numel() == 0 {
            None
        } else {
            Some(self.all_steps(&all, saver)?)
        };
        let (output, last_h, last_c) = match &made {
            // Without steps nothing changes, and without rows or columns there is nothing to
            // compute.
            None => {
                let output = Tensor::f_zeros(
                    [input.size()[0], h.size()[0], h.size()[1]],
                    (state, c.device()),
                )?;
                (output, copied(h, state)?, copied(c, state)?)
            }
            Some(made) => {
                let last = |steps: &Tensor| copied(&steps.f_select(0, -1)?, state);
                let last_c = match made.activations {
                    Some(_) => last(&made.c)?,
                    // `made.c` is then c of the last step alone.
                    None => made.c.f_view(h.size().as_slice())?.f_to_kind(state)?,
                };
                (made.output.f_to_kind(state)?, last(&made.output)?, last_c)
            }
        };
        all.iter().for_each(|tensor| saver.save_optional(*tensor));
        let kept =
            made.as_ref().and_then(|made| Some((&output, &made.c, made.activations.as_ref()?)));
        saver.save_optional(kept.map(|kept| kept.0));
        saver.save_optional(kept.map(|kept| kept.1));
        saver.save_optional(kept.map(|kept| kept.2));
        // An output without a gradient then costs no tensor of zeros.
        saver.set_materialize_grads(false);
        Ok([output, last_h, last_c].into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs =
                (0..place::LEN).map(|slot| ctx.saved_optional(slot)).collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, reference);
        }
        first_derivative(ctx, grads, self)
    }
}

impl Lltm {
    fn all_steps(
        &self,
        inputs: &[Option<&Tensor>; place::LEN],
        saver: &Saver<'_>,
    ) -> Result<kernels::Outputs> {
        let worked: Vec<Option<Tensor>> =
            inputs.iter().map(|input| input.map(worked).transpose()).collect::<Result<_>>()?;
        let [Some(input), Some(weight), bias, Some(h0), Some(c0)] = &worked[..] else {
            return Err(Error::msg("internal error: an argument of lltm is absent"));
        };
        let operands = kernels::Operands { input, weight, bias: bias.as_ref(), h0, c0 };
        let plan = self.plan(Direction::Forward, operands.sizes()?, weight, c0)?;
        kernels::forward(plan, &operands, saver.needs_graph())
    }

    fn plan(
        &self,
        direction: Direction,
        sizes: Sizes,
        weight: &Tensor,
        state: &Tensor,
    ) -> Result<Plan> {
        let kinds = (weight.f_kind()?, state.f_kind()?);
        let chip = Chip::of(state.device(), kinds.0)?;
        Ok(Plan::new(self.way, direction, sizes, kinds, chip))
    }
}

/// A copy, because an output must not share another tensor's memory.
fn copied(tensor: &Tensor, kind: Kind) -> Result<Tensor> {
    Ok(tensor.f_to_dtype(kind, false, true)?)
}

fn reference(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    let inputs = Inputs::new(&inputs);
    let state = (inputs.get(place::H)?, inputs.get(place::C)?);
    let (output, (last_h, last_c)) = lltm_reference(
        inputs.get(place::INPUT)?,
        inputs.get(place::WEIGHT)?,
        inputs.optional(place::BIAS),
        state,
    )?;
    Ok([output, last_h, last_c].into())
}

fn first_derivative(ctx: &Context<'_>, grads: &Tensors, state: &Lltm) -> Result<Tensors> {
    let Some(activations) = ctx.saved_optional(ACTIVATIONS)? else {
        return derivative_of_nothing(ctx, grads);
    };
    let values = |index| grads.optional(index).map(worked).transpose();
    let (grad_output, grad_h, grad_c) = (values(0)?, values(1)?, values(2)?);
    let (weight, c) = (ctx.saved(place::WEIGHT)?, ctx.saved(NEW_C)?);
    let weight = worked(&weight)?;
    let (steps, batch, hidden) = c.size3()?;
    let sizes = Sizes { steps, batch, features: weight.size2()?.1 - hidden, hidden };
    let inputs = kernels::BackwardInputs {
        weight: &weight,
        grad_output: grad_output.as_ref(),
        grad_h: grad_h.as_ref(),
        grad_c: grad_c.as_ref(),
        activations: &activations,
        c: &c,
    };
    let plan = state.plan(Direction::Backward, sizes, &weight, &c)?;
    let made = kernels::backward(plan, &inputs, ctx.needs_input_grad(place::H))?;

    let grad_gates = made.gates.f_view([steps * batch, 3 * hidden])?;
    let product = state.product.unwrap_or(weight.f_kind()?);
    let state_kind = ctx.saved(OUTPUT)?.f_kind()?;
    let wanted = |place, gradient: Tensor, kind| -> Result<Option<Tensor>> {
        if ctx.needs_input_grad(place) { Ok(Some(gradient.f_to_kind(kind)?)) } else { Ok(None) }
    };
    let bias_shape = state.bias_shape.as_deref().filter(|_| ctx.needs_input_grad(place::BIAS));
    let grad_bias = match bias_shape {
        Some(shape) => Some(bias_gradient(&grad_gates, shape)?.f_to_kind(product)?),
        None => None,
    };
    Ok([
        input_gradient(ctx, &grad_gates, &weight, sizes, product)?,
        weight_gradient(ctx, &grad_gates, sizes, product)?,
        grad_bias,
        wanted(place::H, made.h0, product)?,
        wanted(place::C, made.c0, state_kind)?,
    ]
    .into())
}

/// The gradients of a sequence without steps, rows or columns: those for the state are passed
/// through, and the others are zero.
fn derivative_of_nothing(ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    let gradient = |place: usize, from: Option<usize>| -> Result<Option<Tensor>> {
        if !ctx.needs_input_grad(place) {
            return Ok(None);
        }
        let input = ctx.saved(place)?;
        match from.and_then(|output| grads.optional(output)) {
            Some(grad) => Ok(Some(copied(grad, input.f_kind()?)?)),
            None => Ok(Some(input.f_zeros_like()?)),
        }
    };
    let all = [
        (place::INPUT, None),
        (place::WEIGHT, None),
        (place::BIAS, None),
        (place::H, Some(1)),
        (place::C, Some(2)),
    ];
    all.into_iter()
        .map(|(place, from)| gradient(place, from))
        .collect::<Result<Vec<_>>>()
        .map(Into::into)
}

/// The gradient of the input, `dG W_x`, for all steps at once.
fn input_gradient(
    ctx: &Context<'_>,
    grad_gates: &Tensor,
    weight: &Tensor,
    sizes: Sizes,
    kind: Kind,
) -> Result<Option<Tensor>> {
    if !ctx.needs_input_grad(place::INPUT) {
        return Ok(None);
    }
    let Sizes { steps, batch, features, hidden } = sizes;
    let mut weight = weight.f_narrow(1, hidden, features)?;
    /// With fewer rows, the product saves less time than the copy costs.
    const MANY_ROWS: i64 = 256;
    if is_in_tf32(grad_gates)? && steps * batch >= MANY_ROWS {
        // Column by column in memory, the order that csrc/recurrent/columns.cu writes.
        weight = weight.f_transpose(0, 1)?.f_contiguous()?.f_transpose(0, 1)?;
    }
    let gradient = kernels::product(grad_gates, &weight)?;
    Ok(Some(gradient.f_view([steps, batch, features])?.f_to_kind(kind)?))
}

/// The gradient of the weight, `Σ dG[t]ᵀ [h[t-1], x[t]]`, over all steps at once.
fn weight_gradient(
    ctx: &Context<'_>,
    grad_gates: &Tensor,
    sizes: Sizes,
    kind: Kind,
) -> Result<Option<Tensor>> {
    if !ctx.needs_input_grad(place::WEIGHT) {
        return Ok(None);
    }
    let (h0, output, input) = (ctx.saved(place::H)?, ctx.saved(OUTPUT)?, ctx.saved(place::INPUT)?);
    let operands = weight::Operands { grad_gates, h0: &h0, output: &output, input: &input, sizes };
    Ok(Some(operands.product()?.f_to_kind(kind)?))
}

/// Whether libtorch may use tf32 in products of this operand.
fn is_in_tf32(operand: &Tensor) -> Result<bool> {
    Ok(operand.f_kind()? == Kind::Float && operand.device().is_cuda() && matmul_allow_tf32()?)
}
