//! The cell's outputs and gradients as functions of tensors and plain values, below autograd.

use super::kernels::device::TensorCores;
use super::kernels::fused::{self, Extras, Operands, Outputs};
use super::kernels::pointwise;
use super::plan::{Sizes, Way};
use super::{gemm, place};
use crate::ffi::facts::{Facts, empty_of};
use crate::ffi::tensor::plain;
use crate::ops::kinds;
use crate::{Error, Result};
use tch::{Device, Kind, Tensor};

/// What both directions need to know of the arguments besides their values. The backward pass does
/// not ask the tensors for it: changing those that it does not read in place since the forward then
/// causes no version error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shapes {
    sizes: Sizes,
    /// Whether the input is a sequence of one step, `[1, B, F]`.
    is_sequence: bool,
    bias: Option<BiasShape>,
    /// The kind of the product and its operands.
    product: Kind,
    /// The kind and device of all arguments, if c shares its kind with the others.
    alike: Option<(Kind, Device)>,
}

#[derive(Clone, Copy, Debug)]
enum BiasShape {
    Flat,
    Row,
}

impl Shapes {
    /// From the facts of the arguments, of which those of the input describe one step. It is an
    /// error if the sizes do not fit together; a check of the arguments says why.
    pub fn of(known: &[Facts; place::LEN], has_bias: bool, is_sequence: bool) -> Result<Self> {
        Self::that_fit(known, has_bias, is_sequence)
            .ok_or_else(|| Error::msg("internal error: the cell's arguments were not checked"))
    }

    /// As [`Shapes::of`]; `None` if the sizes do not fit together.
    pub fn that_fit(
        known: &[Facts; place::LEN],
        has_bias: bool,
        is_sequence: bool,
    ) -> Option<Self> {
        let [input, weight, bias, h, c] = known;
        let ([batch, features], [_, hidden]) = (input.sizes()?, h.sizes()?);
        let (gates, columns) = (hidden.checked_mul(3)?, hidden.checked_add(features)?);
        let fit = weight.sizes() == Some([gates, columns])
            && [h, c].into_iter().all(|state| state.sizes() == Some([batch, hidden]));
        let bias = match has_bias {
            false => None,
            true if bias.sizes() == Some([gates]) => Some(BiasShape::Flat),
            true if bias.sizes() == Some([1, gates]) => Some(BiasShape::Row),
            true => return None,
        };
        let product = weight.kind()?;
        let alike = input.device().filter(|_| c.is_like(weight)).map(|device| (product, device));
        let sizes = Sizes { batch, features, hidden };
        fit.then_some(Shapes { sizes, is_sequence, bias, product, alike })
    }

