//! Recomputes intermediates instead of saving them: `torch.utils.checkpoint`.

use super::apply::{apply, requires_grad};
use super::context::Context;
use super::double_backward::{differentiate_reference, pull_back};
use super::function::Function;
use super::saver::Saver;
use super::tensors::{Inputs, Tensors};
use crate::ffi::autograd as ffi;
use crate::ffi::pointers::borrowed_pointers;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ptr::NonNull;
use tch::Tensor;
use torch_sys::C_tensor;

/// Runs `function` without keeping its intermediates, and runs it again when the backward pass
/// needs them. It trades time for memory, as `torch.utils.checkpoint` does in Python.
///
/// The inputs and the outputs are kept. The second run starts with the autocast settings and the
/// random state of the first run, on the CPU and on the CUDA devices of the inputs, so that dropout
/// drops the same elements. Afterwards the random state is what it was before the second run. As in
/// PyTorch, the random state belongs to the whole process: if another thread draws random numbers
/// meanwhile, or runs such a backward pass, it may get some numbers twice and change the numbers
/// that this one draws. In the capture of a CUDA graph the random state cannot be set back, so the
/// function must draw no numbers there. Second derivatives (`create_graph`) are right.
///
/// Every tensor that requires grad must be an input, weights included. A closure cannot capture a
/// bare `Tensor` (it is not `Sync`). A tensor that the closure reaches in another way, such as
/// through a `Mutex`, is an error in the backward pass rather than a missing gradient. The function
/// must give the same outputs for the same inputs and must not change its inputs in place. It is
/// dropped with the graph.
///
/// With grad mode off, or when no input requires grad, `checkpoint` just calls `function`.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::{Tensors, checkpoint};
///
/// let (x, w) = (Tensor::from_slice(&[1.0]), Tensor::from_slice(&[0.5]));
/// let (x, w) = (x.set_requires_grad(true), w.set_requires_grad(true));
/// let y = checkpoint(
///     |inputs: &[Option<Tensor>]| match inputs {
///         [Some(x), Some(w)] => Ok((x * w).exp().dropout(0.5, true).into()),
///         _ => unreachable!("two inputs, both present"),
///     },
///     &[Some(&x), Some(&w)],
/// )?
/// .single()?;
/// y.sum(Kind::Double).backward();
/// assert_eq!(w.grad() * &w, x.grad() * &x);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error that `function` reports, here or in the backward pass, or an input that it changed in
/// place.
pub fn checkpoint<F>(function: F, inputs: &[Option<&Tensor>]) -> Result<Tensors>
where
    F: Fn(&[Option<Tensor>]) -> Result<Tensors> + Send + Sync + 'static,
{
    if !ffi::tch_extension_grad_mode()
        || !inputs.iter().flatten().any(|tensor| requires_grad(tensor))
    {
        return Ok(function(&owned_inputs(inputs))?.without_undefined());
    }
    apply(Checkpoint { function, surroundings: None, outputs_len: 0 }, inputs)
}

fn owned_inputs(inputs: &[Option<&Tensor>]) -> Vec<Option<Tensor>> {
    inputs
        .iter()
        .map(|input| input.filter(|tensor| tensor.defined()).map(Tensor::shallow_clone))
        .collect()
}

struct Checkpoint<F> {
    function: F,
    surroundings: Option<Surroundings>,
    outputs_len: usize,
}

impl<F> Function for Checkpoint<F>
where
    F: Fn(&[Option<Tensor>]) -> Result<Tensors> + Send + Sync + 'static,
{
    const NAME: &'static str = "checkpoint";
    const DOUBLE_BACKWARD: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        // Otherwise the engine would make zeros, of the output's kind and shape, even for an output
        // that has no derivative at all.
        saver.set_materialize_grads(false);
        let inputs = owned_inputs(&inputs);
        for input in &inputs {
            saver.save_optional(input.as_ref());
        }
        self.surroundings = Some(Surroundings::of(&inputs)?);
        let versions =
            || inputs.iter().map(|input| input.as_ref().map(version)).collect::<Vec<_>>();
        let before = versions();
        let _uncached = Uncached::new();
        let outputs = (self.function)(&inputs)?;
        if let Some(index) =
            before.iter().zip(versions()).position(|(before, after)| *before != after)
        {
            return Err(Error::Autograd(format!(
                "checkpoint: the function changed input {index} in place, so it could not run again; let it \
                 change a copy"
            )));
        }
        self.outputs_len = outputs.len();
        Ok(outputs)
    }

    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let inputs = (0..ctx.inputs_len())
            .map(|slot| ctx.saved_optional(slot))
            .collect::<Result<Vec<_>>>()?;
        if ctx.create_graph() {
            return differentiate_reference(ctx, &inputs, grads, |inputs| self.again(inputs));
        }
        let copies = inputs.iter().enumerate().map(|(index, input)| match input {
            Some(input) => {
                Ok(Some(input.f_detach()?.f_set_requires_grad(ctx.needs_input_grad(index))?))
            }
            None => Ok(None),
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let outputs = {
            let _grad = WithGrad::new();
            self.again(&copies)?
        };
        pull_back(ctx, &copies, &outputs, grads, false)
    }
}

