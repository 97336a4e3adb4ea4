//! Bindings to `csrc/distributed`: stores, groups of ranks, and operations in flight.

pub(crate) mod ddp;

use super::take_message;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::time::Duration;
use tch::Tensor;
use torch_sys::C_tensor;

/// An error message of c10d's. The caller knows which operation it belongs to.
pub(crate) type Outcome<T> = std::result::Result<T, String>;

#[repr(C)]
#[doc(alias = "c10d::Store")]
struct CStore {
    _opaque: [u8; 0],
}

/// The C++ side of a group: `tch_extension::ProcessGroup` of `csrc/distributed/group.h`.
#[repr(C)]
#[doc(alias = "tch_extension::ProcessGroup")]
pub(crate) struct CGroup {
    _opaque: [u8; 0],
}

#[repr(C)]
#[doc(alias = "tch_extension::Work")]
struct CWork {
    _opaque: [u8; 0],
}

/// What a group is made of. C++ has the same struct.
#[repr(C)]
struct GroupParts {
    rank: i32,
    size: i32,
    timeout: i64,
    name: *const c_char,
    name_length: usize,
    loopback: bool,
    check: bool,
    abort_on_error: bool,
    device: i32,
}

/// An operation. C++ has the same struct.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub op: Op,
    pub reduce: i32,
    /// The root, or the peer.
    pub rank: i32,
    pub tag: i32,
    /// In milliseconds; -1 stands for the group's own.
    pub timeout: i64,
}

/// C++ has the same numbers.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Op {
    AllReduce,
    Broadcast,
    Reduce,
    AllGather,
    ReduceScatter,
    AllToAll,
    Send,
    Recv,
    Barrier,
}

type Take = unsafe extern "C" fn(*mut c_void, *const u8, usize);

unsafe extern "C" {
    fn tch_extension_store_tcp(
        host: *const c_char,
        length: usize,
        port: *mut u16,
        server: bool,
        multi_tenant: bool,
        workers: u64,
        timeout: i64,
        result: *mut *mut CStore,
    ) -> *mut c_char;
    fn tch_extension_store_file(
        path: *const c_char,
        length: usize,
        workers: c_int,
        timeout: i64,
        result: *mut *mut CStore,
    ) -> *mut c_char;
    fn tch_extension_store_hash(timeout: i64, result: *mut *mut CStore) -> *mut c_char;
    fn tch_extension_store_prefix(
        store: *const CStore,
        prefix: *const c_char,
        length: usize,
        result: *mut *mut CStore,
    ) -> *mut c_char;
    fn tch_extension_store_clone(
        store: *const CStore,
        timeout: i64,
        result: *mut *mut CStore,
    ) -> *mut c_char;
    fn tch_extension_store_free(store: *mut CStore);
    fn tch_extension_store_set(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        value: *const u8,
        bytes: usize,
    ) -> *mut c_char;
    fn tch_extension_store_get(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        context: *mut c_void,
        take: Take,
    ) -> *mut c_char;
    fn tch_extension_store_compare_set(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        expected: *const u8,
        expected_bytes: usize,
        desired: *const u8,
        desired_bytes: usize,
        context: *mut c_void,
        take: Take,
    ) -> *mut c_char;
    fn tch_extension_store_add(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        amount: i64,
        result: *mut i64,
    ) -> *mut c_char;
    fn tch_extension_store_wait(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        timeout: i64,
    ) -> *mut c_char;
    fn tch_extension_store_check(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        result: *mut bool,
    ) -> *mut c_char;
    fn tch_extension_store_delete(
        store: *const CStore,
        key: *const c_char,
        length: usize,
        result: *mut bool,
    ) -> *mut c_char;

    fn tch_extension_group_new(
        store: *const CStore,
        parts: *const GroupParts,
        result: *mut *mut CGroup,
    ) -> *mut c_char;
    fn tch_extension_group_free(group: *mut CGroup) -> *mut c_char;
    fn tch_extension_group_end(
        group: *mut CGroup,
        why: *const c_char,
        length: usize,
    ) -> *mut c_char;
    fn tch_extension_group_compare(
        group: *mut CGroup,
        what: *const c_char,
        length: usize,
    ) -> *mut c_char;
    fn tch_extension_group_leave(group: *mut CGroup) -> *mut c_char;
    fn tch_extension_group_shutdown(group: *mut CGroup) -> *mut c_char;
    safe fn tch_extension_no_nccl() -> *const c_char;
    fn tch_extension_group_start(
        group: *const CGroup,
        call: *const Call,
        output: *const C_tensor,
        input: *const C_tensor,
        output_sizes: *const i64,
        input_sizes: *const i64,
        sizes: usize,
        result: *mut *mut CWork,
    ) -> *mut c_char;
    fn tch_extension_group_broadcast_coalesced(
        group: *const CGroup,
        tensors: *const *const C_tensor,
        length: usize,
        bytes: usize,
        root: i32,
    ) -> *mut c_char;
    fn tch_extension_group_monitored_barrier(group: *const CGroup, timeout: i64) -> *mut c_char;
    fn tch_extension_work_wait(work: *mut CWork, timeout: i64) -> *mut c_char;
    fn tch_extension_work_is_completed(work: *mut CWork, done: *mut bool) -> *mut c_char;
    fn tch_extension_work_free(work: *mut CWork);
}

