//! `torch.autograd.graph.saved_tensors_hooks` and `save_on_cpu`.

use super::apply::{contained, discard, give_gradient};
use crate::ffi::autograd as ffi;
use crate::{Error, Result};
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use tch::{Device, Tensor};
use torch_sys::C_tensor;

/// Hooks that are in force in this thread until this guard is dropped. Guards nest: the youngest counts.
#[must_use = "the hooks are in force until the guard is dropped; `let _ =` drops it at once"]
pub struct SavedTensorsHooks {
    // Bound to its thread.
    _thread: PhantomData<*mut u8>,
}

/// Calls `pack` with every tensor that an operator of this crate saves while the guard lives, in this thread, and keeps
/// what it returns in the tensor's place; `unpack` makes the tensor again when a backward asks for it. What
/// `torch.autograd.graph.saved_tensors_hooks` is in Python.
///
/// `pack` runs in [`apply`](super::apply()) with grad mode off and must not change the tensor; `unpack` may run in any
/// thread, once for each backward, and has to return the same shape, kind and values (on any device that the backward can
/// use). A tensor that is packed is no longer checked for changes in place since. An error or panic in `pack` is an error of
/// `apply`, one in `unpack` an error of whoever called backward.
///
/// Only tensors that a [`Function`](super::Function) saves are packed. libtorch's own nodes ask a Python interpreter for
/// their hooks, and there is none here.
///
/// ```
/// use tch::{Kind, Tensor};
/// use tch_extension::autograd::{apply_with, saved_tensors_hooks};
///
/// let x = Tensor::from_slice(&[3.0]).set_requires_grad(true);
/// let guard = saved_tensors_hooks(
///     |tensor| Ok(tensor.to_kind(Kind::Float)), // half the memory of a double
///     |packed: &Tensor| Ok(packed.to_kind(Kind::Double)),
/// );
/// let square = apply_with(
///     "square",
///     &[Some(&x)],
///     |saver, inputs| {
///         saver.save(inputs.get(0)?);
///         Ok(inputs.get(0)?.square().into())
///     },
///     |ctx, grads| Ok((grads.get(0)? * ctx.saved(0)? * 2.0).into()),
/// )?;
/// drop(guard);
/// square.single()?.sum(Kind::Double).backward();
/// assert_eq!(x.grad(), Tensor::from_slice(&[6.0]));
/// # Ok::<(), tch_extension::Error>(())
/// ```
pub fn saved_tensors_hooks<Packed, Pack, Unpack>(pack: Pack, unpack: Unpack) -> SavedTensorsHooks
where
    Packed: Send + 'static,
    Pack: Fn(&Tensor) -> Result<Packed> + Send + Sync + 'static,
    Unpack: Fn(&Packed) -> Result<Tensor> + Send + Sync + 'static,
{
    let hooks = Hooks { pack, unpack, _packed: PhantomData::<fn() -> Packed> };
    STACK.with_borrow_mut(|stack| stack.push(Arc::new(hooks)));
    SavedTensorsHooks { _thread: PhantomData }
}

/// Keeps saved tensors in the CPU's memory until the backward, in page-locked memory if `pin_memory` says so: what
/// `torch.autograd.graph.save_on_cpu` is in Python. For the tensors of [`saved_tensors_hooks`].
pub fn save_on_cpu(pin_memory: bool) -> SavedTensorsHooks {
    let pack = move |tensor: &Tensor| {
        let device = tensor.device();
        let mut copy = tensor.f_to_device(Device::Cpu)?;
        if pin_memory && device.is_cuda() {
            copy = copy.f_pin_memory(device)?;
        }
        Ok((device, copy))
    };
    let unpack = move |(device, copy): &(Device, Tensor)| {
        let kind = copy.f_kind()?;
        Ok(copy.f_to_device_(*device, kind, /* non_blocking */ pin_memory, /* copy */ false)?)
    };
    saved_tensors_hooks(pack, unpack)
}

impl Drop for SavedTensorsHooks {
    fn drop(&mut self) {
        let dropped = STACK.try_with(|stack| stack.try_borrow_mut().ok().and_then(|mut stack| stack.pop()));
        // Outside the borrow: a closure's `Drop` is the user's code.
        drop(dropped);
    }
}

