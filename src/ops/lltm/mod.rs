//! Whole sequences of the LLTM cell.

mod costs;
mod functions;
mod kernels;
mod plan;
mod weight;

use super::lltm_cell::{
    KINDS, are_alike, arguments_fit, f_lltm_cell, functions as cell, in_matching_kinds,
    lltm_cell_reference, place,
};
use super::way::forced;
use crate::amp::Autocast;
use crate::ffi::facts::{Facts, facts};
use crate::operator::{
    Again, Args, Call, Dim, Each, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Slots, call,
};
use crate::ops::kinds;
use crate::{Error, Result};
use cell::Shapes;
pub(super) use costs::COSTS;
use functions::{Operands, Saved};
#[cfg(test)]
pub(super) use plan::way_on_h200;
use plan::{Way, calls_the_cell, is_one_step_of_the_cell};
use tch::{Device, Kind, Tensor};

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
/// x and h are promoted to one kind, which weight and bias must have. The outputs get that kind
/// promoted with c's. On CUDA, if that is `Float` and x a half kind, h of a step is rounded to x's
/// kind for the next product. Under autocast the products run in autocast's kind. For the half kinds,
/// sums and gates are computed in `Float`. In the forward they are never rounded between a product
/// and the operations after it, except for a single step on CUDA that takes two kernels of
/// [`lltm_cell`](super::lltm_cell). The gradients for the gates are rounded to the kind of the
/// products that use them. On CUDA c and h are rounded at each step (c is not where all steps are one
/// kernel), on the CPU only when they are returned.
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
/// on the CPU for half kinds and mixed kinds. Two steps of one kind are a loop of it, except for half
/// kinds and under autocast.
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
    let (h, c) = state;
    let LltmOut { output, h, c } = call(Lltm {}, &LltmIn { input, weight, bias, h, c })?;
    Ok((output, (h, c)))
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
        return Ok((
            output,
            (
                h.f_to_dtype(new_h.f_kind()?, false, true)?,
                c.f_to_dtype(new_c.f_kind()?, false, true)?,
            ),
        ));
    }
    let (mut h, mut c) = (state.0.shallow_clone(), state.1.shallow_clone());
    let mut steps: Vec<Tensor> = Vec::new();
    for step in input.f_unbind(0)? {
        // h may have a wider kind after the first step, because c has.
        let operand = if steps.is_empty() { h } else { h.f_to_kind(weight.f_kind()?)? };
        (h, c) = cell(&step, weight, bias, (&operand, &c))?;
        steps.push(h.shallow_clone());
    }
    Ok((Tensor::f_stack(&steps, 0)?, (h, c)))
}

crate::signature! {
    /// The LLTM over a whole sequence `[T, B, F]`; returns (h of all steps `[T, B, H]`, h, c).
    pub Lltm: LltmIn -> LltmOut = "lltm"(input, weight, bias?, h, c) -> (output, h, c)
}

crate::slots! {
    /// What a sequence keeps: the states c of all steps, `[T, B, H]`, and σ(i), σ(o) and g, `[T, B, 3H]`. A single step
    /// of the cell keeps its own alone, without c, which is an output.
    pub struct LltmKept { states, activations }
}

/// What a call decides for both of its passes.
#[derive(Clone, Copy, Debug, Default)]
pub struct LltmPlan {
    way: Way,
    /// For one step that the cell's kernels compute.
    one_step: Option<Shapes>,
    /// Whether the arguments are known to fit, so that the rule need not run for its errors.
    is_checked: bool,
}

/// The outputs that the backward pass reads.
const OUTPUT: u64 = 1;
const LAST_C: u64 = 1 << 2;

impl Operator for Lltm {
    type Kept = LltmKept;
    type Plan = LltmPlan;

    const READS_OUTPUTS: u64 = OUTPUT | LAST_C;

    fn composed(&self, of: &Args<'_, Self>, is_traced: bool) -> Result<Option<Outputs<Self>>> {
        let way: Way = forced();
        if is_traced {
            return Ok(None);
        }
        let LltmIn { input, weight, bias, h, c } = *of;
        let [first] = facts([Some(input)])?;
        let (Some(&[steps, _, _]), Some(kind)) = (first.all_sizes(), first.kind()) else {
            return Ok(None);
        };
        if !kinds::Kind::of(kind).is_ok_and(|kind| calls_the_cell(way, steps, kind)) {
            return Ok(None);
        }
        let known = facts([Some(input), Some(weight), bias, Some(h), Some(c)])?;
        // The rule reports what does not fit. Under autocast a sequence casts once, and a loop each step.
        let is_cast = || first.device().is_some_and(|device| Autocast::kind(device).is_some());
        if !are_alike(&known, bias.is_some()) || is_cast() || !is_taken(of) {
            return Ok(None);
        }
        let (output, (h, c)) = step_by_step(f_lltm_cell, input, weight, bias, (h, c))?;
        Ok(Some(LltmOut { output, h, c }))
    }