fn check(message: *mut c_char) -> Outcome<()> {
    take_message(message).map_or(Ok(()), Err)
}

/// The pointer and the length of a text.
fn parts(text: &str) -> (*const c_char, usize) {
    (text.as_ptr().cast(), text.len())
}

/// Milliseconds, at least one, because c10d takes zero and less for something else.
pub(crate) fn milliseconds(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX).clamp(1, MOST_MILLISECONDS)
}

/// A hundred years. libtorch adds timeouts to the time of day, in nanoseconds of 64 bits.
const MOST_MILLISECONDS: i64 = 100 * 365 * 24 * 3600 * 1000;

/// Copies bytes that C++ owns.
///
/// # Safety
/// `context` must point to a `Vec<u8>` that nothing else uses meanwhile, and `bytes` to `length`
/// readable bytes.
unsafe extern "C" fn take_bytes(context: *mut c_void, bytes: *const u8, length: usize) {
    // SAFETY: the caller guarantees the vector (see `# Safety`).
    let to = unsafe { &mut *context.cast::<Vec<u8>>() };
    if length > 0 {
        // SAFETY: the caller guarantees the bytes.
        to.extend_from_slice(unsafe { std::slice::from_raw_parts(bytes, length) });
    }
}

/// A handle of a store.
pub(crate) struct Store(*mut CStore);

// SAFETY: c10d's stores and ours lock a mutex in every operation, and the handle itself never changes.
unsafe impl Send for Store {}
// SAFETY: as above.
unsafe impl Sync for Store {}

impl Drop for Store {
    fn drop(&mut self) {
        // SAFETY: we own the handle, and nothing uses it afterwards.
        unsafe { tch_extension_store_free(self.0) }
    }
}

impl Store {
    /// Connects to a server, or is one. Also returns the port. `workers` is the number of clients
    /// to wait for, or zero.
    pub fn tcp(
        host: &str,
        port: u16,
        (server, multi_tenant): (bool, bool),
        workers: u64,
        timeout: Duration,
    ) -> Outcome<(Store, u16)> {
        let (host, length) = parts(host);
        let (mut port, mut result) = (port, std::ptr::null_mut());
        // SAFETY: the text and the variables live during the call. On success we own the handle.
        check(unsafe {
            tch_extension_store_tcp(
                host,
                length,
                &mut port,
                server,
                multi_tenant,
                workers,
                milliseconds(timeout),
                &mut result,
            )
        })?;
        Ok((Store(result), port))
    }

    pub fn file(path: &str, workers: i32, timeout: Duration) -> Outcome<Store> {
        let ((path, length), mut result) = (parts(path), std::ptr::null_mut());
        // SAFETY: as in `tcp`.
        check(unsafe {
            tch_extension_store_file(path, length, workers, milliseconds(timeout), &mut result)
        })?;
        Ok(Store(result))
    }

    pub fn hash(timeout: Duration) -> Outcome<Store> {
        let mut result = std::ptr::null_mut();
        // SAFETY: as in `tcp`.
        check(unsafe { tch_extension_store_hash(milliseconds(timeout), &mut result) })?;
        Ok(Store(result))
    }

    pub fn prefix(&self, prefix: &str) -> Outcome<Store> {
        let ((prefix, length), mut result) = (parts(prefix), std::ptr::null_mut());
        // SAFETY: as in `tcp`; the store lives.
        check(unsafe { tch_extension_store_prefix(self.0, prefix, length, &mut result) })?;
        Ok(Store(result))
    }

