//! Bindings to `csrc/cuda`, to the CUDA functions of libtorch's C shim, and to CUDA's events.
//!
//! `src/cuda/absent.rs` defines the same names for a build without CUDA.

use super::cuda_types::{DeviceProperties, MemoryStats, StreamParts};
pub(crate) use super::kernel::{KernelHandle, LibraryHandle};
use super::take_message;
use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use tch::Tensor;
use torch_sys::C_tensor;

#[doc(alias = "tch_extension::Graph")]
type CGraph = c_void;

#[doc(alias = "c10::cuda::CUDAStreamGuard")]
type CStreamGuard = c_void;

unsafe extern "C" {
    // libtorch's stable C shim (torch/csrc/inductor/aoti_torch/c/shim.h); it returns 0 on success.
    fn aoti_torch_get_current_cuda_stream(device_index: i32, stream: *mut *mut c_void) -> i32;
    fn aoti_torch_create_cuda_guard(device_index: i32, guard: *mut *mut c_void) -> i32;
    fn aoti_torch_delete_cuda_guard(guard: *mut c_void) -> i32;

    // csrc/cuda/stream.cpp
    fn tch_extension_cuda_enter(device: i32, place: *mut LaunchPlace) -> *mut c_char;
    safe fn tch_extension_cuda_leave(device_before: i32) -> *mut c_char;
    fn tch_extension_cuda_stream_current(device: i32, result: *mut StreamParts) -> *mut c_char;
    fn tch_extension_cuda_stream_default(device: i32, result: *mut StreamParts) -> *mut c_char;
    fn tch_extension_cuda_stream_from_pool(
        device: i32,
        high_priority: bool,
        result: *mut StreamParts,
    ) -> *mut c_char;
    fn tch_extension_cuda_stream_synchronize(stream: *const StreamParts) -> *mut c_char;
    fn tch_extension_cuda_stream_is_idle(
        stream: *const StreamParts,
        idle: *mut bool,
    ) -> *mut c_char;
    fn tch_extension_cuda_stream_guard_new(
        stream: *const StreamParts,
        result: *mut *mut CStreamGuard,
    ) -> *mut c_char;
    fn tch_extension_cuda_stream_guard_delete(guard: *mut CStreamGuard) -> *mut c_char;
    fn tch_extension_cuda_record_stream(
        tensor: *const C_tensor,
        stream: *const StreamParts,
    ) -> *mut c_char;
    safe fn tch_extension_cuda_synchronize(device: i32) -> *mut c_char;

    // csrc/cuda/device.cpp
    fn tch_extension_cuda_device_properties(device: i32, result: *mut DeviceFacts) -> *mut c_char;
    fn tch_extension_cuda_version(result: *mut i32) -> *mut c_char;

    // csrc/cuda/memory.cpp
    fn tch_extension_cuda_memory_stats(device: i32, result: *mut MemoryStats) -> *mut c_char;
    safe fn tch_extension_cuda_reset_peak_memory_stats(device: i32) -> *mut c_char;
    safe fn tch_extension_cuda_empty_cache() -> *mut c_char;

    // csrc/cuda/graph.cpp
    fn tch_extension_cuda_graph_begin(
        sharing: *mut CGraph,
        result: *mut *mut CGraph,
    ) -> *mut c_char;
    fn tch_extension_cuda_is_capturing(result: *mut bool) -> *mut c_char;
    fn tch_extension_cuda_graph_end(graph: *mut CGraph) -> *mut c_char;
    fn tch_extension_cuda_capture_report(culprit: *mut *mut c_char, last: *mut *mut c_char);
    fn tch_extension_cuda_graph_count(
        graph: *const CGraph,
        kernels: *mut usize,
        others: *mut usize,
    );
    fn tch_extension_cuda_graph_kernel_names(
        graph: *const CGraph,
        result: *mut *mut c_char,
    ) -> *mut c_char;
    fn tch_extension_cuda_graph_replay(graph: *mut CGraph) -> *mut c_char;
    fn tch_extension_cuda_graph_is_left(graph: *mut CGraph) -> bool;
    fn tch_extension_cuda_graph_delete(graph: *mut CGraph) -> *mut c_char;

    // The CUDA runtime, which libtorch loads.
    fn cudaEventCreateWithFlags(event: *mut *mut c_void, flags: u32) -> i32;
    fn cudaEventRecordWithFlags(event: *mut c_void, stream: *mut c_void, flags: u32) -> i32;
    fn cudaEventSynchronize(event: *mut c_void) -> i32;
    fn cudaEventQuery(event: *mut c_void) -> i32;
    fn cudaEventElapsedTime(milliseconds: *mut f32, start: *mut c_void, end: *mut c_void) -> i32;
    fn cudaEventDestroy(event: *mut c_void) -> i32;
    fn cudaStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: u32) -> i32;
    fn cudaStreamIsCapturing(stream: *mut c_void, status: *mut i32) -> i32;
    safe fn cudaGetLastError() -> i32;
    safe fn cudaGetErrorString(error: i32) -> *const c_char;
}

