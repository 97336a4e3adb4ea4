//! CUDA devices and streams as libtorch uses them; events, graphs and memory; kernel launches, and
//! kernels from any compiler; the precision of matrix products.

#[cfg(not(tch_extension_cuda))]
mod absent;
mod device;
mod event;
mod graph;
mod kernel;
mod launch_status;
mod memory;
#[cfg(tch_extension_cuda)]
pub(crate) mod per_device;
mod precision;
mod stream;

pub use device::{DeviceProperties, device_properties};
pub use event::Event;
pub use graph::Graph;
pub use kernel::{Grid, Kernel, Param, Parameter};
pub use launch_status::LaunchStatus;
pub use memory::{MemoryStats, empty_cache, memory_stats, reset_peak_memory_stats};
pub use precision::{matmul_allow_tf32, rnn_allow_tf32, set_matmul_allow_tf32, set_rnn_allow_tf32};
#[cfg(feature = "open")]
pub(crate) use stream::on_stream;
pub use stream::{Stream, StreamGuard, record_stream};

#[cfg(not(tch_extension_cuda))]
use self::absent as ffi;
#[cfg(tch_extension_cuda)]
use crate::ffi::cuda as ffi;
use crate::{Error, Result};
use std::ffi::c_void;
use std::marker::PhantomData;
use tch::Device;

#[doc(inline)]
pub use crate::__params as params;

/// Whether this build has CUDA kernels. A GPU may still be missing; see
/// [`tch::Cuda::is_available`].
pub const fn is_compiled() -> bool {
    cfg!(tch_extension_cuda)
}

/// The number of CUDA devices that this crate's functions can use. It is 0 if this build has no
/// CUDA.
///
/// ```no_run
/// if tch_extension::cuda::device_count() >= 2 { /* … */ }
/// ```
pub fn device_count() -> usize {
    if is_compiled() { usize::try_from(tch::Cuda::device_count()).unwrap_or(0) } else { 0 }
}

/// The version of the CUDA runtime: 13000 for 13.0.
pub(crate) fn runtime_version() -> Result<u32> {
    ffi::version("runtime_version").map(i32::cast_unsigned)
}

/// Waits, on the CPU, until all work on `device` is done, on all of its streams.
///
/// ```no_run
/// tch_extension::cuda::synchronize(tch::Device::Cuda(0))?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When `device` is not an existing CUDA device, or this build has no CUDA. Errors of CUDA: a
/// kernel that failed is reported here.
pub fn synchronize(device: Device) -> Result<()> {
    let op = "synchronize";
    ffi::synchronize(op, device_index(op, device)?)
}

/// Makes a CUDA device the current device until dropped, then restores the previous one. On the CPU
/// it does nothing.
#[derive(Debug)]
#[must_use = "the device is switched back when the guard is dropped"]
pub struct DeviceGuard {
    /// `None` on the CPU.
    _handle: Option<ffi::DeviceGuardHandle>,
    /// The current device belongs to the thread, so the guard must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl DeviceGuard {
    /// Switches to `device`.
    ///
    /// # Errors
    /// When `device` is neither the CPU nor an existing CUDA device, or this build has no CUDA.
    pub fn new(device: Device) -> Result<DeviceGuard> {
        let op = "DeviceGuard::new";
        let handle = match device {
            Device::Cpu => None,
            device => Some(ffi::DeviceGuardHandle::new(op, device_index(op, device)?)?),
        };
        Ok(DeviceGuard { _handle: handle, _not_send: PhantomData })
    }
}

/// The index of an existing CUDA device. It is checked here, because libtorch's C shim would only
/// print a message.
fn device_index(op: &str, device: Device) -> Result<i32> {
    let reason = match device {
        _ if !is_compiled() => return Err(not_compiled(op)),
        Device::Cuda(index) => match i32::try_from(index) {
            Ok(index) if i64::from(index) < tch::Cuda::device_count() => return Ok(index),
            _ => format!(
                "there is no CUDA device {index}; libtorch sees {}",
                tch::Cuda::device_count()
            ),
        },
        other => format!("expected a CUDA device, got {other:?}"),
    };
    Err(refused(op, reason))
}

fn refused(op: &str, reason: impl Into<String>) -> Error {
    Error::Cuda { op: op.to_string(), reason: reason.into() }
}

fn not_compiled(op: &str) -> Error {
    refused(
        op,
        "this build has no CUDA kernels; build with a libtorch that has CUDA and an nvcc (cargo xtask doctor says \
         what is missing)",
    )
}

/// A stream of CUDA's, by the name that it has in the declarations for C++. Not every family of
/// operators has a function that takes one.
#[allow(non_camel_case_types, dead_code)]
pub(crate) type cudaStream_t = *mut c_void;

/// Whether this thread's current stream of a device is being captured, by anyone. The CPU has none.
pub(crate) fn is_capturing(op: &str, device: Device) -> Result<bool> {
    if !is_compiled() || !device.is_cuda() {
        return Ok(false);
    }
    let _guard = DeviceGuard::new(device)?;
    ffi::is_capturing(op)
}

/// An index that no device has.
const NO_DEVICE: i32 = -1;

/// Makes `device` current, and calls a launcher with the stream that libtorch uses there.
///
/// # Errors
/// When there is no such CUDA device, or CUDA refuses the launch; the error then names the kernel.
pub fn launch(device: Device, launcher: impl FnOnce(*mut c_void) -> LaunchStatus) -> Result<()> {
    let op = "DeviceGuard::new";
    let index = match device {
        Device::Cuda(index) => i32::try_from(index).unwrap_or(NO_DEVICE),
        _ => NO_DEVICE,
    };
    match ffi::LaunchPlace::enter(op, index)? {
        Some(place) => launcher(place.stream()).into_result(),
        // `device_index` has the message for the error. Nothing was launched, so this is never a
        // success.
        None => Err(device_index(op, device)
            .err()
            .unwrap_or_else(|| refused(op, "no such CUDA device"))),
    }
}
