//! Second derivatives of operators whose backward pass is a kernel.

use super::grad::{GradOptions, grad};
use super::{Context, Tensors};
use crate::{Error, Result};
use tch::Tensor;

/// Computes the gradients of an operator by differentiating `reference`, which is the same formula
/// written in differentiable operations. A backward pass calls it when [`Context::create_graph`] is
/// true: the gradients that it returns can be differentiated again, exactly.
///
/// `inputs` are the saved inputs of the forward pass, in order. `grads` are the gradients that the
/// backward pass was given.
///
/// `grads` belong to the outputs that the forward pass gave, so `reference` must give the same ones.
/// Where a formula has several right results, as the singular vectors of a matrix have any sign or, if
/// they are complex, any phase, `reference` must share the forward pass's choice. Otherwise the
/// gradients are wrong, and nothing notices. Save an output, and turn the reference's result to it.
///
/// # Errors
/// An error of `reference` or of libtorch. It is also an error to call this when no graph is to be
/// built, or with another number of inputs or outputs than the operator has.
pub fn differentiate_reference(
    ctx: &Context<'_>,
    inputs: &[Option<Tensor>],
    grads: &Tensors,
    reference: impl FnOnce(&[Option<Tensor>]) -> Result<Tensors>,
) -> Result<Tensors> {
    if !ctx.create_graph() {
        return Err(Error::Autograd(
            "differentiate_reference needs a graph: call it when Context::create_graph() is true, with \
             Function::DOUBLE_BACKWARD set"
                .to_string(),
        ));
    }
    check_len("inputs", inputs.len(), ctx.inputs_len())?;
    // Differentiate with respect to fresh aliases. If one input depends on another (x and x·x, or
    // the states of a recurrent loop), a derivative with respect to the inputs themselves would be
    // the total derivative. Detached copies would cut the graph that the second derivative needs.
    let aliases = inputs
        .iter()
        .map(|input| input.as_ref().map(|tensor| tensor.f_view_as(tensor)).transpose())
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let outputs = reference(&aliases)?;
    pull_back(ctx, &aliases, &outputs, grads, true)
}

/// Computes the gradients of `outputs` with respect to those `inputs` that need one. The outputs
/// must have been computed from `inputs`.
pub(super) fn pull_back(
    ctx: &Context<'_>,
    inputs: &[Option<Tensor>],
    outputs: &Tensors,
    grads: &Tensors,
    create_graph: bool,
) -> Result<Tensors> {
    check_len("outputs of the reference", outputs.len(), grads.len())?;

    let (mut of, mut vectors) = (Vec::new(), Vec::new());
    for (index, (output, vector)) in outputs.iter().zip(grads.iter()).enumerate() {
        if output.is_none() && vector.is_some() {
            return Err(Error::Autograd(format!(
                "differentiate_reference: output {index} has a gradient, but the reference did not return that output"
            )));
        }
        if let (Some(output), Some(vector)) = (output, vector)
            && output.requires_grad()
        {
            of.push(output);
            vectors.push(Some(vector));
        }
    }
    let needed: Vec<usize> =
        (0..inputs.len()).filter(|&index| ctx.needs_input_grad(index)).collect();
    let wanted: Vec<&Tensor> = needed.iter().filter_map(|&index| inputs[index].as_ref()).collect();
    let mut gradients: Vec<Option<Tensor>> = inputs.iter().map(|_| None).collect();
    if of.is_empty() || wanted.is_empty() {
        return Ok(gradients.into());
    }
    let options = GradOptions {
        grad_outputs: &vectors,
        create_graph,
        allow_unused: true,
        ..Default::default()
    };
    let found = grad(&of, &wanted, &options)?;
    for (index, gradient) in needed.into_iter().zip(found.into_vec()) {
        gradients[index] = gradient;
    }
    Ok(gradients.into())
}

fn check_len(what: &str, len: usize, expected: usize) -> Result<()> {
    if len == expected {
        return Ok(());
    }
    Err(Error::Autograd(format!("differentiate_reference: expected {expected} {what}, got {len}")))
}
