//! `torch.autograd.grad` and `torch.autograd.backward`, and functions that ask a tensor about its
//! graph.

use super::apply::owned;
use crate::ffi::autograd as ffi;
use crate::ffi::pointers::borrowed_pointers;
use crate::ffi::take_message;
use crate::{Error, Result};
use tch::Tensor;

/// The options of [`grad`]. The defaults are those of `torch.autograd.grad`.
#[derive(Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// The vector of the vector-Jacobian product, with one entry for each output. If the list is
    /// empty or an entry is absent, the value 1 is used, which works only for an output with a
    /// single element.
    pub grad_outputs: &'a [Option<&'a Tensor>],
    /// Keep the graph for another backward pass. The default is the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// Make the gradients part of a graph, so that they can be differentiated again.
    pub create_graph: bool,
    /// Return `None` for an input that no output depends on, instead of an error.
    pub allow_unused: bool,
}

/// Computes the gradients of `outputs` with respect to `inputs`. It does not change the `grad` of
/// any tensor.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::{GradOptions, grad};
///
/// let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let y = &x * &x * &x;
/// let v = Tensor::from_slice(&[1.0, 10.0]);
/// let options = GradOptions { grad_outputs: &[Some(&v)], ..Default::default() };
/// let gradients = grad(&[&y], &[&x], &options)?;
/// assert_eq!(gradients.get(0)?, &Tensor::from_slice(&[3.0, 120.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// libtorch's own errors (no graph, wrong shapes, an unused input), and any error of a backward
/// pass that runs.
pub fn grad(
    outputs: &[&Tensor],
    inputs: &[&Tensor],
    options: &GradOptions<'_>,
) -> Result<super::Tensors> {
    check_grad_outputs("grad", outputs, options.grad_outputs)?;
    let output_pointers = borrowed_pointers(outputs.iter().map(|&tensor| Some(tensor)));
    let input_pointers = borrowed_pointers(inputs.iter().map(|&tensor| Some(tensor)));
    let grad_pointers = borrowed_pointers(options.grad_outputs.iter().copied());
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    // SAFETY: every pointer is null or borrowed from a live tensor, and each array is valid for its
    // length during the call.
    let message = unsafe {
        ffi::tch_extension_grad(
            output_pointers.as_ptr(),
            output_pointers.len(),
            input_pointers.as_ptr(),
            input_pointers.len(),
            grad_pointers.as_ptr(),
            grad_pointers.len(),
            options.retain_graph.map_or(-1, i32::from),
            options.create_graph,
            options.allow_unused,
            results.as_mut_ptr(),
        )
    };
    if let Some(message) = take_message(message) {
        return Err(Error::Autograd(message));
    }
    // SAFETY: on success each entry is null or a handle that we now own.
    Ok(results.into_iter().map(|tensor| unsafe { owned(tensor) }).collect::<Vec<_>>().into())
}

/// The options of [`backward`]. The defaults are those of `torch.autograd.backward`.
#[derive(Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// As [`GradOptions::grad_outputs`].
    pub grad_outputs: &'a [Option<&'a Tensor>],
    /// Keep the graph for another backward pass. The default is the value of `create_graph`.
    pub retain_graph: Option<bool>,
    /// Make the gradients part of a graph, so that they can be differentiated again. A `grad` that
    /// is part of a graph keeps that graph alive: remove it or set it to zero when you no longer
    /// need it.
    pub create_graph: bool,
    /// Add to the `grad` of these tensors only. `None` means all leaves that `outputs` depend on.
    pub inputs: Option<&'a [&'a Tensor]>,
}

