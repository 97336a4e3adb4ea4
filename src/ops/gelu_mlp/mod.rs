//! Two linear layers with an activation between them.

use super::mlp::kernels::{Wanted, activate, activate_in_place, differentiate};
use super::mlp::plan::{self, Facts};
use super::mlp::{
    Activation, KINDS, Way, cast_or_own, layer, plain_if_any, product, weight_gradient,
};
use super::way::forced;
use super::{gemm, linear, rows};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::{Error, Result, check};
use tch::Tensor;

pub(super) mod parts;

const OP: &str = "gelu_mlp";

/// What [`gelu_mlp`] may be told besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GeluMlpOptions {
    /// The function between the layers.
    pub activation: Activation,
    /// Whether the backward pass keeps a next to z. It is faster by one write of `[M, H]`, and a call
    /// keeps M·H elements more until its backward pass.
    pub save_activations: bool,
}

impl Default for GeluMlpOptions {
    fn default() -> Self {
        GeluMlpOptions { activation: Activation::default(), save_activations: true }
    }
}

/// Two linear layers with an activation between them: the feed-forward part of a transformer.
///
/// ```text
/// z = x W₁ᵀ + b₁        a = act(z)        y = a W₂ᵀ + b₂
/// da = dy W₂            dz = da act'(z)   dx = dz W₁
/// dW₂ = dyᵀ a           db₂ = Σ dy        dW₁ = dzᵀ x        db₁ = Σ dz        Σ over the rows
/// ```
///
/// * `input`: x, `[..., D]`, with any number of leading dimensions, or none; M is their product
/// * `w1`: W₁, `[H, D]`, as torch.nn.Linear has it
/// * `b1`: b₁, `[H]`; `None` for zeros
/// * `w2`: W₂, `[D2, H]`
/// * `b2`: b₂, `[D2]`; `None` for zeros
/// * `options`: the [`Activation`], and what is kept for the backward pass
///
/// Returns y, `[..., D2]`. All tensors have the same kind, which is `Float`, `Double`, `Half` or
/// `BFloat16`, and are on one CPU or CUDA device. Strides and sizes are arbitrary, and tensors may be
/// empty. Under autocast all are first cast to autocast's kind, as libtorch's linear does. There are
/// first and second derivatives with respect to each tensor; only those that are asked for are
/// computed. On CUDA the operator works on libtorch's current stream and never waits for the GPU. It is
/// as deterministic as libtorch's products are.
///
/// The products are those of [`linear`](super::linear()). One pass computes a from z. In the backward
/// pass, another one computes dz in the place of da, with db₁ from values that are not rounded yet, and
/// a if it was not kept. On CUDA, in half kinds and where M·H is at least 10⁷, cuBLASLt computes the
/// GELU with tanh as it stores z, by an approximation of its own. In the half kinds z, a, da and dz are rounded, as in libtorch's three
/// operations, and everything between is computed in `Float`. NaN and infinity give what libtorch's
/// operations give, except that the exact GELU of infinity is infinity on the CPU, too, where oneDNN's
/// is NaN.
///
/// A call whose result has a graph keeps all its tensors, which a second derivative may read. It also
/// keeps z (M·H elements) if x, W₁ or b₁ requires grad, and with
/// [`save_activations`](GeluMlpOptions::save_activations) a (as many) if W₂ does. Without a graph a takes
/// the place of z. A second derivative takes the memory of the composite.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{GeluMlpOptions, gelu_mlp};
/// # let options = (Kind::Double, Device::Cpu);
/// # let randn = |size: &[i64]| Tensor::randn(size, options);
/// # let (x, w1, b1) = (randn(&[2, 5, 4]), randn(&[16, 4]), randn(&[16]));
/// # let (w2, b2) = (randn(&[4, 16]), randn(&[4]));
/// let y = x.linear(&w1, Some(&b1)).gelu("tanh").linear(&w2, Some(&b2));
///
/// let ours = gelu_mlp(&x, &w1, Some(&b1), &w2, Some(&b2), &GeluMlpOptions::default());
/// assert!(ours.allclose(&y, 1e-12, 1e-12, false));
/// ```
///
/// Sources: <https://arxiv.org/abs/1606.08415> (GELU), <https://arxiv.org/abs/2109.08668> (squared
/// ReLU).
///
/// # Panics
/// If [`f_gelu_mlp`] returns an error.
pub fn gelu_mlp(
    input: &Tensor,
    w1: &Tensor,
    b1: Option<&Tensor>,
    w2: &Tensor,
    b2: Option<&Tensor>,
    options: &GeluMlpOptions,
) -> Tensor {
    super::unwrap(f_gelu_mlp(input, w1, b1, w2, b2, options))
}