/// `cudaEventDisableTiming`.
const DISABLE_TIMING: u32 = 2;
/// `cudaEventRecordExternal` and `cudaEventWaitExternal`.
const EXTERNAL: u32 = 1;
/// `cudaStreamCaptureStatusNone`.
const NOT_CAPTURING: i32 = 0;
/// `cudaErrorNotReady`.
const NOT_READY: i32 = 600;

/// A reference to libtorch_cuda.so that stays in the program. Linkers drop a library that nothing
/// refers to, and a program whose own code names no CUDA function would then find no GPU. This is
/// an old complaint about tch.
#[used]
static KEEP_LIBTORCH_CUDA: unsafe extern "C" fn(i32, *mut *mut c_void) -> i32 =
    aoti_torch_get_current_cuda_stream;

fn failed(op: &str, reason: impl Into<String>) -> Error {
    Error::Cuda { op: op.to_string(), reason: reason.into() }
}

/// Converts a message of `csrc/cuda`. Only its first line is kept, because the other lines are
/// general advice from libtorch.
pub(super) fn check(op: &str, message: *mut c_char) -> Result<()> {
    match take_message(message) {
        None => Ok(()),
        Some(text) => Err(failed(op, message_line(&text))),
    }
}

/// What a message of `csrc/cuda` says in its first line.
pub(super) fn message_line(text: &str) -> &str {
    text.lines().next().unwrap_or("unknown error")
}

/// Converts a status of the CUDA runtime.
fn status(op: &str, error: i32) -> Result<()> {
    if error == 0 {
        return Ok(());
    }
    // CUDA keeps the error until somebody asks. Clear it here, so that the check of a later launch
    // does not report it.
    cudaGetLastError();
    // SAFETY: CUDA's texts are static and null-terminated.
    let text = unsafe { CStr::from_ptr(cudaGetErrorString(error)) };
    Err(failed(op, text.to_string_lossy()))
}

/// Keeps a device current until dropped, and holds libtorch's current stream on it.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct LaunchPlace {
    stream: *mut c_void,
    device_before: i32,
    exists: bool,
}

impl LaunchPlace {
    /// Returns `None` if there is no such device.
    pub(crate) fn enter(op: &str, device: i32) -> Result<Option<Self>> {
        let mut place = LaunchPlace { stream: null_mut(), device_before: device, exists: false };
        // SAFETY: C++ writes `place` on success.
        check(op, unsafe { tch_extension_cuda_enter(device, &mut place) })?;
        Ok(Some(place).filter(|place| place.exists))
    }

    pub(crate) fn stream(&self) -> *mut c_void {
        self.stream
    }
}

impl Drop for LaunchPlace {
    fn drop(&mut self) {
        if self.exists {
            // There is nobody to report a message to, but it must be freed.
            drop(take_message(tch_extension_cuda_leave(self.device_before)));
        }
    }
}

pub(crate) fn current_stream(op: &str, device: i32) -> Result<StreamParts> {
    let mut parts = StreamParts::none();
    // SAFETY: C++ writes `parts` on success.
    check(op, unsafe { tch_extension_cuda_stream_current(device, &mut parts) }).map(|()| parts)
}

pub(crate) fn default_stream(op: &str, device: i32) -> Result<StreamParts> {
    let mut parts = StreamParts::none();
    // SAFETY: C++ writes `parts` on success.
    check(op, unsafe { tch_extension_cuda_stream_default(device, &mut parts) }).map(|()| parts)
}