    /// A handle with a connection of its own, which waits for that long, if it has connections.
    pub fn try_clone(&self, timeout: Duration) -> Outcome<Store> {
        let mut result = std::ptr::null_mut();
        // SAFETY: the store lives. On success we own the new handle.
        check(unsafe { tch_extension_store_clone(self.0, milliseconds(timeout), &mut result) })?;
        Ok(Store(result))
    }

    pub fn set(&self, key: &str, value: &[u8]) -> Outcome<()> {
        let (key, length) = parts(key);
        // SAFETY: the store, the text and the bytes live during the call.
        check(unsafe { tch_extension_store_set(self.0, key, length, value.as_ptr(), value.len()) })
    }

    pub fn get(&self, key: &str) -> Outcome<Vec<u8>> {
        let ((key, length), mut value) = (parts(key), Vec::new());
        let context = (&raw mut value).cast();
        // SAFETY: as in `set`. `take_bytes` gets the vector that lives here.
        check(unsafe { tch_extension_store_get(self.0, key, length, context, take_bytes) })?;
        Ok(value)
    }

    pub fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Outcome<Vec<u8>> {
        let ((key, length), mut value) = (parts(key), Vec::new());
        // SAFETY: as in `get`.
        check(unsafe {
            tch_extension_store_compare_set(
                self.0,
                key,
                length,
                expected.as_ptr(),
                expected.len(),
                desired.as_ptr(),
                desired.len(),
                (&raw mut value).cast(),
                take_bytes,
            )
        })?;
        Ok(value)
    }

    pub fn add(&self, key: &str, amount: i64) -> Outcome<i64> {
        let ((key, length), mut result) = (parts(key), 0);
        // SAFETY: as in `set`.
        check(unsafe { tch_extension_store_add(self.0, key, length, amount, &mut result) })?;
        Ok(result)
    }

    pub fn wait(&self, key: &str, timeout: Duration) -> Outcome<()> {
        let (key, length) = parts(key);
        // SAFETY: as in `set`.
        check(unsafe { tch_extension_store_wait(self.0, key, length, milliseconds(timeout)) })
    }

    pub fn check(&self, key: &str) -> Outcome<bool> {
        let ((key, length), mut result) = (parts(key), false);
        // SAFETY: as in `set`.
        check(unsafe { tch_extension_store_check(self.0, key, length, &mut result) })?;
        Ok(result)
    }

    pub fn delete(&self, key: &str) -> Outcome<bool> {
        let ((key, length), mut result) = (parts(key), false);
        // SAFETY: as in `set`.
        check(unsafe { tch_extension_store_delete(self.0, key, length, &mut result) })?;
        Ok(result)
    }
}

/// A handle of a group.
pub(crate) struct Group(*mut CGroup);

// SAFETY: c10d's groups have mutexes for what their own threads share with callers, and
// `distributed::ProcessGroup` starts one operation at a time.
unsafe impl Send for Group {}
// SAFETY: as above.
unsafe impl Sync for Group {}

impl Drop for Group {
    fn drop(&mut self) {
        // SAFETY: we own the handle, and nothing uses it afterwards. A destructor's error can
        // reach nobody.
        drop(check(unsafe { tch_extension_group_free(self.0) }));
    }
}

/// What a group is made of.
pub(crate) struct Parts<'a> {
    pub rank: usize,
    pub size: usize,
    pub timeout: Duration,
    pub name: &'a str,
    pub loopback: bool,
    pub check: bool,
    pub abort_on_error: bool,
    /// The index of this rank's GPU.
    pub device: Option<usize>,
}

