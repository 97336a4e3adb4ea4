//! What a CUDA device is.

use super::{device_index, ffi};
use crate::Result;
#[doc(inline)]
pub use crate::ffi::cuda_types::DeviceProperties;
use tch::Device;

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
