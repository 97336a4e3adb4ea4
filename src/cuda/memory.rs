//! libtorch's CUDA memory.

use super::{device_index, ffi};
use crate::Result;
use tch::Device;

/// What libtorch's allocator holds of a device's memory. All zero under
/// `PYTORCH_NO_CUDA_MEMORY_CACHING`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryStats {
    /// Bytes of tensors.
    pub allocated: u64,
    /// The most there was of [`MemoryStats::allocated`], since the start or
    /// [`reset_peak_memory_stats`].
    pub peak_allocated: u64,
    /// Bytes taken from CUDA: those of tensors, and those kept for later ones.
    pub reserved: u64,
    /// The most there was of [`MemoryStats::reserved`].
    pub peak_reserved: u64,
    /// How often CUDA had no memory left and the allocator gave back what it kept, to try again.
    pub retries: u64,
    /// How often that did not help.
    pub out_of_memory: u64,
}

/// What libtorch's allocator holds of the memory of `device`.
///
/// ```no_run
/// # use tch::{Device, Kind, Tensor};
/// use tch_extension::cuda::{memory_stats, reset_peak_memory_stats};
///
/// reset_peak_memory_stats(Device::Cuda(0))?;
/// let before = memory_stats(Device::Cuda(0))?.allocated;
/// let _x = Tensor::zeros([1 << 20], (Kind::Float, Device::Cuda(0)));
/// println!("{} bytes more at most", memory_stats(Device::Cuda(0))?.peak_allocated - before);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When `device` is no CUDA device that is there, or this build has no CUDA.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    let op = "memory_stats";
    ffi::memory_stats(op, device_index(op, device)?)
}

/// Counts the peaks of [`memory_stats`] from now on.
///
/// ```no_run
/// # use tch::Device;
/// tch_extension::cuda::reset_peak_memory_stats(Device::Cuda(0))?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As [`memory_stats`].
pub fn reset_peak_memory_stats(device: Device) -> Result<()> {
    let op = "reset_peak_memory_stats";
    ffi::reset_peak_memory_stats(op, device_index(op, device)?)
}

/// Gives memory that libtorch keeps and no tensor uses back to CUDA, on every device. Not during a
/// capture.
///
/// ```no_run
/// tch_extension::cuda::empty_cache()?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When there is no CUDA device, or this build has no CUDA.
pub fn empty_cache() -> Result<()> {
    let op = "empty_cache";
    // Device 0 stands for all: the allocator needs one.
    device_index(op, Device::Cuda(0))?;
    ffi::empty_cache(op)
}
