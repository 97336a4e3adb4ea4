//! The memory of libtorch's CUDA allocator.

use super::{device_index, ffi};
use crate::Result;
#[doc(inline)]
pub use crate::ffi::cuda_types::MemoryStats;
use tch::Device;

/// How much of the memory of `device` libtorch's allocator holds.
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
/// When `device` is not an existing CUDA device, or this build has no CUDA.
pub fn memory_stats(device: Device) -> Result<MemoryStats> {
    let op = "memory_stats";
    ffi::memory_stats(op, device_index(op, device)?)
}

/// Starts to measure the peaks of [`memory_stats`] anew.
///
/// ```no_run
/// # use tch::Device;
/// tch_extension::cuda::reset_peak_memory_stats(Device::Cuda(0))?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// As for [`memory_stats`].
pub fn reset_peak_memory_stats(device: Device) -> Result<()> {
    let op = "reset_peak_memory_stats";
    ffi::reset_peak_memory_stats(op, device_index(op, device)?)
}

/// Gives memory that libtorch keeps but no tensor uses back to CUDA, on every device. Do not call
/// it during a capture.
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
    // This checks device 0 only, because the allocator just needs some CUDA device.
    device_index(op, Device::Cuda(0))?;
    ffi::empty_cache(op)
}