/// [`gelu_mlp`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or if
/// libtorch or CUDA fails.
pub fn f_gelu_mlp(
    input: &Tensor,
    w1: &Tensor,
    b1: Option<&Tensor>,
    w2: &Tensor,
    b2: Option<&Tensor>,
    options: &GeluMlpOptions,
) -> Result<Tensor> {
    check_defined(input, w1, b1, w2, b2)?;
    let arguments = [Some(input), Some(w1), b1, Some(w2), b2];
    let cast = autocast_inputs(CastPolicy::LowerPrecision, &arguments)?;
    let arguments = cast_or_own(cast.as_deref(), arguments);
    let [Some(input), Some(w1), b1, Some(w2), b2] = arguments else {
        unreachable!("as many as came")
    };
    check_arguments(input, w1, b1, w2, b2)?;
    let (way, products, input_size) = (forced(), forced(), Vec::new());
    let function = GeluMlp { options: *options, way, products, input_size };
    apply(function, &arguments)?.single()
}

/// [`gelu_mlp`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn gelu_mlp_reference(
    input: &Tensor,
    w1: &Tensor,
    b1: Option<&Tensor>,
    w2: &Tensor,
    b2: Option<&Tensor>,
    options: &GeluMlpOptions,
) -> Result<Tensor> {
    let z = input.f_linear(w1, b1)?;
    let a = match options.activation {
        Activation::GeluTanh => z.f_gelu("tanh")?,
        Activation::Gelu => z.f_gelu("none")?,
        Activation::ReluSquared => z.f_relu()?.f_square()?,
        Activation::Silu => z.f_silu()?,
    };
    Ok(a.f_linear(w2, b2)?)
}

fn check_defined(
    input: &Tensor,
    w1: &Tensor,
    b1: Option<&Tensor>,
    w2: &Tensor,
    b2: Option<&Tensor>,
) -> Result<()> {
    check!(OP, input).defined()?;
    check!(OP, w1).defined()?;
    b1.map(|b1| check!(OP, b1).defined()).transpose()?;
    check!(OP, w2).defined()?;
    b2.map(|b2| check!(OP, b2).defined()).transpose()?;
    Ok(())
}

fn check_arguments(
    input: &Tensor,
    w1: &Tensor,
    b1: Option<&Tensor>,
    w2: &Tensor,
    b2: Option<&Tensor>,
) -> Result<()> {
    let input = &check!(OP, input).kind_in(&KINDS)?.supported_device()?;
    let features = super::mlp::check_input(input)?;
    check!(OP, w1).like(input)?.dim(2, "[H, D]")?;
    let hidden = w1.size2()?.0;
    check!(OP, w1).shape("[H, D]", &[hidden, features])?;
    b1.map(|b1| check!(OP, b1).like(input)?.shape("[H]", &[hidden])).transpose()?;
    check!(OP, w2).like(input)?.dim(2, "[D2, H]")?;
    let outputs = w2.size2()?.0;
    check!(OP, w2).shape("[D2, H]", &[outputs, hidden])?;
    b2.map(|b2| check!(OP, b2).like(input)?.shape("[D2]", &[outputs])).transpose()?;
    Ok(())
}

struct GeluMlp {
    options: GeluMlpOptions,
    way: Way,
    /// How the products are computed.
    products: gemm::Way,
    /// Kept here so that the input need not be unpacked for its own gradient.
    input_size: Vec<i64>,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const W1: usize = 1;
    pub const B1: usize = 2;
    pub const W2: usize = 3;
    pub const B2: usize = 4;
    pub const LEN: usize = 5;
}

/// Saved after the inputs: z and a.
const Z: usize = place::LEN;
const A: usize = place::LEN + 1;

/// Which gradients are needed.
type Needs = [bool; place::LEN];

/// Whether one of the gradients needs dz.
fn needs_dz(needs: Needs) -> bool {
    needs[place::INPUT] || needs[place::W1] || needs[place::B1]
}

/// Whether z and a are kept. If z is not, a takes no more memory than z would.
fn keeps(options: &GeluMlpOptions, needs: Needs) -> (bool, bool) {
    let keeps_z = needs_dz(needs);
    (keeps_z, needs[place::W2] && (options.save_activations || !keeps_z))
}

