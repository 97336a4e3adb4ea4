//! `Tensor.register_hook` and `Tensor.register_post_accumulate_grad_hook`.

use super::apply::{contained, discard, give_gradient, owned, requires_grad};
use crate::ffi::autograd as ffi;
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use tch::Tensor;
use torch_sys::C_tensor;

/// A hook that [`register_hook`] or [`register_post_accumulate_grad_hook`] registered. Dropping it
/// removes the hook, so that `let _ = register_hook(…)` removes it at once; [`Hook::forget`] keeps
/// the hook for as long as the tensor or its graph lives. (In Python it is the other way round: a
/// handle that is dropped leaves its hook.) It keeps neither the tensor nor its graph alive, and
/// may outlive both.
#[must_use = "dropping this removes the hook; `.forget()` keeps it"]
pub struct Hook(NonNull<ffi::HookHandle>);

// SAFETY: the handle is a number and a weak pointer to a list that has a lock.
unsafe impl Send for Hook {}
// SAFETY: as above; `remove` only reads the handle.
unsafe impl Sync for Hook {}

impl Hook {
    /// Removes the hook and drops its closure; if the closure runs at the moment, elsewhere or
    /// because this is called from it, then as soon as it returns. Does nothing the second time.
    pub fn remove(&self) {
        // SAFETY: ours until dropped.
        let message = unsafe { ffi::tch_extension_remove_hook(self.0.as_ptr()) };
        // The lock is the only thing that could fail, and it does not.
        let _ = take_message(message);
    }

    /// Keeps the hook for as long as its tensor or graph lives.
    pub fn forget(self) {
        let hook = std::mem::ManuallyDrop::new(self);
        // SAFETY: ours, and not used again.
        unsafe { ffi::tch_extension_free_hook(hook.0.as_ptr()) };
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.remove();
        // SAFETY: ours, and not used again.
        unsafe { ffi::tch_extension_free_hook(self.0.as_ptr()) };
    }
}

/// Calls `hook` with the gradient of `tensor` whenever a backward computes it: what
/// `Tensor.register_hook` is in Python. `Some` takes the gradient's place, for the `grad` of a leaf
/// and for whatever the tensor was made of; `None` leaves it as it is.
///
/// Hooks run in the order of their registration, each with what the one before made of the
/// gradient, in the thread that runs the backward, and with grad mode on where a graph of the
/// gradients is asked for. A hook does not run when no gradient comes. It belongs to the tensor as
/// it is now: after a change in place it sees the gradient of the value before.
/// [`grad()`](super::grad()) gives an intermediate's gradient after its hooks, unless something
/// behind it is asked for, too: the engine takes it before them then. As in PyTorch, the first hook
/// of a leaf, or of what one operator returned, has to be registered while no other thread runs a
/// backward through it. Further ones and removals may come at any time, from a hook, too.
///
/// A hook must not change the gradient in place: others may hold it. One that holds a tensor whose
/// graph leads to it, its own tensor say, makes a cycle, and neither is freed before the [`Hook`]
/// is dropped (never, if it was forgotten).
///
/// An error, a panic or a gradient of another shape, kind, device or layout becomes an error of
/// whoever called backward.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::register_hook;
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let hook = register_hook(&x, |grad| Ok(Some(grad.clamp(-1.0, 1.0))))?;
/// (&x * &x).sum(Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[1.0]));
/// hook.remove();
/// (&x * &x).sum(Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[7.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When the tensor is undefined or does not require grad.
pub fn register_hook<F>(tensor: &Tensor, hook: F) -> Result<Hook>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    check_requires_grad("register_hook", tensor)?;
    let state = Box::into_raw(Box::new(hook));
    let mut handle = std::ptr::null_mut();
    // SAFETY: the tensor is borrowed, defined and requires grad; `state` is what VTable::<F>
    // expects, and C++ takes it in any case.
    let message = unsafe {
        ffi::tch_extension_register_hook(
            tensor.as_ptr(),
            state.cast(),
            VTable::<F>::VALUE,
            &mut handle,
        )
    };
    registered("register_hook", message, handle)
}

