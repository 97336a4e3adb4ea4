//! The feed-forward part of a transformer with a gate.

use super::mlp::kernels::{GateDerivatives, gate, gate_backward, gate_in_place};
use super::mlp::{KINDS, add_product, cast_or_own, layer, plain_if_any, product, weight_gradient};
use super::way::forced;
use super::{gemm, linear, rows};
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, differentiate_reference};
use crate::{Error, Result, check};
use tch::Tensor;

pub(super) mod parts;

const OP: &str = "swiglu_mlp";

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
/// The products are those of [`linear`](super::linear()). One pass computes h from g and u. In the
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
    check!(OP, input).defined()?;
    check!(OP, w_gate).defined()?;
    check!(OP, w_up).defined()?;
    check!(OP, w_down).defined()?;
    let arguments = [Some(input), Some(w_gate), Some(w_up), Some(w_down)];
    let cast = autocast_inputs(CastPolicy::LowerPrecision, &arguments)?;
    let arguments = cast_or_own(cast.as_deref(), arguments);
    let [Some(input), Some(w_gate), Some(w_up), Some(w_down)] = arguments else {
        unreachable!("as many as came")
    };
    check_arguments(input, w_gate, w_up, w_down)?;
    let function = SwigluMlp { options: *options, products: forced(), input_size: Vec::new() };
    apply(function, &arguments)?.single()
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

fn check_arguments(input: &Tensor, w_gate: &Tensor, w_up: &Tensor, w_down: &Tensor) -> Result<()> {
    let input = &check!(OP, input).kind_in(&KINDS)?.supported_device()?;
    let features = super::mlp::check_input(input)?;
    check!(OP, w_gate).like(input)?.dim(2, "[H, D]")?;
    let hidden = w_gate.size2()?.0;
    check!(OP, w_gate).shape("[H, D]", &[hidden, features])?;
    check!(OP, w_up).like(input)?.shape("[H, D]", &[hidden, features])?;
    check!(OP, w_down).like(input)?.dim(2, "[D2, H]")?;
    let outputs = w_down.size2()?.0;
    check!(OP, w_down).shape("[D2, H]", &[outputs, hidden])?;
    Ok(())
}

struct SwigluMlp {
    options: SwigluMlpOptions,
    /// How the products are computed.
    products: gemm::Way,
    /// Kept here so that the input need not be unpacked for its own gradient.
    input_size: Vec<i64>,
}

/// The positions of the inputs, which are also their slots among the saved tensors.
mod place {
    pub const INPUT: usize = 0;
    pub const GATE: usize = 1;
    pub const UP: usize = 2;
    pub const DOWN: usize = 3;
    pub const LEN: usize = 4;
}

/// Saved after the inputs: g, u and h.
const G: usize = place::LEN;
const U: usize = place::LEN + 1;
const H: usize = place::LEN + 2;

/// Which gradients are needed.
type Needs = [bool; place::LEN];

/// Whether one of the gradients needs dg or du.
fn needs_gates(needs: Needs) -> bool {
    needs[place::INPUT] || needs[place::GATE] || needs[place::UP]
}

/// Whether g and u, and h are kept. If g and u are not, h takes less memory than they would.
fn keeps(options: &SwigluMlpOptions, needs: Needs) -> (bool, bool) {
    let keeps_gates = needs_gates(needs);
    (keeps_gates, needs[place::DOWN] && (options.save_activations || !keeps_gates))
}

impl Function for SwigluMlp {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let needs: Needs = std::array::from_fn(|place| saver.needs_input_grad(place));
        let (keeps_gates, keeps_h) = keeps(&self.options, needs);
        let Forward { output, gates, h } = self.run(inputs, keeps_gates)?;
        if saver.needs_graph() {
            self.input_size = inputs.get(place::INPUT)?.size();
        }
        (0..place::LEN).for_each(|place| saver.save_optional(inputs.optional(place)));
        saver.save_optional(gates.as_ref().map(|(g, _)| g));
        saver.save_optional(gates.as_ref().map(|(_, u)| u));
        saver.save_optional(Some(&h).filter(|_| keeps_h));
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        if ctx.create_graph() {
            let inputs = (0..place::LEN).map(|slot| ctx.saved_optional(slot));
            let inputs = inputs.collect::<Result<Vec<_>>>()?;
            return differentiate_reference(ctx, &inputs, grads, reference);
        }
        let needs: Needs = std::array::from_fn(|place| ctx.needs_input_grad(place));
        let saved = |needed: bool, slot| match needed {
            true => ctx.saved_optional(slot),
            false => Ok(None),
        };
        let saved = Saved {
            input: saved(needs[place::GATE] || needs[place::UP], place::INPUT)?,
            w_gate: saved(needs[place::INPUT], place::GATE)?,
            w_up: saved(needs[place::INPUT], place::UP)?,
            w_down: saved(needs_gates(needs), place::DOWN)?,
            gates: plain_if_any(ctx.saved_optional(G)?)?.zip(plain_if_any(ctx.saved_optional(U)?)?),
            h: plain_if_any(saved(needs[place::DOWN], H)?)?,
        };
        self.gradients(grads.get(0)?, saved, needs)
    }
}