thread_local! {
    static STACK: RefCell<Vec<Arc<dyn Pair>>> = const { RefCell::new(Vec::new()) };
}

/// Those in force now, if any.
pub(super) fn in_force() -> Option<Arc<dyn Pair>> {
    STACK.with_borrow(|stack| stack.last().cloned())
}

/// What `VTABLE.start` takes; valid as long as the hooks are.
pub(super) fn pointer(hooks: &Arc<dyn Pair>) -> *const c_void {
    std::ptr::from_ref(hooks).cast()
}

/// A pair of hooks whose packed type is forgotten.
pub(super) trait Pair: Send + Sync {
    fn pack(&self, tensor: &Tensor) -> Result<Box<dyn Any + Send>>;
    fn unpack(&self, packed: &(dyn Any + Send)) -> Result<Tensor>;
}

struct Hooks<Packed, Pack, Unpack> {
    pack: Pack,
    unpack: Unpack,
    _packed: PhantomData<fn() -> Packed>,
}

impl<Packed, Pack, Unpack> Pair for Hooks<Packed, Pack, Unpack>
where
    Packed: Send + 'static,
    Pack: Fn(&Tensor) -> Result<Packed> + Send + Sync,
    Unpack: Fn(&Packed) -> Result<Tensor> + Send + Sync,
{
    fn pack(&self, tensor: &Tensor) -> Result<Box<dyn Any + Send>> {
        Ok(Box::new((self.pack)(tensor)?))
    }

    fn unpack(&self, packed: &(dyn Any + Send)) -> Result<Tensor> {
        let packed =
            packed.downcast_ref().ok_or_else(|| Error::msg("internal error: packed by other hooks"))?;
        (self.unpack)(packed)
    }
}

/// One saved tensor.
struct State {
    hooks: Arc<dyn Pair>,
    /// Behind a lock, because a tensor is not `Sync` and backwards may run side by side.
    packed: Mutex<Option<Box<dyn Any + Send>>>,
}

pub(super) const VTABLE: &ffi::SavedHooksVTable =
    &ffi::SavedHooksVTable { start, pack, unpack, drop: drop_state };

/// # Safety
/// `hooks` must come from [`pointer`], of hooks that live.
unsafe extern "C" fn start(hooks: *const c_void) -> *mut c_void {
    // SAFETY: as the caller promises.
    let hooks = unsafe { &*hooks.cast::<Arc<dyn Pair>>() };
    Box::into_raw(Box::new(State { hooks: Arc::clone(hooks), packed: Mutex::new(None) })).cast()
}

/// # Safety
/// `state` must come from [`start`], `tensor` must be live, and `results` from the caller's frame.
unsafe extern "C" fn pack(
    state: *mut c_void,
    tensor: *const C_tensor,
    results: *mut ffi::BackwardResults,
) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: as the caller promises.
        let state = unsafe { &*state.cast::<State>() };
        // SAFETY: as the caller promises; the clone is ours.
        let tensor = unsafe { Tensor::clone_from_ptr(tensor.cast_mut()) };
        let packed = state.hooks.pack(&tensor)?;
        *state.packed.lock().unwrap_or_else(PoisonError::into_inner) = Some(packed);
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { contained("the pack hook of a saved tensor", results, run) }
}

/// # Safety
/// As [`pack`].
unsafe extern "C" fn unpack(state: *const c_void, results: *mut ffi::BackwardResults) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: as the caller promises.
        let state = unsafe { &*state.cast::<State>() };
        let packed = state.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let packed = packed.as_deref().ok_or_else(|| Error::msg("internal error: nothing was packed"))?;
        let tensor = state.hooks.unpack(packed)?;
        // SAFETY: `results` is the caller's.
        unsafe { give_gradient(results, 0, tensor) };
        Ok(())
    };
    // SAFETY: as the caller promises.
    unsafe { contained("the unpack hook of a saved tensor", results, run) }
}

/// # Safety
/// `state` must come from [`start`] and not be used again.
unsafe extern "C" fn drop_state(state: *mut c_void) {
    // SAFETY: as the caller promises.
    let state = unsafe { Box::from_raw(state.cast::<State>()) };
    // A panic in a user's Drop has nowhere to go.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(state))) {
        discard(panic);
    }
}
