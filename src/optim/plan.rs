//! How much of the parameters a block takes at a time, and how many matrices are orthogonalised at once.

use tch::Device;

/// The number of values of a chunk, for spans of `total` values together.
///
/// A GPU has 4096 chunks or more where that leaves at least 1024 values each (one vector of 16
/// bytes per thread of a block): enough for all multiprocessors to end at about the same time. No
/// chunk is larger than 16384, because the last one of a span is partly empty. The number depends on
/// nothing else, so that sums are added up in the same order on each GPU.
pub(super) fn chunk(total: i64, device: Device) -> i64 {
    const SMALLEST: i64 = 1024;
    const LARGEST: i64 = 16384;
    const CHUNKS: u64 = 4096;
    match device {
        // As large as libtorch's grain, a fraction of a core's L2 cache.
        Device::Cpu => 8192,
        _ => {
            let share = (total.max(1).unsigned_abs() / CHUNKS).max(1).next_power_of_two();
            i64::try_from(share).unwrap_or(LARGEST).clamp(SMALLEST, LARGEST)
        }
    }
}

/// The number of matrices of `len` values that are orthogonalised at once. Their directions and what
/// becomes of them take 8 bytes per value at a time, and a product of 64 Mi values fills any GPU.
pub(super) fn matrices(len: i64) -> usize {
    const VALUES: i64 = 64 << 20;
    usize::try_from(VALUES / len.max(1)).unwrap_or(1).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_small_for_small_models() {
        let of = |total| chunk(total, Device::Cuda(0));
        assert_eq!([0, 1, 123_000, 4 << 20].map(of), [1024; 4]);
        assert_eq!([10_800_000, 124_439_808, i64::MAX].map(of), [4096, 16384, 16384]);
        assert_eq!(chunk(124_439_808, Device::Cpu), 8192);
    }

    #[test]
    fn large_matrices_are_orthogonalised_one_by_one() {
        assert_eq!([1, 2048 * 2048, 64 << 20, i64::MAX].map(matrices), [64 << 20, 16, 1, 1]);
    }
}
