//! CUDA events.

use super::{DeviceGuard, Stream, device_index, ffi, refused};
use crate::Result;
use std::time::Duration;
use tch::Device;

/// A point in the work of a CUDA stream, and the time at which the GPU reaches it.
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
    /// Makes an event for a CUDA device.
    ///
    /// # Errors
    /// When there is no such device, or this build has no CUDA.
    pub fn new(device: Device) -> Result<Event> {
        create("Event::new", device, true, false)
    }

    /// Makes an event that can only be waited for. It is cheaper than one that records the time.
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
    /// As for [`Event::new`].
    pub fn without_timing(device: Device) -> Result<Event> {
        create("Event::without_timing", device, false, false)
    }

    /// Makes an event with a time that becomes part of a graph when it is captured: each replay
    /// records it where the capture recorded it, and waits for it where the capture waited. The
    /// time between two such events is the time of the graph's work between them, without that of
    /// its launch. The event may be dropped before the graph. Any other event that is recorded in a
    /// capture only orders the captured streams.
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
    /// As for [`Event::new`].
    pub fn external(device: Device) -> Result<Event> {
        create("Event::external", device, true, true)
    }

    /// Records the event on libtorch's current stream of the device, after the work that was given
    /// to the stream so far.
    ///
    /// # Errors
    /// An error of CUDA.
    pub fn record(&self) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.record("Event::record", Stream::current(self.device)?.parts())
    }

    /// Records the event on `stream`, after the work that was given to the stream so far.
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
    /// When the stream belongs to another device, or an error of CUDA.
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

    /// Waits, on the CPU, until the work before the event is done. If the event was never recorded,
    /// it returns at once.
    ///
    /// # Errors
    /// Errors of CUDA: a kernel that failed is reported here.
    pub fn synchronize(&self) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.synchronize("Event::synchronize")
    }

    /// Whether the work before the event is done. It is true if the event was never recorded. Does
    /// not wait.
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
    /// Errors of CUDA: a kernel that failed is reported here.
    pub fn is_done(&self) -> Result<bool> {
        let _guard = DeviceGuard::new(self.device)?;
        self.handle.is_done("Event::is_done")
    }

    /// The time on the device from this event to `end`. It waits for `end`. Both events must have
    /// been recorded.
    ///
    /// # Errors
    /// When one of them was made by [`Event::without_timing`] or was not recorded, or an error of
    /// CUDA.
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
