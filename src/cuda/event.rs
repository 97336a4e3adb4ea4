//! Points in a stream's work.

use super::{DeviceGuard, Stream};
use crate::Result;
#[cfg(tch_extension_cuda)]
use crate::{Error, ffi::cuda as ffi};
use std::ffi::c_void;
use std::time::Duration;
use tch::Device;

/// A point in the work of a CUDA stream, with its time.
///
/// ```no_run
/// # use tch::Device;
/// use tch_extension::cuda::Event;
///
/// let (start, end) = (Event::new(Device::Cuda(0))?, Event::new(Device::Cuda(0))?);
/// start.record()?;
/// // … work on the GPU …
/// end.record()?;
/// println!("{:?}", start.elapsed(&end)?);
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct Event {
    raw: *mut c_void,
    device: Device,
}

impl Event {
    /// A new event of a CUDA device.
    ///
    /// # Errors
    /// When there is no such device.
    pub fn new(device: Device) -> Result<Event> {
        let _guard = DeviceGuard::new(device)?;
        Stream::current(device)?;
        create().map(|raw| Event { raw, device })
    }

    /// Puts the event behind what libtorch's current stream of the device has to do so far.
    ///
    /// # Errors
    /// CUDA's.
    pub fn record(&self) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        record(self.raw, Stream::current(self.device)?)
    }

    /// The device's time from this event to `end`; waits for `end`. Both must have been recorded.
    ///
    /// # Errors
    /// CUDA's.
    pub fn elapsed(&self, end: &Event) -> Result<Duration> {
        let _guard = DeviceGuard::new(self.device)?;
        elapsed(self.raw, end.raw)
    }
}

#[cfg(tch_extension_cuda)]
impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by cudaEventCreate, destroyed once. Its status is of no use here.
        let _ = unsafe { ffi::cudaEventDestroy(self.raw) };
    }
}

#[cfg(tch_extension_cuda)]
fn create() -> Result<*mut c_void> {
    let mut raw = std::ptr::null_mut();
    // SAFETY: `raw` is written on success.
    status("Event::new", unsafe { ffi::cudaEventCreate(&mut raw) }).map(|()| raw)
}

#[cfg(tch_extension_cuda)]
fn record(event: *mut c_void, stream: Stream) -> Result<()> {
    // SAFETY: a live event and a stream of the same device.
    status("Event::record", unsafe { ffi::cudaEventRecord(event, stream.as_ptr()) })
}

#[cfg(tch_extension_cuda)]
fn elapsed(start: *mut c_void, end: *mut c_void) -> Result<Duration> {
    // SAFETY: a live event.
    status("Event::elapsed", unsafe { ffi::cudaEventSynchronize(end) })?;
    let mut milliseconds = 0.0;
    // SAFETY: live events; CUDA itself refuses those that were not recorded.
    status("Event::elapsed", unsafe { ffi::cudaEventElapsedTime(&mut milliseconds, start, end) })?;
    Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
}

#[cfg(tch_extension_cuda)]
fn status(op: &str, error: i32) -> Result<()> {
    if error == 0 {
        return Ok(());
    }
    // CUDA keeps the error for whoever asks next, which would be the check of some innocent launch.
    ffi::cudaGetLastError();
    // SAFETY: CUDA's texts are static and terminated.
    let text = unsafe { std::ffi::CStr::from_ptr(ffi::cudaGetErrorString(error)) };
    Err(Error::Cuda { op: op.to_string(), reason: text.to_string_lossy().into_owned() })
}

#[cfg(not(tch_extension_cuda))]
fn create() -> Result<*mut c_void> {
    unreachable!("Stream::current refuses without CUDA")
}

#[cfg(not(tch_extension_cuda))]
fn record(_: *mut c_void, _: Stream) -> Result<()> {
    unreachable!("there is no event without CUDA")
}

#[cfg(not(tch_extension_cuda))]
fn elapsed(_: *mut c_void, _: *mut c_void) -> Result<Duration> {
    unreachable!("there is no event without CUDA")
}
