//! `csrc/include/tch_extension/column_sums.h`: sums of the columns of a matrix, as a part of some
//! kernels.

use crate::Result;
use crate::ffi::{checked, optional_ptr};
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// The C++ struct; a part of kernels' parameters.
#[repr(C)]
pub(super) struct ColumnSums {
    pub rows: i64,
    pub columns: i64,
    pub slabs: i64,
    pub partial: *mut c_void,
    pub sums: *mut c_void,
}

impl ColumnSums {
    /// For the columns of a `[rows, columns]`, into `sums` (`[columns]`). The second is the memory
    /// that the struct points to, to be kept until the kernels are started.
    pub(super) fn new(
        (rows, columns): (i64, i64),
        sums: &mut Tensor,
        like: (Kind, Device),
    ) -> Result<(Self, Option<Tensor>)> {
        let slabs = match like.1 {
            Device::Cuda(_) => slabs_on_cuda(rows, columns, like.0),
            _ => slabs_on_cpu(rows),
        };
        let kind = if like.0 == Kind::Double { Kind::Double } else { Kind::Float };
        let memory =
            if slabs > 1 { Some(Tensor::f_empty([slabs, columns], (kind, like.1))?) } else { None };
        let partial = optional_ptr("partial", memory.as_ref(), &[slabs, columns], (kind, like.1))?;
        let sums = checked("sums", sums, &[columns], like)?;
        Ok((ColumnSums { rows, columns, slabs, partial, sums }, memory))
    }

    /// None are wanted: for kernels that can do without.
    pub(super) fn none((rows, columns): (i64, i64)) -> Self {
        let null = std::ptr::null_mut();
        ColumnSums { rows, columns, slabs: 1, partial: null, sums: null }
    }
}

/// Enough for every thread, and short enough for rounding errors.
fn slabs_on_cpu(rows: i64) -> i64 {
    const ROWS: i64 = 1024;
    rows.div_euclid(ROWS) + i64::from(rows.rem_euclid(ROWS) > 0) + i64::from(rows == 0)
}

/// As many blocks as fill a large GPU, but at least four rows for each thread; one, when few would
/// be left, to save the second kernel.
fn slabs_on_cuda(rows: i64, columns: i64, kind: Kind) -> i64 {
    const BLOCKS: i64 = 1024;
    const THREADS: i64 = 256;
    let lanes = match kind {
        Kind::Double => 2,
        Kind::Float => 4,
        _ => 8,
    };
    let vectors = if columns % lanes == 0 { columns / lanes } else { columns };
    let side_by_side = (0..=4).map(|power| 1 << power).find(|&x| x >= vectors).unwrap_or(16);
    let tiles = (vectors / side_by_side).max(1);
    let slabs = (BLOCKS / tiles).min(rows / (4 * (THREADS / side_by_side)));
    if slabs < 4 { 1 } else { slabs }
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
}
