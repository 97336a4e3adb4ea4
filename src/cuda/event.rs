//! Points in a stream's work.

use super::{DeviceGuard, Stream, device_index, ffi, refused};
use crate::Result;
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
    pub(super) handle: ffi::EventHandle,
    device: Device,
    timing: bool,
}

impl Event {
    /// A new event of a CUDA device.
    ///
    /// # Errors
    /// When there is no such device, or this build has no CUDA.
    pub fn new(device: Device) -> Result<Event> {
        create("Event::new", device, true, false)
    }

    /// A new event that is only waited for: cheaper than one that has a time.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// use tch_extension::cuda::Event;
    ///
    /// let done = Event::without_timing(Device::Cuda(0))?;
    /// done.record()?;
    /// done.synchronize()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Event::new`].
    pub fn without_timing(device: Device) -> Result<Event> {
        create("Event::without_timing", device, false, false)
    }

    /// A new event, with a time, that the capture of a graph makes part of the graph: each replay
    /// records it where the capture recorded it, and waits for it where the capture did. Between
    /// two of them is the time of what the graph does there, without that of its launch. It may be
    /// dropped before the graph. Any other event, recorded in a capture, only orders the captured
    /// streams.
    ///
    /// ```no_run
    /// # use tch::{Device, Tensor};
    /// use tch_extension::cuda::{Event, Graph};
    ///
    /// # let x = Tensor::ones([8], (tch::Kind::Float, Device::Cuda(0)));
    /// let (start, end) = (Event::external(Device::Cuda(0))?, Event::external(Device::Cuda(0))?);
    /// let (graph, y) = Graph::capture(Device::Cuda(0), || {
    ///     start.record()?;
    ///     let y = x.f_exp()?;
    ///     end.record()?;
    ///     Ok(y)
    /// })?;
    /// graph.replay()?;
    /// println!("{:?}", start.elapsed(&end)?);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// In Python: `torch.cuda.Event(enable_timing=True, external=True)`.
    ///
    /// # Errors
    /// As [`Event::new`].
    pub fn external(device: Device) -> Result<Event> {
        create("Event::external", device, true, true)
    }

    /// Puts the event behind what libtorch's current stream of the device has to do so far.
    ///
    /// # Errors
    /// CUDA's.
    pub fn record(&self) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.record("Event::record", Stream::current(self.device)?.parts())
    }

    /// Puts the event behind what `stream` has to do so far.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// use tch_extension::cuda::{Event, Stream};
    ///
    /// let (side, done) = (Stream::new(Device::Cuda(0))?, Event::new(Device::Cuda(0))?);
    /// done.record_on(&side)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the stream is another device's; CUDA's.
    pub fn record_on(&self, stream: &Stream) -> Result<()> {
        let op = "Event::record_on";
        if stream.device() != self.device {
            let reason = format!(
                "expected a stream of {:?}, as the event, got {:?}",
                self.device,
                stream.device()
            );
            return Err(refused(op, reason));
        }
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.record(op, stream.parts())
    }

    /// Waits, on the CPU, until the work before the event is done. An event that was never recorded
    /// is not waited for.
    ///
    /// # Errors
    /// CUDA's; a kernel that failed shows here.
    pub fn synchronize(&self) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.synchronize("Event::synchronize")
    }

    /// Whether the work before the event is done; true if it was never recorded. Does not wait.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// # let event = tch_extension::cuda::Event::new(Device::Cuda(0))?;
    /// event.record()?;
    /// let done = event.is_done()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// CUDA's; a kernel that failed shows here.
    pub fn is_done(&self) -> Result<bool> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.is_done("Event::is_done")
    }

    /// The device's time from this event to `end`; waits for `end`. Both must have been recorded.
    ///
    /// # Errors
    /// When one of them is [`Event::without_timing`], or was not recorded; CUDA's.
    pub fn elapsed(&self, end: &Event) -> Result<Duration> {
        let op = "Event::elapsed";
        if !(self.timing && end.timing) {
            return Err(refused(
                op,
                "an event made by Event::without_timing has no time; use Event::new",
            ));
        }
        let _guard = DeviceGuard::new(self.device)?;
        end.handle.synchronize(op)?;
        let milliseconds = self.handle.milliseconds_until(op, &end.handle)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

fn create(op: &str, device: Device, timing: bool, external: bool) -> Result<Event> {
    device_index(op, device)?;
    let _guard = DeviceGuard::new(device)?;
    ffi::EventHandle::new(op, timing, external).map(|handle| Event { handle, device, timing })
}
