//! The sums of the columns of a matrix, which several kernels compute among other things.

use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::{checked, optional_ptr};
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// The sums of the columns of a matrix, for example the gradient of a bias. The CPU kernels
/// (cpu_column_sums.h) and the CUDA kernels (cuda_column_sums.h) share this struct.
///
/// The rows are cut into slabs. The kernel writes the sums of each slab to `partial`, and a second
/// kernel adds these up. If there is a single slab, its sums are the result. The cuts depend only
/// on sizes, strides and alignment, so that the same inputs give the same bits.
///
/// Rows whose length is not a multiple of 16 bytes cannot be read 16 bytes at a time, because most
/// of them do not begin at a multiple of 16 bytes. If the matrix is contiguous, F rows can be read
/// as one row that is F times as long (folding): each of these long rows begins at a multiple of 16
/// bytes. Each column then has F sums, which the second kernel adds up.
#[repr(C)]
pub(super) struct ColumnSums {
    /// M, the number of rows.
    pub rows: i64,
    /// N, the number of columns.
    pub columns: i64,
    /// S, the number of slabs: at least 1, and on CUDA at most 65535.
    pub slabs: i64,
    /// The sums of the slabs, `[S·F, N]` of the compute kind (float for the half kinds); null if
    /// S·F is 1.
    pub partial: *mut c_void,
    /// The result, `[N]`.
    pub sums: *mut c_void,
    /// F: on CUDA this many rows are read as one; 0 and 1 switch folding off.
    pub fold: i64,
}

/// Whether all pointers are multiples of 16 bytes.
pub(super) fn is_aligned(pointers: &[*mut c_void]) -> bool {
    pointers.iter().all(|pointer| pointer.addr() % 16 == 0)
}

impl ColumnSums {
    /// The sums of the columns of a `[rows, columns]` matrix, to be written to `sums`
    /// (`[columns]`). `may_fold` says that the matrix is contiguous and begins at a multiple of 16
    /// bytes. Returned next to the struct is the memory that its `partial` points to, which the
    /// caller keeps until the kernels have been launched.
    pub(super) fn new(
        (rows, columns): (i64, i64),
        may_fold: bool,
        sums: &mut Tensor,
        like: (Kind, Device),
    ) -> Result<(Self, Option<Tensor>)> {
        let (slabs, fold) = match like.1 {
            Device::Cuda(_) => cuts_on_cuda(rows, columns, like.0, may_fold),
            _ => (slabs_on_cpu(rows), 1),
        };
        let kind = if like.0 == Kind::Double { Kind::Double } else { Kind::Float };
        let size = [slabs * fold, columns];
        let memory = if size[0] > 1 { Some(empty_of(&size, (kind, like.1))?) } else { None };
        let partial = optional_ptr("partial", memory.as_ref(), &size, (kind, like.1))?;
        let sums = checked("sums", sums, &[columns], like)?;
        Ok((ColumnSums { rows, columns, slabs, partial, sums, fold }, memory))
    }

    /// No sums at all, for kernels that can leave them out.
    pub(super) fn none((rows, columns): (i64, i64)) -> Self {
        let null = std::ptr::null_mut();
        ColumnSums { rows, columns, slabs: 1, partial: null, sums: null, fold: 1 }
    }
}

/// How many slabs the rows are cut into on the CPU: enough for every thread, and each short enough
/// to keep rounding errors small.
fn slabs_on_cpu(rows: i64) -> i64 {
    const ROWS: i64 = 1024;
    rows.div_euclid(ROWS) + i64::from(rows.rem_euclid(ROWS) > 0) + i64::from(rows == 0)
}

/// How many values 16 bytes hold.
fn lanes(kind: Kind) -> i64 {
    16 / kind.elt_size_in_bytes() as i64
}

/// The number of slabs on CUDA, and how many rows are read as one.
fn cuts_on_cuda(rows: i64, columns: i64, kind: Kind, may_fold: bool) -> (i64, i64) {
    /// Folding needs a second kernel. Below this size, reading value by value takes no longer than
    /// that kernel does.
    const FEWEST_BYTES: i64 = 4 << 20;
    /// With fewer long rows, the partial sums would be a large part of the data that is read.
    const FEWEST_LONG_ROWS: i64 = 8;
    let slabs = slabs_on_cuda(rows, columns, kind);
    let is_odd = columns % lanes(kind) != 0;
    let bytes = rows.saturating_mul(columns).saturating_mul(kind.elt_size_in_bytes() as i64);
    if !may_fold || !is_odd || bytes < FEWEST_BYTES {
        return (slabs, 1);
    }
    // A power of two, because the number of lanes is one.
    let fold = lanes(kind) >> columns.trailing_zeros();
    if rows / fold < FEWEST_LONG_ROWS {
        return (slabs, 1);
    }
    let most = BLOCKS / fold;
    let slabs = most_slabs_on_cuda(rows / fold, columns.saturating_mul(fold), kind);
    (slabs.clamp(1, most), fold)
}

