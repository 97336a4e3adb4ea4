//! The kernels of `csrc/nn`.

use crate::ffi::facts::empty_of;
use crate::ffi::tensor::touch;
use crate::ffi::{checked, kind_code};
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// Rows, which are added to those of a table at sorted indices.
///
/// The indices are cut into chunks. The first kernel adds the rows of each chunk whose indices are
/// equal, a run, and adds the sum to the table's row. Where a run crosses a border, it writes what
/// it has of it, and the second kernel adds up these parts in order.
#[repr(C)]
struct AddRows {
    /// N, the number of indices.
    count: i64,
    /// V, the number of the table's rows.
    rows: i64,
    /// D, the number of columns.
    columns: i64,
    /// The `TchExtensionKind` of the table.
    kind: i32,
    reserved: i32,
    /// `[N]`, ascending.
    indices: *const i32,
    /// `[N]`: which row belongs to each index.
    places: *const i64,
    /// `[N, D]`.
    grad: *const c_void,
    /// `[V, D]`.
    table: *mut c_void,
    /// `[⌈N / CHUNK⌉, 2, D]`: what a chunk has of a run that began before it, and of one that goes on
    /// after it. In half kinds it is of kind `Float`.
    partial: *mut c_void,
}

/// The indices of a chunk; `kChunk` in `csrc/nn/embedding.cu`.
const CHUNK: i64 = 32;

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_nn_add_rows_cuda(
        params: *const AddRows,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// Whether [`add_rows`] computes on this device, for so many rows of a table and indices.
pub(super) fn adds_rows(device: Device, rows: i64, indices: i64) -> bool {
    let is_known = |count: i64| count <= i64::from(i32::MAX);
    crate::cuda::is_compiled() && device.is_cuda() && is_known(rows) && is_known(indices)
}

/// Adds each row of `grad` (`[N, D]`) to that of `table` (`[V, D]`, contiguous, on CUDA) at its index
/// (`[N]`), always in the same order. In half kinds the sum of a row is computed in `Float`, and rounded
/// once. Equal indices cost no more than others.
pub(super) fn add_rows(table: &mut Tensor, grad: &Tensor, indices: &Tensor) -> Result<()> {
    let (like, (rows, columns)) = ((table.f_kind()?, table.device()), table.size2()?);
    let count = indices.size1()?;
    let (sorted, places) = indices.f_to_kind(Kind::Int)?.f_sort_stable(true, 0, false)?;
    let chunks = count / CHUNK + i64::from(count % CHUNK != 0);
    let wide = if like.0 == Kind::Double { Kind::Double } else { Kind::Float };
    let of_partial = (wide, like.1);
    let partial = empty_of(&[chunks, 2, columns], of_partial)?;
    let params = AddRows {
        count,
        rows,
        columns,
        kind: kind_code(like.0)?,
        reserved: 0,
        indices: checked("indices", &sorted, &[count], (Kind::Int, like.1))?.cast_const().cast(),
        places: checked("places", &places, &[count], (Kind::Int64, like.1))?.cast_const().cast(),
        grad: checked("grad", grad, &[count, columns], like)?,
        table: checked("table", table, &[rows, columns], like)?,
        partial: checked("partial", &partial, &[chunks, 2, columns], of_partial)?,
    };
    if !matches!(like.0, Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16) {
        return Err(Error::msg("internal error: rows of this kind are not added in place"));
    }
    // SAFETY: all addresses were checked to belong to arrays of the stated sizes and kinds. The table is
    // borrowed exclusively, and the partial sums were made for this call. The places are a permutation,
    // and the kernels skip indices that are no rows.
    #[cfg(tch_extension_cuda)]
    crate::cuda::launch(like.1, |stream| unsafe {
        tch_extension_nn_add_rows_cuda(&params, stream)
    })?;
    #[cfg(not(tch_extension_cuda))]
    let _ = params;
    touch(table);
    Ok(())
}
