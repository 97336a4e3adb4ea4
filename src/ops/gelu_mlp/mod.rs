//! Two linear layers with an activation between them.

use super::gemm::{self, Way as ProductWay};
use super::mlp::kernels::{Wanted, activate, activate_in_place, differentiate};
use super::mlp::plan::{self, Facts};
use super::mlp::{Activation, KINDS, Way, layer, product, weight_gradient};
use super::way::forced;
use super::{linear, reshaped, rows};
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Slots, call,
};
use crate::ops::kinds::Kind;
use crate::{Error, Result};
use tch::Tensor;

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
/// a if it was not kept. On CUDA of compute capability 9.0, in half kinds, of more than four rows that begin
/// at multiples of 16 bytes, cuBLASLt computes the GELU with tanh as it stores z, by an approximation of
/// its own. In the half kinds z, a, da
/// and dz are rounded, as in libtorch's three operations, and everything between is computed in `Float`.
/// NaN and infinity give what libtorch's operations give, except that the exact GELU of infinity is
/// infinity on the CPU, too, where oneDNN's is NaN.
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
    let GeluMlpOptions { activation, save_activations } = *options;
    let operator = GeluMlp { activation, save_activations };
    Ok(call(operator, &GeluMlpIn { input, w1, b1, w2, b2 })?.output)
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
    Ok(options.activation.f_apply(&z)?.f_linear(w2, b2)?)
}

impl Activation {
    /// The function in plain tch operations.
    pub(crate) fn f_apply(self, z: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Activation::GeluTanh => z.f_gelu("tanh")?,
            Activation::Gelu => z.f_gelu("none")?,
            Activation::ReluSquared => z.f_relu()?.f_square()?,
            Activation::Silu => z.f_silu()?,
        })
    }
}

crate::signature! {
    /// `linear(f(linear(input, w1, b1)), w2, b2)`: the feed-forward part of GPT-2.
    ///
    /// f is "gelu_tanh", "gelu", "relu_squared" or "silu". Without save_activations the backward pass computes
    /// f again.
    pub GeluMlp: GeluMlpIn -> GeluMlpOut = "gelu_mlp"(
        input, w1, b1?, w2, b2?, activation: Activation = Activation::GeluTanh, save_activations: bool = true
    ) -> (output)
}

crate::slots! {
    /// z and a, `[M, H]`, each if a gradient needs it.
    pub struct Hidden { z?, a? }
}

impl Operator for GeluMlp {
    type Kept = Hidden;
    type Plan = (Way, ProductWay);

    const AUTOCAST: [Option<CastPolicy>; 2] = [Some(CastPolicy::LowerPrecision); 2];

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<(Way, ProductWay)> {
        Ok((forced(), forced()))
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let input = of.input.kind_in(&KINDS)?.supported_device()?;
        let (rows, features) = linear::split(input, "[..., D]")?;
        let w1 = of.w1.like(input)?.dim(2, "[H, D]")?;
        let hidden = &w1.sizes()[0];
        w1.shape("[H, D]", &[hidden.clone(), features.clone()])?;
        if let Some(b1) = &of.b1 {
            b1.like(input)?.shape("[H]", std::slice::from_ref(hidden))?;
        }
        let w2 = of.w2.like(input)?.dim(2, "[D2, H]")?;
        let outputs = &w2.sizes()[0];
        w2.shape("[D2, H]", &[outputs.clone(), hidden.clone()])?;
        if let Some(b2) = &of.b2 {
            b2.like(input)?.shape("[D2]", std::slice::from_ref(outputs))?;
        }
        let of_hidden = || input.sized([rows.clone(), hidden.clone()]);
        let keeps_z = needs_dz(needs);
        // If z is not kept, a takes no more memory than z would.
        let keeps_a = needs.w2 && (self.save_activations || !keeps_z);
        Ok(Made {
            outputs: GeluMlpOut { output: input.clone().with_last(outputs.clone()) },
            kept: Hidden { z: keeps_z.then(of_hidden), a: keeps_a.then(of_hidden) },
        })
    }

    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        let (w1, w2) = (needs.input, needs_dz(needs));
        GeluMlpIn { input: needs.w1, w1, b1: false, w2, b2: false }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let Made { outputs, kept } = call.check()?;
        let GeluMlpIn { w2, b2, .. } = call.of;
        let (z, a) = self.hidden(call, kept.z.is_some())?;
        let output = layer(&a, w2, b2, call.plan.1)?;
        let output = reshaped(&output, outputs.output.sizes())?;
        Ok(Made { outputs: GeluMlpOut { output }, kept: Hidden { z, a: kept.a.map(|_| a) } })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let metas = again.metas()?;
        let Again { of, kept, needs, plan: (_, way), .. } = again;
        let mut gradients = GeluMlpIn::none();
        let Some(grad) = grads.output else { return Ok(gradients) };
        let dy = &rows(&grad)?;
        let z = || kept.z.as_ref().ok_or_else(|| Error::msg("internal error: z was not kept"));
        let mut a = kept.a.filter(|_| needs.w2);
        let mut dz = None;
        if let Some(w2) = &of.w2 {
            let wanted = Wanted { sums: needs.b1, output: needs.w2 && a.is_none() };
            let found = differentiate(product(dy, w2, way)?, z()?, self.activation, &wanted)?;
            gradients.b1 = found.sums;
            a = a.or(found.output);
            dz = Some(found.grad_input);
        }
        if needs.w2 {
            let a = match a {
                Some(a) => a,
                None => activate(z()?, self.activation)?,
            };
            gradients.w2 = Some(weight_gradient(dy, &a, way)?);
        }
        gradients.b2 = needs.b2.then(|| linear::bias_grad(dy)).transpose()?;
        if let (Some(dz), Some(input)) = (&dz, &of.input) {
            gradients.w1 = Some(weight_gradient(dz, &rows(input)?, way)?);
        }
        if let (Some(dz), Some(w1)) = (&dz, &of.w1) {
            gradients.input = Some(product(dz, w1, way)?.f_view(metas.input.sizes())?);
        }
        Ok(gradients)
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let GeluMlp { activation, save_activations } = *self;
        let options = GeluMlpOptions { activation, save_activations };
        let output = gelu_mlp_reference(of.input, of.w1, of.b1, of.w2, of.b2, &options)?;
        Ok(GeluMlpOut { output })
    }
}

/// Whether one of the gradients needs dz.
fn needs_dz(needs: &Needs<GeluMlp>) -> bool {
    needs.input || needs.w1 || needs.b1
}

impl GeluMlp {
    /// z, if it is to be kept, and a.
    fn hidden(&self, call: &Call<'_, Self>, keeps_z: bool) -> Result<(Option<Tensor>, Tensor)> {
        let GeluMlpIn { input, w1, b1, .. } = call.of;
        let ((way, products), input) = (call.plan, &rows(input)?);
        let activation = self.activation;
        let facts = Facts {
            activation,
            kind: Kind::of(input.f_kind()?)?,
            is_cuda: input.device().is_cuda(),
            rows: input.size()[0],
        };
        // A way that is forced for products is one without an epilogue.
        let is_free = way != Way::Automatic || products == ProductWay::Automatic;
        if is_free
            && plan::takes_epilogue(way, &facts)
            && let Some(found) = gemm::linear_gelu(input, w1, b1, keeps_z, way == Way::Automatic)?
        {
            return Ok((found.z, found.output));
        }
        let z = layer(input, w1, b1, products)?;
        if !keeps_z {
            return Ok((None, activate_in_place(z, activation)?));
        }
        let a = activate(&z, activation)?;
        Ok((Some(z), a))
    }
}
