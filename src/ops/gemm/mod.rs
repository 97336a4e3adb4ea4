//! Matrix products and the operations that follow them, fused into one kernel where one exists.
//! `linear`, `matmul_add_relu` and the cells share this module.

// The epilogue with a GELU is that of the feature `mlp`.
#[cfg(not(tch_extension_cuda))]
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
mod absent;
pub(super) mod costs;
#[cfg(tch_extension_cuda)]
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
mod kernels;
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
pub(super) mod plan;

#[cfg(test)]
pub(super) use plan::ways_on_h200;
#[doc(hidden)]
pub use plan::{Counters, Way};

use super::costs::multiprocessors;
use super::kinds;
use super::{reshaped, rows};
use crate::Result;
use crate::ffi::tensor::is_in_memory;
use costs::COSTS;
use plan::{Description, choose};
use std::marker::PhantomData;
use tch::{Kind, Tensor};

#[cfg(not(tch_extension_cuda))]
use absent as calls;
#[cfg(tch_extension_cuda)]
use kernels as calls;

#[doc(hidden)]
pub use calls::counters;

/// The arguments of a product.
#[derive(Clone, Copy)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
struct Operands<'a> {
    lhs: &'a Tensor,
    /// A weight `[N, K]`, if `is_linear`.
    rhs: &'a Tensor,
    bias: Option<&'a Tensor>,
    is_linear: bool,
    relu: bool,
}

/// A product that `csrc/gemm` has described. The operands, whose addresses it has, stay borrowed.
struct Described<'a> {
    facts: Description,
    operands: PhantomData<&'a Tensor>,
}

/// `relu(lhs @ rhs + bias)`. `None` unless all tensors share one kind and one CUDA device, the bias
/// does not enlarge the product, no operand has to be copied because of its layout, and the shapes
/// fit together; and where libtorch's product is faster.
pub(crate) fn matmul_add_relu(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: &Tensor,
    way: Way,
) -> Result<Option<Tensor>> {
    compute(Operands { lhs, rhs, bias: Some(bias), is_linear: false, relu: true }, way)
}

/// `input @ weightᵀ + bias`, under the same conditions.
pub(crate) fn linear(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    way: Way,
) -> Result<Option<Tensor>> {
    compute(Operands { lhs: input, rhs: weight, bias, is_linear: true, relu: false }, way)
}

/// An RMS norm of a product's input x, which is not computed apart: Σ w (x / r) g = (Σ w (x g)) / r.
#[derive(Clone, Copy)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
pub(crate) struct InputNorm<'a> {
    pub weight: &'a Tensor,
    pub eps: f64,
}

impl InputNorm<'_> {
    /// Whether the kernel computes it. In `Half`, an input times its weight could overflow before the sum is
    /// divided; in `BFloat16` only if their sum of squares does, too.
    fn fits(&self, input: &Tensor) -> Result<bool> {
        let Self { weight, .. } = self;
        let is_row = weight.size() == [input.size().last().copied().unwrap_or(0)];
        Ok(is_row
            && input.f_kind()? == Kind::BFloat16
            && weight.f_kind()? == Kind::BFloat16
            && weight.device() == input.device()
            && is_in_memory(weight)
            && weight.is_contiguous()
            && weight.data_ptr().addr().is_multiple_of(16))
    }
}

/// `input @ weightᵀ + sum` of a sum of the output's size, under the same conditions.
#[cfg_attr(not(all(feature = "norm", feature = "mlp")), allow(dead_code))]
pub(crate) fn linear_add(
    input: &Tensor,
    weight: &Tensor,
    sum: &Tensor,
    way: Way,
) -> Result<Option<Tensor>> {
    if !input.is_contiguous() || !sum.is_contiguous() {
        return Ok(None);
    }
    let (lhs, rhs, bias) = (&rows(input)?, &weight.f_tr()?, &rows(sum)?);
    let operands = Operands { lhs, rhs, bias: Some(bias), is_linear: false, relu: false };
    let output = compute(operands, way)?;
    output.map(|output| reshaped(&output, &sum.size())).transpose()
}

/// `input @ weightᵀ + bias` of several layers, for few rows, in one launch, or that of the input's norm.
/// `None` where their products are not faster together.
pub(crate) fn linear_together<const N: usize>(
    input: &Tensor,
    norm: Option<InputNorm<'_>>,
    layers: [(&Tensor, Option<&Tensor>); N],
    way: Way,
) -> Result<Option<[Tensor; N]>> {
    let Some(described) = describe_together(input, norm, layers, way)? else { return Ok(None) };
    let outputs = calls::run_together(described.each_ref(), norm, false)?;
    match outputs.iter().all(Option::is_some) {
        true => Ok(Some(outputs.map(|output| output.unwrap_or_default()))),
        false => Ok(None),
    }
}