impl<F> Checkpoint<F>
where
    F: Fn(&[Option<Tensor>]) -> Result<Tensors> + Send + Sync + 'static,
{
    /// Runs the function a second time.
    fn again(&self, inputs: &[Option<Tensor>]) -> Result<Tensors> {
        let outputs = {
            let _entered = self.surroundings.as_ref().map(Surroundings::enter).transpose()?;
            let _uncached = Uncached::new();
            (self.function)(inputs)?.without_undefined()
        };
        if outputs.len() != self.outputs_len {
            return Err(Error::Autograd(format!(
                "the function returned {} outputs the first time and {} the second",
                self.outputs_len,
                outputs.len()
            )));
        }
        if reaches_other_leaf(&outputs, inputs)? {
            return Err(Error::Autograd(
                "the function uses a tensor that requires grad but is none of its inputs, so its gradient would \
                 be missing; make it an input"
                    .to_string(),
            ));
        }
        Ok(outputs)
    }
}

fn version(tensor: &Tensor) -> i64 {
    // SAFETY: the pointer is borrowed from a live tensor.
    unsafe { ffi::tch_extension_version(tensor.as_ptr()) }
}

fn reaches_other_leaf(outputs: &[Option<Tensor>], inputs: &[Option<Tensor>]) -> Result<bool> {
    let (outputs, inputs) = (pointers(outputs), pointers(inputs));
    let mut found = false;
    // SAFETY: every pointer is null or borrowed from a live tensor, and each array is valid for its
    // length during the call.
    let message = unsafe {
        ffi::tch_extension_reaches_other_leaf(
            outputs.as_ptr(),
            outputs.len(),
            inputs.as_ptr(),
            inputs.len(),
            &mut found,
        )
    };
    take_message(message).map_or(Ok(found), |message| Err(Error::Autograd(message)))
}

fn pointers(tensors: &[Option<Tensor>]) -> Vec<*const C_tensor> {
    borrowed_pointers(tensors.iter().map(Option::as_ref))
}

/// The random states and autocast settings at one moment.
struct Surroundings(NonNull<ffi::Surroundings>);

// SAFETY: it holds plain data and reference-counted handles, which belong to no thread.
unsafe impl Send for Surroundings {}
// SAFETY: C++ only reads it, and locks the random generators that it refers to.
unsafe impl Sync for Surroundings {}

impl Surroundings {
    fn of(inputs: &[Option<Tensor>]) -> Result<Self> {
        let inputs = pointers(inputs);
        let mut made = std::ptr::null_mut();
        // SAFETY: every pointer is null or borrowed from a live tensor during the call.
        Self::taken(
            unsafe { ffi::tch_extension_surroundings(inputs.as_ptr(), inputs.len(), &mut made) },
            made,
        )
    }

    /// Switches to this state until the returned guard is dropped.
    fn enter(&self) -> Result<Entered> {
        let mut before = std::ptr::null_mut();
        // SAFETY: `self` owns the pointer until it is dropped.
        let message = unsafe { ffi::tch_extension_enter(self.0.as_ptr(), &mut before) };
        Ok(Entered(Self::taken(message, before)?))
    }

    fn taken(message: *mut std::ffi::c_char, made: *mut ffi::Surroundings) -> Result<Self> {
        if let Some(message) = take_message(message) {
            return Err(Error::Autograd(message));
        }
        NonNull::new(made)
            .map(Surroundings)
            .ok_or_else(|| Error::msg("internal error: no random state"))
    }
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        // SAFETY: `self` owns the pointer, and nobody uses it again.
        unsafe { ffi::tch_extension_free_surroundings(self.0.as_ptr()) };
    }
}

/// The state before `enter`, which is restored on drop.
struct Entered(Surroundings);

impl Drop for Entered {
    // This also runs when the function panics.
    fn drop(&mut self) {
        // SAFETY: `self` owns the pointer until it is dropped.
        let message = unsafe { ffi::tch_extension_restore(self.0.0.as_ptr()) };
        // Restoring a state that the same generators produced does not fail.
        let _ = take_message(message);
    }
}

/// Keeps the autocast cache off until dropped. In the second run, the cache would hold the copies
/// of the inputs and never release them. In the first run, a weight is cast with grad mode off.
/// Whether a later user of the cached copy then finds the weight's graph depends on the libtorch
/// version; in 2.11 it does.
struct Uncached(bool);

impl Uncached {
    fn new() -> Self {
        Uncached(ffi::tch_extension_set_autocast_cache(false))
    }
}

impl Drop for Uncached {
    fn drop(&mut self) {
        ffi::tch_extension_set_autocast_cache(self.0);
    }
}

/// Keeps grad mode on until dropped.
struct WithGrad(bool);

impl WithGrad {
    fn new() -> Self {
        WithGrad(ffi::tch_extension_set_grad_mode(true))
    }
}

impl Drop for WithGrad {
    fn drop(&mut self) {
        ffi::tch_extension_set_grad_mode(self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn the_autocast_cache_is_off_and_then_as_it_was() {
        let set = ffi::tch_extension_set_autocast_cache;
        for before in [false, true] {
            set(before);
            drop(Uncached::new());
            assert_eq!(set(true), before);
            let _uncached = Uncached::new();
            assert!(!set(false));
        }
        set(true);
    }

    #[test]
    fn both_runs_are_without_the_autocast_cache() {
        let runs = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&runs);
        let function = move |inputs: &[Option<Tensor>]| {
            assert!(!ffi::tch_extension_set_autocast_cache(false));
            counter.fetch_add(1, Ordering::SeqCst);
            Ok(inputs[0].as_ref().map(|x| x * 2.0).into())
        };
        let x = Tensor::from(1.0).set_requires_grad(true);
        let y = checkpoint(function, &[Some(&x)]).and_then(Tensors::single).expect("checkpoint");
        y.backward();
        assert_eq!((x.grad().double_value(&[]), runs.load(Ordering::SeqCst)), (2.0, 2));
        assert!(ffi::tch_extension_set_autocast_cache(true));
    }
}
