//! CUDA graphs.

use super::{DeviceGuard, Stream, StreamGuard, device_index, ffi, refused};
use crate::Result;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::Device;

/// Work on the GPU that was captured once and is launched again as a whole: libtorch's `CUDAGraph`,
/// for steps whose many small kernels take longer to launch than to run.
///
/// What must hold:
/// - **Warm up first**: run the closure's work a few times before, best on a side stream, so that
///   libraries are loaded and have chosen their kernels.
/// - **Memory that libtorch only keeps** is given back to CUDA before a capture, on all devices, as
///   Python's `torch.cuda.graph` does: what comes next allocates anew, so capture before a loop,
///   not in it.
/// - **No waiting for the GPU** in the closure: no reading of values on the CPU, no `synchronize`,
///   no shape that depends on values. It makes the capture fail, as an `Err`. Nor may any other
///   thread synchronise the whole device, empty libtorch's cache, replay a graph or draw CUDA
///   random numbers meanwhile; allocating is fine.
/// - **The same memory**: a replay reads the tensors that the closure read, where they were. Keep
///   them alive as long as the graph, and change their values in place (`copy_`).
/// - **The results belong to the graph**: the memory of tensors made in the closure is in a pool of
///   the graph's, and each replay overwrites it. Before the first replay they hold nothing of use.
///   Copy what is to stay.
/// - The CPU's part of the closure, such as counters and prints, happens in the capture only.
///
/// Random numbers differ from replay to replay, as they would without a graph. All graphs of a
/// device share their place in the sequence, on the GPU, too: replay those that draw on one stream,
/// or one after the other is done, and let the work be done before the last of them is dropped.
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

// SAFETY: libtorch's graph is bound to no thread once it is captured; it may be replayed and
// deleted by any, one at a time (it is not Sync).
unsafe impl Send for Graph {}

impl Graph {
    /// Captures the work that `body` gives to `device`, on a stream of its own, without doing it,
    /// and hands back what `body` returned. In thread-local mode: other threads may go on
    /// allocating. One capture at a time in a process; a second waits for the first, so `body` must
    /// not wait for a thread that captures.
    ///
    /// # Errors
    /// That of `body`; when its work cannot be captured, or when called by a `body`; when `device`
    /// is no CUDA device that is there, or this build has no CUDA. After an error or a panic of
    /// `body` nothing is left of the capture.
    pub fn capture<T>(device: Device, body: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        capture("Graph::capture", Place::OwnStream(device), None, body)
    }

    /// [`Graph::capture`] on a stream of the caller's, which may have done work before. A backward
    /// runs on the streams of its forward: one is captured alone where its forward ran on the
    /// stream that is being captured.
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
    /// As [`Graph::capture`]; when `stream` is CUDA's default stream, which cannot be captured, or
    /// is being captured.
    pub fn capture_on<T>(stream: &Stream, body: impl FnOnce() -> Result<T>) -> Result<(Graph, T)> {
        capture("Graph::capture_on", Place::Stream(stream), None, body)
    }

    /// [`Graph::capture`] on the device of `other`, in the same pool of memory: what `other` needs
    /// between its kernels only, this one uses, too. Replay them one at a time, in the order in
    /// which they were captured; and results of `other` that were dropped before this capture are
    /// no longer there.
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
    /// As [`Graph::capture`].
    pub fn capture_in_pool_of<T>(
        other: &Graph,
        body: impl FnOnce() -> Result<T>,
    ) -> Result<(Graph, T)> {
        capture("Graph::capture_in_pool_of", Place::OwnStream(other.device), Some(other), body)
    }

    /// Does the captured work again, on the current stream of the graph's device, with what its
    /// inputs now hold. Does not wait for it.
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
    /// CUDA's.
    pub fn replay(&self) -> Result<()> {
        self.handle.replay("Graph::replay")
    }

    /// How many kernels a replay launches: what to look at when an operator should be one kernel.
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

    /// What a replay does beside kernels: copies, fills and the like.
    pub fn other_nodes(&self) -> usize {
        self.handle.count().1
    }

    /// The device on which it was captured.
    pub fn device(&self) -> Device {
        self.device
    }
}

/// Where a capture takes place.
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
    let _turn = Turn::take(op)?;
    refuse_if_capturing(op, device)?;
    let stream = place.stream(op)?;
    // Dropped in reverse: a capture that `body` left by an error or a panic is given up under its
    // own stream.
    let _guard = StreamGuard::new(&stream)?;
    refuse_if_capturing(op, device)?;
    let mut handle = ffi::GraphHandle::begin(op, sharing.map(|graph| &graph.handle))?;
    let result = body()?;
    handle.end(op)?;
    Ok((Graph { handle, device }, result))
}

/// For captures that are not this crate's.
fn refuse_if_capturing(op: &str, device: Device) -> Result<()> {
    let _guard = DeviceGuard::new(device)?;
    if ffi::is_capturing(op)? {
        return Err(refused(op, "the current stream is being captured already"));
    }
    Ok(())
}

/// libtorch keeps one state of capture for its random numbers: captures take turns.
struct Turn(#[allow(dead_code)] MutexGuard<'static, ()>);

static TURN: Mutex<()> = Mutex::new(());

thread_local! {
    static CAPTURING: Cell<bool> = const { Cell::new(false) };
}

impl Turn {
    fn take(op: &str) -> Result<Turn> {
        if CAPTURING.get() {
            return Err(refused(
                op,
                "this thread is capturing already; a capture cannot hold another",
            ));
        }
        // A closure that panicked left nothing behind.
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        CAPTURING.set(true);
        Ok(Turn(turn))
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        CAPTURING.set(false);
    }
}
