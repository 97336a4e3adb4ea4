//! Bindings to `csrc/distributed/ddp.cpp`.

use super::{CGroup, CWork, Group, Outcome, Work, check};
use crate::error::panic_text;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::null_mut;
use tch::Tensor;
use torch_sys::C_tensor;

#[repr(C)]
#[doc(alias = "tch_extension::Ddp")]
struct CDdp {
    _opaque: [u8; 0],
}

#[repr(C)]
#[doc(alias = "tch_extension::Bucket")]
struct CBucket {
    _opaque: [u8; 0],
}

#[repr(C)]
struct HookCall {
    _opaque: [u8; 0],
}

/// C++ has the same struct, with comments.
#[repr(C)]
#[derive(Clone, Copy)]
#[doc(alias = "tch_extension::DdpOptions")]
pub(crate) struct Options {
    pub bucket_bytes: i64,
    pub first_bucket_bytes: i64,
    pub compress: i32,
    pub find_unused_parameters: bool,
    pub gradient_as_bucket_view: bool,
    pub static_graph: bool,
    pub broadcast_buffers: bool,
    pub verify: bool,
}

#[repr(C)]
struct TensorList {
    tensors: *const *const C_tensor,
    length: usize,
}

/// C++ has the same struct.
#[repr(C)]
struct DdpTensors {
    parameters: TensorList,
    names: *const *const c_char,
    name_lengths: *const usize,
    frozen: TensorList,
    buffers: TensorList,
    states: TensorList,
}

/// C++ has the same struct. The times are in nanoseconds.
#[repr(C)]
#[derive(Clone, Copy, Default)]
#[doc(alias = "tch_extension::DdpStatistics")]
pub(crate) struct Statistics {
    pub iteration: i64,
    pub forward: i64,
    pub backward: i64,
    pub communication: i64,
    pub overlap: i64,
    pub rebuilt: bool,
    pub can_be_static: bool,
}

#[repr(C)]
struct CommHookVTable {
    run: unsafe extern "C" fn(*mut c_void, *const CBucket, *mut HookCall) -> c_int,
    drop: unsafe extern "C" fn(*mut c_void),
}

unsafe extern "C" {
    fn tch_extension_ddp_new(
        group: *const CGroup,
        tensors: *const DdpTensors,
        options: *const Options,
        hook: *mut c_void,
        vtable: *const CommHookVTable,
        result: *mut *mut CDdp,
    ) -> *mut c_char;
    fn tch_extension_ddp_free(ddp: *mut CDdp) -> *mut c_char;
    fn tch_extension_ddp_begin(ddp: *const CDdp, synchronise: bool, capturing: bool)
    -> *mut c_char;
    fn tch_extension_ddp_end(
        ddp: *const CDdp,
        outputs: *const *mut C_tensor,
        length: usize,
    ) -> *mut c_char;
    fn tch_extension_ddp_check(ddp: *const CDdp, for_step: bool) -> *mut c_char;
    fn tch_extension_ddp_mark_stepped(ddp: *const CDdp) -> *mut c_char;
    fn tch_extension_ddp_set_sample_rate(ddp: *const CDdp, passes: i32) -> *mut c_char;
    fn tch_extension_ddp_statistics(
        ddp: *const CDdp,
        result: *mut Statistics,
        context: *mut c_void,
        take: unsafe extern "C" fn(*mut c_void, i64),
    ) -> *mut c_char;
    fn tch_extension_ddp_bucket_index(bucket: *const CBucket) -> usize;
    fn tch_extension_ddp_bucket_is_last(bucket: *const CBucket) -> bool;
    fn tch_extension_ddp_bucket_tensors(
        bucket: *const CBucket,
        buffer: *mut *mut C_tensor,
        context: *mut c_void,
        take: unsafe extern "C" fn(*mut c_void, *mut C_tensor),
    ) -> *mut c_char;
    fn tch_extension_ddp_hook_fail(call: *mut HookCall, text: *const c_char, length: usize);
    fn tch_extension_ddp_hook_pending(call: *mut HookCall, work: *mut CWork);
}

/// The gradients that are communicated at once.
#[derive(Debug)]
pub(crate) struct Bucket {
    pub index: usize,
    pub is_last: bool,
    pub buffer: Tensor,
    pub gradients: Vec<Tensor>,
}

