//! The kernels of `csrc/linear`.

use crate::ffi::facts::empty_of;
use crate::ffi::tensor::{describe, is_in_memory, is_plain, plain};
use crate::ffi::{checked, kind_code};
use crate::kernels::raw_kernels;
use crate::ops::column_sums::{ColumnSums, is_aligned};
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Tensor};

/// The parameters of the kernels for the bias' gradient.
#[repr(C)]
struct BiasGrad {
    /// The sums of M rows and N columns; the columns are the output features. `sums.sums` is db,
    /// `[N]`.
    sums: ColumnSums,
    /// The distance from a row of dY to the next, in elements.
    row_stride: i64,
    /// The `TchExtensionKind` of dY and db.
    kind: i32,
    reserved: i32,
    /// dY, `[M, N]`; the N elements of a row are adjacent.
    grad: *const c_void,
}

unsafe extern "C" {
    fn tch_extension_linear_bias_grad_finish_cpu(params: *const BiasGrad);
}

/// Matrices side by side, and the sums of their columns.
#[repr(C)]
struct Concatenate {
    /// The sums of M rows and N columns, those of all parts.
    sums: ColumnSums,
    /// The columns of each part; all rows begin at a multiple of 16 bytes.
    columns: [i64; 3],
    /// The `TchExtensionKind` of all.
    kind: i32,
    reserved: i32,
    /// `[M, columns]` each.
    parts: [*const c_void; 3],
    /// `[M, N]`.
    output: *mut c_void,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_linear_concatenate_cuda(
        params: *const Concatenate,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

raw_kernels! {
    "linear";
    /// Computes all sums on CUDA; on the CPU it computes the sums of each slab.
    fn run(BiasGrad) = tch_extension_linear_bias_grad_cpu, tch_extension_linear_bias_grad_cuda;
}

/// The sums of the columns of `grad` (`[M, N]`): `[N]`, of `grad`'s kind.
pub(crate) fn bias_grad(grad: &Tensor) -> Result<Tensor> {
    let grad = rows(grad)?;
    let size = grad.size2()?;
    let like = (grad.f_kind()?, grad.device());
    let mut grad_bias = empty_of(&[size.1], like)?;
    let is_contiguous = grad.stride()[0] == size.1;
    let may_fold = is_contiguous && is_aligned(&[grad.data_ptr()]);
    let (sums, _partial) = ColumnSums::new(size, may_fold, &mut grad_bias, like)?;
    let params = BiasGrad {
        sums,
        row_stride: grad.stride()[0],
        kind: kind_code(like.0)?,
        reserved: 0,
        grad: grad.data_ptr(),
    };
    // SAFETY: `rows` made sure that the elements of each row are adjacent in memory, and libtorch
    // that rows at this stride belong to the tensor. `ColumnSums` checked the arrays that are
    // written; they are new, so they overlap nothing that is read.
    unsafe { run(like.1, &params)? };
    if like.1 == Device::Cpu && params.sums.slabs > 1 {
        // SAFETY: as above; `run` has written the partial sums.
        unsafe { tch_extension_linear_bias_grad_finish_cpu(&params) };
    }
    Ok(grad_bias)
}

/// The parts of a gradient (`[M, columns]` each, on one device and of one kind) side by side, and the sums
/// of the columns, both made in one pass. `None` where there is no kernel for it: on the CPU, and for parts
/// with gaps or whose rows do not all begin at multiples of 16 bytes.
pub(super) fn concatenated(parts: &[Tensor; 3]) -> Result<Option<(Tensor, Tensor)>> {
    let (like, rows) = ((parts[0].f_kind()?, parts[0].device()), parts[0].size2()?.0);
    let lanes = 16 / like.0.elt_size_in_bytes() as i64;
    let mut columns = [0; 3];
    for (part, columns) in parts.iter().zip(&mut columns) {
        *columns = part.size2()?.1;
        let has_kernel = crate::cuda::is_compiled() && like.1.is_cuda() && is_plain(part);
        if !(has_kernel && *columns % lanes == 0 && is_aligned(&[part.data_ptr()])) {
            return Ok(None);
        }
    }
    let size = [rows, columns.iter().sum()];
    let (output, mut grad_bias) = (empty_of(&size, like)?, empty_of(&size[1..], like)?);
    let (sums, _partial) = ColumnSums::new((rows, size[1]), true, &mut grad_bias, like)?;
    let part = |place: usize| -> Result<*const c_void> {
        Ok(checked("part", &parts[place], &[rows, columns[place]], like)?.cast_const())
    };
    let params = Concatenate {
        sums,
        columns,
        kind: kind_code(like.0)?,
        reserved: 0,
        parts: [part(0)?, part(1)?, part(2)?],
        output: checked("output", &output, &size, like)?,
    };
    // SAFETY: all addresses were checked to belong to arrays of the stated sizes and kinds, whose rows are
    // read and written 16 bytes at a time; what is written is new, so it overlaps nothing that is read.
    #[cfg(tch_extension_cuda)]
    crate::cuda::launch(like.1, |stream| unsafe {
        tch_extension_linear_concatenate_cuda(&params, stream)
    })?;
    #[cfg(not(tch_extension_cuda))]
    let _ = params;
    Ok(Some((output, grad_bias)))
}

/// The matrix itself if the elements of each row are adjacent in memory, otherwise a copy.
fn rows(matrix: &Tensor) -> Result<Tensor> {
    let (&[_, columns], &[_, column_stride]) = (&matrix.size()[..], &matrix.stride()[..]) else {
        return Err(Error::msg(format!(
            "internal error: linear's gradient should be a matrix: {}",
            describe(matrix)
        )));
    };
    if (column_stride == 1 || columns <= 1) && is_in_memory(matrix) {
        return Ok(matrix.shallow_clone());
    }
    plain(matrix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn rows_are_read_without_a_copy() {
        let wide = Tensor::randn([6, 10], (Kind::Double, Device::Cpu));
        let read = |matrix: &Tensor| rows(matrix).unwrap().data_ptr() == matrix.data_ptr();
        assert!(read(&wide) && read(&wide.narrow(1, 2, 5)) && read(&wide.slice(0, 1, 6, 2)));
        assert!(read(&wide.narrow(0, 0, 1).expand([4, 10], false)) && read(&wide.narrow(1, 3, 1)));
        assert!(!read(&wide.transpose(0, 1)) && !read(&wide.internal_neg_view()));
        for matrix in [wide.narrow(1, 2, 5), wide.transpose(0, 1), wide.internal_neg_view()] {
            let expected = matrix.sum_dim_intlist([0_i64].as_slice(), false, Kind::Double);
            assert!(bias_grad(&matrix).unwrap().allclose(&expected, 1e-14, 1e-14, false));
        }
        assert!(bias_grad(&wide.view([60])).is_err());
    }
}