impl Function for GeluMlp {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let needs: Needs = std::array::from_fn(|place| saver.needs_input_grad(place));
        let (keeps_z, keeps_a) = keeps(&self.options, needs);
        let Forward { output, z, a } = self.run(inputs, keeps_z)?;
        if saver.needs_graph() {
            self.input_size = inputs.get(place::INPUT)?.size();
        }
        (0..place::LEN).for_each(|place| saver.save_optional(inputs.optional(place)));
        saver.save_optional(z.as_ref());
        saver.save_optional(Some(&a).filter(|_| keeps_a));
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs = (0..place::LEN).map(|slot| ctx.saved_optional(slot));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, |inputs| self.reference(inputs));
        }
        let needs: Needs = std::array::from_fn(|place| ctx.needs_input_grad(place));
        let saved = |needed: bool, slot| match needed {
            true => ctx.saved_optional(slot),
            false => Ok(None),
        };
        let saved = Saved {
            input: saved(needs[place::W1], place::INPUT)?,
            w1: saved(needs[place::INPUT], place::W1)?,
            w2: saved(needs_dz(needs), place::W2)?,
            z: plain_if_any(ctx.saved_optional(Z)?)?,
            a: plain_if_any(saved(needs[place::W2], A)?)?,
        };
        self.gradients(grads.get(0)?, saved, needs)
    }
}

/// What the forward pass computes.
struct Forward {
    output: Tensor,
    /// `[M, H]`, if it is to be kept.
    z: Option<Tensor>,
    /// `[M, H]`.
    a: Tensor,
}

/// What the backward pass reads; each if a gradient needs it.
struct Saved {
    input: Option<Tensor>,
    w1: Option<Tensor>,
    w2: Option<Tensor>,
    z: Option<Tensor>,
    a: Option<Tensor>,
}

impl GeluMlp {
    fn run(&self, inputs: Inputs<'_>, keeps_z: bool) -> Result<Forward> {
        let input = inputs.get(place::INPUT)?;
        let (w1, b1) = (inputs.get(place::W1)?, inputs.optional(place::B1));
        let (z, a) = self.hidden(&rows(input)?, w1, b1, keeps_z)?;
        let (w2, b2) = (inputs.get(place::W2)?, inputs.optional(place::B2));
        let output = layer(&a, w2, b2, self.products)?;
        let mut size = input.size();
        size.pop();
        size.push(output.size2()?.1);
        Ok(Forward { output: linear::reshaped(&output, &size)?, z, a })
    }

    /// z, if it is to be kept, and a.
    fn hidden(
        &self,
        input: &Tensor,
        w1: &Tensor,
        b1: Option<&Tensor>,
        keeps_z: bool,
    ) -> Result<(Option<Tensor>, Tensor)> {
        let activation = self.options.activation;
        let facts = Facts {
            activation,
            kind: input.f_kind()?,
            is_cuda: input.device().is_cuda(),
            rows: input.size2()?.0,
            hidden: w1.size2()?.0,
        };
        if plan::takes_epilogue(self.way, &facts)
            && let Some(found) = gemm::linear_gelu(input, w1, b1, keeps_z)?
        {
            return Ok((found.z, found.output));
        }
        let z = layer(input, w1, b1, self.products)?;
        if !keeps_z {
            return Ok((None, activate_in_place(z, activation)?));
        }
        let a = activate(&z, activation)?;
        Ok((Some(z), a))
    }

    fn gradients(&self, grad: &Tensor, saved: Saved, needs: Needs) -> Result<Tensors> {
        let (dy, way) = (&rows(grad)?, self.products);
        let mut gradients: [Option<Tensor>; place::LEN] = Default::default();
        let mut a = saved.a;
        let mut dz = None;
        if let (Some(w2), Some(z)) = (&saved.w2, &saved.z) {
            let wanted = Wanted { sums: needs[place::B1], output: needs[place::W2] && a.is_none() };
            let da = product(dy, w2, way)?;
            let found = differentiate(da, z, self.options.activation, &wanted)?;
            gradients[place::B1] = found.sums;
            a = a.or(found.output);
            dz = Some(found.grad_input);
        }
        if needs[place::W2] && a.is_none() {
            let z = saved.z.as_ref();
            let z = z.ok_or_else(|| Error::msg("internal error: neither z nor a was saved"))?;
            a = Some(activate(z, self.options.activation)?);
        }
        gradients[place::W2] = a.as_ref().map(|a| weight_gradient(dy, a, way)).transpose()?;
        drop(a);
        gradients[place::B2] = needs[place::B2].then(|| linear::bias_grad(dy)).transpose()?;
        if let (Some(dz), Some(input)) = (&dz, &saved.input) {
            gradients[place::W1] = Some(weight_gradient(dz, &rows(input)?, way)?);
        }
        if let (Some(dz), Some(w1)) = (&dz, &saved.w1) {
            let dx = product(dz, w1, way)?;
            gradients[place::INPUT] = Some(dx.f_view(self.input_size.as_slice())?);
        }
        Ok(gradients.into())
    }

    fn reference(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let [Some(input), Some(w1), b1, Some(w2), b2] = inputs else {
            return Err(Error::msg("internal error: an input was not saved"));
        };
        Ok(gelu_mlp_reference(input, w1, b1.as_ref(), w2, b2.as_ref(), &self.options)?.into())
    }
}
