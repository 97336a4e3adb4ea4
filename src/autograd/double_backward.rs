//! Second derivatives of operators whose backward is a kernel.

use super::grad::{GradOptions, grad};
use super::{Context, Tensors};
use crate::{Error, Result};
use tch::Tensor;

/// The gradients of an operator, computed by differentiating `reference`, the same maths in
/// differentiable operations. For a backward that finds [`Context::create_graph`] true: what it
/// returns can be differentiated again, exactly.
///
/// `inputs` are the forward's inputs as saved, in order; `grads` what the backward was given.
///
/// # Errors
/// What `reference` reports, or libtorch; without a graph to build; when inputs or outputs are not
/// as many as the operator has.
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
    // Fresh aliases: where one input depends on another (x and x·x, the states of a recurrent
    // loop), a derivative with respect to the inputs themselves would be the total one. Detached
    // copies would cut the graph that the second derivative needs.
    let aliases = inputs
        .iter()
        .map(|input| input.as_ref().map(|tensor| tensor.f_view_as(tensor)).transpose())
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let outputs = reference(&aliases)?;
    pull_back(ctx, &aliases, &outputs, grads, true)
}

/// The gradients, with respect to those of `inputs` that need one, of `outputs` that were computed
/// from them.
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
                "differentiate_reference: output {index} has a gradient, but this time there is no such output"
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
