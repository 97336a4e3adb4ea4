//! How much of the parameters a block takes at a time, how many matrices are orthogonalised at once, and how.

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

/// The number of matrices, of as many as there are, that are orthogonalised at once: of 64 Mi values, or, in
/// `Half`, more of them, because a GPU's last tiles leave fewer multiprocessors idle the more matrices there
/// are. X before and after a product and four matrices of its smaller side take 1.5 GiB then, or less.
pub(super) fn matrices(count: usize, rows: i64, columns: i64, is_in_half: bool) -> usize {
    let len = rows.saturating_mul(columns).max(1);
    let smaller = rows.min(columns);
    let of_smaller = smaller.saturating_mul(smaller).saturating_mul(4);
    let most = match is_in_half {
        false => (64 << 20) / len,
        true => (768 << 20) / len.saturating_mul(2).saturating_add(of_smaller),
    };
    let most = usize::try_from(most).unwrap_or(1).max(1);
    // Batches of about one size.
    count.div_ceil(count.div_ceil(most).max(1)).max(1)
}

/// Whether all that the iterations compute of matrices of norm 1 is far below the largest number of
/// `Half`, with X times 16, and times `ratio` in the end.
pub(super) fn fits_half((a, b, c): (f64, f64, f64), steps: usize, ratio: f64) -> bool {
    const POINTS: u32 = 256;
    // The largest singular value, and the largest factor by which one changed.
    let (mut value, mut factor) = (1.0, 1.0_f64);
    for _ in 0..steps {
        let at = |point: u32| value * f64::from(point) / f64::from(POINTS);
        let polynomial = |x: f64| (a + b * x.powi(2) + c * x.powi(4)).abs();
        factor = (0..=POINTS).map(|point| polynomial(at(point))).fold(factor, f64::max);
        value = (0..=POINTS).map(|point| at(point) * polynomial(at(point))).fold(0.0, f64::max);
        if value > 2.0 {
            return false;
        }
    }
    // Two iterations are one product, or one of them and the last ratio.
    factor.powi(3) * ratio.max(1.0) <= f64::from(1 << 15)
}

/// Whether the kernel for symmetric products takes less time than one that computes all values, of so many
/// matrices of `n` rows: whether a large GPU needs fewer rounds of its multiprocessors. That kernel's
/// tiles of 256 × 256 values each take two of them, and the other's of 128 × 256 one.
pub(super) fn has_symmetric_kernel(matrices: i64, n: i64) -> bool {
    const PROCESSORS: u64 = 132;
    let [n, matrices] = [n, matrices].map(i64::unsigned_abs);
    let rounds = |tiles: u64, at_once| tiles.saturating_mul(matrices).div_ceil(at_once);
    let side = n.div_ceil(256);
    let (lower, all) = (side.saturating_mul(side + 1) / 2, side.saturating_mul(n.div_ceil(128)));
    n % 8 == 0 && rounds(lower, PROCESSORS / 2) < rounds(all, PROCESSORS)
}

/// How many iterations are one product with X, one segment after another: one each, or in the Gram form
/// two and one in turns, if that takes fewer operations. Three at a time, or two after two, lose the small
/// singular values of matrices with one large column.
pub(super) fn segments(steps: usize, rows: i64, columns: i64, has_kernel: bool) -> Vec<usize> {
    // The tiles on the diagonal are computed whole.
    let symmetric = if has_kernel { 0.6 } else { 1.0 };
    let longer = rows.max(columns) as f64 / rows.min(columns).max(1) as f64;
    // In products of n³ for n rows: G and the product with X; Z; and for each further iteration two for G,
    // one for Z and one for the product of all Z.
    let of_segment = |steps: &usize| {
        longer * (symmetric + 1.0) + symmetric * (1.0 + 4.0 * (*steps as f64 - 1.0))
    };
    let operations = |segments: &[usize]| segments.iter().map(of_segment).sum::<f64>();
    let plain = vec![1; steps];
    let (mut gram, rest) = ([2, 1].repeat(steps / 3), steps % 3);
    gram.extend((rest > 0).then_some(rest));
    if operations(&gram) < operations(&plain) { gram } else { plain }
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
    fn large_matrices_are_orthogonalised_in_batches_of_one_size() {
        let of = |in_half| move |(count, rows, columns)| matrices(count, rows, columns, in_half);
        let of_llama = [(32, 2048, 2048), (32, 512, 2048), (32, 8192, 2048), (16, 2048, 8192)];
        assert_eq!(of_llama.map(of(true)), [32, 32, 16, 16]);
        assert_eq!(of_llama.map(of(false)), [16, 32, 4, 4]);
        assert_eq!(of(true)((33, 8192, 2048)), 11);
        for in_half in [false, true] {
            let huge = [(3, 1 << 20, 1 << 20), (2, i64::MAX, 2), (1, 1, 1), (0, 4, 4)];
            assert_eq!(huge.map(of(in_half)), [1, 1, 1, 1]);
        }
    }

    #[test]
    fn fewer_operations_decide_the_form() {
        for has_kernel in [false, true] {
            assert_eq!(segments(5, 2048, 2048, has_kernel), [1; 5]);
            assert_eq!(segments(5, 2048, 8192, has_kernel), [2, 1, 2]);
            assert_eq!(segments(5, 8192, 2048, has_kernel), [2, 1, 2]);
        }
        let wide = |steps| segments(steps, 1, 4, false);
        assert_eq!(
            [0, 1, 2, 3, 4].map(wide),
            [vec![], vec![1], vec![2], vec![2, 1], vec![2, 1, 1]]
        );
        assert_eq!([6, 8].map(wide), [vec![2, 1, 2, 1], vec![2, 1, 2, 1, 2]]);
    }

    #[test]
    fn the_symmetric_kernel_is_for_many_tiles() {
        let large = [(16, 2048), (4, 2048), (1, 8192), (24, 768), (16, 2056)];
        assert_eq!(large.map(|(matrices, n)| has_symmetric_kernel(matrices, n)), [true; 5]);
        let others = [(1, 2048), (32, 512), (0, 2048), (16, 2044), (1, 1), (i64::MAX, 7)];
        assert_eq!(others.map(|(matrices, n)| has_symmetric_kernel(matrices, n)), [false; 6]);
    }

    #[test]
    fn coefficients_that_could_overflow_are_found() {
        let torchs = (3.4445, -4.7750, 2.0315);
        assert!(fits_half(torchs, 5, 1.0) && fits_half(torchs, 99, 18.2));
        assert!(fits_half((2.0, -1.5, 0.5), 3, 2.0) && fits_half((1.0, 0.0, 0.0), 0, 1.0));
        assert!(!fits_half(torchs, 5, 1e4));
        for grows in [(2.5, 0.0, 0.0), (1.0, 2.0, 0.0), (3.0, -40.0, 30.0), (f64::MAX, 0.0, 0.0)] {
            assert!(!fits_half(grows, 5, 1.0), "{grows:?}");
        }
    }
}