/// Why this build has no NCCL; `None` if it has.
pub(crate) fn no_nccl() -> Option<String> {
    let text = tch_extension_no_nccl();
    if text.is_null() {
        return None;
    }
    // SAFETY: C++ returns null or a constant, which ends with NUL.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

impl Group {
    pub fn new(store: &Store, group: &Parts<'_>) -> Outcome<Group> {
        let (name, name_length) = parts(group.name);
        let number = |value: usize| i32::try_from(value).map_err(|error| error.to_string());
        let group = GroupParts {
            rank: number(group.rank)?,
            size: number(group.size)?,
            timeout: milliseconds(group.timeout),
            name,
            name_length,
            loopback: group.loopback,
            check: group.check,
            abort_on_error: group.abort_on_error,
            device: group.device.map_or(Ok(-1), number)?,
        };
        let mut result = std::ptr::null_mut();
        // SAFETY: the store, the parts and the name live during the call. On success we own the
        // handle.
        check(unsafe { tch_extension_group_new(store.0, &group, &mut result) })?;
        Ok(Group(result))
    }

    /// For C++ that works on the group, which must not outlive this handle unless it takes c10d's
    /// group out of it.
    #[allow(dead_code)]
    pub fn as_ptr(&self) -> *const CGroup {
        self.0
    }

    /// Makes all operations fail, those in flight and later ones, on all ranks.
    pub fn end(&self, why: &str) -> Outcome<()> {
        let (why, length) = parts(why);
        // SAFETY: the group and the text live during the call.
        check(unsafe { tch_extension_group_end(self.0, why, length) })
    }

    /// Is an error on every rank if some of them do something else, and the group compares.
    pub fn compare(&self, what: &str) -> Outcome<()> {
        let (what, length) = parts(what);
        // SAFETY: the group and the text live during the call.
        check(unsafe { tch_extension_group_compare(self.0, what, length) })
    }

    /// Waits for what is in flight on a GPU, at most for the timeout, before the group is dropped. The
    /// error says what is lost.
    pub fn leave(&self) -> Outcome<()> {
        // SAFETY: the group lives.
        check(unsafe { tch_extension_group_leave(self.0) })
    }

    pub fn shutdown(&self) -> Outcome<()> {
        // SAFETY: the group lives.
        check(unsafe { tch_extension_group_shutdown(self.0) })
    }

    /// Starts an operation.
    pub fn start(
        &self,
        call: Call,
        output: Option<&Tensor>,
        input: Option<&Tensor>,
        (output_sizes, input_sizes): (&[i64], &[i64]),
    ) -> Outcome<Work> {
        use Op::*;
        let needs_output = !matches!(call.op, Send | Barrier);
        let needs_input = matches!(call.op, AllGather | ReduceScatter | AllToAll | Send);
        if output.is_some() != needs_output
            || input.is_some() != needs_input
            || output_sizes.len() != input_sizes.len()
        {
            return Err(format!("internal error: {:?} with other arguments", call.op));
        }
        let pointer = |tensor: Option<&Tensor>| tensor.map_or(std::ptr::null(), Tensor::as_ptr);
        let mut result = std::ptr::null_mut();
        // SAFETY: the group, the tensors and the arrays live during the call, and C++ keeps what
        // it needs longer. The arrays have one length, and the tensors that the operation uses
        // exist. On success we own the handle.
        check(unsafe {
            tch_extension_group_start(
                self.0,
                &call,
                pointer(output),
                pointer(input),
                output_sizes.as_ptr(),
                input_sizes.as_ptr(),
                output_sizes.len(),
                &mut result,
            )
        })?;
        Ok(Work(result))
    }

    pub fn broadcast_coalesced(&self, tensors: &[&Tensor], bytes: usize, root: i32) -> Outcome<()> {
        let tensors: Vec<*const C_tensor> = tensors.iter().map(|tensor| tensor.as_ptr()).collect();
        // SAFETY: the group and the tensors live during the call.
        check(unsafe {
            tch_extension_group_broadcast_coalesced(
                self.0,
                tensors.as_ptr(),
                tensors.len(),
                bytes,
                root,
            )
        })
    }

    pub fn monitored_barrier(&self, timeout: Duration) -> Outcome<()> {
        // SAFETY: the group lives.
        check(unsafe { tch_extension_group_monitored_barrier(self.0, milliseconds(timeout)) })
    }
}

/// A handle of an operation in flight.
pub(crate) struct Work(*mut CWork);

// SAFETY: the C++ side belongs to this handle alone; c10d's work has a mutex for what it shares with
// threads of c10d's own.
unsafe impl Send for Work {}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: we own the handle, and nothing uses it afterwards. c10d keeps what the operation
        // needs.
        unsafe { tch_extension_work_free(self.0) }
    }
}

impl Work {
    /// Waits. Without a timeout, it waits as long as the operation may take.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Outcome<()> {
        // SAFETY: the work lives.
        check(unsafe { tch_extension_work_wait(self.0, timeout.map_or(0, milliseconds)) })
    }

    /// Also after an error, which `wait` returns.
    pub fn is_completed(&self) -> bool {
        let mut done = false;
        // SAFETY: the work and the variable live.
        let asked = check(unsafe { tch_extension_work_is_completed(self.0, &mut done) });
        done || asked.is_err()
    }
}