    /// Whether there is anything to compute.
    pub fn is_anything(&self) -> bool {
        self.sizes.batch > 0 && self.sizes.hidden > 0
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

/// Computes h' and c'; for a sequence of one step, the output; and, if `keep` is set, what
/// [`backward`] reads.
pub(crate) fn forward(
    operands: &Operands<'_>,
    known: &[Facts; place::LEN],
    shapes: &Shapes,
    way: Way,
    keep: bool,
) -> Result<Outputs> {
    let sizes = shapes.sizes;
    let extras = Extras { activations: keep, output: shapes.is_sequence };
    let Some((kind, device)) = shapes.alike else { return by_product(operands, sizes, extras) };
    let on = kinds::Device::from(device);
    let kind = kinds::Kind::of(kind)?;
    if sizes.fuse_forward(way, kind, on) {
        return fused::forward(operands, known, sizes, extras);
    }
    if sizes.fit_tensor_cores(kind, on)
        && fused::allow_bulk_copies(known, sizes)
        && sizes.use_tensor_cores(way, TensorCores::of(on)?.processors)
        && let Some(outputs) = fused::forward_by_tensor_cores(operands, known, sizes, extras)?
    {
        return Ok(outputs);
    }
    by_product(operands, sizes, extras)
}

/// libtorch's product, followed by one kernel for the rest.
fn by_product(operands: &Operands<'_>, sizes: Sizes, extras: Extras) -> Result<Outputs> {
    let Operands { input, weight, bias, h, c } = *operands;
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
    let Sizes { batch, hidden, .. } = sizes;
    let state = || empty_of(&[batch, hidden], (kind, c.device()));
    let (mut new_h, mut new_c) = (state()?, state()?);
    let output = || empty_of(&[1, batch, hidden], (kind, c.device()));
    let mut output = extras.output.then(output).transpose()?;
    let written =
        pointwise::Written { new_h: &mut new_h, new_c: &mut new_c, output: output.as_mut() };
    pointwise::forward(&mut gates, bias.as_ref(), &c, written, extras.activations)?;
    Ok(Outputs { new_h, new_c, activations: extras.activations.then_some(gates), output })
}

/// What [`backward`] reads. The weight may be absent if the gradients of input and h are not
/// needed; input and h may be absent if that of the weight is not.
pub(crate) struct Saved {
    pub input: Option<Tensor>,
    pub weight: Option<Tensor>,
    pub h: Option<Tensor>,
    pub new_c: Tensor,
    pub activations: Tensor,
}

/// Whether the gradient of each argument is needed.
pub(crate) type Needs = [bool; place::LEN];
/// The gradient of each argument.
pub(crate) type Gradients = [Option<Tensor>; place::LEN];

/// Computes the gradients that are needed, from those for h' and c'; an absent one is zero. For a
/// sequence of one step, that for h' may be `[1, B, H]`.
pub(crate) fn backward(
    [grad_new_h, grad_new_c]: [Option<&Tensor>; 2],
    saved: &Saved,
    shapes: &Shapes,
    needs: &Needs,
    way: Way,
) -> Result<Gradients> {
    let is_fused = |(kind, device): (Kind, Device)| {
        let kind = kinds::Kind::of(kind);
        kind.is_ok_and(|kind| shapes.sizes.fuse_backward(way, kind, device.into()))
    };
    if !shapes.alike.is_some_and(is_fused) {
        return backward_by_product([grad_new_h, grad_new_c], saved, shapes, needs);
    }
    let inputs = fused::BackwardInputs {
        grad_new_h,
        grad_new_c,
        activations: &saved.activations,
        new_c: &saved.new_c,
        input: saved.input.as_ref(),
        h: saved.h.as_ref(),
        weight: saved.weight.as_ref(),
    };
    let input = needs[place::INPUT].then(|| shapes.input_size());
    let bias = shapes.bias_size().filter(|_| needs[place::BIAS]);
    let asked = fused::Asked {
        input: input.as_deref(),
        weight: needs[place::WEIGHT],
        bias: bias.as_deref(),
        h: needs[place::H],
        c: needs[place::C],
    };
    fused::backward(&inputs, shapes.sizes, asked)
}

/// One kernel for the gradients of the gates and c, and libtorch's products for the others.
fn backward_by_product(
    grads: [Option<&Tensor>; 2],
    saved: &Saved,
    shapes: &Shapes,
    needs: &Needs,
) -> Result<Gradients> {
    let values = |grad: Option<&Tensor>| grad.map(|grad| plain(&of_one_step(grad)?)).transpose();
    let (grad_new_h, grad_new_c) = (values(grads[0])?, values(grads[1])?);
    let mut grad_gates = Tensor::f_empty_like(&saved.activations)?;
    let mut grad_c = if needs[place::C] { Some(Tensor::f_empty_like(&saved.new_c)?) } else { None };
    let inputs = pointwise::BackwardInputs {
        grad_new_h: grad_new_h.as_ref(),
        grad_new_c: grad_new_c.as_ref(),
        activations: &saved.activations,
        new_c: &saved.new_c,
    };
    pointwise::backward(&inputs, &mut grad_gates, grad_c.as_mut())?;

    let grad_gates = grad_gates.f_to_kind(shapes.product)?;
    let (grad_h, grad_input) = input_gradients(&grad_gates, saved, shapes.sizes, needs)?;
    let grad_input = grad_input.map(|grad| grad.f_view(&shapes.input_size()[..])).transpose()?;
    let grad_weight = match (&saved.input, &saved.h) {
        (Some(input), Some(h)) if needs[place::WEIGHT] => {
            // The concatenation is computed again, because it would be the largest tensor to keep.
            let hx = Tensor::f_cat(&[h, &of_one_step(input)?], 1)?;
            Some(grad_gates.f_transpose(0, 1)?.f_mm(&hx)?)
        }
        _ => None,
    };
    let bias = shapes.bias_size().filter(|_| needs[place::BIAS]);
    let grad_bias = bias.map(|size| bias_gradient(&grad_gates, &size)).transpose()?;
    Ok([grad_input, grad_weight, grad_bias, grad_h, grad_c])
}

/// The gradients of h and x: `dG W`, of which only the columns that are needed are computed.
fn input_gradients(
    grad_gates: &Tensor,
    saved: &Saved,
    sizes: Sizes,
    needs: &Needs,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (needs_h, needs_input) = (needs[place::H], needs[place::INPUT]);
    let Some(weight) = saved.weight.as_ref().filter(|_| needs_h || needs_input) else {
        return Ok((None, None));
    };
    let Sizes { features, hidden, .. } = sizes;
    if needs_h && needs_input {
        // One product of all columns is faster than two. Its parts are copied, because gradients
        // do not share memory, and because the fused kernel writes separate tensors, too.
        let grad = grad_gates.f_mm(weight)?;
        let part = |start, len| grad.f_narrow_copy(1, start, len);
        return Ok((Some(part(0, hidden)?), Some(part(hidden, features)?)));
    }
    let product =
        |start, len| -> Result<Tensor> { Ok(grad_gates.f_mm(&weight.f_narrow(1, start, len)?)?) };
    let grad_h = needs_h.then(|| product(0, hidden)).transpose()?;
    let grad_input = needs_input.then(|| product(hidden, features)).transpose()?;
    Ok((grad_h, grad_input))
}

/// The gradient of a bias of this size: `Σ dG` over the rows.
pub(crate) fn bias_gradient(grad_gates: &Tensor, size: &[i64]) -> Result<Tensor> {
    let sum = grad_gates.f_sum_dim_intlist([0_i64].as_slice(), false, grad_gates.f_kind()?)?;
    Ok(sum.f_reshape(size)?)
}

/// Removes the first dimension of a sequence of one step, `[1, B, F]`; any other tensor is
/// unchanged.
pub(crate) fn of_one_step(tensor: &Tensor) -> Result<Tensor> {
    Ok(if tensor.dim() == 3 { tensor.f_select(0, 0)? } else { tensor.shallow_clone() })
}
