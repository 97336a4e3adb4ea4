//! `csrc/linear/linear.h`.

use crate::ffi::tensor::{is_in_memory, plain};
use crate::ffi::{kind_code, no_kernel};
use crate::ops::column_sums::{ColumnSums, is_aligned};
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Tensor};

#[repr(C)]
struct BiasGrad {
    sums: ColumnSums,
    row_stride: i64,
    kind: i32,
    reserved: i32,
    grad: *const c_void,
}

unsafe extern "C" {
    fn tch_extension_linear_bias_grad_cpu(params: *const BiasGrad);
    fn tch_extension_linear_bias_grad_finish_cpu(params: *const BiasGrad);
    #[cfg(tch_extension_cuda)]
    fn tch_extension_linear_bias_grad_cuda(
        params: *const BiasGrad,
        stream: *mut c_void,
    ) -> crate::cuda::LaunchStatus;
}

/// The sums of the columns of `grad` ([M, N]): [N], of its kind.
pub(crate) fn bias_grad(grad: &Tensor) -> Result<Tensor> {
    let grad = rows(grad)?;
    let size = grad.size2()?;
    let like = (grad.f_kind()?, grad.device());
    let mut grad_bias = Tensor::f_empty([size.1], like)?;
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
    match like.1 {
        // SAFETY: `rows` has seen to it that the elements of each row are neighbours in memory, and
        // libtorch that rows so far apart are its own; `ColumnSums` has checked what is written,
        // which is new and so apart from what is read, and freed in the order of the stream.
        #[cfg(tch_extension_cuda)]
        device @ Device::Cuda(_) => crate::cuda::launch(device, |stream| unsafe {
            tch_extension_linear_bias_grad_cuda(&params, stream)
        })?,
        Device::Cpu => {
            // SAFETY: as above.
            unsafe { tch_extension_linear_bias_grad_cpu(&params) };
            if params.sums.slabs > 1 {
                // SAFETY: as above; the partial sums are there now.
                unsafe { tch_extension_linear_bias_grad_finish_cpu(&params) };
            }
        }
        device => return Err(no_kernel("linear", device)),
    }
    Ok(grad_bias)
}

/// The matrix itself if the elements of each row are neighbours in memory, otherwise a copy.
fn rows(matrix: &Tensor) -> Result<Tensor> {
    let (&[_, columns], &[_, column_stride]) = (&matrix.size()[..], &matrix.stride()[..]) else {
        return Err(Error::msg(format!(
            "internal error: linear's gradient should be a matrix: {matrix:?}"
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
    use std::mem::{offset_of, size_of};
    use tch::Kind;

    unsafe extern "C" {
        /// Sizes and offsets as the C++ compiler sees them.
        static tch_extension_linear_layout: [usize; 13];
    }

    #[test]
    fn the_structs_agree_with_the_c_side() {
        let ours = [
            size_of::<ColumnSums>(),
            offset_of!(ColumnSums, rows),
            offset_of!(ColumnSums, columns),
            offset_of!(ColumnSums, slabs),
            offset_of!(ColumnSums, partial),
            offset_of!(ColumnSums, sums),
            offset_of!(ColumnSums, fold),
            size_of::<BiasGrad>(),
            offset_of!(BiasGrad, sums),
            offset_of!(BiasGrad, row_stride),
            offset_of!(BiasGrad, kind),
            offset_of!(BiasGrad, reserved),
            offset_of!(BiasGrad, grad),
        ];
        // SAFETY: a constant of this length in csrc/linear/cpu.cpp.
        assert_eq!(ours, unsafe { tch_extension_linear_layout });
    }

    #[test]
    fn rows_are_read_where_they_lie() {
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
