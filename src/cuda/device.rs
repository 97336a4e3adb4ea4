//! What a CUDA device is.

use super::{device_index, ffi};
use crate::Result;
use tch::Device;

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
}

/// The properties of a CUDA device. libtorch asks CUDA for them once and keeps them.
///
/// ```no_run
/// # use tch::Device;
/// use tch_extension::cuda::{Grid, device_properties};
///
/// // A persistent kernel has one block for each multiprocessor, and each computes several tiles.
/// # let tiles = 4096;
/// let blocks = tiles.min(device_properties(Device::Cuda(0))?.multi_processor_count);
/// let grid = Grid::new([blocks, 1, 1], [256, 1, 1]);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// When `device` is not an existing CUDA device, or this build has no CUDA.
pub fn device_properties(device: Device) -> Result<DeviceProperties> {
    let op = "device_properties";
    ffi::device_properties(op, device_index(op, device)?)
}
