//! Which product the CPU computes. On CUDA, `src/ops/gemm/plan.rs` chooses.

/// From this many columns on, each value of the left factor is used for at least one vector.
const LEAST_COLUMNS: i64 = 16;
/// With more multiplications, libtorch's product is as fast.
const MOST_MULTIPLICATIONS: i64 = 80_000_000;
/// The longest sum: a piece of the right factor then stays in the L1 cache.
const MOST_INNER: i64 = 1024;
/// The same on Intel's CPUs, for which MKL has its fastest kernels. Our own product is faster there
/// only where most of the time goes into calling MKL.
const MOST_INNER_ON_INTEL: i64 = 32;

/// Whether the product of `csrc/matmul_add_relu/cpu_product.cpp` is faster than libtorch's.
pub(super) fn small_product_is_faster([rows, inner, columns]: [i64; 3], is_intel: bool) -> bool {
    let most_inner = if is_intel { MOST_INNER_ON_INTEL } else { MOST_INNER };
    (1..=most_inner).contains(&inner)
        && (LEAST_COLUMNS..=MOST_MULTIPLICATIONS).contains(&columns)
        && rows <= MOST_MULTIPLICATIONS / columns / inner
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_products_are_bounded() {
        for (sizes, expected) in [
            ([1, 1, 16], [true, true]),
            ([1, 1, 15], [false, false]),
            ([20, 32, 20], [true, true]),
            ([20, 33, 20], [true, false]),
            ([20, 1024, 20], [true, false]),
            ([20, 1025, 20], [false, false]),
            ([20, 0, 20], [false, false]),
            ([5000, 32, 500], [true, true]),
            ([5001, 32, 500], [false, false]),
            ([i64::MAX, 32, i64::MAX], [false, false]),
        ] {
            let found = [false, true].map(|is_intel| small_product_is_faster(sizes, is_intel));
            assert_eq!(found, expected, "{sizes:?}");
        }
    }
}