    fn cast(&self, of: &Args<'_, Self>) -> Result<Option<Vec<Option<Tensor>>>> {
        let LltmIn { input, weight, bias, h, c } = *of;
        in_matching_kinds([Some(input), Some(weight), bias, Some(h), Some(c)])
    }

    fn plan(&self, of: &Args<'_, Self>, _: &Needs<Self>) -> Result<LltmPlan> {
        let way = forced();
        let LltmIn { input, weight, bias, h, c } = *of;
        let known = facts([Some(input), Some(weight), bias, Some(h), Some(c)])?;
        let is_alike = are_alike(&known, bias.is_some());
        let kinds = (known[1].kind(), known[4].kind());
        let one_step = match (known[0].sizes(), kinds, known[4].device()) {
            (Some([1, _, _]), (Some(product), Some(state)), Some(device)) => {
                let kinds = kinds::Kind::of(product).ok().zip(kinds::Kind::of(state).ok());
                let is_the_cell_s = kinds
                    .is_some_and(|kinds| is_one_step_of_the_cell(way, 1, kinds, device.into()));
                let known = of_one_step(known);
                Shapes::that_fit(&known, bias.is_some(), true).filter(|_| is_the_cell_s)
            }
            _ => None,
        };
        let one_step = one_step.filter(Shapes::is_anything);
        Ok(LltmPlan { way, is_checked: is_alike && one_step.is_some(), one_step })
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let LltmIn { input, weight, bias, h, c } = of;
        input.kind_in(&KINDS)?.supported_device()?.dim(3, "[T, B, F]")?;
        let [steps, batch, features] = [0, 1, 2].map(|dim| input.sizes()[dim].clone());
        let kind = arguments_fit(input, [&batch, &features], (weight, bias.as_ref()), (h, c))?;
        let hidden = h.sizes()[1].clone();
        let gates = weight.sizes()[0].clone();
        let all = [steps.clone(), batch.clone(), gates.clone()];
        D::product(&all).ok_or_else(|| {
            let sizes = format!("T = {steps:?}, B = {batch:?}, H = {hidden:?}");
            input.refuse("sizes whose products fit 64 bits", sizes, "")
        })?;
        let like = input.of_kind(kind);
        let [output, activations] =
            [hidden, gates].map(|columns| like.sized([steps.clone(), batch.clone(), columns]));
        let is_kept = needed(needs).contains(&true);
        Ok(Made {
            kept: LltmKept {
                states: is_kept.then(|| output.clone()),
                activations: is_kept.then_some(activations),
            },
            outputs: LltmOut { output, h: h.of_kind(kind), c: c.of_kind(kind) },
        })
    }

    fn reads(&self, needs: &Needs<Self>) -> LltmIn<Each<bool>> {
        let LltmIn { weight: needs_weight, .. } = *needs;
        LltmIn { input: needs_weight, weight: true, bias: false, h: needs_weight, c: false }
    }

    /// One step reads the weight for products with it only, and no output but c; several steps read no
    /// last c, which is the last of all that are kept, and the output for the gradient of the weight.
    fn reads_for(&self, _: &LltmOut<Each<bool>>, needs: &Needs<Self>, plan: &LltmPlan) -> [u64; 3] {
        let is_one_step = plan.one_step.is_some();
        let weight = u64::from(!is_one_step || needs.input || needs.h) << place::WEIGHT;
        let outputs = match is_one_step {
            true => LAST_C,
            false => OUTPUT * u64::from(needs.weight),
        };
        [!(1 << place::WEIGHT) | weight, outputs, u64::MAX]
    }

    /// A trace may compute the forward pass again.
    fn reads_in_trace(&self, _: &Needs<Self>) -> LltmIn<Each<bool>> {
        LltmIn::each(|_| true)
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let LltmPlan { way, one_step, is_checked } = call.plan;
        let LltmIn { input, weight, bias, h, c } = call.of;
        let operands = Operands { input, weight, bias, h, c };
        if is_checked && !call.is_traced {
            let keep = needed(call.needs).contains(&true);
            return made(functions::forward(&operands, way, one_step.as_ref(), keep)?);
        }
        let said = call.check()?.kept;
        let is_repeated = call.is_traced && is_repeated(c.device(), c.f_kind()?);
        let keep = said.activations.is_some() && !is_repeated;
        let mut found = functions::forward(&operands, way, one_step.as_ref(), keep)?;
        if call.is_traced {
            let c = found.c.as_ref().or(found.last_c.as_ref());
            (found.c, found.activations) =
                (as_said(c, said.states)?, as_said(found.activations.as_ref(), said.activations)?);
        }
        made(found)
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let LltmOut { output, h, c } = &grads;
        let grads = [output, h, c].map(Option::as_ref);
        if grads.iter().all(Option::is_none) {
            // Nothing depends on this call.
            return Ok(LltmIn::none());
        }
        let metas = again.metas()?;
        let needs = needed(&again.needs);
        let [input, weight, bias, h, c] = gradients(grads, &metas, &needs, again)?;
        Ok(LltmIn { input, weight, bias, h, c })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let LltmIn { input, weight, bias, h, c } = *of;
        let (output, (h, c)) = lltm_reference(input, weight, bias, (h, c))?;
        Ok(LltmOut { output, h, c })
    }
}

