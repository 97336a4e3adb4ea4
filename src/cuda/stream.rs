//! CUDA streams, and which stream is current.

use super::{DeviceGuard, Event, device_index, ffi, refused};
use crate::Result;
use crate::ffi::cuda_types::StreamParts;
use std::ffi::c_void;
use std::marker::PhantomData;
use tch::{Device, Tensor};

/// A stream of a CUDA device, with libtorch's own identifier, so that libtorch's allocator and
/// guards recognise it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    parts: StreamParts,
    device: Device,
}

impl Stream {
    /// The current stream: the one that libtorch now uses on `device` in this thread. Launch your
    /// own kernels on it.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// # use tch_extension::cuda::Stream;
    /// let stream = Stream::current(Device::Cuda(0))?.as_ptr();
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// When `device` is not an existing CUDA device, or this build has no CUDA.
    pub fn current(device: Device) -> Result<Stream> {
        let op = "Stream::current";
        ffi::current_stream(op, device_index(op, device)?).map(|parts| Stream { parts, device })
    }

    /// The default stream, which libtorch uses on `device` unless another stream is made current.
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
    /// As for [`Stream::current`].
    pub fn default_of(device: Device) -> Result<Stream> {
        let op = "Stream::default_of";
        ffi::default_stream(op, device_index(op, device)?).map(|parts| Stream { parts, device })
    }

    /// A side stream, to be used next to the default one. libtorch has 32 of them for each device
    /// and hands them out in rotation: after 32 calls, the first one is handed out again.
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
    /// As for [`Stream::current`].
    pub fn new(device: Device) -> Result<Stream> {
        from_pool("Stream::new", device, false)
    }

    /// Like [`Stream::new`]. If `high` is true, it hands out one of another 32 streams, whose work
    /// the GPU prefers.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// let urgent = tch_extension::cuda::Stream::with_priority(Device::Cuda(0), true)?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Stream::current`].
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

    /// Waits, on the CPU, until all work that was given to the stream so far is done.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// tch_extension::cuda::Stream::current(Device::Cuda(0))?.synchronize()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of CUDA: a kernel that failed is reported here.
    pub fn synchronize(&self) -> Result<()> {
        ffi::synchronize_stream("Stream::synchronize", &self.parts)
    }

    /// Whether all work that was given to the stream so far is done. Does not wait.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// let idle = tch_extension::cuda::Stream::current(Device::Cuda(0))?.is_idle()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of CUDA: a kernel that failed is reported here.
    pub fn is_idle(&self) -> Result<bool> {
        ffi::stream_is_idle("Stream::is_idle", &self.parts)
    }

    /// Makes later work on this stream wait, on the GPU, for an event, which may belong to another
    /// device. It does not wait for an event that was never recorded.
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
    /// An error of CUDA.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let _guard = DeviceGuard::new(self.device)?;
        event.handle.block("Stream::wait", &self.parts)
    }

    /// Makes later work on this stream wait, on the GPU, for all work that was given to `other` so
    /// far.
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
    /// An error of CUDA.
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

/// Makes a stream and its device current in this thread until dropped, even by a panic that
/// unwinds. Then the previous stream and device are restored. Guards nest; drop the inner one
/// first.
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
    /// The current stream belongs to the thread, so the guard must stay in it.
    _not_send: PhantomData<*mut ()>,
}

impl StreamGuard {
    /// Makes `stream` current. It does not wait for the previous stream; use
    /// [`Stream::wait_stream`] for that.
    ///
    /// # Errors
    /// An error of CUDA.
    pub fn new(stream: &Stream) -> Result<StreamGuard> {
        let handle = ffi::StreamGuardHandle::new("StreamGuard::new", &stream.parts)?;
        Ok(StreamGuard { _handle: handle, _not_send: PhantomData })
    }
}

/// Calls `body` while a stream of another library, or null, the default one, is current on `device`.
#[cfg(feature = "open")]
pub(crate) fn on_stream<T>(
    op: &str,
    device: Device,
    stream: *mut c_void,
    body: impl FnOnce() -> Result<T>,
) -> Result<T> {
    /// `cudaStreamLegacy`, another name of the default stream.
    const LEGACY: usize = 1;
    let raw = if stream.addr() == LEGACY { std::ptr::null_mut() } else { stream };
    // libtorch's identifier of another library's stream is its address.
    let parts = StreamParts { raw, id: raw.addr() as i64, device: device_index(op, device)? };
    let _guard = StreamGuard::new(&Stream { parts, device })?;
    body()
}

/// Tells libtorch's allocator that work on `stream` uses the tensor. When the tensor is dropped,
/// its memory is not reused before that work is done. This is needed for a tensor that was made on
/// one stream and is used on another, if it is dropped without the first stream waiting for the
/// other.
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
