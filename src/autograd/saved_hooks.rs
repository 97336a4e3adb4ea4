//! Hooks on saved tensors: `torch.autograd.graph.saved_tensors_hooks` and `save_on_cpu`.

use super::apply::{contained, give_gradient};
use crate::ffi::autograd as ffi;
use crate::ffi::exceptions::discard;
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

/// A guard that keeps a pair of hooks active in this thread until it is dropped. Guards nest: the
/// hooks of the newest guard are used.
#[must_use = "the hooks are in force until the guard is dropped; `let _ =` drops it at once"]
pub struct SavedTensorsHooks {
    id: u64,
    // The raw pointer makes the guard `!Send`, so it stays in its thread.
    _thread: PhantomData<*mut u8>,
}

/// Calls `pack` with every tensor that an operator of this crate saves in this thread while the
/// guard lives, and keeps what `pack` returns instead of the tensor. `unpack` restores the tensor
/// when a backward pass asks for it. In Python this is `torch.autograd.graph.saved_tensors_hooks`.
///
/// `pack` runs in [`apply`](super::apply()) with grad mode off and must not change the tensor.
/// `unpack` may run in any thread, once for each time that a backward pass asks, and must return a
/// tensor of the same shape, kind and device, in any strides. No operator of this crate writes into
/// what it returns. A packed tensor is no longer checked for later changes in place, so `pack` must
/// copy data that may change. An error or a panic in `pack` is an error of `apply`. An error or a
/// panic in `unpack`, or a tensor of another shape, is an error for the caller of the backward pass.
/// It is also an error if `unpack` runs a backward pass that needs the very tensor that it is
/// restoring.
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

/// Keeps saved tensors in CPU memory until the backward pass, as `torch.autograd.graph.save_on_cpu`
/// does in Python. If `pin_memory` is true, that memory is page-locked. It affects the same tensors
/// as [`saved_tensors_hooks`].
pub fn save_on_cpu(pin_memory: bool) -> SavedTensorsHooks {
    let pack = move |tensor: &Tensor| {
        let (device, kind) = (tensor.device(), tensor.f_kind()?);
        let copy = if pin_memory && device.is_cuda() {
            let mut pinned =
                Tensor::f_empty(tensor.size(), (kind, Device::Cpu))?.f_pin_memory(device)?;
            pinned.f_copy_(tensor)?;
            pinned
        } else {
            // Also copy a CPU tensor, because packed tensors are not checked for changes in place.
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
        // Remove this guard's own entry, because guards may be dropped in any order.
        let dropped = STACK.try_with(|stack| {
            let mut stack = stack.try_borrow_mut().ok()?;
            let place = stack.iter().position(|(id, _)| *id == self.id)?;
            Some(stack.remove(place))
        });
        // Drop it after the borrow has ended, because a closure's `Drop` is the user's code.
        drop(dropped);
    }
}

thread_local! {
    /// The active hooks of this thread, with ascending ids.
    static STACK: RefCell<Vec<(u64, Arc<dyn Pair>)>> = const { RefCell::new(Vec::new()) };
}

/// The hooks that are active now, if any.
pub(super) fn in_force() -> Option<Arc<dyn Pair>> {
    STACK.with_borrow(|stack| stack.last().map(|(_, hooks)| Arc::clone(hooks)))
}

/// The pointer that `VTABLE.start` takes. It is valid as long as the hooks are.
pub(super) fn pointer(hooks: &Arc<dyn Pair>) -> *const c_void {
    std::ptr::from_ref(hooks).cast()
}

/// A pair of hooks with the packed type erased.
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

/// One saved tensor, packed.
struct State {
    hooks: Arc<dyn Pair>,
    /// It has a lock because a tensor is not `Sync` and several backward passes may run at once.
    packed: Mutex<Option<Box<dyn Any + Send>>>,
    /// The thread that holds that lock in order to unpack.
    unpacks: Mutex<Option<ThreadId>>,
}

/// Records that this thread unpacks, until dropped.
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
/// `hooks` must come from [`pointer`], and those hooks must be alive.
unsafe extern "C" fn start(hooks: *const c_void) -> *mut c_void {
    // SAFETY: the caller passes a pointer to live hooks (see `# Safety`).
    let hooks = unsafe { &*hooks.cast::<Arc<dyn Pair>>() };
    Box::into_raw(Box::new(State {
        hooks: Arc::clone(hooks),
        packed: Mutex::new(None),
        unpacks: Mutex::new(None),
    }))
    .cast()
}

/// # Safety
/// `state` must come from [`start`], `tensor` must be alive, and `results` must come from the C++
/// frame that calls.
unsafe extern "C" fn pack(
    state: *mut c_void,
    tensor: *const C_tensor,
    results: *mut ffi::BackwardResults,
) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: the caller guarantees that `state` comes from `start` (see `# Safety`).
        let state = unsafe { &*state.cast::<State>() };
        // SAFETY: the caller guarantees a live tensor (see `# Safety`). We own the clone.
        let tensor = unsafe { Tensor::clone_from_ptr(tensor.cast_mut()) };
        let packed = state.hooks.pack(&tensor)?;
        *state.packed.lock().unwrap_or_else(PoisonError::into_inner) = Some(packed);
        Ok(())
    };
    // SAFETY: the caller guarantees `results` (see `# Safety`).
    unsafe { contained("the pack hook of a saved tensor", results, run) }
}

/// # Safety
/// As for [`pack`].
unsafe extern "C" fn unpack(state: *const c_void, results: *mut ffi::BackwardResults) -> c_int {
    let run = || -> Result<()> {
        // SAFETY: the caller guarantees that `state` comes from `start` (see `# Safety`).
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
        // SAFETY: `results` belongs to the C++ frame that called.
        unsafe { give_gradient(results, 0, tensor) };
        Ok(())
    };
    // SAFETY: the caller guarantees `results` (see `# Safety`).
    unsafe { contained("the unpack hook of a saved tensor", results, run) }
}

/// # Safety
/// `state` must come from [`start`], and nobody may use it again.
unsafe extern "C" fn drop_state(state: *mut c_void) {
    // SAFETY: the caller hands over a `State` that `start` boxed (see `# Safety`).
    let state = unsafe { Box::from_raw(state.cast::<State>()) };
    // A panic in a user's `Drop` cannot be reported: no caller is left to return it to.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(state))) {
        discard(panic);
    }
}
