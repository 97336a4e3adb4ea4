//! What a backward pass can ask of its graph node: [`Context`].

use super::apply::owned;
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use tch::Tensor;

/// What a backward pass can ask of its graph node.
pub struct Context<'a> {
    node: &'a ffi::FunctionNode,
    results: *mut ffi::BackwardResults,
    inputs_len: usize,
}

impl<'a> Context<'a> {
    /// # Safety
    /// `results` must live as long as the context, and nobody else may use it in that time.
    pub(super) unsafe fn new(
        node: &'a ffi::FunctionNode,
        results: *mut ffi::BackwardResults,
        inputs_len: usize,
    ) -> Self {
        Context { node, results, inputs_len }
    }

    /// Returns the saved tensor in this slot.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "square",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let x = inputs.get(0)?;
    ///         saver.save(x);
    ///         Ok((x * x).into())
    ///     },
    ///     |ctx, grads| {
    ///         assert!(ctx.saved(1).is_err()); // wrong: the forward pass saved slot 0 only
    ///         Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[6.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the tensor was absent, when it was changed in place after it was saved, when an earlier
    /// backward pass freed the graph, or when it is an intermediate and grad mode is on.
    pub fn saved(&self, slot: usize) -> Result<Tensor> {
        self.saved_optional(slot)?.ok_or_else(|| {
            Error::Autograd(format!("saved tensor {slot} was absent in the forward"))
        })
    }

    /// Like [`Context::saved`], for a slot whose tensor may have been absent.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "scale",
    ///     &[Some(&x), None],
    ///     |saver, inputs| {
    ///         let (x, scale) = (inputs.get(0)?, inputs.optional(1));
    ///         saver.save_optional(scale);
    ///         Ok(match scale {
    ///             Some(scale) => x * scale,
    ///             None => x.copy(),
    ///         }
    ///         .into())
    ///     },
    ///     |ctx, grads| {
    ///         assert!(ctx.saved(0).is_err()); // wrong: the forward pass had no scale to save
    ///         let grad = match ctx.saved_optional(0)? {
    ///             Some(scale) => grads.get(0)? * scale,
    ///             None => grads.get(0)?.copy(),
    ///         };
    ///         Ok([Some(grad), None].into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[1.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Context::saved`], except that an absent tensor is `None`.
    pub fn saved_optional(&self, slot: usize) -> Result<Option<Tensor>> {
        let mut tensor = std::ptr::null_mut();
        // SAFETY: the node is alive while its backward pass runs. On success this function owns the
        // handle.
        let message = unsafe { ffi::tch_extension_saved(self.node, slot, &mut tensor) };
        match take_message(message) {
            Some(message) => Err(Error::Autograd(message)),
            // SAFETY: the pointer is null or a handle that C++ allocated for us.
            None => Ok(unsafe { owned(tensor) }),
        }
    }

