//! `torch.autograd.Function` for Rust.

use super::apply::owned;
use super::tensors::{Inputs, Tensors};
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use tch::Tensor;
use torch_sys::C_tensor;

/// An operator with a backward of its own: what `torch.autograd.Function` is in Python.
///
/// The value itself is the operator's state: sizes, numbers, whatever is no tensor. `forward` may
/// fill it in; then it moves into the graph, where `backward` reads it, perhaps more than once and
/// from another thread. Tensors belong into [`Saver::save`], which lets the engine free them,
/// checks that nobody changed them and makes no cycles. A bare tensor in the state does not
/// compile, because a `Tensor` is not `Sync`. (One in a `Mutex` would; an input or output in there
/// makes a cycle, and the graph is never freed.)
///
/// ```compile_fail
/// struct Hidden { input: tch::Tensor }
/// # use tch_extension::{Result, autograd::*};
/// impl Function for Hidden {
/// #   const NAME: &'static str = "hidden";
/// #   fn forward(&mut self, _: &mut Saver<'_>, _: Inputs<'_>) -> Result<Tensors> { Ok(().into()) }
/// #   fn backward(&self, _: &Context<'_>, _: &Tensors) -> Result<Tensors> { Ok(().into()) }
/// }
/// ```
///
/// # Example
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::{Result, autograd::*};
///
/// struct Square;
///
/// impl Function for Square {
///     const NAME: &'static str = "square";
///
///     fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
///         let x = inputs.get(0)?;
///         saver.save(x);
///         Ok((x * x).into())
///     }
///
///     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
///         Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
///     }
/// }
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let y = apply(Square, &[Some(&x)])?.single()?;
/// y.sum(Kind::Double).backward();
/// assert_eq!(x.grad().double_value(&[0]), 6.0);
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub trait Function: Send + Sync + Sized + 'static {
    /// The operator's name, in error messages and in the graph (`NAMEBackward`).
    const NAME: &'static str;

    /// Whether `backward` is itself made of differentiable operations on its gradients and on saved
    /// inputs and outputs. If so, it runs with grad mode on when a graph of the gradients is asked
    /// for (`create_graph`). If not, a second derivative through this operator is an error, never a
    /// wrong number.
    ///
    /// A gradient that comes out without a graph although the incoming ones have one is refused,
    /// too: most likely the graph was lost. Where it honestly does not depend on them (a gradient
    /// is linear in the incoming ones, so then it is zero, as that of `floor`), call
    /// [`Context::mark_constant`] or return `None` for it.
    const DOUBLE_BACKWARD: bool = false;

    /// Computes the outputs, with grad mode off.
    ///
    /// # Errors
    /// Reach the caller of [`apply`](super::apply()) as they are.
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors>;

    /// Computes a gradient for each input from one for each output. Entries for inputs that need
    /// none ([`Context::needs_input_grad`]) may be absent.
    ///
    /// An error, a panic or a gradient of the wrong shape becomes an error of whoever called
    /// backward, naming this operator.
    ///
    /// # Errors
    /// Whatever goes wrong.
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors>;
}

/// A tensor that is kept for the backward.
pub(super) enum Saved {
    Absent,
    /// It is borrowed until after the node has its own handle.
    Input(usize),
    Other(Tensor),
}

/// What a forward tells the graph.
pub struct Saver<'a> {
    name: &'static str,
    pub(super) inputs: &'a [Option<&'a Tensor>],
    pub(super) pointers: &'a [*const C_tensor],
    pub(super) needs_graph: bool,
    pub(super) saved: Vec<Saved>,
    pub(super) dirty: Vec<usize>,
    pub(super) non_differentiable: Vec<usize>,
    pub(super) materialize_grads: bool,
}

