//! CUDA graphs.

use super::{Stream, StreamGuard, device_index, ffi, is_capturing, refused};
use crate::error::panic_text;
use crate::{Error, Result};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::Device;

/// Work on the GPU that was captured once and can be launched again as a whole: libtorch's
/// `CUDAGraph`. Use it for steps with many small kernels that take longer to launch than to run.
///
/// The rules are:
/// - **Warm up first**: run the closure's work a few times before the capture, best on a side
///   stream, so that libraries are loaded and have chosen their kernels.
/// - **Cached memory is released**: before a capture, memory that libtorch keeps without using it
///   is given back to CUDA on all devices, as Python's `torch.cuda.graph` does. Later allocations
///   must get memory from CUDA again, so capture before a loop, not in it.
/// - **No waiting for the GPU** in the closure: do not read values on the CPU, do not call
///   `synchronize`, and let no shape depend on values. Otherwise the capture fails with an `Err`
///   that names the operation, even if the operation panics, as `double_value` does.
///   During the capture, no other thread may synchronise the whole device, empty libtorch's cache,
///   replay a graph or draw CUDA random numbers either; allocating is fine.
/// - **The same memory**: a replay reads and writes the tensors that the closure did, at the same
///   addresses. The graph keeps their memory, also if you drop them. Change their values in place
///   (`copy_`): a tensor that gets other memory is no longer the graph's. After `set_data` a replay
///   still uses the former memory; `resize_` frees it, and then a replay is an error.
/// - **The results belong to the graph**: the memory of tensors that the closure makes is in the
///   graph's own pool, and each replay overwrites it. Before the first replay it is uninitialised.
///   Copy results that you want to keep.
/// - Whatever the closure does on the CPU, such as counting or printing, happens only in the
///   capture.
///
/// Random numbers differ from replay to replay, as they would without a graph. All graphs of a
/// device share one state of the random number generator, which is also on the GPU. Replay graphs
/// that draw random numbers on one stream, or start one when the other is done, and let the work
/// finish before the last of them is dropped.
///
/// ```no_run
/// # use tch::{Device, Kind, Tensor};
/// use tch_extension::cuda::Graph;
///
/// let mut x = Tensor::zeros([64, 64], (Kind::Float, Device::Cuda(0)));
/// let _ = x.matmul(&x).relu(); // warms up
/// let (graph, y) = Graph::capture(Device::Cuda(0), || Ok(x.f_matmul(&x)?.f_relu()?))?;
/// x.copy_(&Tensor::ones([64, 64], (Kind::Float, Device::Cpu)));
/// graph.replay()?;
/// y.print(); // of the ones
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct Graph {
    handle: ffi::GraphHandle,
    device: Device,
}

