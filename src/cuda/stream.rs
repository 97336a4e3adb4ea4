//! Streams, and which one is current.

use super::{DeviceGuard, Event, device_index, ffi, refused};
use crate::Result;
use std::ffi::c_void;
use std::marker::PhantomData;
use tch::{Device, Tensor};

/// A stream as `csrc/cuda/stream.cpp` has it.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamParts {
    pub(crate) raw: *mut c_void,
    id: i64,
    device: i32,
}

// SAFETY: a name; CUDA's functions on streams may be called from any thread.
unsafe impl Send for StreamParts {}
// SAFETY: as above.
unsafe impl Sync for StreamParts {}

impl StreamParts {
    #[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
    pub(crate) fn none() -> Self {
        StreamParts { raw: std::ptr::null_mut(), id: 0, device: 0 }
    }
}

/// A stream of a CUDA device, by libtorch's own name for it: its allocator and its guards know it
/// again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    parts: StreamParts,
    device: Device,
}

impl Stream {
    /// The stream on which libtorch works at the moment, in this thread, on `device`. Kernels of
    /// one's own belong on it.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// # use tch_extension::cuda::Stream;
    /// let stream = Stream::current(Device::Cuda(0))?.as_ptr();
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When `device` is no CUDA device that is there, or this build has no CUDA.
    pub fn current(device: Device) -> Result<Stream> {
        let op = "Stream::current";
        ffi::current_stream(op, device_index(op, device)?).map(|parts| Stream { parts, device })
    }

    /// The stream on which libtorch works on `device` unless told otherwise.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// # use tch_extension::cuda::Stream;
    /// let side = Stream::new(Device::Cuda(0))?;
    /// side.wait_stream(&Stream::default_of(Device::Cuda(0))?)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::current`].
    pub fn default_of(device: Device) -> Result<Stream> {
        let op = "Stream::default_of";
        ffi::default_stream(op, device_index(op, device)?).map(|parts| Stream { parts, device })
    }

    /// A stream beside the default one. libtorch has 32 of them for a device and hands them out in
    /// turn: after as many calls the first comes again.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// use tch_extension::cuda::{Stream, StreamGuard};
    ///
    /// let side = Stream::new(Device::Cuda(0))?;
    /// // Behind what is under way: the work on `side` reads what it makes.
    /// side.wait_stream(&Stream::current(Device::Cuda(0))?)?;
    /// let guard = StreamGuard::new(&side)?;
    /// // … work on `side` …
    /// drop(guard);
    /// Stream::current(Device::Cuda(0))?.wait_stream(&side)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::current`].
    pub fn new(device: Device) -> Result<Stream> {
        from_pool("Stream::new", device, false)
    }

    /// [`Stream::new`]; with `high`, from as many further streams whose work the GPU prefers.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// let urgent = tch_extension::cuda::Stream::with_priority(Device::Cuda(0), true)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stream::current`].
    pub fn with_priority(device: Device, high: bool) -> Result<Stream> {
        from_pool("Stream::with_priority", device, high)
    }

    /// The `cudaStream_t`. Null is CUDA's default stream.
    pub fn as_ptr(&self) -> *mut c_void {
        self.parts.raw
    }

    /// The device it belongs to.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Waits, on the CPU, until all work given to the stream so far is done.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// tch_extension::cuda::Stream::current(Device::Cuda(0))?.synchronize()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// CUDA's; a kernel that failed shows here.
    pub fn synchronize(&self) -> Result<()> {
        ffi::synchronize_stream("Stream::synchronize", &self.parts)
    }

    /// Whether all work given to the stream so far is done. Does not wait.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// let idle = tch_extension::cuda::Stream::current(Device::Cuda(0))?.is_idle()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// CUDA's; a kernel that failed shows here.
    pub fn is_idle(&self) -> Result<bool> {
        ffi::stream_is_idle("Stream::is_idle", &self.parts)
    }

    /// Has work given to this stream from now on wait, on the GPU, for an event; of another device,
    /// too. An event that was never recorded is not waited for.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// use tch_extension::cuda::{Event, Stream};
    ///
    /// let ready = Event::without_timing(Device::Cuda(0))?;
    /// ready.record()?;
    /// Stream::new(Device::Cuda(0))?.wait(&ready)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// CUDA's.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        event.handle.block("Stream::wait", &self.parts)
    }

    /// Has work given to this stream from now on wait, on the GPU, for all that `other` has to do
    /// so far.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// use tch_extension::cuda::Stream;
    ///
    /// let side = Stream::new(Device::Cuda(0))?;
    /// side.wait_stream(&Stream::current(Device::Cuda(0))?)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// CUDA's.
    pub fn wait_stream(&self, other: &Stream) -> Result<()> {
        let event = Event::without_timing(other.device)?;
        event.record_on(other)?;
        self.wait(&event)
    }

    pub(super) fn parts(&self) -> &StreamParts {
        &self.parts
    }
}

fn from_pool(op: &str, device: Device, high: bool) -> Result<Stream> {
    ffi::pool_stream(op, device_index(op, device)?, high).map(|parts| Stream { parts, device })
}

/// Makes a stream and its device current in this thread until dropped, then the former stream and
/// device again; when a panic unwinds, too. Guards nest; drop the inner one first.
///
/// ```no_run
/// # use tch::{Device, Kind, Tensor};
/// use tch_extension::cuda::{Stream, StreamGuard};
///
/// let side = Stream::new(Device::Cuda(0))?;
/// let _guard = StreamGuard::new(&side)?;
/// let x = Tensor::zeros([3], (Kind::Float, Device::Cuda(0))); // on `side`
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the former stream is put back when the guard is dropped"]
pub struct StreamGuard {
    _handle: ffi::StreamGuardHandle,
    /// The current stream is the thread's: the guard stays in it.
    _not_send: PhantomData<*mut ()>,
}

impl StreamGuard {
    /// Makes `stream` current. It does not wait for the former one: [`Stream::wait_stream`].
    ///
    /// # Errors
    /// CUDA's.
    pub fn new(stream: &Stream) -> Result<StreamGuard> {
        let handle = ffi::StreamGuardHandle::new("StreamGuard::new", &stream.parts)?;
        Ok(StreamGuard { _handle: handle, _not_send: PhantomData })
    }
}

/// Tells libtorch's allocator that work on `stream` uses the tensor: when the tensor is dropped,
/// its memory is not used for another one before that work is done. Needed where a tensor made on
/// one stream is read on another and dropped without the first waiting for the second.
///
/// ```no_run
/// # use tch::{Device, Kind, Tensor};
/// use tch_extension::cuda::{Stream, StreamGuard, record_stream};
///
/// let x = Tensor::zeros([1024], (Kind::Float, Device::Cuda(0)));
/// let side = Stream::new(Device::Cuda(0))?;
/// side.wait_stream(&Stream::current(Device::Cuda(0))?)?;
/// record_stream(&x, &side)?;
/// let guard = StreamGuard::new(&side)?;
/// let y = x.exp();
/// drop(x); // not used for another tensor before `exp` is done
/// # drop((guard, y));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When the tensor is not on the stream's device, or this build has no CUDA.
pub fn record_stream(tensor: &Tensor, stream: &Stream) -> Result<()> {
    let op = "record_stream";
    if !tensor.defined() || tensor.device() != stream.device {
        let got =
            if tensor.defined() { format!("{:?}", tensor.device()) } else { "none".to_string() };
        return Err(refused(
            op,
            format!("expected a tensor on {:?}, as the stream, got {got}", stream.device),
        ));
    }
    ffi::record_stream(op, tensor, &stream.parts)
}