    /// Whether this backward pass must compute the gradient of input `index`: the input requires
    /// grad, and the gradients that the caller asked for depend on it.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let (x, w) = (Tensor::from_slice(&[3.0]), Tensor::from_slice(&[5.0]));
    /// let x = x.set_requires_grad(true);
    /// let y = apply_with(
    ///     "product",
    ///     &[Some(&x), Some(&w)],
    ///     |saver, inputs| {
    ///         let (x, w) = (inputs.get(0)?, inputs.get(1)?);
    ///         saver.save(x);
    ///         saver.save(w);
    ///         Ok((x * w).into())
    ///     },
    ///     |ctx, grads| {
    ///         let (x, w, grad) = (ctx.saved(0)?, ctx.saved(1)?, grads.get(0)?);
    ///         // Wrong: `[grad * &w, grad * &x]`. It computes a gradient of `w` that nobody wants.
    ///         let grad_x = ctx.needs_input_grad(0).then(|| grad * &w);
    ///         let grad_w = ctx.needs_input_grad(1).then(|| grad * &x);
    ///         Ok([grad_x, grad_w].into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[5.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn needs_input_grad(&self, index: usize) -> bool {
        // SAFETY: the node is alive while its backward pass runs.
        unsafe { ffi::tch_extension_needs_input_grad(self.node, index) }
    }

    /// Declares that the gradient of input `index` does not depend on the incoming gradients. Such
    /// a gradient may have no graph, even if the backward pass is otherwise differentiable
    /// ([`Function::DOUBLE_BACKWARD`]). Because a gradient is linear in the incoming gradients, it
    /// must then be zero, as for `floor`. If the caller asks for a graph, the zeros are checked; on
    /// CUDA, that check waits for the device.
    ///
    /// [`Function::DOUBLE_BACKWARD`]: super::Function::DOUBLE_BACKWARD
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::{Result, autograd::*};
    ///
    /// struct Floor;
    ///
    /// impl Function for Floor {
    ///     const NAME: &'static str = "floor";
    ///     const DOUBLE_BACKWARD: bool = true;
    ///     fn forward(&mut self, _saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
    ///         Ok(inputs.get(0)?.floor().into())
    ///     }
    ///     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    ///         // Wrong: leaving this out. The zeros have no graph, so `second` below would be an
    ///         // error.
    ///         ctx.mark_constant(0);
    ///         Ok(grads.get(0)?.zeros_like().into())
    ///     }
    /// }
    ///
    /// let x = Tensor::from_slice(&[1.5]).set_requires_grad(true);
    /// let square = &x * &x;
    /// let y = apply(Floor, &[Some(&square)])?.single()? * &square;
    /// let create_graph = GradOptions { create_graph: true, ..Default::default() };
    /// let first = grad(&[&y], &[&x], &create_graph)?.single()?;
    /// let second = grad(&[&first], &[&x], &GradOptions::default())?.single()?;
    /// assert_eq!(second, Tensor::from_slice(&[4.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn mark_constant(&self, index: usize) {
        // SAFETY: the results live while the backward pass runs, and only this thread uses them.
        unsafe { ffi::tch_extension_mark_constant(self.results, index) };
    }

    /// The number of inputs that the forward pass had, absent inputs included.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "sum_of_any_number",
    ///     &[Some(&x), None, Some(&x)],
    ///     |_, inputs| {
    ///         let zero = inputs.get(0)?.zeros_like();
    ///         Ok(inputs.iter().flatten().fold(zero, |sum, input| sum + *input).into())
    ///     },
    ///     |ctx, grads| {
    ///         let grad = grads.get(0)?;
    ///         // Wrong: `grad.copy().into()`. It is an error, because every input must have an
    ///         // entry.
    ///         let of = |index| ctx.needs_input_grad(index).then(|| grad.copy());
    ///         Ok((0..ctx.inputs_len()).map(of).collect::<Vec<_>>().into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[2.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn inputs_len(&self) -> usize {
        self.inputs_len
    }

    /// Whether the caller wants to differentiate these gradients again (`create_graph`) and this
    /// operator allows it ([`Function::DOUBLE_BACKWARD`]). If so, operations in the backward pass
    /// are recorded in the graph.
    ///
    /// [`Function::DOUBLE_BACKWARD`]: super::Function::DOUBLE_BACKWARD
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::{Result, autograd::*};
    ///
    /// struct Cube;
    ///
    /// impl Function for Cube {
    ///     const NAME: &'static str = "cube";
    ///     const DOUBLE_BACKWARD: bool = true;
    ///     fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
    ///         let x = inputs.get(0)?;
    ///         saver.save(x);
    ///         Ok((x * x * x).into())
    ///     }
    ///     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    ///         if ctx.create_graph() {
    ///             let inputs = [ctx.saved_optional(0)?];
    ///             return differentiate_reference(ctx, &inputs, grads, |inputs| {
    ///                 Ok(inputs[0].as_ref().map(|x| x * x * x).into())
    ///             });
    ///         }
    ///         // Wrong: using a kernel in both cases. Its result has no graph, so `second` below
    ///         // would be an error. (The next line stands for a kernel.)
    ///         Ok((grads.get(0)? * ctx.saved(0)?.square() * 3.0).into())
    ///     }
    /// }
    ///
    /// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
    /// let y = apply(Cube, &[Some(&x)])?.single()?;
    /// let create_graph = GradOptions { create_graph: true, ..Default::default() };
    /// let first = grad(&[&y], &[&x], &create_graph)?.single()?;
    /// let second = grad(&[&first], &[&x], &GradOptions::default())?.single()?;
    /// assert_eq!(second, Tensor::from_slice(&[12.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn create_graph(&self) -> bool {
        // SAFETY: the node is alive while its backward pass runs.
        unsafe { ffi::tch_extension_creates_graph(self.node) }
    }

    /// Whether nobody reads the saved tensors after this backward pass: its caller does not keep the
    /// graph (`retain_graph`), and they do not come from hooks
    /// ([`saved_tensors_hooks`](super::saved_tensors_hooks)), whose owner may keep what `unpack`
    /// returns. A kernel may then write into a saved tensor that the forward pass made for itself:
    /// neither an input nor an output, nor one that shares memory with them. As for libtorch's own
    /// operators, no other thread may run a backward pass of the same graph meanwhile. A pass that
    /// writes and then fails must refuse to be repeated.
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::{Result, autograd::*};
    ///
    /// struct Scale;
    ///
    /// impl Function for Scale {
    ///     const NAME: &'static str = "scale";
    ///     fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
    ///         let x = inputs.get(0)?;
    ///         saver.save(&x.ones_like());
    ///         Ok((x * 1.0).into())
    ///     }
    ///     fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
    ///         let own = ctx.saved(0)?;
    ///         let mut room = if ctx.is_last_backward() { own } else { own.copy() };
    ///         Ok(room.f_mul_(grads.get(0)?)?.into())
    ///     }
    /// }
    ///
    /// let x = Tensor::from_slice(&[2.0]).set_requires_grad(true);
    /// let y = apply(Scale, &[Some(&x)])?.single()?;
    /// let keep = GradOptions { retain_graph: Some(true), ..Default::default() };
    /// for options in [keep, GradOptions::default()] {
    ///     assert_eq!(grad(&[&y], &[&x], &options)?.single()?, Tensor::from_slice(&[1.0]));
    /// }
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn is_last_backward(&self) -> bool {
        // SAFETY: `results` lives as long as the context.
        unsafe { ffi::tch_extension_is_last_backward(self.results) }
    }

    /// The incoming gradients that may be overwritten, one bit for each of the first 64: nobody but this
    /// backward pass holds them or their memory, neither the caller nor a hook nor another node.
    pub(crate) fn owned_gradients(&self) -> u64 {
        // SAFETY: `results` lives as long as the context.
        unsafe { ffi::tch_extension_owned_gradients(self.results) }
    }
}