pub(crate) fn pool_stream(op: &str, device: i32, high_priority: bool) -> Result<StreamParts> {
    let mut parts = StreamParts::none();
    // SAFETY: C++ writes `parts` on success.
    check(op, unsafe { tch_extension_cuda_stream_from_pool(device, high_priority, &mut parts) })
        .map(|()| parts)
}

pub(crate) fn synchronize_stream(op: &str, stream: &StreamParts) -> Result<()> {
    // SAFETY: `stream` has parts that libtorch made.
    check(op, unsafe { tch_extension_cuda_stream_synchronize(stream) })
}

pub(crate) fn stream_is_idle(op: &str, stream: &StreamParts) -> Result<bool> {
    let mut idle = false;
    // SAFETY: `stream` has parts that libtorch made, and C++ writes `idle` on success.
    check(op, unsafe { tch_extension_cuda_stream_is_idle(stream, &mut idle) }).map(|()| idle)
}

pub(crate) fn record_stream(op: &str, tensor: &Tensor, stream: &StreamParts) -> Result<()> {
    // SAFETY: the pointer is borrowed from a live tensor, and `stream` has parts that libtorch
    // made.
    check(op, unsafe { tch_extension_cuda_record_stream(tensor.as_ptr(), stream) })
}

pub(crate) fn synchronize(op: &str, device: i32) -> Result<()> {
    check(op, tch_extension_cuda_synchronize(device))
}

/// csrc/cuda/device.cpp mirrors it.
#[repr(C)]
struct DeviceFacts {
    /// Ends with a zero.
    name: [u8; 256],
    major: i32,
    minor: i32,
    multi_processor_count: u32,
    total_memory: u64,
    l2_cache_size: u64,
    shared_memory_per_multiprocessor: u64,
    clock_rate: u32,
    memory_clock_rate: u32,
    memory_bus_width: u32,
}

pub(crate) fn device_properties(op: &str, device: i32) -> Result<DeviceProperties> {
    let mut facts = DeviceFacts {
        name: [0; 256],
        major: 0,
        minor: 0,
        multi_processor_count: 0,
        total_memory: 0,
        l2_cache_size: 0,
        shared_memory_per_multiprocessor: 0,
        clock_rate: 0,
        memory_clock_rate: 0,
        memory_bus_width: 0,
    };
    // SAFETY: C++ writes `facts` on success.
    check(op, unsafe { tch_extension_cuda_device_properties(device, &mut facts) })?;
    let name = facts.name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(DeviceProperties {
        name: String::from_utf8_lossy(name).into_owned(),
        major: facts.major,
        minor: facts.minor,
        multi_processor_count: facts.multi_processor_count,
        total_memory: facts.total_memory,
        l2_cache_size: facts.l2_cache_size,
        shared_memory_per_multiprocessor: facts.shared_memory_per_multiprocessor,
        clock_rate: facts.clock_rate,
        memory_clock_rate: facts.memory_clock_rate,
        memory_bus_width: facts.memory_bus_width,
    })
}

/// The version of the CUDA runtime that is loaded: 13000 for 13.0.
pub(crate) fn version(op: &str) -> Result<i32> {
    let mut version = 0;
    // SAFETY: C++ writes `version` on success.
    check(op, unsafe { tch_extension_cuda_version(&mut version) }).map(|()| version)
}

pub(crate) fn memory_stats(op: &str, device: i32) -> Result<MemoryStats> {
    let mut stats = MemoryStats::default();
    // SAFETY: C++ writes `stats` on success.
    check(op, unsafe { tch_extension_cuda_memory_stats(device, &mut stats) }).map(|()| stats)
}

pub(crate) fn reset_peak_memory_stats(op: &str, device: i32) -> Result<()> {
    check(op, tch_extension_cuda_reset_peak_memory_stats(device))
}

pub(crate) fn empty_cache(op: &str) -> Result<()> {
    check(op, tch_extension_cuda_empty_cache())
}

pub(crate) fn is_capturing(op: &str) -> Result<bool> {
    let mut capturing = false;
    // SAFETY: C++ writes `capturing` on success.
    check(op, unsafe { tch_extension_cuda_is_capturing(&mut capturing) }).map(|()| capturing)
}

/// libtorch's device guard.
#[derive(Debug)]
pub(crate) struct DeviceGuardHandle(*mut c_void);