/// Communicates a bucket. C++ calls it once at a time, in any thread.
pub(crate) type Hook = Box<dyn FnMut(Bucket) -> Outcome<Option<Work>> + Send>;

/// The tensors of a model.
pub(crate) struct Model<'a> {
    /// Those that are trained, with their names.
    pub parameters: Vec<(&'a str, &'a Tensor)>,
    pub frozen: Vec<&'a Tensor>,
    pub buffers: Vec<&'a Tensor>,
    /// All that rank 0 hands to the others.
    pub states: Vec<&'a Tensor>,
}

/// A handle of a reduction.
pub(crate) struct Ddp(*mut CDdp);

// SAFETY: C++ has mutexes for what the engine's threads share with callers. The forward pass and
// the statistics, which do not lock, are called under a lock of `distributed::Ddp`.
unsafe impl Send for Ddp {}
// SAFETY: as above.
unsafe impl Sync for Ddp {}

impl Drop for Ddp {
    fn drop(&mut self) {
        // SAFETY: we own the handle, and nothing uses it afterwards. A destructor's error can
        // reach nobody.
        drop(check(unsafe { tch_extension_ddp_free(self.0) }));
    }
}

impl Ddp {
    /// The tensors must have been checked: each parameter is a leaf that requires a gradient, and
    /// there is at least one.
    pub fn new(
        group: &Group,
        model: &Model<'_>,
        options: &Options,
        hook: Option<Hook>,
    ) -> Outcome<Ddp> {
        let pointers = |tensors: &[&Tensor]| -> Vec<*const C_tensor> {
            tensors.iter().map(|tensor| tensor.as_ptr()).collect()
        };
        let list = |pointers: &[*const C_tensor]| TensorList {
            tensors: pointers.as_ptr(),
            length: pointers.len(),
        };
        let parameters: Vec<&Tensor> = model.parameters.iter().map(|(_, tensor)| *tensor).collect();
        let names: Vec<*const c_char> =
            model.parameters.iter().map(|(name, _)| name.as_ptr().cast()).collect();
        let name_lengths: Vec<usize> =
            model.parameters.iter().map(|(name, _)| name.len()).collect();
        let (parameters, frozen) = (pointers(&parameters), pointers(&model.frozen));
        let (buffers, states) = (pointers(&model.buffers), pointers(&model.states));
        let tensors = DdpTensors {
            parameters: list(&parameters),
            names: names.as_ptr(),
            name_lengths: name_lengths.as_ptr(),
            frozen: list(&frozen),
            buffers: list(&buffers),
            states: list(&states),
        };
        let hook = hook.map_or(null_mut(), |hook| Box::into_raw(Box::new(hook)));
        let mut result = null_mut();
        // SAFETY: the group, the tensors, the names and the arrays live during the call, and each
        // array has the length that is passed. C++ takes over the hook, whose type is that of the
        // table, even if it fails. On success we own the handle.
        check(unsafe {
            tch_extension_ddp_new(
                group.as_ptr(),
                &tensors,
                options,
                hook.cast(),
                &HOOK,
                &mut result,
            )
        })?;
        Ok(Ddp(result))
    }

    /// Before a forward pass.
    pub fn begin(&self, synchronise: bool, capturing: bool) -> Outcome<()> {
        // SAFETY: the handle lives.
        check(unsafe { tch_extension_ddp_begin(self.0, synchronise, capturing) })
    }

    /// After it. May replace the tensors.
    pub fn end(&self, outputs: &mut [Tensor]) -> Outcome<()> {
        let pointers: Vec<*mut C_tensor> = outputs.iter_mut().map(Tensor::as_mut_ptr).collect();
        // SAFETY: the handle and the tensors live, and nothing else uses these handles of them.
        check(unsafe { tch_extension_ddp_end(self.0, pointers.as_ptr(), pointers.len()) })
    }

    pub fn check(&self, for_step: bool) -> Outcome<()> {
        // SAFETY: the handle lives.
        check(unsafe { tch_extension_ddp_check(self.0, for_step) })
    }

    pub fn mark_stepped(&self) -> Outcome<()> {
        // SAFETY: the handle lives.
        check(unsafe { tch_extension_ddp_mark_stepped(self.0) })
    }