/// `silu(input @ gateᵀ) (input @ upᵀ)`, or that of the input's norm, under the same conditions.
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
pub(crate) fn linear_gated(
    input: &Tensor,
    norm: Option<InputNorm<'_>>,
    gate: &Tensor,
    up: &Tensor,
    way: Way,
) -> Result<Option<Tensor>> {
    let layers = [(gate, None), (up, None)];
    let Some(described) = describe_together(input, norm, layers, way)? else { return Ok(None) };
    if described[0].facts.product.n != described[1].facts.product.n {
        return Ok(None);
    }
    let [output, _] = calls::run_together(described.each_ref(), norm, true)?;
    Ok(output)
}

/// The products of these layers, if they can be computed together and the largest is faster so.
fn describe_together<'a, const N: usize>(
    input: &'a Tensor,
    norm: Option<InputNorm<'_>>,
    layers: [(&'a Tensor, Option<&'a Tensor>); N],
    way: Way,
) -> Result<Option<[Described<'a>; N]>> {
    let size = input.size();
    let rows: i64 = size.iter().rev().skip(1).product();
    let normed = norm.as_ref().map_or(Ok(true), |norm| norm.fits(input))?;
    if !normed || rows > plan::MOST_SHORT_BY_TENSOR || !matches!(way, Way::Automatic | Way::Skinny)
    {
        return Ok(None);
    }
    let mut all = Vec::with_capacity(N);
    for (rhs, bias) in layers {
        let operands = Operands { lhs: input, rhs, bias, is_linear: true, relu: false };
        match calls::describe(operands)? {
            Some(described) if described.facts.can_join() => all.push(described),
            _ => return Ok(None),
        }
    }
    let largest = all.iter().max_by_key(|each| each.facts.product.n);
    let is_faster = match largest {
        Some(_) if way == Way::Skinny => true,
        Some(largest) => chosen(&largest.facts)? == Way::Skinny,
        None => false,
    };
    Ok(is_faster.then_some(all).and_then(|all| all.try_into().ok()))
}

/// `lhs @ rhs` by a kernel of this crate, without autograd, under the same conditions.
pub(crate) fn product(lhs: &Tensor, rhs: &Tensor, way: Way) -> Result<Option<Tensor>> {
    match way {
        // Without a bias, libtorch's product does the same as our plan.
        Way::Plan | Way::Hopper | Way::Pass => Ok(None),
        _ => compute(Operands { lhs, rhs, bias: None, is_linear: false, relu: false }, way),
    }
}

/// `lhs @ rhs` of matrices, by a kernel of this crate or by libtorch.
pub(crate) fn mm(lhs: &Tensor, rhs: &Tensor, way: Way) -> Result<Tensor> {
    match product(lhs, rhs, way)? {
        Some(product) => Ok(product),
        None => Ok(lhs.f_mm(rhs)?),
    }
}

fn compute(operands: Operands<'_>, way: Way) -> Result<Option<Tensor>> {
    if way == Way::Composite {
        return Ok(None);
    }
    let Some(described) = calls::describe(operands)? else { return Ok(None) };
    match way {
        Way::Automatic => match chosen(&described.facts)? {
            Way::Composite => Ok(None),
            chosen => calls::run(&described, chosen),
        },
        forced if described.facts.can(forced) => calls::run(&described, forced),
        _ => Ok(None),
    }
}

/// The fastest way on the operands' device.
fn chosen(facts: &Description) -> Result<Way> {
    let device = kinds::Device::Cuda(usize::try_from(facts.device).unwrap_or(usize::MAX));
    choose(facts, || Ok((COSTS.of(device)?, multiprocessors(device)?)))
}

/// gelu(z), and z if it is wanted.
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
pub(crate) struct WithZ {
    pub output: Tensor,
    pub z: Option<Tensor>,
}

/// `gelu(z)` of z = `input weightᵀ + bias`, with tanh, of matrices, as one call of cuBLASLt. `None` if
/// cuBLASLt has no such call, or, if `only_fast` is set, a slow one; and unless all tensors share one half
/// kind and one CUDA device.
#[cfg_attr(not(feature = "mlp"), allow(dead_code))]
pub(crate) fn linear_gelu(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    wants_z: bool,
    only_fast: bool,
) -> Result<Option<WithZ>> {
    let operands = Operands { lhs: input, rhs: weight, bias, is_linear: true, relu: false };
    let Some(described) = calls::describe(operands)? else { return Ok(None) };
    // For rows that begin off 16 bytes, cuBLASLt has only slow kernels with this epilogue.
    let is_slow = described.facts.padding.launches > 0;
    if input.dim() != 2 || (only_fast && is_slow) {
        return Ok(None);
    }
    calls::run_gelu(&described, wants_z)
}
