//! CUDA's current stream and device, as libtorch sees them; events; launches.

mod event;

pub use event::Event;

#[cfg(tch_extension_cuda)]
use crate::ffi::cuda as ffi;
use crate::{Error, Result};
use std::ffi::{CStr, c_char, c_void};
use tch::Device;

/// Whether this build has CUDA kernels. A GPU may still be missing: [`tch::Cuda::is_available`].
pub const fn is_compiled() -> bool {
    cfg!(tch_extension_cuda)
}

/// A stream of a CUDA device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    raw: *mut c_void,
    device: Device,
}

impl Stream {
    /// The stream on which libtorch works at the moment, in this thread, on `device`. Kernels of one's own
    /// belong on it.
    ///
    /// # Errors
    /// When `device` is no CUDA device that is there, or this build has no CUDA.
    pub fn current(device: Device) -> Result<Stream> {
        let index = device_index("Stream::current", device)?;
        current_stream(index).map(|raw| Stream { raw, device })
    }

    /// The `cudaStream_t`. Null is CUDA's default stream.
    pub fn as_ptr(&self) -> *mut c_void {
        self.raw
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.device
    }
}

/// Makes a CUDA device the current one until dropped, then the former one again. On the CPU it does nothing.
#[derive(Debug)]
#[must_use = "the device is switched back when the guard is dropped"]
pub struct DeviceGuard {
    /// Null on the CPU. The pointer also keeps the guard in the thread whose device it set.
    #[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
    raw: *mut c_void,
}

impl DeviceGuard {
    /// Switches to `device`.
    ///
    /// # Errors
    /// When it is neither the CPU nor a CUDA device that is there, or this build has no CUDA.
    pub fn new(device: Device) -> Result<DeviceGuard> {
        if device == Device::Cpu {
            return Ok(DeviceGuard { raw: std::ptr::null_mut() });
        }
        let index = device_index("DeviceGuard::new", device)?;
        create_guard(index).map(|raw| DeviceGuard { raw })
    }
}

#[cfg(tch_extension_cuda)]
impl Drop for DeviceGuard {
    fn drop(&mut self) {
        if !self.raw.is_null() {
            // SAFETY: made by aoti_torch_create_cuda_guard, deleted once. Its status is of no use here.
            let _ = unsafe { ffi::aoti_torch_delete_cuda_guard(self.raw) };
        }
    }
}

/// The index of a CUDA device that is there. Checked here, because libtorch's C shim would only print.
fn device_index(op: &str, device: Device) -> Result<i32> {
    let reason = match device {
        _ if !is_compiled() => {
            "this build has no CUDA kernels; build with a libtorch that has CUDA and an nvcc (cargo xtask doctor \
             says what is missing)"
                .to_string()
        }
        Device::Cuda(index) => match i32::try_from(index) {
            Ok(index) if i64::from(index) < tch::Cuda::device_count() => return Ok(index),
            _ => format!("there is no CUDA device {index}; libtorch sees {}", tch::Cuda::device_count()),
        },
        other => format!("expected a CUDA device, got {other:?}"),
    };
    Err(Error::Cuda { op: op.to_string(), reason })
}

#[cfg(tch_extension_cuda)]
fn current_stream(index: i32) -> Result<*mut c_void> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the device exists; `raw` is written on success.
    let status = unsafe { ffi::aoti_torch_get_current_cuda_stream(index, &mut raw) };
    shim_status("Stream::current", status).map(|()| raw)
}

#[cfg(tch_extension_cuda)]
fn create_guard(index: i32) -> Result<*mut c_void> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: the device exists; `raw` is written on success.
    let status = unsafe { ffi::aoti_torch_create_cuda_guard(index, &mut raw) };
    shim_status("DeviceGuard::new", status).map(|()| raw)
}

#[cfg(tch_extension_cuda)]
fn shim_status(op: &str, status: i32) -> Result<()> {
    match status {
        0 => Ok(()),
        _ => Err(Error::Cuda {
            op: op.to_string(),
            reason: "libtorch failed; its message is on stderr".to_string(),
        }),
    }
}

#[cfg(not(tch_extension_cuda))]
fn current_stream(_: i32) -> Result<*mut c_void> {
    unreachable!("device_index refuses without CUDA")
}

#[cfg(not(tch_extension_cuda))]
fn create_guard(_: i32) -> Result<*mut c_void> {
    unreachable!("device_index refuses without CUDA")
}

/// What a launcher written with `tch_extension/launch.h` returns: whether its kernel was started.
#[repr(C)]
#[derive(Debug)]
pub struct LaunchStatus {
    kernel: *const c_char,
    error: *const c_char,
}

impl LaunchStatus {
    fn into_result(self) -> Result<()> {
        if self.error.is_null() {
            return Ok(());
        }
        // SAFETY: only C++ makes this type, from static, terminated texts.
        let text = |text| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
        Err(Error::Launch { kernel: text(self.kernel), message: text(self.error) })
    }
}

/// Calls a launcher with `device` current, and hands it the stream on which libtorch works there.
///
/// # Errors
/// When there is no such CUDA device, or CUDA refused the launch; the error names the kernel.
pub fn launch(device: Device, launcher: impl FnOnce(*mut c_void) -> LaunchStatus) -> Result<()> {
    let _guard = DeviceGuard::new(device)?;
    let stream = Stream::current(device)?;
    launcher(stream.as_ptr()).into_result()
}
