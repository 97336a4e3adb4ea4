//! The feed-forward part of a transformer with a gate.

use super::gemm::{self, Way as ProductWay};
use super::mlp::kernels::{GateDerivatives, gate, gate_backward, gate_in_place};
use super::mlp::{KINDS, add_product, layer, product, weight_gradient};
use super::way::forced;
use super::{linear, reshaped, rows};
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Slots, call,
};
use crate::{Error, Result};
use tch::Tensor;

/// What [`swiglu_mlp`] may be told besides its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SwigluMlpOptions {
    /// Whether the backward pass keeps h next to g and u. It is faster by one write of `[M, H]`, and a
    /// call keeps M·H elements more until its backward pass.
    pub save_activations: bool,
}

impl Default for SwigluMlpOptions {
    fn default() -> Self {
        SwigluMlpOptions { save_activations: true }
    }
}

/// Two linear layers, the product of one and the SiLU of the other, and a third layer: the feed-forward
/// part of Llama and many others.
///
/// ```text
/// g = x Wgᵀ        u = x Wuᵀ        h = silu(g) u        y = h Wdᵀ        silu(g) = g / (1 + exp(-g))
/// dh = dy Wd       dg = dh u silu'(g)       du = dh silu(g)
/// dWd = dyᵀ h      dWg = dgᵀ x              dWu = duᵀ x          dx = dg Wg + du Wu
/// ```
///
/// * `input`: x, `[..., D]`, with any number of leading dimensions, or none; M is their product
/// * `w_gate`: Wg, `[H, D]`, as torch.nn.Linear has it
/// * `w_up`: Wu, `[H, D]`
/// * `w_down`: Wd, `[D2, H]`
/// * `options`: what is kept for the backward pass
///
/// Returns y, `[..., D2]`. All tensors have the same kind, which is `Float`, `Double`, `Half` or
/// `BFloat16`, and are on one CPU or CUDA device. Strides and sizes are arbitrary, and tensors may be
/// empty. Under autocast all are first cast to autocast's kind, as libtorch's linear does. There are
/// first and second derivatives with respect to each tensor; only those that are asked for are
/// computed. On CUDA the operator works on libtorch's current stream and never waits for the GPU. It is
/// as deterministic as libtorch's products are.
///
/// The products are those of [`linear`](super::linear()). One pass computes h from g and u. Without a graph,
/// one kernel computes h from up to 8 rows of half kinds; it may add in another order. In the
/// backward pass, another one computes dg and du, du in the place of dh, and h if it was not kept. In
/// the half kinds g, u, h, dh, dg and du are rounded, and everything between is computed in `Float`:
/// silu(g) is not rounded, as it is in libtorch's operations. dx is dg Wg, rounded, to which the other
/// product is added before it is rounded; libtorch's operations round both products and their sum. NaN
/// and infinity give what libtorch's operations give.
///
/// A call whose result has a graph keeps all its tensors, which a second derivative may read. It also
/// keeps g and u (M·H elements each) if x, Wg or Wu requires grad, and with
/// [`save_activations`](SwigluMlpOptions::save_activations) h (as many) if Wd does. libtorch's operations
/// also keep silu(g). Without a graph h takes the place of g. A second derivative takes the memory of
/// the composite.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{SwigluMlpOptions, swiglu_mlp};
/// # let options = (Kind::Double, Device::Cpu);
/// # let randn = |size: &[i64]| Tensor::randn(size, options);
/// # let (x, w_gate, w_up) = (randn(&[2, 5, 4]), randn(&[16, 4]), randn(&[16, 4]));
/// # let w_down = randn(&[4, 16]);
/// let linear = |x: &Tensor, w: &Tensor| x.linear(w, None::<&Tensor>);
/// let y = linear(&(linear(&x, &w_gate).silu() * linear(&x, &w_up)), &w_down);
///
/// let ours = swiglu_mlp(&x, &w_gate, &w_up, &w_down, &SwigluMlpOptions::default());
/// assert!(ours.allclose(&y, 1e-12, 1e-12, false));
/// ```
///
/// Source: <https://arxiv.org/abs/2002.05202>.
///
/// # Panics
/// If [`f_swiglu_mlp`] returns an error.
pub fn swiglu_mlp(
    input: &Tensor,
    w_gate: &Tensor,
    w_up: &Tensor,
    w_down: &Tensor,
    options: &SwigluMlpOptions,
) -> Tensor {
    super::unwrap(f_swiglu_mlp(input, w_gate, w_up, w_down, options))
}

/// [`swiglu_mlp`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), or if
/// libtorch or CUDA fails.
pub fn f_swiglu_mlp(
    input: &Tensor,
    w_gate: &Tensor,
    w_up: &Tensor,
    w_down: &Tensor,
    options: &SwigluMlpOptions,
) -> Result<Tensor> {
    let operator = SwigluMlp { save_activations: options.save_activations };
    Ok(call(operator, &SwigluMlpIn { input, w_gate, w_up, w_down })?.output)
}

/// [`swiglu_mlp`] in plain tch operations, without checks of its own.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn swiglu_mlp_reference(
    input: &Tensor,
    w_gate: &Tensor,
    w_up: &Tensor,
    w_down: &Tensor,
) -> Result<Tensor> {
    let linear = |input: &Tensor, weight: &Tensor| input.f_linear(weight, None::<&Tensor>);
    let h = linear(input, w_gate)?.f_silu()?.f_mul(&linear(input, w_up)?)?;
    Ok(linear(&h, w_down)?)
}