/// Adds the gradients of `outputs` to the `grad` of the leaves that they depend on. This is
/// `Tensor::backward` with a `Result` and with the options that Python has.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::autograd::{BackwardOptions, backward};
///
/// let x = Tensor::from_slice(&[1.0, 2.0]).set_requires_grad(true);
/// let w = Tensor::from_slice(&[3.0, 4.0]).set_requires_grad(true);
/// let y = &x * &w;
/// let v = Tensor::from_slice(&[1.0, 10.0]);
/// backward(&[&y], &BackwardOptions { grad_outputs: &[Some(&v)], inputs: Some(&[&w]), ..Default::default() })?;
/// assert_eq!(w.grad(), Tensor::from_slice(&[1.0, 20.0]));
/// assert!(!x.grad().defined());
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// libtorch's own errors (no graph, wrong shapes, an output of several elements without a vector),
/// and any error of a backward pass that runs.
pub fn backward(outputs: &[&Tensor], options: &BackwardOptions<'_>) -> Result<()> {
    check_grad_outputs("backward", outputs, options.grad_outputs)?;
    let output_pointers = borrowed_pointers(outputs.iter().map(|&tensor| Some(tensor)));
    let grad_pointers = borrowed_pointers(options.grad_outputs.iter().copied());
    if options.inputs.is_some_and(<[_]>::is_empty) {
        return Err(Error::argument(
            "backward",
            "inputs",
            "at least one tensor",
            "none",
            "leave it out for all leaves",
        ));
    }
    let inputs = options.inputs.unwrap_or_default();
    let input_pointers = borrowed_pointers(inputs.iter().map(|&tensor| Some(tensor)));
    // SAFETY: every pointer is null or borrowed from a live tensor, and each array is valid for its
    // length during the call.
    let message = unsafe {
        ffi::tch_extension_backward(
            output_pointers.as_ptr(),
            output_pointers.len(),
            grad_pointers.as_ptr(),
            grad_pointers.len(),
            input_pointers.as_ptr(),
            input_pointers.len(),
            options.retain_graph.map_or(-1, i32::from),
            options.create_graph,
        )
    };
    take_message(message).map_or(Ok(()), |message| Err(Error::Autograd(message)))
}

fn check_grad_outputs(
    name: &str,
    outputs: &[&Tensor],
    grad_outputs: &[Option<&Tensor>],
) -> Result<()> {
    if grad_outputs.is_empty() || grad_outputs.len() == outputs.len() {
        return Ok(());
    }
    Err(Error::argument(
        name,
        "grad_outputs",
        format!("{} entries, one for each output", outputs.len()),
        grad_outputs.len().to_string(),
        "write None where there is none",
    ))
}

/// Makes backward passes fill in the `grad` of a tensor that is not a leaf: Python's
/// `Tensor.retain_grad`. It does nothing for a leaf.
///
/// # Errors
/// When the tensor is undefined or does not require grad.
pub fn retain_grad(tensor: &Tensor) -> Result<()> {
    // SAFETY: the pointer is borrowed from a live tensor.
    let message = unsafe { ffi::tch_extension_retain_grad(tensor.as_ptr()) };
    take_message(message)
        .map_or(Ok(()), |message| Err(Error::Autograd(format!("retain_grad: {message}"))))
}

/// The name of the graph node that made the tensor: Python's `Tensor.grad_fn.name()`. It is a name
/// such as `MulBackward0` or, for an operator of this crate, the operator's name followed by
/// `Backward`. It is `None` for a leaf.
///
/// # Errors
/// For a view that was made with grad mode off and whose base was changed in place afterwards:
/// libtorch has no node for such a view.
pub fn grad_fn(tensor: &Tensor) -> Result<Option<String>> {
    if !tensor.defined() {
        return Ok(None);
    }
    let mut name = std::ptr::null_mut();
    // SAFETY: the pointer is borrowed from a live tensor, and we own the name afterwards.
    match take_message(unsafe { ffi::tch_extension_grad_fn(tensor.as_ptr(), &mut name) }) {
        Some(message) => Err(Error::Autograd(format!("grad_fn: {message}"))),
        None => Ok(take_message(name)),
    }
}