const BLOCKS: i64 = 1024;

/// The number of slabs without folding. Instead of fewer than four slabs there is one, which saves
/// the second kernel.
fn slabs_on_cuda(rows: i64, columns: i64, kind: Kind) -> i64 {
    let slabs = most_slabs_on_cuda(rows, columns, kind);
    if slabs < 4 { 1 } else { slabs }
}

/// As many slabs as give enough blocks to fill a large GPU, but at least four rows for each thread.
fn most_slabs_on_cuda(rows: i64, columns: i64, kind: Kind) -> i64 {
    const THREADS: i64 = 256;
    let lanes = lanes(kind);
    let vectors = if columns % lanes == 0 { columns / lanes } else { columns };
    let side_by_side = (0..=4).map(|power| 1 << power).find(|&x| x >= vectors).unwrap_or(16);
    let tiles = (vectors / side_by_side).max(1);
    (BLOCKS / tiles).min(rows / (4 * (THREADS / side_by_side)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slabs_are_few_and_never_none() {
        assert_eq!([0, 1, 1024, 1025, 5000].map(slabs_on_cpu), [1, 1, 1, 2, 5]);
        let cuda = |rows, columns| slabs_on_cuda(rows, columns, Kind::Half);
        assert_eq!([cuda(0, 0), cuda(0, 8), cuda(1, 1), cuda(200, 4096)], [1; 4]);
        assert_eq!((cuda(256, 1024), cuda(8192, 1024), cuda(1 << 40, 1024)), (4, 128, 128));
        assert_eq!((cuda(1 << 40, 1), cuda(1 << 40, 1 << 30)), (1024, 1));
        for columns in [1, 2, 3, 31, 33, 255, 256, 257, 100_000] {
            for rows in [0, 1, 63, 64, 65, 1000, 1 << 20] {
                for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
                    let slabs = slabs_on_cuda(rows, columns, kind);
                    assert!((1..=1024).contains(&slabs) && (slabs == 1 || slabs < rows));
                }
            }
        }
    }

    #[test]
    fn long_matrices_of_odd_rows_are_folded() {
        let cuts = |rows, columns, kind| cuts_on_cuda(rows, columns, kind, true);
        assert_eq!(cuts(87_804, 2671, Kind::Half), (6, 8));
        assert_eq!(cuts(87_804, 2671, Kind::Float), (6, 4));
        assert_eq!(cuts(87_804, 2671, Kind::Double), (6, 2));
        assert_eq!(cuts(3071, 7142, Kind::BFloat16), (4, 4));
        // Not folded: rows of whole vectors, a small matrix, and a matrix that may not be folded.
        assert_eq!(cuts(87_804, 2672, Kind::Half).1, 1);
        assert_eq!(cuts(700, 2671, Kind::Half), (slabs_on_cuda(700, 2671, Kind::Half), 1));
        assert_eq!(cuts_on_cuda(87_804, 2671, Kind::Half, false).1, 1);
        // Few rows are not folded: their partial sums would be larger than the matrix.
        assert_eq!((cuts(63, 40_001, Kind::Half).1, cuts(64, 40_001, Kind::Half).1), (1, 8));
        assert_eq!(cuts(1, 4_194_305, Kind::Half).1, 1);
        // The shapes of the operators' own tests.
        for (rows, columns) in [(70_003, 31), (4099, 513), (1031, 2670), (65_536, 127)] {
            for kind in [Kind::Half, Kind::Float] {
                assert!(cuts(rows, columns, kind).1 > 1, "{rows} {columns} {kind:?}");
            }
        }
        assert_eq!(cuts(8195, 1028, Kind::Half), (64, 2));
        for columns in [1, 2, 3, 5, 12, 31, 1001, 1_000_003, (1 << 40) + 1] {
            for rows in [1, 7, 100, 70_003, 1 << 22] {
                for kind in [Kind::Double, Kind::Float, Kind::Half] {
                    let (slabs, fold) = cuts(rows, columns, kind);
                    assert!(slabs >= 1 && slabs * fold <= BLOCKS);
                    assert!(fold == 1 || (columns.saturating_mul(fold)) % lanes(kind) == 0);
                }
            }
        }
    }
}
