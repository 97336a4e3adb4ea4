//! A linear layer whose output is cut into three parts, such as queries, keys and values.

use super::{Linear, LinearIn, bias_gradient, composite, gradients, kernels};
use crate::amp::CastPolicy;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Leaf, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Signature, Slots, call,
};
use crate::ops::gemm::{self, Way};
use crate::ops::rows;
use crate::{Error, Result};
use tch::Tensor;

/// [`linear`](super::linear()), whose output is cut into three parts of these sizes along its last dimension:
/// `[..., size]` each, with gaps between the rows, because they are in the memory of one product.
///
/// Its backward pass makes one gradient of those of the parts, where an absent one means zeros, and computes
/// linear's from it. On CUDA one kernel reads them, writes the whole gradient and adds up its columns for
/// the bias, if every row begins at a multiple of 16 bytes; libtorch's split would concatenate them, and
/// linear read the result once more.
///
/// # Errors
/// As for [`f_linear`](super::f_linear), or when the sizes do not add up to that of the output.
pub fn f_linear_parts(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    sizes: [i64; 3],
) -> Result<[Tensor; 3]> {
    let operator = LinearParts { sizes: sizes.to_vec() };
    let LinearPartsOut { first, second, third } =
        call(operator, &LinearPartsIn { input, weight, bias })?;
    Ok([first, second, third])
}

crate::signature! {
    /// The three parts of `input @ weight.T + bias` that have these last sizes.
    LinearParts: LinearPartsIn -> LinearPartsOut =
        "linear"(input, weight, bias?, sizes: Vec<i64>) -> (first, second, third)
}

/// The arguments as linear's.
fn whole<L: Leaf>(of: LinearPartsIn<L>) -> LinearIn<L> {
    LinearIn { input: of.input, weight: of.weight, bias: of.bias }
}

fn of_parts<L: Leaf>(of: LinearIn<L>) -> LinearPartsIn<L> {
    LinearPartsIn { input: of.input, weight: of.weight, bias: of.bias }
}

impl LinearParts {
    /// The parts of an output, each made from its size.
    fn cut<T>(&self, part: impl FnMut(i64) -> T) -> Result<[T; 3]> {
        let parts: Vec<T> = self.sizes.iter().copied().map(part).collect();
        parts.try_into().map_err(|_| Error::msg("internal error: linear: expected three sizes"))
    }
}

impl Operator for LinearParts {
    type Kept = ();
    type Plan = Way;

    const AUTOCAST: [Option<CastPolicy>; 2] = Linear::AUTOCAST;
    const SECOND: Second = Second::Itself;

    fn plan(&self, of: &Args<'_, Self>, needs: &Needs<Self>) -> Result<Way> {
        Linear {}.plan(&whole(of.clone()), &whole(needs.clone()))
    }

    fn rule<D: Dim>(
        &self,
        of: &Metas<Self, D>,
        needs: &Needs<Self>,
    ) -> Result<Made<Self, Meta<D>>> {
        let all = Linear {}.rule(&whole(of.clone()), &whole(needs.clone()))?.outputs.output;
        let sum = self.sizes.iter().try_fold(0_i64, |sum, &size| sum.checked_add(size));
        let fits = |sum: i64| of.weight.sizes()[0].number().is_none_or(|out| out == sum);
        if !self.sizes.iter().all(|&size| size >= 0) || !sum.is_some_and(fits) {
            let expected = format!("[out, in] with out = the sum of the sizes {:?}", self.sizes);
            return Err(of.weight.refuse(expected, format!("{:?}", of.weight.sizes()), ""));
        }
        let [first, second, third] = self.cut(|size| all.clone().with_last(size.into()))?;
        Ok(Made::only(LinearPartsOut { first, second, third }))
    }

    fn reads(&self, needs: &Needs<Self>) -> Needs<Self> {
        of_parts(Linear {}.reads(&whole(needs.clone())))
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        let LinearPartsIn { input, weight, bias } = call.of;
        let output = match gemm::linear(input, weight, bias, call.plan)? {
            Some(output) => output,
            None => composite(input, weight, bias)?,
        };
        let mut at = 0;
        let [first, second, third] = self.cut(|size| -> Result<Tensor> {
            at += size;
            // A view could not be changed in place later.
            Ok(output.f_narrow(-1, at - size, size)?.f_detach()?)
        })?;
        Ok(Made::only(LinearPartsOut { first: first?, second: second?, third: third? }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let input = again.metas()?.input;
        let LinearPartsOut { first, second, third } = grads;
        let grads = [first, second, third];
        let Some(like) = grads.iter().flatten().next() else { return Ok(LinearPartsIn::none()) };
        let (like, is_recorded) = ((like.f_kind()?, like.device()), again.is_recorded);
        let mut parts = Vec::with_capacity(grads.len());
        for (grad, &size) in grads.iter().zip(&self.sizes) {
            parts.push(match grad {
                Some(grad) => rows(grad)?,
                None => {
                    let sizes = input.clone().with_last(size);
                    rows(&Tensor::f_zeros(sizes.sizes(), like)?)?
                }
            });
        }
        let parts: [Tensor; 3] = parts
            .try_into()
            .map_err(|_| Error::msg("internal error: linear: expected three gradients"))?;
        let needs_bias = again.needs.bias;
        let made = match needs_bias && !is_recorded {
            true => kernels::concatenated(&parts)?,
            false => None,
        };
        let (grad, mut of_bias) = match made {
            Some((grad, of_bias)) => (grad, Some(of_bias)),
            None => (Tensor::f_cat(&parts, 1)?, None),
        };
        let way = (!is_recorded).then_some(again.plan);
        let found = gradients(&grad, &whole(again.of), input.sizes(), way)?;
        if needs_bias && of_bias.is_none() {
            of_bias = Some(bias_gradient(&grad, is_recorded)?);
        }
        Ok(LinearPartsIn { bias: of_bias, ..of_parts(found) })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let output = super::linear_reference(of.input, of.weight, of.bias)?;
        let mut parts = output.f_split_with_sizes(self.sizes.as_slice(), -1)?.into_iter();
        LinearPartsOut::own(Self::NAME, |_| parts.next())
    }
}
