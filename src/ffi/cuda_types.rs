//! Plain structs of CUDA that cross the C boundary, and that [`crate::cuda`] gives to users.

use std::ffi::c_void;

/// What a CUDA device is, as Python's `torch.cuda.get_device_properties` says it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// The product's name, such as `NVIDIA H200`.
    pub name: String,
    /// The first number of the compute capability: 9 of 9.0.
    pub major: i32,
    /// The second number of the compute capability.
    pub minor: i32,
    /// The number of streaming multiprocessors.
    pub multi_processor_count: u32,
    /// In bytes.
    pub total_memory: u64,
    /// In bytes.
    pub l2_cache_size: u64,
    /// In bytes.
    pub shared_memory_per_multiprocessor: u64,
    /// The highest rate of the multiprocessors' clock, in kHz; 0 if CUDA does not tell it, as for the
    /// following two.
    pub clock_rate: u32,
    /// The highest rate of the memory's clock, in kHz. Two bits per line move in each cycle.
    pub memory_clock_rate: u32,
    /// The number of lines between the device and its memory.
    pub memory_bus_width: u32,
}

/// How much of a device's memory libtorch's allocator holds. All fields are zero under
/// `PYTORCH_NO_CUDA_MEMORY_CACHING`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes in use by tensors.
    pub allocated: u64,
    /// The maximum of [`MemoryStats::allocated`] since the start or since
    /// [`reset_peak_memory_stats`](crate::cuda::reset_peak_memory_stats).
    pub peak_allocated: u64,
    /// Bytes taken from CUDA: those in use by tensors, and those kept for later tensors.
    pub reserved: u64,
    /// The maximum of [`MemoryStats::reserved`].
    pub peak_reserved: u64,
    /// How often CUDA had no memory left, so that the allocator released its cache and tried again.
    pub retries: u64,
    /// How often the second try failed, too.
    pub out_of_memory: u64,
}

/// A stream as represented in `csrc/cuda/stream.cpp`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamParts {
    pub(crate) raw: *mut c_void,
    pub(crate) id: i64,
    pub(crate) device: i32,
}

// SAFETY: it only identifies a stream, and any thread may call CUDA's functions on streams.
unsafe impl Send for StreamParts {}
// SAFETY: as for `Send`.
unsafe impl Sync for StreamParts {}

impl StreamParts {
    #[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
    pub(crate) fn none() -> Self {
        StreamParts { raw: std::ptr::null_mut(), id: 0, device: 0 }
    }
}

/// `KernelGrid` of `csrc/cuda/kernel.cpp`.
#[doc(alias = "tch_extension::KernelGrid")]
#[repr(C)]
#[derive(Debug)]
pub(crate) struct LaunchGrid {
    pub(crate) blocks: [u32; 3],
    pub(crate) threads: [u32; 3],
    /// 0 if no cluster is asked for.
    pub(crate) cluster: [u32; 3],
    pub(crate) shared: u64,
}

/// What a kernel takes on a device.
#[derive(Debug)]
pub(crate) struct LaunchFacts {
    /// 10 * major + minor.
    pub(crate) capability: i32,
    /// In a block.
    pub(crate) max_threads: u32,
    pub(crate) static_shared: u64,
    /// The most dynamic shared memory that a block can have.
    pub(crate) max_shared: u64,
    /// The number of parameters, if CUDA tells it.
    pub(crate) params: Option<usize>,
    /// Their sizes, of the first ones if there are very many.
    pub(crate) sizes: Vec<usize>,
}