impl<'a> Saver<'a> {
    #[inline]
    pub(super) fn new(
        name: &'static str,
        inputs: &'a [Option<&'a Tensor>],
        pointers: &'a [*const C_tensor],
        needs_graph: bool,
    ) -> Self {
        Saver {
            name,
            inputs,
            pointers,
            needs_graph,
            saved: Vec::new(),
            dirty: Vec::new(),
            non_differentiable: Vec::new(),
            materialize_grads: true,
        }
    }

    /// Keeps a tensor for the backward, under the next slot number: 0, 1, ….
    ///
    /// Inputs and outputs keep their place in the graph. Anything else is an intermediate: plain
    /// data, which a backward that runs with grad mode on may not read (see
    /// [`Context::create_graph`]).
    pub fn save(&mut self, tensor: &Tensor) {
        self.save_optional(Some(tensor));
    }

    /// [`Saver::save`] for a tensor that may be absent; takes a slot in any case.
    pub fn save_optional(&mut self, tensor: Option<&Tensor>) {
        // Without a graph there is no backward to read it.
        if !self.needs_graph {
            return;
        }
        if self.saved.capacity() == 0 {
            // Inputs, outputs and an intermediate: mostly the only allocation.
            self.saved.reserve(self.inputs.len() + 3);
        }
        let input_of =
            |tensor: &Tensor| self.pointers.iter().position(|&input| input == tensor.as_ptr());
        self.saved.push(match tensor {
            None => Saved::Absent,
            Some(tensor) => {
                input_of(tensor).map_or_else(|| Saved::Other(tensor.shallow_clone()), Saved::Input)
            }
        });
    }

    /// Whether there will be a backward at all: grad mode is on and some input requires grad.
    pub fn needs_graph(&self) -> bool {
        self.needs_graph
    }

    /// Whether input `index` requires grad, and there will be a backward.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_graph
            && self.inputs.get(index).copied().flatten().is_some_and(Tensor::requires_grad)
    }

    /// Input `index`, to be changed in place and returned as an output: a handle to the same
    /// memory, already [marked dirty](Saver::mark_dirty).
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::{Result, autograd::*};
    ///
    /// struct Double;
    ///
    /// impl Function for Double {
    ///     const NAME: &'static str = "double_";
    ///     fn forward(&mut self, saver: &mut Saver<'_>, _inputs: Inputs<'_>) -> Result<Tensors> {
    ///         let mut x = saver.in_place(0)?;
    ///         let _ = x.g_mul_scalar_(2.0);
    ///         Ok(x.into())
    ///     }
    ///     fn backward(&self, _ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    ///         Ok((grads.get(0)? * 2.0).into())
    ///     }
    /// }
    ///
    /// let leaf = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let x = &leaf * 1.0;
    /// apply(Double, &[Some(&x)])?;
    /// assert_eq!(x, Tensor::from_slice(&[6.0]));
    /// x.sum(Kind::Double).backward();
    /// assert_eq!(leaf.grad(), Tensor::from_slice(&[2.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// Where there will be a backward: for a leaf that requires grad or a view of one, for a view
    /// that libtorch lets nobody change in place (one of several made by `chunk` or `unbind`, say),
    /// and for a view that is not the first input present. Nothing has been changed then. (A view
    /// has to be the only output, too; that is seen only afterwards.)
    pub fn in_place(&mut self, index: usize) -> Result<Tensor> {
        let input = Inputs::new(self.inputs).get(index)?;
        if self.needs_graph {
            // SAFETY: each is null or borrowed from a live tensor, and `index` is one of a tensor.
            let message = unsafe {
                ffi::tch_extension_check_in_place(
                    self.pointers.as_ptr(),
                    self.pointers.len(),
                    index,
                )
            };
            if let Some(message) = take_message(message) {
                return Err(Error::Autograd(format!(
                    "{}: in_place({index}): {message}",
                    self.name
                )));
            }
        }
        self.mark_dirty(index);
        Ok(input.shallow_clone())
    }

    /// Declares that the forward changed input `index` in place; it must be among the outputs.
    /// Where there will be a backward, a view that is changed in place has to be the first input
    /// present: libtorch's graph knows no other way. [`Saver::in_place`] checks that before
    /// anything is changed.
    pub fn mark_dirty(&mut self, index: usize) {
        self.dirty.push(index);
    }

    /// Declares that output `index` has no derivative. Outputs of integer kinds never have one.
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }

    /// Whether the backward gets zeros (the default) or nothing for an output that no gradient
    /// reached.
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize_grads = materialize;
    }
}

/// What a backward can ask the graph.
pub struct Context<'a> {
    node: &'a ffi::FunctionNode,
    results: *mut ffi::BackwardResults,
    inputs_len: usize,
}

impl<'a> Context<'a> {
    /// # Safety
    /// `results` must live as long as the context, and nobody else may use it meanwhile.
    pub(super) unsafe fn new(
        node: &'a ffi::FunctionNode,
        results: *mut ffi::BackwardResults,
        inputs_len: usize,
    ) -> Self {
        Context { node, results, inputs_len }
    }

    /// The saved tensor of this slot.
    ///
    /// # Errors
    /// When it was absent, when it was changed in place since, when the graph was freed by an
    /// earlier backward, or when an intermediate is read with grad mode on.
    pub fn saved(&self, slot: usize) -> Result<Tensor> {
        self.saved_optional(slot)?.ok_or_else(|| {
            Error::Autograd(format!("saved tensor {slot} was absent in the forward"))
        })
    }

    /// [`Context::saved`] for a slot that may have been absent.
    ///
    /// # Errors
    /// As [`Context::saved`].
    pub fn saved_optional(&self, slot: usize) -> Result<Option<Tensor>> {
        let mut tensor = std::ptr::null_mut();
        // SAFETY: the node is alive while its backward runs; on success the handle becomes ours.
        let message = unsafe { ffi::tch_extension_saved(self.node, slot, &mut tensor) };
        match take_message(message) {
            Some(message) => Err(Error::Autograd(message)),
            // SAFETY: null or a handle that C++ allocated for us.
            None => Ok(unsafe { owned(tensor) }),
        }
    }

    /// Whether this backward has to compute the gradient of input `index`: it requires grad, and
    /// the caller of backward did not leave it out.
    pub fn needs_input_grad(&self, index: usize) -> bool {
        // SAFETY: the node is alive while its backward runs.
        unsafe { ffi::tch_extension_needs_input_grad(self.node, index) }
    }

    /// Declares that the gradient of input `index` does not depend on the incoming gradients, so
    /// that it may come without a graph from a backward that is differentiable otherwise
    /// ([`Function::DOUBLE_BACKWARD`]). A gradient is linear in the incoming ones: such a one is
    /// zero, as that of `floor`. That is checked where a graph is asked for, on CUDA by waiting for
    /// it.
    pub fn mark_constant(&self, index: usize) {
        // SAFETY: the results live while the backward runs, and only this thread touches them.
        unsafe { ffi::tch_extension_mark_constant(self.results, index) };
    }

    /// How many inputs the forward had, absent ones included.
    pub fn inputs_len(&self) -> usize {
        self.inputs_len
    }

    /// Whether the caller wants to differentiate these gradients again (`create_graph`) and this
    /// operator allows it ([`Function::DOUBLE_BACKWARD`]): what is computed now becomes part of the
    /// graph.
    pub fn create_graph(&self) -> bool {
        ffi::tch_extension_grad_mode()
    }
}