impl DeviceGuardHandle {
    pub(crate) fn new(op: &str, device: i32) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: libtorch writes `raw` on success.
        match unsafe { aoti_torch_create_cuda_guard(device, &mut raw) } {
            0 => Ok(DeviceGuardHandle(raw)),
            _ => Err(failed(op, "libtorch failed; its message is on stderr")),
        }
    }
}

impl Drop for DeviceGuardHandle {
    fn drop(&mut self) {
        // SAFETY: aoti_torch_create_cuda_guard made it, and it is deleted once. There is nobody to
        // report the status to.
        let _ = unsafe { aoti_torch_delete_cuda_guard(self.0) };
    }
}

/// libtorch's stream guard.
#[derive(Debug)]
pub(crate) struct StreamGuardHandle(*mut c_void);

impl StreamGuardHandle {
    pub(crate) fn new(op: &str, stream: &StreamParts) -> Result<Self> {
        let mut raw = null_mut();
        // SAFETY: `stream` has parts that libtorch made, and C++ writes `raw` on success.
        check(op, unsafe { tch_extension_cuda_stream_guard_new(stream, &mut raw) })
            .map(|()| StreamGuardHandle(raw))
    }
}

impl Drop for StreamGuardHandle {
    fn drop(&mut self) {
        // SAFETY: tch_extension_cuda_stream_guard_new made it in this thread, and it is deleted
        // once. There is nobody to report a message to, but it must be freed.
        drop(take_message(unsafe { tch_extension_cuda_stream_guard_delete(self.0) }));
    }
}

/// A `cudaEvent_t`.
#[derive(Debug)]
pub(crate) struct EventHandle {
    raw: *mut c_void,
    /// Whether a capture adds graph nodes for its records and waits.
    external: bool,
    /// Whether a capture did so. The graph then refers to the event, and may outlive this handle.
    in_a_graph: AtomicBool,
}

// SAFETY: any thread may call CUDA's functions on events, even several at once.
unsafe impl Send for EventHandle {}
// SAFETY: as for `Send`.
unsafe impl Sync for EventHandle {}

impl EventHandle {
    /// Makes an event for the current device.
    pub(crate) fn new(op: &str, timing: bool, external: bool) -> Result<Self> {
        let mut raw = null_mut();
        let flags = if timing { 0 } else { DISABLE_TIMING };
        // SAFETY: CUDA writes `raw` on success.
        status(op, unsafe { cudaEventCreateWithFlags(&mut raw, flags) }).map(|()| EventHandle {
            raw,
            external,
            in_a_graph: AtomicBool::new(false),
        })
    }

    pub(crate) fn record(&self, op: &str, stream: &StreamParts) -> Result<()> {
        let flags = self.flags(op, stream)?;
        // SAFETY: the event is alive, and libtorch never destroys its streams.
        status(op, unsafe { cudaEventRecordWithFlags(self.raw, stream.raw, flags) })
    }

    pub(crate) fn block(&self, op: &str, stream: &StreamParts) -> Result<()> {
        let flags = self.flags(op, stream)?;
        // SAFETY: the event is alive, and libtorch never destroys its streams.
        status(op, unsafe { cudaStreamWaitEvent(stream.raw, self.raw, flags) })
    }

    /// The flags for a record or a wait. CUDA refuses `EXTERNAL` outside of a capture.
    fn flags(&self, op: &str, stream: &StreamParts) -> Result<u32> {
        if !self.external {
            return Ok(0);
        }
        let mut capturing = NOT_CAPTURING;
        // SAFETY: libtorch never destroys its streams, and CUDA writes `capturing` on success.
        status(op, unsafe { cudaStreamIsCapturing(stream.raw, &mut capturing) })?;
        if capturing == NOT_CAPTURING {
            return Ok(0);
        }
        self.in_a_graph.store(true, Ordering::Relaxed);
        Ok(EXTERNAL)
    }

    pub(crate) fn synchronize(&self, op: &str) -> Result<()> {
        // SAFETY: the event is alive.
        status(op, unsafe { cudaEventSynchronize(self.raw) })
    }

