//! What a forward pass tells the graph: [`Saver`].

use super::tensors::Inputs;
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::fmt::Display;
use tch::Tensor;
use torch_sys::C_tensor;

/// A tensor that is saved for the backward pass.
pub(super) enum Saved {
    Absent,
    /// The input with this index. It stays borrowed until the graph node holds its own handle.
    Input(usize),
    Other(Tensor),
}

/// What a forward pass tells the graph about its inputs, outputs and saved tensors.
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

    /// Saves a tensor for the backward pass in the next slot. Slots are numbered 0, 1, 2, ….
    ///
    /// A saved input or output keeps its history in the graph. Any other tensor is an intermediate:
    /// it is saved as plain data, and a backward pass that runs with grad mode on cannot read it
    /// (see [`Context::create_graph`](super::Context::create_graph)).
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[0.5]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "exp",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let y = inputs.get(0)?.exp();
    ///         // Wrong: hiding `y` in a `Mutex` that the second closure reads. The output would
    ///         // own the node and the node the output, so that neither is ever freed.
    ///         saver.save(&y);
    ///         Ok(y.into())
    ///     },
    ///     |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), y.detach());
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn save(&mut self, tensor: &Tensor) {
        self.save_optional(Some(tensor));
    }

    /// Like [`Saver::save`], for a tensor that may be absent. It takes a slot in either case.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "scaled_square", // x² or, with a constant `scale`, x²·scale
    ///     &[Some(&x), None],
    ///     |saver, inputs| {
    ///         let (x, scale) = (inputs.get(0)?, inputs.optional(1));
    ///         // Wrong: `if let Some(scale) = scale { saver.save(scale) }`. Without a scale, `x`
    ///         // would then be in slot 0.
    ///         saver.save_optional(scale);
    ///         saver.save(x); // always slot 1
    ///         let square = x * x;
    ///         Ok(match scale {
    ///             Some(scale) => square * scale,
    ///             None => square,
    ///         }
    ///         .into())
    ///     },
    ///     |ctx, grads| {
    ///         let grad = grads.get(0)? * ctx.saved(1)? * 2.0;
    ///         let grad = match ctx.saved_optional(0)? {
    ///             Some(scale) => grad * scale,
    ///             None => grad,
    ///         };
    ///         Ok([Some(grad), None].into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[6.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn save_optional(&mut self, tensor: Option<&Tensor>) {
        // Without a graph, no backward pass will read it.
        if !self.needs_graph {
            return;
        }
        if self.saved.capacity() == 0 {
            // Room for inputs, outputs and an intermediate: this is usually the only allocation.
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

    /// Whether there can be a backward pass at all: grad mode is on and some input requires grad.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[0.0]).set_requires_grad(true);
    /// let y = apply_with(
    ///     "sigmoid",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let y = inputs.get(0)?.sigmoid();
    ///         // Wrong: computing the derivative always. Inference would pay for it and never use
    ///         // it.
    ///         if saver.needs_graph() {
    ///             saver.save(&(&y - &y * &y));
    ///         }
    ///         Ok(y.into())
    ///     },
    ///     |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)?).into()),
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[0.25]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn needs_graph(&self) -> bool {
        self.needs_graph
    }

    /// Whether there can be a backward pass and input `index` requires grad.
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
    ///         // Wrong: saving both factors always. `x` would stay in memory, although only the
    ///         // gradient of `w` needs it, and `w` requires none.
    ///         let needs = [saver.needs_input_grad(0), saver.needs_input_grad(1)];
    ///         saver.save_optional(needs[0].then_some(w));
    ///         saver.save_optional(needs[1].then_some(x));
    ///         Ok((x * w).into())
    ///     },
    ///     |ctx, grads| {
    ///         let grad = grads.get(0)?;
    ///         let times = |factor: Option<Tensor>| factor.map(|factor| grad * factor);
    ///         Ok([times(ctx.saved_optional(0)?), times(ctx.saved_optional(1)?)].into())
    ///     },
    /// )?
    /// .single()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[5.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn needs_input_grad(&self, index: usize) -> bool {
        self.needs_graph
            && self.inputs.get(index).copied().flatten().is_some_and(Tensor::requires_grad)
    }

    /// Returns input `index` for a change in place: a handle to the same memory, already [marked
    /// dirty](Saver::mark_dirty). The forward pass changes it and returns it as an output.
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
    ///         // Wrong: `inputs.get(0)?.shallow_clone()`. For a tensor that must not be changed,
    ///         // `apply` would then fail only after the change.
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
    /// When there can be a backward pass, this is an error for
    /// - a leaf that requires grad, or a view of one;
    /// - a view that libtorch does not allow to be changed in place, for example one of several
    ///   that `chunk` or `unbind` made;
    /// - a view that is not the first input that is present.
    ///
    /// Nothing has been changed by then. A changed view must also be the only output; that is
    /// checked only after the forward pass.
    pub fn in_place(&mut self, index: usize) -> Result<Tensor> {
        let input = Inputs::new(self.inputs).get(index)?;
        self.check_in_place(index, format_args!("in_place({index})"))?;
        self.mark_dirty(index);
        Ok(input.shallow_clone())
    }

    /// Whether libtorch allows the input to be changed in place, when there can be a backward pass.
    pub(crate) fn check_in_place(&self, index: usize, what: impl Display) -> Result<()> {
        Inputs::new(self.inputs).get(index)?;
        if !self.needs_graph {
            return Ok(());
        }
        // SAFETY: each pointer is null or borrowed from a live tensor, and `index` is in range, because
        // `get` found that input.
        let message = unsafe {
            ffi::tch_extension_check_in_place(self.pointers.as_ptr(), self.pointers.len(), index)
        };
        match take_message(message) {
            Some(message) => Err(Error::Autograd(format!("{}: {what}: {message}", self.name))),
            None => Ok(()),
        }
    }

    /// Declares that the forward pass changed input `index` in place. That input must be among the
    /// outputs. If there can be a backward pass, a view that is changed in place must be the first
    /// input that is present, because libtorch's graph supports no other case. [`Saver::in_place`]
    /// checks this before anything is changed.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let leaf = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let x = &leaf * 1.0;
    /// apply_with(
    ///     "double_",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let mut x = inputs.get(0)?.shallow_clone();
    ///         let _ = x.g_mul_scalar_(2.0);
    ///         // Wrong: leaving this out. `x` would keep its old place in the graph, and `leaf`
    ///         // would get the gradient 1.
    ///         saver.mark_dirty(0);
    ///         Ok(x.into())
    ///     },
    ///     |_, grads| Ok((grads.get(0)? * 2.0).into()),
    /// )?;
    /// x.sum(Kind::Double).backward();
    /// assert_eq!(leaf.grad(), Tensor::from_slice(&[2.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn mark_dirty(&mut self, index: usize) {
        self.dirty.push(index);
    }

    /// Declares that output `index` has no derivative. An output of an integer kind never has one.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let [y, sign] = apply_with(
    ///     "double_and_sign",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let x = inputs.get(0)?;
    ///         // Wrong: leaving this out. `sign` would require grad, and the backward pass below
    ///         // would silently ignore any gradient that reaches it.
    ///         saver.mark_non_differentiable(1);
    ///         Ok([x * 2.0, x.sign()].into())
    ///     },
    ///     |_, grads| Ok((grads.get(0)? * 2.0).into()),
    /// )?
    /// .exactly::<2>()?;
    /// assert!(y.requires_grad() && !sign.requires_grad());
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[2.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn mark_non_differentiable(&mut self, index: usize) {
        self.non_differentiable.push(index);
    }

    /// Chooses what the backward pass gets for an output that no gradient reached: zeros (the
    /// default) or, with `false`, an absent tensor.
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_extension::autograd::apply_with;
    ///
    /// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
    /// let [y, _unused] = apply_with(
    ///     "double_and_triple",
    ///     &[Some(&x)],
    ///     |saver, inputs| {
    ///         let x = inputs.get(0)?;
    ///         saver.set_materialize_grads(false);
    ///         Ok([x * 2.0, x * 3.0].into())
    ///     },
    ///     |_, grads| {
    ///         // Wrong: `grads.get(1)?`. It is an error when no gradient reached output 1, as
    ///         // here.
    ///         let double = grads.optional(0).map(|grad: &Tensor| grad * 2.0);
    ///         let triple = grads.optional(1).map(|grad: &Tensor| grad * 3.0);
    ///         Ok(match (double, triple) {
    ///             (Some(double), Some(triple)) => Some(double + triple),
    ///             (double, triple) => double.or(triple),
    ///         }
    ///         .into())
    ///     },
    /// )?
    /// .exactly::<2>()?;
    /// y.sum(Kind::Double).backward();
    /// assert_eq!(x.grad(), Tensor::from_slice(&[2.0]));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn set_materialize_grads(&mut self, materialize: bool) {
        self.materialize_grads = materialize;
    }
}

/// Whether libtorch allows a tensor to be changed in place by an operator whose first input it is, if a
/// graph is recorded. An operator of several nodes asks before the first of them changes anything.
pub(crate) fn check_in_place(op: &str, what: &str, tensor: &Tensor) -> Result<()> {
    let pointer: *const C_tensor = tensor.as_ptr();
    // SAFETY: the pointer is borrowed from a live tensor, and it is the only one.
    let message = unsafe { ffi::tch_extension_check_in_place(&pointer, 1, 0) };
    match take_message(message) {
        Some(message) => Err(Error::Autograd(format!("{op}: {what}: {message}"))),
        None => Ok(()),
    }
}
