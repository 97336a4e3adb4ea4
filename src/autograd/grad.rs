//! `torch.autograd.grad`.

use super::function::owned;
use super::pointers::borrowed_pointers;
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use tch::Tensor;

/// What [`grad`] can be told; the default is what `torch.autograd.grad` does by default.
#[derive(Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// The vector of the vector-Jacobian product, one entry for each output. Empty, or an absent entry, means
    /// one; that is possible for outputs of a single element only.
    pub grad_outputs: &'a [Option<&'a Tensor>],
    /// Keep the graph for another backward. By default, as `create_graph`.
    pub retain_graph: Option<bool>,
    /// Make the gradients part of a graph, so that they can be differentiated again.
    pub create_graph: bool,
    /// Give `None` for an input that no output depends on, instead of an error.
    pub allow_unused: bool,
}

/// The gradients of `outputs` with respect to `inputs`, without touching anybody's `grad`.
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
/// libtorch's own (no graph, wrong shapes, an unused input), and whatever fails in a backward on the way.
pub fn grad(outputs: &[&Tensor], inputs: &[&Tensor], options: &GradOptions<'_>) -> Result<super::Tensors> {
    if !options.grad_outputs.is_empty() && options.grad_outputs.len() != outputs.len() {
        return Err(Error::argument(
            "grad",
            "grad_outputs",
            format!("{} entries, one for each output", outputs.len()),
            options.grad_outputs.len().to_string(),
            "write None where there is none",
        ));
    }
    let output_pointers = borrowed_pointers(outputs.iter().map(|&tensor| Some(tensor)));
    let input_pointers = borrowed_pointers(inputs.iter().map(|&tensor| Some(tensor)));
    let grad_pointers = borrowed_pointers(options.grad_outputs.iter().copied());
    let mut results = vec![std::ptr::null_mut(); inputs.len()];
    // SAFETY: every pointer is null or borrowed from a live tensor, and valid for its length during the call.
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
    // SAFETY: on success each entry is null or a handle for us to own.
    Ok(results.into_iter().map(|tensor| unsafe { owned(tensor) }).collect::<Vec<_>>().into())
}
