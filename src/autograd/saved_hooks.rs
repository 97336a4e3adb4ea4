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
use std::thread::{self, ThreadId};
use tch::{Device, Tensor};
use torch_sys::C_tensor;

/// Hooks that are in force in this thread until this guard is dropped. Guards nest: the youngest
/// counts.
#[must_use = "the hooks are in force until the guard is dropped; `let _ =` drops it at once"]
pub struct SavedTensorsHooks {
    id: u64,
    // Bound to its thread.
    _thread: PhantomData<*mut u8>,
}

/// Calls `pack` with every tensor that an operator of this crate saves while the guard lives, in
/// this thread, and keeps what it returns in the tensor's place; `unpack` makes the tensor again
/// when a backward asks for it. What `torch.autograd.graph.saved_tensors_hooks` is in Python.
///
/// `pack` runs in [`apply`](super::apply()) with grad mode off and must not change the tensor;
/// `unpack` may run in any thread, each time that a backward asks, and has to return a tensor of
/// the same shape, kind and device. A tensor that is packed is no longer checked for changes in
/// place since: `pack` has to copy what may change. An error or panic in `pack` is an error of
/// `apply`, one in `unpack`, or another shape, an error of whoever called backward. `unpack` cannot
/// unpack, by a backward of its own, the very tensor that it makes: that is an error, too.
///
/// Only tensors that a [`Function`](super::Function) saves are packed. libtorch's own nodes ask a
/// Python interpreter for their hooks, and there is none here.
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
    let id = STACK.with_borrow_mut(|stack| {
        let id = stack.last().map_or(0, |(last, _)| last + 1);
        stack.push((id, Arc::new(hooks)));
        id
    });
    SavedTensorsHooks { id, _thread: PhantomData }
}

/// Keeps saved tensors in the CPU's memory until the backward, in page-locked memory if
/// `pin_memory` says so: what `torch.autograd.graph.save_on_cpu` is in Python. For the tensors of
/// [`saved_tensors_hooks`].
pub fn save_on_cpu(pin_memory: bool) -> SavedTensorsHooks {
    let pack = move |tensor: &Tensor| {
        let (device, kind) = (tensor.device(), tensor.f_kind()?);
        let copy = if pin_memory && device.is_cuda() {
            let mut pinned =
                Tensor::f_empty(tensor.size(), (kind, Device::Cpu))?.f_pin_memory(device)?;
            pinned.f_copy_(tensor)?;
            pinned
        } else {
            // A copy on the CPU, too: what hooks packed is not checked for changes in place.
            tensor.f_to_device_(
                Device::Cpu,
                kind,
                /* non_blocking */ false,
                /* copy */ true,
            )?
        };
        Ok((device, copy))
    };
    let unpack = move |(device, copy): &(Device, Tensor)| {
        let kind = copy.f_kind()?;
        Ok(copy.f_to_device_(
            *device, kind, /* non_blocking */ pin_memory, /* copy */ false,
        )?)
    };
    saved_tensors_hooks(pack, unpack)
}

impl Drop for SavedTensorsHooks {
    fn drop(&mut self) {
        // Its own, in whatever order guards are dropped.
        let dropped = STACK.try_with(|stack| {
            let mut stack = stack.try_borrow_mut().ok()?;
            let place = stack.iter().position(|(id, _)| *id == self.id)?;
            Some(stack.remove(place))
        });
        // Outside the borrow: a closure's `Drop` is the user's code.
        drop(dropped);
    }
}

thread_local! {
    /// Under ascending numbers.
    static STACK: RefCell<Vec<(u64, Arc<dyn Pair>)>> = const { RefCell::new(Vec::new()) };
}

/// Those in force now, if any.
pub(super) fn in_force() -> Option<Arc<dyn Pair>> {
    STACK.with_borrow(|stack| stack.last().map(|(_, hooks)| Arc::clone(hooks)))
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
        let packed = packed
            .downcast_ref()
            .ok_or_else(|| Error::msg("internal error: packed by other hooks"))?;
        (self.unpack)(packed)
    }
}

/// One saved tensor.
struct State {
    hooks: Arc<dyn Pair>,
    /// Behind a lock, because a tensor is not `Sync` and backwards may run side by side.
    packed: Mutex<Option<Box<dyn Any + Send>>>,
    /// Who holds the lock to unpack.
    unpacks: Mutex<Option<ThreadId>>,
}

/// Says who unpacks, until dropped.
struct Unpacking<'a>(&'a Mutex<Option<ThreadId>>);

impl<'a> Unpacking<'a> {
    fn begin(owner: &'a Mutex<Option<ThreadId>>) -> Self {
        *owner.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread::current().id());
        Unpacking(owner)
    }
}

impl Drop for Unpacking<'_> {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

pub(super) const VTABLE: &ffi::SavedHooksVTable =
    &ffi::SavedHooksVTable { start, pack, unpack, drop: drop_state };

/// # Safety
/// `hooks` must come from [`pointer`], of hooks that live.
unsafe extern "C" fn start(hooks: *const c_void) -> *mut c_void {
    // SAFETY: as the caller promises.
    let hooks = unsafe { &*hooks.cast::<Arc<dyn Pair>>() };
    Box::into_raw(Box::new(State {
        hooks: Arc::clone(hooks),
        packed: Mutex::new(None),
        unpacks: Mutex::new(None),
    }))
    .cast()
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
        let owner = *state.unpacks.lock().unwrap_or_else(PoisonError::into_inner);
        if owner == Some(thread::current().id()) {
            return Err(Error::msg(
                "the unpack hook of a saved tensor asked for the very tensor that it makes",
            ));
        }
        let packed = state.packed.lock().unwrap_or_else(PoisonError::into_inner);
        let _unpacking = Unpacking::begin(&state.unpacks);
        let packed =
            packed.as_deref().ok_or_else(|| Error::msg("internal error: nothing was packed"))?;
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
