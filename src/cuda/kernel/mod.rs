//! Kernels from images that any compiler made.

mod grid;
mod image;
mod params;

pub use grid::Grid;
pub use params::{Param, Parameter};

use self::image::Image;
use super::{DeviceGuard, NO_DEVICE, device_count, device_index, ffi, not_compiled, refused};
use crate::ffi::cuda_types::LaunchFacts;
use crate::{Error, Result};
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tch::Device;

/// A CUDA kernel from an image that any compiler made: nvcc, NVRTC, Triton, cuTile, cuda-oxide. It
/// is launched on libtorch's current stream, with the memory of tensors.
///
/// An image is a cubin (for one architecture), a fatbin (for several) or PTX, which the driver
/// compiles for the GPU at hand. The name is that in the image, which C++ mangles unless the kernel
/// is `extern "C"`.
///
/// ```no_run
/// # use tch::{Device, Kind, Tensor};
/// use tch_extension::cuda::{Grid, Kernel, params};
///
/// // nvcc -cubin -arch=sm_90a add.cu, where add.cu has
/// // extern "C" __global__ void add(const float* x, float* y, float a, long long n)
/// # let image = || std::fs::read("add.cubin");
/// let kernel = Kernel::load(image()?, "add")?;
///
/// let x = Tensor::ones([1000], (Kind::Float, Device::Cuda(0)));
/// let y = x.empty_like();
/// let n = x.numel() as i64;
/// let grid = Grid::new([n.unsigned_abs().div_ceil(256) as u32, 1, 1], [256, 1, 1]);
/// // SAFETY: these are the kernel's parameters. Both tensors are contiguous, of f32, on this device,
/// // and have n elements. The kernel accesses only these.
/// unsafe { kernel.launch(x.device(), grid, params![x.data_ptr(), y.data_ptr(), 0.5f32, n])? };
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// **Loaded once, and never unloaded.** [`load`](Kernel::load) gives the image to CUDA, once in a
/// process however often equal bytes are loaded. Each device gets its copy at the first launch there,
/// or at [`prepare`](Kernel::prepare). A kernel may still be running, or be part of a graph, when the
/// last `Kernel` is dropped, so an image stays until the process ends.
///
/// **In a graph.** A launch can be captured, and a graph needs no `Kernel` to be kept alive. Call
/// [`prepare`](Kernel::prepare), or launch once, before the capture: then nothing is loaded in it.
/// The values of parameters are those of the capture.
///
/// **Checked.** The sizes of grid, blocks, clusters and shared memory are checked against the limits
/// of the kernel on the device, and the number and the sizes of the parameters against the image.
/// What the parameters mean is unknown to CUDA, which is why [`launch`](Kernel::launch) is unsafe.
///
/// A clone is the same kernel. All threads may use it.
///
/// Equivalent to: Python's `torch.cuda._compile_kernel`, or `cuda.core`'s `ObjectCode.get_kernel`.
#[derive(Clone)]
pub struct Kernel {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    image: Image,
    handle: ffi::KernelHandle,
    /// By the device's index.
    facts: Mutex<HashMap<i32, Arc<LaunchFacts>>>,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Kernel({}, {})", self.inner.name, self.inner.image)
    }
}

