//! `Σ wᵢ xᵢ` over a list of tensors. Without weights they count as ones.

use tch::Tensor;
use tch_extension::autograd::Tensors;
use tch_extension::library::CallContext;
use tch_extension::{Error, Result, check};

fn first(tensors: &[Tensor]) -> Result<&Tensor> {
    tensors.first().ok_or_else(|| {
        let hint = "pass a list with a tensor in it";
        Error::argument("weighted_sum", "tensors", "one or more", "none", hint)
    })
}

/// Runs on the CPU and on CUDA.
pub fn forward(tensors: &[Tensor], weights: Option<&Tensor>) -> Result<Tensor> {
    let first = first(tensors)?;
    let known = check!("weighted_sum", "tensors", *first).defined()?;
    for tensor in tensors {
        check!("weighted_sum", "tensors", *tensor)
            .defined()?
            .like(&known)?
            .shape("the first", &first.size())?;
    }
    let Some(weights) = weights else {
        // A copy, because a result must not be an argument.
        return tensors[1..]
            .iter()
            .try_fold(first.f_mul_scalar(1.0)?, |sum, it| Ok(sum.f_add(it)?));
    };
    let count = [tensors.len() as i64];
    check!("weighted_sum", weights).defined()?.like(&known)?.shape("[tensors]", &count)?;
    let weights = weights.f_unbind(0)?;
    let sum = first.f_mul(&weights[0])?;
    let mut rest = tensors.iter().zip(&weights).skip(1);
    rest.try_fold(sum, |sum, (tensor, weight)| Ok(sum.f_addcmul(tensor, weight)?))
}

/// Only what the result looks like. The kernel's checks read sizes, which would tie the compiled
/// program to these sizes.
pub fn fake(tensors: &[Tensor], _weights: Option<&Tensor>) -> Result<Tensor> {
    Ok(first(tensors)?.f_empty_like()?)
}

/// One gradient for each tensor of the list, and one for the weights. The weights are saved first, and
/// then the tensors.
pub fn gradients(ctx: &CallContext<'_>, grads: &Tensors) -> Result<Tensors> {
    let grad = grads.get(0)?;
    let count = ctx.inputs_len() - 1;
    let Some(weights) = ctx.saved_optional(0)? else {
        let same = (0..count).map(|_| Some(grad.shallow_clone()));
        return Ok(same.chain([None]).collect::<Vec<_>>().into());
    };
    let mut of_tensors = Vec::new();
    let mut of_weights = Vec::new();
    for (index, weight) in weights.f_unbind(0)?.iter().enumerate() {
        of_tensors.push(Some(grad.f_mul(weight)?));
        of_weights.push(grad.f_mul(&ctx.saved(1 + index)?)?.f_sum(None)?);
    }
    of_tensors.push(Some(Tensor::f_stack(&of_weights, 0)?));
    Ok(of_tensors.into())
}
