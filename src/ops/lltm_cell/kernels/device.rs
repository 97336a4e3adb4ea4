//! What plans need to know about a GPU.

use crate::Result;
#[cfg(tch_extension_cuda)]
use crate::cuda::per_device::PerDevice;
use crate::ops::kinds::Device;

/// The number of multiprocessors of a GPU that can run the tensor-core kernel; 0 for any other GPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TensorCores {
    pub processors: i64,
}

impl TensorCores {
    #[cfg(test)]
    pub const H200: TensorCores = TensorCores { processors: 132 };

    pub fn are_there(self) -> bool {
        self.processors > 0
    }

    pub fn of(device: Device) -> Result<TensorCores> {
        #[cfg(tch_extension_cuda)]
        {
            static KNOWN: PerDevice<TensorCores> = PerDevice::new();
            KNOWN.of("lltm_cell", device, |_, found| {
                // SAFETY: the function only queries the current device, which `KNOWN.of` has set.
                found.processors =
                    i64::from(unsafe { tch_extension_lltm_cell_hopper_processors_cuda() });
                None
            })
        }
        #[cfg(not(tch_extension_cuda))]
        {
            let _ = device;
            Ok(TensorCores::default())
        }
    }
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_lltm_cell_hopper_processors_cuda() -> i32;
}