    pub(crate) fn is_done(&self, op: &str) -> Result<bool> {
        // SAFETY: the event is alive.
        let error = unsafe { cudaEventQuery(self.raw) };
        if error == NOT_READY {
            // This is no failure, but CUDA keeps it as an error until somebody asks, so clear it.
            cudaGetLastError();
            return Ok(false);
        }
        status(op, error).map(|()| true)
    }

    pub(crate) fn milliseconds_until(&self, op: &str, end: &EventHandle) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, and CUDA itself refuses events that were not recorded.
        status(op, unsafe { cudaEventElapsedTime(&mut milliseconds, self.raw, end.raw) })
            .map(|()| milliseconds)
    }
}

impl Drop for EventHandle {
    fn drop(&mut self) {
        // If the event is in a graph, a replay would record a destroyed event. These few events are
        // kept until the program ends.
        if !self.in_a_graph.load(Ordering::Relaxed) {
            // SAFETY: cudaEventCreateWithFlags made it, and it is destroyed once. There is nobody
            // to report the status to.
            let _ = unsafe { cudaEventDestroy(self.raw) };
        }
    }
}

/// The operation of libtorch that made this process's last capture invalid, and the one that
/// started last.
pub(crate) fn capture_report() -> (Option<String>, Option<String>) {
    let (mut culprit, mut last) = (null_mut(), null_mut());
    // SAFETY: C++ writes both pointers. Each is null or a message that we now own.
    unsafe { tch_extension_cuda_capture_report(&mut culprit, &mut last) };
    (take_message(culprit), take_message(last))
}

/// A `Graph` of `csrc/cuda/graph.cpp`. If it is dropped before its capture has ended, the capture
/// is given up.
#[derive(Debug)]
pub(crate) struct GraphHandle(*mut c_void);

impl GraphHandle {
    /// Begins to capture this thread's current stream.
    pub(crate) fn begin(op: &str, sharing: Option<&GraphHandle>) -> Result<Self> {
        let sharing = sharing.map_or(null_mut(), |graph| graph.0);
        let mut raw = null_mut();
        // SAFETY: `sharing` is null or a live graph, of which only the pool's identifier is read.
        // C++ writes `raw` on success.
        check(op, unsafe { tch_extension_cuda_graph_begin(sharing, &mut raw) })
            .map(|()| GraphHandle(raw))
    }

    /// Ends the capture. Call it once, in the thread of [`GraphHandle::begin`] and with the same
    /// current stream.
    pub(crate) fn end(&mut self, op: &str) -> Result<()> {
        // SAFETY: the graph is alive.
        check(op, unsafe { tch_extension_cuda_graph_end(self.0) })
    }

    /// The number of kernels and the number of other nodes.
    pub(crate) fn count(&self) -> (usize, usize) {
        let (mut kernels, mut others) = (0, 0);
        // SAFETY: the graph is alive, and C++ writes both numbers.
        unsafe { tch_extension_cuda_graph_count(self.0, &mut kernels, &mut others) };
        (kernels, others)
    }

    /// The name of each kernel, and how often it is launched.
    pub(crate) fn kernel_names(&self) -> Result<Vec<(String, usize)>> {
        // SAFETY: the graph is alive, and C++ writes the text.
        let lines =
            super::text(|result| unsafe { tch_extension_cuda_graph_kernel_names(self.0, result) })?;
        let of_line = |line: &str| {
            let (count, name) = line.split_once(' ')?;
            Some((name.to_owned(), count.parse().ok()?))
        };
        Ok(lines.lines().filter_map(of_line).collect())
    }

    pub(crate) fn replay(&self, op: &str) -> Result<()> {
        // SAFETY: the graph is alive, and C++ refuses it if its capture has not ended.
        check(op, unsafe { tch_extension_cuda_graph_replay(self.0) })
    }

    /// Whether a tensor that the graph uses has been left to it alone since the capture, or has
    /// other memory now.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn is_left(&self) -> bool {
        // SAFETY: the graph is alive, and nobody else uses it, because the handle is not `Sync`.
        unsafe { tch_extension_cuda_graph_is_left(self.0) }
    }
}

impl Drop for GraphHandle {
    fn drop(&mut self) {
        // SAFETY: tch_extension_cuda_graph_begin made it, and it is deleted once. There is nobody
        // to report a message to, but it must be freed.
        drop(take_message(unsafe { tch_extension_cuda_graph_delete(self.0) }));
    }
}
