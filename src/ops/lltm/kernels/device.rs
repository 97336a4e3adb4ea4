//! What plans ask of a GPU: `csrc/lltm` says which of its kernels run there, and how many blocks of
//! them at a time.

use crate::Result;
#[cfg(tch_extension_cuda)]
use crate::ffi::once_a_device::{OnceADevice, constant};
use tch::Device;

/// How many clusters of large blocks a GPU runs at a time; zeros where it has none, or no code for
/// them.
#[repr(C)]
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
            static KNOWN: OnceADevice<Clusters> = OnceADevice::new();
            // SAFETY: the C side fills both places, and returns null or a constant text.
            KNOWN.of("lltm", device, |index, clusters| unsafe {
                constant(tch_extension_lltm_persistent_device(index, clusters))
            })
        }
        #[cfg(not(tch_extension_cuda))]
        {
            let _ = device;
            Ok(Clusters::default())
        }
    }
}

/// How many blocks a GPU runs at the same time, one on each multiprocessor; none where there is no
/// code for it.
#[repr(C)]
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
            static KNOWN: OnceADevice<Grid> = OnceADevice::new();
            // SAFETY: the C side fills the place, and returns null or a constant text.
            KNOWN.of("lltm", device, |index, grid| unsafe {
                constant(tch_extension_lltm_grid_device(index, grid))
            })
        }
        #[cfg(not(tch_extension_cuda))]
        {
            let _ = device;
            Ok(Grid::default())
        }
    }
}

/// The multiprocessors of a GPU that has the kernel; none elsewhere.
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
            static KNOWN: OnceADevice<TensorCores> = OnceADevice::new();
            KNOWN.of("lltm", device, |_, found| {
                // SAFETY: it asks the device that is current.
                found.processors =
                    i64::from(unsafe { tch_extension_lltm_cell_hopper_processors() });
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
    fn tch_extension_lltm_persistent_device(
        device: i32,
        clusters: *mut Clusters,
    ) -> *const std::ffi::c_char;
    fn tch_extension_lltm_grid_device(device: i32, grid: *mut Grid) -> *const std::ffi::c_char;
    fn tch_extension_lltm_cell_hopper_processors() -> i32;
}