/// What the forward pass computes.
struct Forward {
    output: Tensor,
    /// g and u, `[M, H]`, if they are to be kept.
    gates: Option<(Tensor, Tensor)>,
    /// `[M, H]`.
    h: Tensor,
}

/// What the backward pass reads; each if a gradient needs it.
struct Saved {
    input: Option<Tensor>,
    w_gate: Option<Tensor>,
    w_up: Option<Tensor>,
    w_down: Option<Tensor>,
    gates: Option<(Tensor, Tensor)>,
    h: Option<Tensor>,
}

impl SwigluMlp {
    fn run(&self, inputs: Inputs<'_>, keeps_gates: bool) -> Result<Forward> {
        let (input, way) = (inputs.get(place::INPUT)?, self.products);
        let matrix = rows(input)?;
        let g = layer(&matrix, inputs.get(place::GATE)?, None, way)?;
        let u = layer(&matrix, inputs.get(place::UP)?, None, way)?;
        let (gates, h) = match keeps_gates {
            true => {
                let h = gate(&g, &u)?;
                (Some((g, u)), h)
            }
            false => (None, gate_in_place(g, &u)?),
        };
        let output = layer(&h, inputs.get(place::DOWN)?, None, way)?;
        let mut size = input.size();
        size.pop();
        size.push(output.size2()?.1);
        Ok(Forward { output: linear::reshaped(&output, &size)?, gates, h })
    }

    fn gradients(&self, grad: &Tensor, saved: Saved, needs: Needs) -> Result<Tensors> {
        let (dy, way) = (&rows(grad)?, self.products);
        let mut gradients: [Option<Tensor>; place::LEN] = Default::default();
        let mut h = saved.h;
        let mut derivatives = None;
        if let (Some(w_down), Some((g, u))) = (&saved.w_down, &saved.gates) {
            let wants_h = needs[place::DOWN] && h.is_none();
            let mut found = gate_backward(product(dy, w_down, way)?, g, u, wants_h)?;
            h = h.or(found.output.take());
            derivatives = Some(found);
        }
        if needs[place::DOWN] {
            let h = match (h, &saved.gates) {
                (Some(h), _) => h,
                (None, Some((g, u))) => gate(g, u)?,
                (None, None) => return Err(Error::msg("internal error: neither h nor g and u")),
            };
            gradients[place::DOWN] = Some(weight_gradient(dy, &h, way)?);
        }
        let Some(GateDerivatives { gate: dg, up: du, .. }) = derivatives else {
            return Ok(gradients.into());
        };
        if let Some(input) = &saved.input {
            let input = &rows(input)?;
            let of = |needed: bool, grad: &Tensor| {
                needed.then(|| weight_gradient(grad, input, way)).transpose()
            };
            gradients[place::GATE] = of(needs[place::GATE], &dg)?;
            gradients[place::UP] = of(needs[place::UP], &du)?;
        }
        if let (Some(w_gate), Some(w_up)) = (&saved.w_gate, &saved.w_up) {
            let dx = add_product(product(&dg, w_gate, way)?, &du, w_up)?;
            gradients[place::INPUT] = Some(dx.f_view(self.input_size.as_slice())?);
        }
        Ok(gradients.into())
    }
}

fn reference(inputs: &[Option<Tensor>]) -> Result<Tensors> {
    let [Some(input), Some(w_gate), Some(w_up), Some(w_down)] = inputs else {
        return Err(Error::msg("internal error: an input was not saved"));
    };
    Ok(swiglu_mlp_reference(input, w_gate, w_up, w_down)?.into())
}
