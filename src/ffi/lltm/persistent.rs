//! `csrc/lltm/persistent.h`: which sequences one kernel computes from the first step to the last.

use super::Sizes;
use crate::Result;
use tch::{Device, Kind};

/// How many clusters of large blocks a GPU runs at a time; zeros where it has none, or no code for them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clusters {
    of_8: i64,
    of_16: i64,
}

impl Clusters {
    pub fn are_there(self) -> bool {
        self.of_8 > 0
    }

    /// Asked once a device.
    pub fn of(device: Device) -> Result<Clusters> {
        #[cfg(tch_extension_cuda)]
        if let Device::Cuda(index) = device {
            use std::sync::OnceLock;
            static KNOWN: [OnceLock<Clusters>; 64] = [const { OnceLock::new() }; 64];
            let known = KNOWN.get(index);
            if let Some(clusters) = known.and_then(OnceLock::get) {
                return Ok(*clusters);
            }
            let _guard = crate::cuda::DeviceGuard::new(device)?;
            let mut counts = [0; 2];
            // SAFETY: the C side fills both places, and returns null or a constant text.
            let error = unsafe { tch_extension_lltm_persistent_device(index as i32, counts.as_mut_ptr()) };
            if !error.is_null() {
                // SAFETY: as above.
                let reason = unsafe { std::ffi::CStr::from_ptr(error) }.to_string_lossy().into_owned();
                return Err(crate::Error::Cuda { op: "lltm".to_string(), reason });
            }
            let [of_8, of_16] = counts;
            let clusters = Clusters { of_8, of_16 };
            return Ok(*known.map_or(&clusters, |known| known.get_or_init(|| clusters)));
        }
        let _ = device;
        Ok(Clusters::default())
    }
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_lltm_persistent_device(device: i32, clusters: *mut i64) -> *const std::ffi::c_char;
}

/// As the kernels count: the values of all gates.
pub(super) fn counts_in_32_bits(Sizes { steps, batch, hidden, .. }: Sizes) -> bool {
    let values = [batch, hidden, 3].iter().try_fold(steps, |product, &size| product.checked_mul(size));
    values.is_some_and(|values| i32::try_from(values).is_ok())
}

/// Rows that a cluster computes.
const ROWS: i64 = 8;

/// A kernel, and what it takes.
pub(super) struct Kernel {
    /// Blocks that share rows.
    pub cluster: i64,
    /// How many clusters run at a time.
    at_a_time: i64,
    /// What a step of each costs, forward and backward, in tenths of a microsecond: about, as measured on an H200 with few
    /// rows. What several turns cost is extrapolated.
    step: i64,
}

impl Kernel {
    /// The kernel for these sizes, if there is one: the weights have to fit on chip, and the kernel counts in 32 bits.
    pub fn new(sizes: Sizes, product: Kind, clusters: Clusters) -> Option<Kernel> {
        if !counts_in_32_bits(sizes) {
            return None;
        }
        let Sizes { batch, hidden, .. } = sizes;
        let groups = batch.saturating_add(ROWS - 1) / ROWS;
        let half = matches!(product, Kind::Half | Kind::BFloat16);
        // Of the smallest, several blocks share a multiprocessor.
        let of_8 = |share, step| Kernel { cluster: 8, at_a_time: share * clusters.of_8, step };
        let of_16 = |step| Kernel { cluster: 16, at_a_time: clusters.of_16, step };
        let found = match (half, hidden) {
            (false, ..=128) => of_8(1, 70),
            (true, ..=128) => of_8(2, 20),
            (true, ..=256) => of_8(1, 23),
            (true, ..=512) if groups <= clusters.of_16 => of_16(29),
            (true, ..=512) => of_8(1, 39),
            (true, ..=768) => of_16(53),
            _ => return None,
        };
        (found.at_a_time > 0).then_some(found)
    }

    /// Than one or two kernels for each step.
    pub fn is_faster(&self, sizes: Sizes) -> bool {
        /// Fewer are over before the weights are on chip.
        const FEW: i64 = 8;
        /// What a step costs the GPU on other paths, forward and backward, in the same tenths: about, in the half kinds. The
        /// host, two or more launches a step, costs more.
        const OTHERS: i64 = 130;

        let groups = sizes.batch.saturating_add(ROWS - 1) / ROWS;
        let turns = groups.saturating_add(self.at_a_time - 1) / self.at_a_time;
        sizes.steps >= FEW && turns.saturating_mul(self.step) <= OTHERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Clusters = Clusters { of_8: 15, of_16: 7 };

    fn sizes(steps: i64, batch: i64, hidden: i64) -> Sizes {
        Sizes { steps, batch, features: hidden, hidden }
    }

    fn faster(steps: i64, batch: i64, hidden: i64, kind: Kind) -> Option<i64> {
        let sizes = sizes(steps, batch, hidden);
        Kernel::new(sizes, kind, H200).filter(|kernel| kernel.is_faster(sizes)).map(|kernel| kernel.cluster)
    }

    #[test]
    fn kernels_suit_the_size() {
        assert_eq!(faster(512, 16, 128, Kind::BFloat16), Some(8));
        assert_eq!(faster(512, 16, 128, Kind::Double), Some(8));
        assert_eq!(faster(512, 120, 128, Kind::Float), Some(8));
        assert_eq!(faster(512, 121, 128, Kind::Float), None);
        assert_eq!(faster(512, 16, 129, Kind::Float), None);
        assert_eq!(faster(512, 1024, 128, Kind::Half), Some(8));
        assert_eq!(faster(512, 56, 512, Kind::Half), Some(16));
        assert_eq!(faster(512, 57, 512, Kind::Half), Some(8));
        assert_eq!(faster(512, 256, 512, Kind::Half), Some(8));
        assert_eq!(faster(512, 112, 768, Kind::Half), Some(16));
        // A third turn costs more than a kernel a step.
        assert_eq!(faster(512, 113, 768, Kind::Half), None);
        // Too few steps to pay for the weights.
        assert_eq!(faster(7, 16, 128, Kind::Half), None);
    }

    #[test]
    fn there_is_a_kernel_where_the_weights_fit() {
        let cluster = |clusters, batch, hidden| {
            Kernel::new(sizes(512, batch, hidden), Kind::Half, clusters).map(|kernel| kernel.cluster)
        };
        assert_eq!(cluster(H200, 57, 768), Some(16));
        assert_eq!(cluster(H200, 1, 769), None);
        // A GPU, or a part of one, without clusters of 16; without any.
        let part = Clusters { of_8: 1, of_16: 0 };
        assert_eq!(cluster(part, 16, 512), Some(8));
        assert_eq!(cluster(part, 16, 513), None);
        assert_eq!(cluster(Clusters::default(), 16, 4), None);
        // More than the kernel can count, and more than anybody can.
        assert_eq!(cluster(H200, 1 << 18, 4), Some(8));
        assert_eq!(cluster(H200, 1 << 19, 4), None);
        assert_eq!(cluster(H200, i64::MAX, 4), None);
    }
}