crate::signature! {
    /// `linear(silu(linear(input, w_gate)) * linear(input, w_up), w_down)`: the feed-forward part of Llama.
    pub SwigluMlp: SwigluMlpIn -> SwigluMlpOut =
        "swiglu_mlp"(input, w_gate, w_up, w_down, save_activations: bool = true) -> (output)
}

crate::slots! {
    /// g, u and h, `[M, H]`, each if a gradient needs it.
    pub struct Hidden { g?, u?, h? }
}

impl Operator for SwigluMlp {
    type Kept = Hidden;
    type Plan = ProductWay;

    const AUTOCAST: [Option<CastPolicy>; 2] = [Some(CastPolicy::LowerPrecision); 2];

    fn plan(&self, _: &Args<'_, Self>, _: &Needs<Self>) -> Result<ProductWay> {
        Ok(forced())
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let input = of.input.kind_in(&KINDS)?.supported_device()?;
        let (rows, features) = linear::split(input, "[..., D]")?;
        let w_gate = of.w_gate.like(input)?.dim(2, "[H, D]")?;
        let hidden = &w_gate.sizes()[0];
        let shape = [hidden.clone(), features.clone()];
        w_gate.shape("[H, D]", &shape)?;
        of.w_up.like(input)?.shape("[H, D]", &shape)?;
        let w_down = of.w_down.like(input)?.dim(2, "[D2, H]")?;
        let outputs = &w_down.sizes()[0];
        w_down.shape("[D2, H]", &[outputs.clone(), hidden.clone()])?;
        let of_hidden = || input.sized([rows.clone(), hidden.clone()]);
        let keeps_gates = needs_gates(needs);
        // If g and u are not kept, h takes less memory than they would.
        let keeps_h = needs.w_down && (self.save_activations || !keeps_gates);
        Ok(Made {
            outputs: SwigluMlpOut { output: input.clone().with_last(outputs.clone()) },
            kept: Hidden {
                g: keeps_gates.then(of_hidden),
                u: keeps_gates.then(of_hidden),
                h: keeps_h.then(of_hidden),
            },
        })
    }

    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        let (w_gate, w_up, w_down) = (needs.input, needs.input, needs_gates(needs));
        SwigluMlpIn { input: needs.w_gate || needs.w_up, w_gate, w_up, w_down }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        let Made { outputs, kept } = call.check()?;
        let SwigluMlpIn { input, w_gate, w_up, w_down } = call.of;
        let (matrix, way) = (rows(input)?, call.plan);
        let together = match kept.g {
            Some(_) => None,
            None => gemm::linear_gated(&matrix, None, w_gate, w_up, way)?,
        };
        let (g, u, h) = match together {
            Some(h) => (None, None, h),
            None => {
                let g = layer(&matrix, w_gate, None, way)?;
                let u = layer(&matrix, w_up, None, way)?;
                match kept.g {
                    Some(_) => {
                        let h = gate(&g, &u)?;
                        (Some(g), Some(u), h)
                    }
                    None => (None, None, gate_in_place(g, &u)?),
                }
            }
        };
        let output = layer(&h, w_down, None, way)?;
        let output = reshaped(&output, outputs.output.sizes())?;
        let kept = Hidden { g, u, h: kept.h.map(|_| h) };
        Ok(Made { outputs: SwigluMlpOut { output }, kept })
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let metas = again.metas()?;
        let Again { of, kept, needs, plan: way, .. } = again;
        let mut gradients = SwigluMlpIn::none();
        let Some(grad) = grads.output else { return Ok(gradients) };
        let dy = &rows(&grad)?;
        let gates = || match (&kept.g, &kept.u) {
            (Some(g), Some(u)) => Ok((g, u)),
            _ => Err(Error::msg("internal error: g and u were not kept")),
        };
        let mut h = kept.h.filter(|_| needs.w_down);
        let mut derivatives = None;
        if let Some(w_down) = &of.w_down {
            let ((g, u), wants_h) = (gates()?, needs.w_down && h.is_none());
            let mut found = gate_backward(product(dy, w_down, way)?, g, u, wants_h)?;
            h = h.or(found.output.take());
            derivatives = Some(found);
        }
        if needs.w_down {
            let h = match h {
                Some(h) => h,
                None => gates().and_then(|(g, u)| gate(g, u))?,
            };
            gradients.w_down = Some(weight_gradient(dy, &h, way)?);
        }
        let Some(GateDerivatives { gate: dg, up: du, .. }) = derivatives else {
            return Ok(gradients);
        };
        if let Some(input) = &of.input {
            let input = &rows(input)?;
            let weight = |needed: bool, grad: &Tensor| {
                needed.then(|| weight_gradient(grad, input, way)).transpose()
            };
            gradients.w_gate = weight(needs.w_gate, &dg)?;
            gradients.w_up = weight(needs.w_up, &du)?;
        }
        if let (Some(w_gate), Some(w_up)) = (&of.w_gate, &of.w_up) {
            let dx = add_product(product(&dg, w_gate, way)?, &du, w_up)?;
            gradients.input = Some(dx.f_view(metas.input.sizes())?);
        }
        Ok(gradients)
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let output = swiglu_mlp_reference(of.input, of.w_gate, of.w_up, of.w_down)?;
        Ok(SwigluMlpOut { output })
    }
}

/// Whether one of the gradients needs dg or du.
fn needs_gates(needs: &Needs<SwigluMlp>) -> bool {
    needs.input || needs.w_gate || needs.w_up
}
