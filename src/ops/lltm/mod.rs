//! Whole sequences of the LLTM cell.

mod functions;
mod kernels;
pub(super) mod parts;
mod plan;
mod weight;

use super::lltm_cell::{
    KINDS, Matched, applied, check_the_others, f_lltm_cell, in_matching_kinds, is_ordinary,
    lltm_cell_reference, place,
};
use super::way::forced;
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::ffi::facts::{Facts, facts};
use crate::{Error, Result, check};
use functions::{Operands, Outputs, Saved, Shapes, copied};
#[doc(hidden)]
pub use plan::Way;
use tch::{Kind, Tensor};

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
/// Returns (h of all steps `[T, B, H]`, (h, c) after the last step, each `[B, H]`). All three are
/// contiguous and have memory of their own: the last h is a copy, not a view of the first result.
/// The tensors are of kind `Float`, `Double`, `Half` or `BFloat16`, on one CPU or CUDA device.
/// Strides and sizes are arbitrary; tensors may be empty, and there may be no steps at all. There
/// are first and second derivatives of each output with respect to each tensor.
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
    let known = facts_of_one_step(way, &arguments)?;
    if known.is_some() {
        return in_order(apply(Lltm { way, known, shapes: None }, &arguments)?);
    }
    let input =
        check!(OP, input).defined()?.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
    let (steps, batch, features) = input.tensor().size3()?;
    check_the_others(OP, &input, (batch, features), weight, bias, state)?;
    let matched = in_matching_kinds(OP, &arguments)?;
    matched.as_ref().map(|matched| check_state(c, matched)).transpose()?;
    let input = input.tensor();
    if matched.is_none() && way.calls_the_cell(steps, input.f_kind()?) {
        return step_by_step(f_lltm_cell, input, weight, bias, state);
    }
    in_order(applied(Lltm { way, known: None, shapes: None }, &arguments, matched)?)
}

/// The facts of the arguments, those of the input describing one step. `None` unless all checks
/// would pass and one step of these arguments is the cell's. That is the common case; it is known
/// from the facts, without further queries of each tensor.
fn facts_of_one_step(
    way: Way,
    arguments: &[Option<&Tensor>; place::LEN],
) -> Result<Option<[Facts; place::LEN]>> {
    if way != Way::Automatic {
        return Ok(None);
    }
    let mut known = facts(*arguments)?;
    let input = &mut known[place::INPUT];
    if !matches!(input.sizes(), Some([1, _, _])) {
        return Ok(None);
    }
    *input = input.of_one_step();
    let (Some(kind), Some(device)) = (input.kind(), input.device()) else { return Ok(None) };
    let is_the_cell_s = way.is_one_step_of_the_cell(1, (kind, kind), device);
    let takes = is_the_cell_s && is_ordinary(&known, arguments[place::BIAS].is_some());
    Ok(takes.then_some(known))
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
    step_by_step(lltm_cell_reference, input, weight, bias, state)
}

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

/// Loops over the steps.
fn step_by_step(
    cell: Cell,
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
        let (new_h, new_c) = cell(&step, weight, bias, state)?;
        let output = new_h.f_unsqueeze(0)?.f_narrow(0, 0, 0)?;
        return Ok((output, (copied(h, new_h.f_kind()?)?, copied(c, new_c.f_kind()?)?)));
    }
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

struct Lltm {
    way: Way,
    /// The facts of the arguments, if this is one step and they have been queried already. Only the
    /// forward needs them.
    known: Option<[Facts; place::LEN]>,
    /// Known after the forward.
    shapes: Option<Shapes>,
}

/// Saved after the inputs: h of all steps (not of a single one), c of all steps, and σ(i), σ(o), g.
/// They are absent if there is nothing to compute.
const OUTPUT: usize = place::LEN;
const C: usize = place::LEN + 1;
const ACTIVATIONS: usize = place::LEN + 2;

impl Function for Lltm {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let (input, weight, bias) =
            (inputs.get(place::INPUT)?, inputs.get(place::WEIGHT)?, inputs.optional(place::BIAS));
        let (h, c) = (inputs.get(place::H)?, inputs.get(place::C)?);
        let operands = Operands { input, weight, bias, h, c };
        let (outputs, shapes) =
            functions::forward(&operands, self.known.take(), self.way, saver.needs_graph())?;
        let Outputs { output, last_h, last_c, c: all_c, activations } = outputs;
        let all = [Some(input), Some(weight), bias, Some(h), Some(c)];
        all.iter().for_each(|tensor| saver.save_optional(*tensor));
        saver.save_optional(all_c.as_ref().map(|_| &output));
        saver.save_optional(activations.as_ref().map(|_| all_c.as_ref().unwrap_or(&last_c)));
        saver.save_optional(activations.as_ref());
        self.shapes = Some(shapes);
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
        let Some(shapes) = &self.shapes else {
            return Err(Error::msg("internal error: lltm had no forward"));
        };
        let needs: [bool; place::LEN] = std::array::from_fn(|place| ctx.needs_input_grad(place));
        let grads = [grads.optional(0), grads.optional(1), grads.optional(2)];
        // Tensors that are not read may have been changed in place since the forward.
        let saved = |is_read: bool, slot| is_read.then(|| ctx.saved(slot)).transpose();
        let Some(activations) = ctx.saved_optional(ACTIVATIONS)? else {
            let mut inputs = [const { None }; place::LEN];
            for (place, input) in inputs.iter_mut().enumerate() {
                *input = saved(needs[place], place)?;
            }
            return Ok(functions::backward_of_nothing(grads, inputs)?.into());
        };
        let saved = Saved {
            input: saved(needs[place::WEIGHT], place::INPUT)?,
            weight: saved(shapes.reads_weight(&needs), place::WEIGHT)?,
            h: saved(needs[place::WEIGHT], place::H)?,
            output: saved(needs[place::WEIGHT] && !shapes.is_one_step(), OUTPUT)?,
            c: ctx.saved(C)?,
            activations,
        };
        Ok(functions::backward(grads, saved, shapes, &needs, self.way)?.into())
    }
}

/// The composite of the operator's inputs. Where autocast gave the products' operands their kind, h
/// has the state's kind after a step, as in the forward pass, and is cast for the next one.
fn reference(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    let inputs: Vec<Option<&Tensor>> = inputs.iter().map(Option::as_ref).collect();
    let inputs = Inputs::new(&inputs);
    let cell: Cell = |input, weight, bias, (h, c)| {
        lltm_cell_reference(input, weight, bias, (&h.f_to_kind(weight.f_kind()?)?, c))
    };
    let (output, (last_h, last_c)) = step_by_step(
        cell,
        inputs.get(place::INPUT)?,
        inputs.get(place::WEIGHT)?,
        inputs.optional(place::BIAS),
        (inputs.get(place::H)?, inputs.get(place::C)?),
    )?;
    Ok([output, last_h, last_c].into())
}