fn made(found: super::recurrent::kernels::Outputs) -> Result<Made<Lltm, Tensor>> {
    let super::recurrent::kernels::Outputs { output, last_h: h, last_c, c, activations } = found;
    let last_c = last_c.ok_or_else(|| Error::msg("internal error: an LLTM without c"))?;
    Ok(Made {
        outputs: LltmOut { output, h, c: last_c },
        kept: LltmKept { states: c, activations },
    })
}

/// The facts of the arguments of a single step: those of the input without the dimension of the steps.
fn of_one_step([input, others @ ..]: [Facts; 5]) -> [Facts; 5] {
    let [weight, bias, h, c] = others;
    [input.of_one_step(), weight, bias, h, c]
}

/// Whether the operator's rule takes the arguments.
fn is_taken(of: &Args<'_, Lltm>) -> bool {
    let metas = crate::operator::metas_of::<Lltm>(LltmIn::tensors(of).as_ref());
    metas.and_then(|metas| Lltm {}.rule(&metas, &LltmIn::each(|_| false))).is_ok()
}

fn needed(needs: &Needs<Lltm>) -> cell::Needs {
    let LltmIn { input, weight, bias, h, c } = *needs;
    [input, weight, bias, h, c]
}

fn absent() -> Error {
    Error::msg("lltm: what the forward pass keeps is absent: call lltm_forward with these needs")
}

/// Whether a traced backward pass computes the forward pass once more: half kinds on the CPU are
/// computed as `Float`, and so are the values that are kept; a trace does not know the device.
fn is_repeated(device: Device, kind: Kind) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Half | Kind::BFloat16)
}

/// What a trace is given of what was kept, with the kind and sizes that the rule says. Zeros stand for what
/// its backward pass computes again.
fn as_said(kept: Option<&Tensor>, said: Option<Meta<i64>>) -> Result<Option<Tensor>> {
    let Some(said) = said else { return Ok(None) };
    let count: i64 = said.sizes().iter().product();
    Ok(Some(match kept.filter(|kept| kept.numel() as i64 == count) {
        Some(kept) => kept.f_view(said.sizes())?.f_to_kind(said.kind())?,
        None => said.allocate()?.f_zeros_like()?,
    }))
}

fn gradients(
    grads: [Option<&Tensor>; 3],
    metas: &Metas<Lltm, i64>,
    needs: &cell::Needs,
    again: Again<'_, Lltm>,
) -> Result<cell::Gradients> {
    let inputs = [
        Some(&metas.input),
        Some(&metas.weight),
        metas.bias.as_ref(),
        Some(&metas.h),
        Some(&metas.c),
    ];
    if metas.input.sizes()[0] == 0 || metas.h.sizes().contains(&0) {
        let needed = std::array::from_fn(|place| inputs[place].filter(|_| needs[place]));
        return functions::backward_of_nothing(grads, needed);
    }
    let Again { of, kept, outputs, plan, is_traced, .. } = again;
    let LltmIn { input, weight, bias, h, c } = of;
    let saved = match is_traced && is_repeated(metas.c.device(), metas.c.kind()) {
        true => {
            let (Some(input), Some(weight), Some(h), Some(c)) = (input, weight, h, c) else {
                return Err(absent());
            };
            let operands =
                Operands { input: &input, weight: &weight, bias: bias.as_ref(), h: &h, c: &c };
            let made = functions::forward(&operands, plan.way, plan.one_step.as_ref(), true)?;
            let (output, activations) = (Some(made.output), made.activations.ok_or_else(absent)?);
            let c = made.c.or(made.last_c).ok_or_else(absent)?;
            let [input, weight, h] = [input, weight, h].map(Some);
            Saved { input, weight, h, output, c, activations }
        }
        false => {
            let LltmKept { states, activations } = kept;
            let (c, output) = (states.or(outputs.c).ok_or_else(absent)?, outputs.output);
            let activations = activations.ok_or_else(absent)?;
            Saved { input, weight, h, output, c, activations }
        }
    };
    let bias = metas.bias.as_ref().map(|bias| bias.sizes().to_vec());
    let kinds = (metas.weight.kind(), metas.c.kind());
    match plan.one_step {
        Some(shapes) => {
            functions::backward_of_one_step(grads, saved.of_one_step()?, &shapes, needs)
        }
        None => functions::backward(grads, &saved, bias.as_deref(), kinds, needs, plan.way),
    }
}
