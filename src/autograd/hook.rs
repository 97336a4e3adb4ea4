//! Hooks on gradients: `Tensor.register_hook` and `Tensor.register_post_accumulate_grad_hook`.

use super::apply::{contained, give_gradient, owned, requires_grad};
use crate::ffi::autograd as ffi;
use crate::ffi::exceptions::{self, discard};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use tch::Tensor;
use torch_sys::C_tensor;

/// A hook that [`register_hook`] or [`register_post_accumulate_grad_hook`] registered. Dropping it
/// removes the hook, so that `let _ = register_hook(…)` removes it at once. [`Hook::forget`] keeps
/// the hook for as long as the tensor or its graph lives. (In Python it is the other way round:
/// dropping the handle leaves the hook registered.) It keeps neither the tensor nor its graph
/// alive, and may outlive both.
#[must_use = "dropping this removes the hook; `.forget()` keeps it"]
pub struct Hook(NonNull<ffi::HookHandle>);

// SAFETY: the handle is a number and a weak pointer to a list that has its own lock.
unsafe impl Send for Hook {}
// SAFETY: as for `Send`; `remove` only reads the handle.
unsafe impl Sync for Hook {}

impl Hook {
    /// Removes the hook and drops its closure. If the closure is running, in another thread or
    /// because it made this call itself, it is dropped as soon as it returns. A second call does
    /// nothing.
    pub fn remove(&self) {
        // SAFETY: `self` owns the handle until it is dropped.
        let message = unsafe { ffi::tch_extension_remove_hook(self.0.as_ptr()) };
        // Only locking could fail, and it does not.
        let _ = take_message(message);
    }

    /// Keeps the hook for as long as its tensor or graph lives.
    pub fn forget(self) {
        let hook = std::mem::ManuallyDrop::new(self);
        // SAFETY: the handle is ours, and nobody uses it again.
        unsafe { ffi::tch_extension_free_hook(hook.0.as_ptr()) };
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        self.remove();
        // SAFETY: the handle is ours, and nobody uses it again.
        unsafe { ffi::tch_extension_free_hook(self.0.as_ptr()) };
    }
}

/// Calls `hook` with the gradient of `tensor` whenever a backward pass computes it, as
/// `Tensor.register_hook` does in Python. If the hook returns `Some`, that tensor replaces the
/// gradient, both for the `grad` of a leaf and for the operations that produced the tensor. `None`
/// leaves the gradient unchanged.
///
/// Hooks run in the order of their registration, and each gets the gradient that the previous hook
/// left. They run in the thread that runs the backward pass, and with grad mode on if the caller
/// asked for a graph of the gradients. A hook does not run when no gradient arrives. It belongs to
/// the tensor as it is now: after a change in place, it still gets the gradient of the earlier
/// value. [`grad()`](super::grad()) returns an intermediate's gradient after its hooks have run.
/// There is one exception: if the same call also asks for the gradient of a tensor that this
/// intermediate was computed from, the engine takes the intermediate's gradient before its hooks
/// run.
///
/// As in PyTorch, the first hook of a leaf, or of the outputs of one operator, must be registered
/// while no other thread runs a backward pass through it. Further hooks may be registered and
/// removed at any time, even by a hook.
///
/// A hook must not change the gradient in place, because others may hold it. A hook that holds a
/// tensor whose graph leads to the hook, such as its own tensor, makes a reference cycle: neither
/// is freed until the [`Hook`] is dropped, and never if it was forgotten.
///
/// If the hook returns an error, panics, or returns a gradient of another shape, kind, device or
/// layout, the caller of the backward pass gets an error.
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
    // SAFETY: the tensor is borrowed and defined, and it requires grad. `state` has the type that
    // VTable::<F> expects, and C++ takes ownership of it even on failure.
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

/// Calls `hook` with the leaf `tensor` whenever a backward pass has added to its `grad`, as
/// `Tensor.register_post_accumulate_grad_hook` does in Python. The hook can do an optimizer step
/// and free the gradient before the next gradient is computed.
///
/// Hooks run in the order of their registration, in the thread that runs the backward pass.
/// [`grad()`](super::grad()) adds to no `grad`, so it calls no such hook. An error or a panic
/// becomes an error for the caller of the backward pass. As in PyTorch, the first hook of a leaf
/// must be registered while no other thread runs a backward pass into it. The closure gets the leaf
/// as its argument. If it also holds the leaf itself, the leaf stays alive until the [`Hook`] is
/// dropped, or forever if it was forgotten.
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
/// When the tensor is undefined, does not require grad or is not a leaf.
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
    // SAFETY: the tensor is a borrowed leaf that requires grad. `state` has the type that
    // VTable::<F> expects, and C++ takes ownership of it even on failure.
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
        return Err(Error::Autograd(exceptions::named(name, &message)));
    }
    NonNull::new(handle)
        .map(Hook)
        .ok_or_else(|| Error::msg(format!("internal error: {name} made no handle")))
}

/// The two functions through which C++ calls and drops an `F`.
struct VTable<F>(std::marker::PhantomData<F>);

impl<F> VTable<F>
where
    F: Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
{
    // This is a reference to a constant, because C++ keeps the pointer for as long as the hook
    // lives.
    const VALUE: &'static ffi::FunctionVTable =
        &ffi::FunctionVTable { backward: call::<F>, drop: drop_hook::<F> };
}

/// # Safety
/// `state` must be the boxed `F` of a registration. `results` must come from the C++ frame that
/// calls. `grads` must point to one handle, which this function takes over.
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
        // SAFETY: the caller guarantees both pointers (see `# Safety`). `F: Sync`, so any thread
        // may use a shared reference.
        let (hook, grad) = unsafe { (&*state.cast::<F>(), owned(*grads)) };
        let grad =
            grad.ok_or_else(|| Error::msg("internal error: a hook was called without a gradient"))?;
        if let Some(replaced) = hook(&grad)? {
            if !replaced.defined() {
                return Err(Error::msg(
                    "the hook returned an undefined tensor; return None to keep the gradient",
                ));
            }
            // SAFETY: `results` belongs to the C++ frame that called.
            unsafe { give_gradient(results, 0, replaced) };
        }
        Ok(())
    };
    // SAFETY: the caller guarantees `results` (see `# Safety`).
    unsafe { contained("the hook", results, run) }
}

/// # Safety
/// `state` must be the boxed `F` of a registration, and nobody may use it again.
unsafe extern "C" fn drop_hook<F>(state: *mut c_void) {
    // SAFETY: the caller hands over the boxed `F` (see `# Safety`).
    let hook = unsafe { Box::from_raw(state.cast::<F>()) };
    // A panic in a user's `Drop` cannot be reported: no caller is left to return it to.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(hook))) {
        discard(panic);
    }
}