/// Calls `hook` with the leaf `tensor` whenever a backward has added to its `grad`: what
/// `Tensor.register_post_accumulate_grad_hook` is in Python. An optimizer step can be done there,
/// and the gradient freed, before the next one comes.
///
/// Hooks run in the order of their registration, in the thread that runs the backward.
/// [`grad()`](super::grad()) adds to no `grad` and calls none. An error or a panic becomes an error
/// of whoever called backward. As in PyTorch, the first hook of a leaf has to be registered while
/// no other thread runs a backward into it. A hook that holds its own leaf keeps it alive until the
/// [`Hook`] is dropped; if that was forgotten, for ever. The closure is given the leaf.
///
/// ```
/// use tch::{Kind, Tensor, no_grad};
/// use tch_extension::autograd::register_post_accumulate_grad_hook;
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let step = register_post_accumulate_grad_hook(&x, |x| {
///     let (mut x, mut grad) = (x.shallow_clone(), x.grad());
///     no_grad(|| x.f_sub_(&(&grad * 0.1)))?;
///     let _ = grad.zero_();
///     Ok(())
/// })?;
/// (&x * &x).sum(Kind::Double).backward();
/// assert_eq!(f64::try_from(&x)?, 3.0 - 0.1 * 6.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// When the tensor is undefined, does not require grad or is no leaf.
pub fn register_post_accumulate_grad_hook<F>(tensor: &Tensor, hook: F) -> Result<Hook>
where
    F: Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
{
    const NAME: &str = "register_post_accumulate_grad_hook";
    check_requires_grad(NAME, tensor)?;
    if !tensor.is_leaf() {
        return Err(Error::argument(
            NAME,
            "tensor",
            "a leaf",
            "the result of an operation",
            "only a leaf's `grad` is added to; register_hook sees the gradient of any tensor",
        ));
    }
    let hook = move |leaf: &Tensor| hook(leaf).map(|()| None);
    register_post_accumulate(tensor, Box::into_raw(Box::new(hook)))
}

fn register_post_accumulate<F>(tensor: &Tensor, state: *mut F) -> Result<Hook>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    let mut handle = std::ptr::null_mut();
    // SAFETY: the tensor is a borrowed leaf that requires grad; `state` is what VTable::<F>
    // expects, and C++ takes it in any case.
    let message = unsafe {
        ffi::tch_extension_register_post_accumulate_grad_hook(
            tensor.as_ptr(),
            state.cast(),
            VTable::<F>::VALUE,
            &mut handle,
        )
    };
    registered("register_post_accumulate_grad_hook", message, handle)
}

fn check_requires_grad(name: &str, tensor: &Tensor) -> Result<()> {
    if requires_grad(tensor) {
        return Ok(());
    }
    let got = if tensor.defined() { "one that does not" } else { "an undefined one" };
    Err(Error::argument(
        name,
        "tensor",
        "a tensor that requires grad",
        got,
        "only such a tensor gets a gradient",
    ))
}

fn registered(name: &str, message: *mut c_char, handle: *mut ffi::HookHandle) -> Result<Hook> {
    if let Some(message) = take_message(message) {
        return Err(Error::Autograd(format!("{name}: {message}")));
    }
    NonNull::new(handle)
        .map(Hook)
        .ok_or_else(|| Error::msg(format!("internal error: {name} made no handle")))
}

/// The two entries through which C++ reaches an `F`.
struct VTable<F>(std::marker::PhantomData<F>);

impl<F> VTable<F>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    // A reference to a constant: C++ keeps it for as long as the hook lives.
    const VALUE: &'static ffi::FunctionVTable =
        &ffi::FunctionVTable { backward: call::<F>, drop: drop_hook::<F> };
}

/// # Safety
/// `state` must be a boxed `F` of a registration, `results` from the call's own C++ frame, and
/// `grads` must point to one handle, which becomes ours.
unsafe extern "C" fn call<F>(
    state: *const c_void,
    _node: *const ffi::FunctionNode,
    grads: *const *mut C_tensor,
    _grads_len: usize,
    results: *mut ffi::BackwardResults,
) -> c_int
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    let run = || -> Result<()> {
        // SAFETY: as the caller promises; `F: Sync` makes a shared reference fine on any thread.
        let (hook, grad) = unsafe { (&*state.cast::<F>(), owned(*grads)) };
        let grad =
            grad.ok_or_else(|| Error::msg("internal error: a hook was called without a gradient"))?;
        if let Some(replaced) = hook(&grad)? {
            if !replaced.defined() {
                return Err(Error::msg(
                    "the hook returned an undefined tensor; return None to keep the gradient",
                ));
            }
            // SAFETY: `results` is the caller's.
            unsafe { give_gradient(results, 0, replaced) };
        }
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { contained("the hook", results, run) }
}

/// # Safety
/// `state` must be a boxed `F` of a registration and not be used again.
unsafe extern "C" fn drop_hook<F>(state: *mut c_void) {
    // SAFETY: as the caller promises.
    let hook = unsafe { Box::from_raw(state.cast::<F>()) };
    // A panic in a user's Drop has nowhere to go.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(hook))) {
        discard(panic);
    }
}