/// The loaded images of this process.
static LIBRARIES: Mutex<Option<HashMap<Arc<[u8]>, ffi::LibraryHandle>>> = Mutex::new(None);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kernel {
    /// Loads the kernel of this name from an image, whose extent is checked. Whether it has code for
    /// a device is known only there, at the first launch or [`prepare`](Kernel::prepare).
    ///
    /// `include_bytes!("add.cubin").as_slice()` and a `Vec<u8>` are images. The driver trusts what is
    /// inside, so load only images that you trust, as you would a library.
    ///
    /// # Errors
    /// When the bytes are no image or were cut off, CUDA refuses them, or the image has no kernel of
    /// this name; when there is no CUDA device, or this build has no CUDA.
    pub fn load(image: impl Into<Arc<[u8]>>, name: &str) -> Result<Kernel> {
        let op = "Kernel::load";
        let bytes = image.into();
        let image = Image::of(&bytes).map_err(|reason| refused(op, reason))?;
        let c_name = CString::new(name)
            .map_err(|_| refused(op, format!("the name {name:?} contains a zero byte")))?;
        if !super::is_compiled() {
            return Err(not_compiled(op));
        }
        if device_count() == 0 {
            return Err(refused(op, "there is no CUDA device"));
        }
        let library = library(op, image, bytes)?;
        let found = library.kernel(op, &c_name).map_err(|error| with_image(error, image))?;
        let handle = found.ok_or_else(|| {
            let names = library.names().filter(|names| !names.is_empty());
            let names = names.unwrap_or_else(|| "no kernel that CUDA could name".to_string());
            refused(op, format!("the image, {image}, has no kernel {name:?}; it has {names}"))
        })?;
        let (name, facts) = (name.to_string(), Mutex::default());
        Ok(Kernel { inner: Arc::new(Inner { name, image, handle, facts }) })
    }

    /// The kernel's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Loads the kernel on `device`, so that the first launch does not. Compiling PTX can take
    /// seconds; the driver keeps the result in its cache on disk.
    ///
    /// ```no_run
    /// # use tch::Device;
    /// # fn prepare(kernel: &tch_extension::cuda::Kernel) -> tch_extension::Result<()> {
    /// kernel.prepare(Device::Cuda(0))?; // before a graph is captured, or a time is measured
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// When the image has no code for the device's architecture; when `device` is not an existing
    /// CUDA device.
    pub fn prepare(&self, device: Device) -> Result<()> {
        let index = device_index("Kernel::prepare", device)?;
        let _guard = DeviceGuard::new(device)?;
        self.facts(index).map(|_| ())
    }

    /// Launches the kernel on libtorch's current stream of `device`. It does not wait for the
    /// kernel. [`params!`](crate::cuda::params) makes the parameters, whose values are copied.
    ///
    /// # Safety
    /// - The parameters have the types and the meaning that the kernel expects. Only their number
    ///   and sizes are checked.
    /// - The kernel accesses only memory that it may access in this call: on `device`, inside the
    ///   tensors, whose kinds, strides and alignment are those it was written for. Nothing else
    ///   writes that memory, or reads what the kernel writes, in another stream at the same time.
    /// - Memory lives until the kernel has run. libtorch sees to this for tensors that were made on
    ///   the current stream; for others, see [`record_stream`](crate::cuda::record_stream). Memory
    ///   of a captured launch lives as long as the graph.
    /// - The grid is one that the kernel was written for. A kernel that waits for blocks which do
    ///   not run, or for threads that have ended, never ends.
    ///
    /// A kernel that writes to a tensor does not tell autograd. Write to tensors that are new, or
    /// call this inside an operator of your own.
    ///
    /// # Errors
    /// When the grid is empty or exceeds a limit, or a parameter is missing, too many or of another
    /// size; as for [`prepare`](Kernel::prepare); when CUDA refuses the launch. Nothing is launched
    /// then. A kernel that fails while it runs is reported by a later call.
    pub unsafe fn launch(&self, device: Device, grid: Grid, params: &[Param<'_>]) -> Result<()> {
        let op = "Kernel::launch";
        let index = match device {
            Device::Cuda(index) => i32::try_from(index).unwrap_or(NO_DEVICE),
            _ => NO_DEVICE,
        };
        let Some(place) = ffi::LaunchPlace::enter(op, index)? else {
            return Err(device_index(op, device)
                .err()
                .unwrap_or_else(|| refused(op, "no such CUDA device")));
        };
        let facts = self.facts(index)?;
        grid.check(&facts)
            .and_then(|()| params::check(params, &facts))
            .map_err(|message| self.failed(message))?;
        let mut addresses: Vec<_> = params.iter().map(Param::address).collect();
        // SAFETY: the place makes the device current and has its stream. Number and sizes of the
        // parameters are checked. The caller guarantees the rest.
        unsafe {
            let inner = &self.inner;
            inner.handle.launch(&inner.name, index, &grid.parts(), &mut addresses, place.stream())
        }
    }

    /// What the kernel takes on the current device, which has this index.
    fn facts(&self, index: i32) -> Result<Arc<LaunchFacts>> {
        if let Some(facts) = lock(&self.inner.facts).get(&index) {
            return Ok(Arc::clone(facts));
        }
        // Not under the lock: loading may wait for other threads' work. Two threads may do it both.
        let facts = self.inner.handle.prepare(index).map_err(|(message, capability)| {
            let (major, minor) = (capability / 10, capability % 10);
            self.failed(format!(
                "{message}; the image is {}, and the GPU {index} has compute capability {major}.{minor}",
                self.inner.image
            ))
        })?;
        let facts = Arc::new(facts);
        lock(&self.inner.facts).insert(index, Arc::clone(&facts));
        Ok(facts)
    }

    fn failed(&self, message: String) -> Error {
        Error::Launch { kernel: self.inner.name.clone(), message }
    }
}

/// The library of an image, which is loaded unless equal bytes already are.
fn library(op: &str, image: Image, bytes: Arc<[u8]>) -> Result<ffi::LibraryHandle> {
    let mut libraries = lock(&LIBRARIES);
    let libraries = libraries.get_or_insert_default();
    if let Some(library) = libraries.get(&bytes) {
        return Ok(*library);
    }
    let text;
    let whole = match image {
        // CUDA reads a text up to a zero.
        Image::Ptx => {
            text = [&bytes, &b"\0"[..]].concat();
            &text
        }
        Image::Cubin(_) | Image::Fatbin => &bytes[..],
    };
    // SAFETY: `Image::of` has checked the extent of a cubin or fatbin, and the text ends with a zero.
    let library =
        unsafe { ffi::LibraryHandle::load(op, whole) }.map_err(|error| with_image(error, image))?;
    libraries.insert(bytes, library);
    Ok(library)
}

/// CUDA's error, with what the image is: often it is one for another architecture.
fn with_image(error: Error, image: Image) -> Error {
    match error {
        Error::Cuda { op, reason } => {
            Error::Cuda { op, reason: format!("{reason}; the image is {image}") }
        }
        other => other,
    }
}
