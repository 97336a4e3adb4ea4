//! Devices and streams, by the CUDA runtime alone.

#[path = "../../src/cuda/launch_status.rs"]
mod launch_status;
#[path = "../../src/cuda/per_device.rs"]
pub(crate) mod per_device;

use crate::ops::kinds::Device;
use crate::{Error, Result};
pub(crate) use launch_status::LaunchStatus;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_void};
use std::marker::PhantomData;
use std::ptr::null_mut;

unsafe extern "C" {
    fn cudaGetDevice(device: *mut i32) -> i32;
    safe fn cudaSetDevice(device: i32) -> i32;
    safe fn cudaGetLastError() -> i32;
    safe fn cudaGetErrorString(error: i32) -> *const c_char;
}

thread_local! {
    /// The stream of kernels that are launched, while `on_stream` runs.
    static STREAM: Cell<*mut c_void> = const { Cell::new(null_mut()) };
}

fn check(op: &str, what: &str, error: i32) -> Result<()> {
    if error == 0 {
        return Ok(());
    }
    // CUDA keeps the error until somebody asks. The check of a later launch must not report it.
    cudaGetLastError();
    // SAFETY: CUDA's texts are constant and null-terminated.
    let text = unsafe { CStr::from_ptr(cudaGetErrorString(error)) }.to_string_lossy();
    Err(Error::Cuda { op: op.to_string(), reason: format!("{what}: {text}") })
}

/// Makes a device current until dropped, then restores the previous one.
pub(crate) struct DeviceGuard {
    before: Option<i32>,
    /// The current device belongs to the thread, so the guard must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl DeviceGuard {
    pub(crate) fn new(device: Device) -> Result<DeviceGuard> {
        DeviceGuard::of("CUDA", device)
    }

    fn of(op: &str, device: Device) -> Result<DeviceGuard> {
        let index = match device {
            Device::Cuda(index) => i32::try_from(index).unwrap_or(i32::MAX),
            other => {
                let reason = format!("expected a CUDA device, got {other:?}");
                return Err(Error::Cuda { op: op.to_string(), reason });
            }
        };
        let mut before = 0;
        // SAFETY: CUDA writes the number of the device.
        check(op, "there is no current CUDA device", unsafe { cudaGetDevice(&mut before) })?;
        let is_other = before != index;
        if is_other {
            check(op, &format!("CUDA device {index} cannot be used"), cudaSetDevice(index))?;
        }
        Ok(DeviceGuard { before: is_other.then_some(before), _not_send: PhantomData })
    }
}

impl Drop for DeviceGuard {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // There is nobody to report an error to.
            _ = cudaSetDevice(before);
        }
    }
}

/// Calls `body`, whose kernels are launched on this device and stream.
pub(crate) fn on_stream<T>(
    op: &str,
    device: Device,
    stream: *mut c_void,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    struct Restore(*mut c_void);
    impl Drop for Restore {
        fn drop(&mut self) {
            STREAM.set(self.0);
        }
    }
    let _guard = DeviceGuard::of(op, device)?;
    let _restore = Restore(STREAM.replace(stream));
    body()
}

/// Calls a launcher, within [`on_stream`].
pub(crate) fn launch(
    device: Device,
    launcher: impl FnOnce(*mut c_void) -> LaunchStatus,
) -> Result<()> {
    let _guard = DeviceGuard::new(device)?;
    launcher(STREAM.get()).into_result()
}