    pub fn set_sample_rate(&self, passes: i32) -> Outcome<()> {
        // SAFETY: the handle lives.
        check(unsafe { tch_extension_ddp_set_sample_rate(self.0, passes) })
    }

    /// Also returns the size of each bucket in bytes.
    pub fn statistics(&self) -> Outcome<(Statistics, Vec<i64>)> {
        let (mut result, mut sizes) = (Statistics::default(), Vec::<i64>::new());
        let context = (&raw mut sizes).cast();
        // SAFETY: the handle and the variables live; `take_size` gets the vector that lives here.
        check(unsafe { tch_extension_ddp_statistics(self.0, &mut result, context, take_size) })?;
        Ok((result, sizes))
    }
}

/// # Safety
/// `context` must point to a `Vec<i64>` that nothing else uses meanwhile.
unsafe extern "C" fn take_size(context: *mut c_void, bytes: i64) {
    // SAFETY: the caller guarantees the vector (see `# Safety`).
    unsafe { &mut *context.cast::<Vec<i64>>() }.push(bytes);
}

/// # Safety
/// `context` must point to a `Vec<Tensor>` that nothing else uses meanwhile, and `tensor` must be a
/// handle that the caller gives up.
unsafe extern "C" fn take_tensor(context: *mut c_void, tensor: *mut C_tensor) {
    // SAFETY: the caller guarantees both (see `# Safety`).
    unsafe { (*context.cast::<Vec<Tensor>>()).push(Tensor::from_ptr(tensor)) }
}

static HOOK: CommHookVTable = CommHookVTable { run: run_hook, drop: drop_hook };

/// # Safety
/// `bucket` must be the bucket that the Reducer passes to a hook.
unsafe fn bucket_of(bucket: *const CBucket) -> Outcome<Bucket> {
    let (mut buffer, mut gradients) = (null_mut(), Vec::<Tensor>::new());
    let context = (&raw mut gradients).cast();
    // SAFETY: the caller guarantees the bucket (see `# Safety`); `take_tensor` gets the vector that
    // lives here, and handles that C++ gives up. On success we own `buffer`.
    unsafe {
        check(tch_extension_ddp_bucket_tensors(bucket, &mut buffer, context, take_tensor))?;
        Ok(Bucket {
            index: tch_extension_ddp_bucket_index(bucket),
            is_last: tch_extension_ddp_bucket_is_last(bucket),
            buffer: Tensor::from_ptr(buffer),
            gradients,
        })
    }
}

/// # Safety
/// `state` must be the boxed [`Hook`] of a registration, which nothing else uses meanwhile. `bucket`
/// and `call` must come from the C++ frame that calls.
unsafe extern "C" fn run_hook(
    state: *mut c_void,
    bucket: *const CBucket,
    call: *mut HookCall,
) -> c_int {
    let run = || -> Outcome<Option<Work>> {
        // SAFETY: the caller guarantees both (see `# Safety`).
        let (hook, bucket) = unsafe { (&mut *state.cast::<Hook>(), bucket_of(bucket)?) };
        hook(bucket)
    };
    let outcome = catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|payload| Err(format!("it panicked: {}", panic_text(&*payload))));
    match outcome {
        Ok(None) => 0,
        Ok(Some(work)) => {
            let work = std::mem::ManuallyDrop::new(work);
            // SAFETY: the caller guarantees `call`, and C++ takes over the work.
            unsafe { tch_extension_ddp_hook_pending(call, work.0) };
            0
        }
        Err(text) => {
            // SAFETY: the caller guarantees `call`; the text lives during the call.
            unsafe { tch_extension_ddp_hook_fail(call, text.as_ptr().cast(), text.len()) };
            1
        }
    }
}

/// # Safety
/// `state` must be the boxed [`Hook`] of a registration, and nobody may use it again.
unsafe extern "C" fn drop_hook(state: *mut c_void) {
    // SAFETY: the caller hands over the boxed hook (see `# Safety`).
    let hook = unsafe { Box::from_raw(state.cast::<Hook>()) };
    // A panic in a user's `Drop` has no caller that it could be returned to.
    if let Err(panic) = catch_unwind(AssertUnwindSafe(move || drop(hook))) {
        std::mem::forget(panic);
    }
}
