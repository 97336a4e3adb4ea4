//! Operators with their own backward pass: `torch.autograd.Function` for Rust.

use super::context::Context;
use super::saver::Saver;
use super::tensors::{Inputs, Tensors};
use crate::Result;

/// An operator with its own backward pass: Rust's counterpart of `torch.autograd.Function`.
///
/// The value itself is the operator's state: sizes, numbers and whatever else is not a tensor.
/// `forward` may fill it in. The value then moves into the graph, where `backward` reads it,
/// perhaps more than once and from another thread. Tensors belong in [`Saver::save`]: the engine
/// can then free them early, reports an error if one was changed in place, and no reference cycle
/// arises. A bare tensor in the state does not compile, because a `Tensor` is not `Sync`. A tensor
/// in a `Mutex` does compile, but if it is an input or an output, it makes a reference cycle, and
/// the graph is never freed.
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
    /// The operator's name, as error messages give it. The graph node is called `NAMEBackward`.
    const NAME: &'static str;

    /// Whether `backward` consists of differentiable operations on its gradients and on saved
    /// inputs and outputs. If it does, `backward` runs with grad mode on whenever the caller asks
    /// for a graph of the gradients (`create_graph`). If it does not, a second derivative through
    /// this operator is an error, never a wrong number.
    ///
    /// If an incoming gradient has a graph but a gradient that `backward` returns has none, a
    /// second derivative through that gradient is an error, too: most likely the graph was lost. A
    /// gradient is linear in the incoming gradients, so one that really does not depend on them is
    /// zero, as for `floor`. For such a gradient, call [`Context::mark_constant`] or return `None`.
    const DOUBLE_BACKWARD: bool = false;

    /// Whether autocast is off in `forward` and `backward`, in whatever region they run. Set it for
    /// an operator whose inputs [`autocast_inputs`](crate::amp::autocast_inputs) has cast before
    /// [`apply`](super::apply()), or which autocast must not change: its results then have the kinds
    /// that its operations give, and a backward pass inside a region gives the gradients that it
    /// gives outside. In Python these are `torch.amp.custom_fwd(cast_inputs=…)` and `custom_bwd`.
    /// Unless it is set, autocast casts operations of `forward` and `backward`, as PyTorch does.
    ///
    /// What `backward` runs is covered, also the hooks that unpack saved tensors, but not the second
    /// derivative of an operation that it recorded.
    const WITHOUT_AUTOCAST: bool = false;

    /// Computes the outputs. Grad mode is off while it runs.
    ///
    /// # Errors
    /// The caller of [`apply`](super::apply()) gets an error of the forward pass unchanged.
    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors>;

    /// Computes one gradient for each input, given one gradient for each output. The entry for an
    /// input that needs no gradient ([`Context::needs_input_grad`]) may be absent.
    ///
    /// An error, a panic or a gradient of the wrong shape becomes an error for the caller of the
    /// backward pass. The message names this operator. If the error is an exception that came from
    /// C++ or Python, and it is passed on as it is, a caller in C++ or Python gets that exception.
    ///
    /// # Errors
    /// Anything that goes wrong in the backward pass.
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors>;
}
