//! What plans need to know about a GPU. `csrc/recurrent` says which of its kernels run on it, and how
//! many of their blocks run at a time.

use super::{cudnn, onednn};
use crate::Result;
#[cfg(tch_extension_cuda)]
use crate::cuda::per_device::{PerDevice, constant};
use crate::ops::kinds::Device;
use crate::ops::recurrent::plan::Way;

/// How many clusters of large blocks a GPU runs at a time, of 8 and of 16 blocks each. Both are 0
/// if the GPU has no clusters, or if there is no code for it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clusters {
    pub of_8: i64,
    pub of_16: i64,
}

impl Clusters {
    #[cfg(test)]
    pub const H200: Clusters = Clusters { of_8: 15, of_16: 7 };

    pub fn are_there(self) -> bool {
        self.of_8 > 0
    }

    pub fn of(device: Device) -> Result<Clusters> {
        #[cfg(tch_extension_cuda)]
        {
            static KNOWN: PerDevice<Clusters> = PerDevice::new();
            KNOWN.of("recurrent", device, |index, clusters| {
                let mut counts = [0; 2];
                // SAFETY: the C side fills both elements of `counts`, and returns null or a pointer
                // to a constant string.
                let error = unsafe {
                    constant(tch_extension_recurrent_cluster_device_cuda(
                        index,
                        counts.as_mut_ptr(),
                    ))
                };
                *clusters = Clusters { of_8: counts[0], of_16: counts[1] };
                error
            })
        }
        #[cfg(not(tch_extension_cuda))]
        {
            let _ = device;
            Ok(Clusters::default())
        }
    }
}

/// How many blocks a GPU runs at the same time, one on each multiprocessor; 0 if there is no code
/// for the GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Grid {
    pub blocks: i64,
}

impl Grid {
    #[cfg(test)]
    pub const H200: Grid = Grid { blocks: 132 };

    pub fn is_there(self) -> bool {
        self.blocks > 0
    }

    pub fn blocks(self) -> i64 {
        self.blocks
    }

    pub fn of(device: Device) -> Result<Grid> {
        #[cfg(tch_extension_cuda)]
        {
            static KNOWN: PerDevice<Grid> = PerDevice::new();
            // SAFETY: the C side fills `blocks`, and returns null or a pointer to a constant
            // string.
            KNOWN.of("recurrent", device, |index, grid| unsafe {
                constant(tch_extension_recurrent_grid_device_cuda(index, &mut grid.blocks))
            })
        }
        #[cfg(not(tch_extension_cuda))]
        {
            let _ = device;
            Ok(Grid::default())
        }
    }
}

impl Way {
    /// Whether a device has kernels for this way.
    ///
    /// # Errors
    /// When CUDA fails.
    pub fn is_on(self, device: tch::Device) -> Result<bool> {
        let device = Device::from(device);
        Ok(match self {
            Way::Resident | Way::Cluster => Clusters::of(device)?.are_there(),
            Way::TensorCores | Way::Grid | Way::PlainGrid | Way::WideGrid | Way::CrowdedGrid => {
                Grid::of(device)?.is_there()
            }
            Way::Cudnn => device.is_cuda() && cudnn::is_enabled(),
            Way::Onednn => device == Device::Cpu && onednn::is_enabled(),
            Way::Packed => device == Device::Cpu,
            Way::Block | Way::Fused => device.is_cuda(),
            Way::Step => device.is_cuda() || device == Device::Cpu,
            Way::Automatic | Way::Cells => true,
        })
    }
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    /// Writes how many clusters of 8 and of 16 blocks run at a time.
    fn tch_extension_recurrent_cluster_device_cuda(
        device: i32,
        clusters: *mut i64,
    ) -> *const std::ffi::c_char;
    /// Writes how many blocks run at a time.
    fn tch_extension_recurrent_grid_device_cuda(
        device: i32,
        blocks: *mut i64,
    ) -> *const std::ffi::c_char;
}
