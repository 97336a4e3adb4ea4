//! `Σ wᵢ xᵢ` over a list of tensors. Without weights they count as ones.

use std::sync::LazyLock;
use tch::Tensor;
use tch_extension::autograd::{Context, Function, Inputs, Saver, Tensors, apply};
use tch_extension::library::{Operator, below_autograd};
use tch_extension::{Error, Result, args, check};

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
        return tensors[1..].iter().try_fold(first.f_mul_scalar(1.0)?, |sum, it| Ok(sum.f_add(it)?));
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

// Registered when this library is loaded.
static WEIGHTED_SUM: LazyLock<Operator> =
    LazyLock::new(|| Operator::find("python_ops::weighted_sum").expect("weighted_sum"));

/// The inputs of the graph's node are the tensors of the list one by one, and then the weights.
pub fn autograd(tensors: &[Tensor], weights: Option<&Tensor>) -> Result<Tensor> {
    let mut inputs: Vec<_> = tensors.iter().map(Some).collect();
    inputs.push(weights);
    apply(WeightedSum { count: tensors.len() }, &inputs)?.single()
}

struct WeightedSum {
    count: usize,
}

impl Function for WeightedSum {
    const NAME: &'static str = "weighted_sum";

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let tensors = (0..self.count).map(|index| inputs.get(index)).collect::<Result<Vec<_>>>()?;
        let weights = inputs.optional(self.count);
        saver.save_optional(weights);
        if weights.is_some() {
            tensors.iter().for_each(|tensor| saver.save(tensor));
        }
        let output: Tensor = below_autograd(|| WEIGHTED_SUM.call(args![&tensors, weights]))?;
        Ok(output.into())
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let grad = grads.get(0)?;
        let Some(weights) = ctx.saved_optional(0)? else {
            let same = (0..self.count).map(|_| Some(grad.shallow_clone()));
            return Ok(same.chain([None]).collect::<Vec<_>>().into());
        };
        let mut to_tensors = Vec::new();
        let mut to_weights = Vec::new();
        for (index, weight) in weights.f_unbind(0)?.iter().enumerate() {
            to_tensors.push(Some(grad.f_mul(weight)?));
            to_weights.push(grad.f_mul(&ctx.saved(1 + index)?)?.f_sum(None)?);
        }
        to_tensors.push(Some(Tensor::f_stack(&to_weights, 0)?));
        Ok(to_tensors.into())
    }
}