// SAFETY: after its capture, libtorch's graph is bound to no thread. Any thread may replay and
// delete it, one at a time (it is not Sync).
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `body` gives to `device`, on a stream of its own, without running it,
    /// and returns what `body` returned. The capture is in thread-local mode, so that other threads
    /// may continue to allocate. A process can run one capture at a time. A second one waits for
    /// the first, so `body` must not wait for a thread that captures.
    ///
    /// # Errors
    /// An error of `body`; when its work cannot be captured; when a `body` itself calls this; when
    /// `device` is not an existing CUDA device, or this build has no CUDA; when libtorch's allocator is
    /// not its native one (`PYTORCH_CUDA_ALLOC_CONF`), which alone tells what a graph must keep. After
    /// an error or a panic of `body`, nothing is left of the capture.
    pub fn capture<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        capture("Graph::capture", Place::OwnStream(device), None, body)
    }

    /// Like [`Graph::capture`], on a stream of your choice, which may have done work before. A
    /// backward pass runs on the streams of its forward pass. To capture a backward pass alone, run
    /// its forward pass on the stream that is then captured.
    ///
    /// ```no_run
    /// # use tch::{Device, Kind, Tensor};
    /// use tch_extension::autograd::{GradOptions, grad};
    /// use tch_extension::cuda::{Graph, Stream, StreamGuard};
    ///
    /// let device = Device::Cuda(0);
    /// let x = Tensor::ones([1024], (Kind::Float, device)).set_requires_grad(true);
    /// let side = Stream::new(device)?;
    /// side.wait_stream(&Stream::current(device)?)?;
    /// let guard = StreamGuard::new(&side)?;
    /// let y = x.f_exp()?.f_sum(Kind::Float)?;
    /// drop(guard);
    /// let options = GradOptions { retain_graph: Some(true), ..Default::default() };
    /// let (graph, gradients) = Graph::capture_on(&side, || grad(&[&y], &[&x], &options))?;
    /// graph.replay()?;
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Graph::capture`]; and when `stream` is CUDA's default stream, which cannot be
    /// captured, or is already being captured.
    pub fn capture_on<T>(stream: &Stream, body: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        capture("Graph::capture_on", Place::Stream(stream), None, body)
    }

    /// Like [`Graph::capture`], on the device of `other` and with the same memory pool: the new
    /// graph also uses memory that `other` needs only for intermediates. Replay the two graphs one
    /// at a time, in the order in which they were captured. Results of `other` that were dropped
    /// before this capture are overwritten.
    ///
    /// ```no_run
    /// # use tch::{Device, Kind, Tensor};
    /// use tch_extension::cuda::Graph;
    ///
    /// let x = Tensor::ones([1024], (Kind::Float, Device::Cuda(0)));
    /// let (first, y) = Graph::capture(Device::Cuda(0), || Ok(x.f_exp()?))?;
    /// let (second, z) = Graph::capture_in_pool_of(&first, || Ok(y.f_sin()?))?;
    /// first.replay()?;
    /// second.replay()?;
    /// # drop(z);
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Graph::capture`].
    pub fn capture_in_pool_of<T>(
        other: &Graph,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(Graph, T)> {
        capture("Graph::capture_in_pool_of", Place::OwnStream(other.device), Some(other), body)
    }

    /// Like [`Graph::capture_on`] for a function `op`, in the memory pool of `sharing` if there is
    /// one.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn capture_for<T>(
        op: &str,
        stream: &Stream,
        sharing: Option<&Graph>,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(Graph, T)> {
        capture(op, Place::Stream(stream), sharing, body)
    }

    /// Runs the captured work again, on the current stream of the graph's device, with the current
    /// values of its inputs. Does not wait for it.
    ///
    /// ```no_run
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::cuda::Graph;
    /// # let mut x = Tensor::ones([1024], (Kind::Float, Device::Cuda(0)));
    /// let (graph, y) = Graph::capture(Device::Cuda(0), || Ok(x.f_exp()?))?;
    /// for _ in 0..3 {
    ///     let _ = x.f_add_scalar_(1.0)?;
    ///     graph.replay()?;
    ///     println!("{}", y.mean(Kind::Float).double_value(&[]));
    /// }
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// An error of CUDA; when a tensor that the graph uses has got other memory (`resize_`).
    pub fn replay(&self) -> Result<()> {
        self.handle.replay("Graph::replay")
    }

    /// Whether a replay would use what nobody else has any more, though somebody had at the end of
    /// the capture, or would be an error, because a tensor has other memory.
    #[cfg_attr(not(feature = "train"), allow(dead_code))]
    pub(crate) fn is_left(&self) -> bool {
        self.handle.is_left()
    }

    /// The number of kernels that a replay launches. Use it to check that an operator is a single
    /// kernel.
    ///
    /// ```no_run
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::cuda::Graph;
    /// # let x = Tensor::ones([1024], (Kind::Float, Device::Cuda(0)));
    /// let (graph, _) = Graph::capture(Device::Cuda(0), || Ok(x.f_exp()?.f_sin()?))?;
    /// assert_eq!((graph.kernels(), graph.other_nodes()), (2, 0));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    pub fn kernels(&self) -> usize {
        self.handle.count().0
    }

    /// The name of each of these kernels, and how often a replay launches it. Names are as C++ writes
    /// them, with template arguments; one that the driver does not know is empty.
    ///
    /// ```no_run
    /// # use tch_extension::cuda::Graph;
    /// # fn show(graph: &Graph) -> tch_extension::Result<()> {
    /// for (name, count) in graph.kernel_names()? {
    ///     println!("{count:>5} {name}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn kernel_names(&self) -> Result<Vec<(String, usize)>> {
        self.handle.kernel_names()
    }

    /// The number of nodes of a replay that are not kernels: copies, fills and the like.
    pub fn other_nodes(&self) -> usize {
        self.handle.count().1
    }

    /// The device on which the graph was captured.
    pub fn device(&self) -> Device {
        self.device
    }
}

/// The device or stream for a capture.
enum Place<'a> {
    OwnStream(Device),
    Stream(&'a Stream),
}

impl Place<'_> {
    fn device(&self) -> Device {
        match self {
            Place::OwnStream(device) => *device,
            Place::Stream(stream) => stream.device(),
        }
    }

    fn stream(&self, op: &str) -> Result<Stream> {
        let stream = match self {
            Place::OwnStream(device) => Stream::new(*device)?,
            Place::Stream(stream) => **stream,
        };
        match stream.as_ptr().is_null() {
            true => {
                Err(refused(op, "CUDA's default stream cannot be captured; use one of Stream::new"))
            }
            false => Ok(stream),
        }
    }
}

fn capture<T>(
    op: &str,
    place: Place<'_>,
    sharing: Option<&Graph>,
    body: impl FnOnce() -> Result<T>,
) -> Result<(Graph, T)> {
    let device = place.device();
    device_index(op, device)?;
    let _lock = CaptureLock::take(op)?;
    refuse_if_capturing(op, device)?;
    let stream = place.stream(op)?;
    // Values are dropped in reverse order, so if `body` ends with an error or a panic, the capture
    // is given up while its stream is still current.
    let _guard = StreamGuard::new(&stream)?;
    refuse_if_capturing(op, device)?;
    let mut handle = ffi::GraphHandle::begin(op, sharing.map(|graph| &graph.handle))?;
    let result = run(op, body)?;
    handle.end(op).map_err(|error| named(op, error))?;
    Ok((Graph { handle, device }, result))
}

/// Runs the body of a capture. A panic of tch's about an operation that cannot be captured becomes
/// an error; any other panic continues.
fn run<T>(op: &str, body: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(result) => result.map_err(|error| named(op, error)),
        Err(payload) => match ffi::capture_report().0 {
            Some(culprit) => Err(cannot_be_captured(op, &culprit, panic_text(&*payload))),
            None => resume_unwind(payload),
        },
    }
}

/// The error of a capture that failed, with the operation that cannot be captured, if it is known.
fn named(op: &str, error: Error) -> Error {
    let of_libtorch = matches!(error, Error::Torch(_) | Error::Autograd(_));
    match ffi::capture_report() {
        (Some(culprit), _) => cannot_be_captured(op, &culprit, &error.to_string()),
        (None, Some(last)) if of_libtorch && error.to_string().contains("captur") => {
            cannot_be_captured(op, &last, &error.to_string())
        }
        _ => error,
    }
}

fn cannot_be_captured(op: &str, culprit: &str, text: &str) -> Error {
    // A panic of tch's `unwrap` quotes libtorch's text with escaped line breaks, and further lines
    // are general advice.
    let reason = text.find("CUDA error").map_or(text, |start| &text[start..]);
    let reason = reason.split('\n').next().and_then(|line| line.split("\\n").next());
    let reason = reason.unwrap_or_default();
    let way_out = "leave it out of what is captured, and keep values on the GPU";
    refused(op, format!("{culprit} cannot be captured: {reason}; {way_out}"))
}

/// Detects captures that other code has begun.
fn refuse_if_capturing(op: &str, device: Device) -> Result<()> {
    if is_capturing(op, device)? {
        return Err(refused(op, "the current stream is being captured already"));
    }
    Ok(())
}

/// A lock for captures, because libtorch keeps only one capture state for its random numbers.
struct CaptureLock(#[allow(dead_code)] MutexGuard<'static, ()>);

static CAPTURES: Mutex<()> = Mutex::new(());

thread_local! {
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
}

impl CaptureLock {
    fn take(op: &str) -> Result<CaptureLock> {
        if CAPTURING.get() {
            return Err(refused(
                op,
                "this thread is capturing already; a capture cannot hold another",
            ));
        }
        // The lock may be poisoned by a closure that panicked, but it left no state behind.
        let lock = CAPTURES.lock().unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(true);
        Ok(CaptureLock(lock))
    }
}

impl Drop for CaptureLock {
    fn drop(&mut self) {
        CAPTURING.set(false);
    }
}
