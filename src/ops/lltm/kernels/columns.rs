//! `csrc/lltm/columns.h`: what all steps multiply, column by column.

use super::Sizes;
use crate::Result;
use crate::ffi::checked;
use crate::ffi::tensor::plain;
use std::ffi::c_void;
use tch::{Kind, Tensor};

#[repr(C)]
#[cfg_attr(not(tch_extension_cuda), allow(dead_code))]
struct Columns {
    batch: i64,
    rows: i64,
    hidden: i64,
    features: i64,
    to_stride: i64,
    h0: *const c_void,
    output: *const c_void,
    input: *const c_void,
    to: *mut c_void,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_lltm_columns_cuda(
        params: *const Columns,
        stream: *mut c_void,
    ) -> crate::cuda::LaunchStatus;
}

/// Rows that cuBLAS may read 16 bytes at a time.
const OF_16_BYTES: i64 = 4;

/// `[h[t-1] | x[t]]ᵀ` of all steps, `[H + F, T·B]`, of kind `Float` on CUDA.
pub(crate) fn columns([h0, output, input]: [&Tensor; 3], sizes: Sizes) -> Result<Tensor> {
    let Sizes { steps, batch, features, hidden } = sizes;
    let like = (Kind::Float, output.device());
    let (h0, output, input) = (plain(h0)?, plain(output)?, plain(input)?);
    let (rows, columns) = (steps * batch, hidden + features);
    let to_stride = (rows + OF_16_BYTES - 1) / OF_16_BYTES * OF_16_BYTES;
    let to = Tensor::f_empty([columns, to_stride], like)?;
    let params = Columns {
        batch,
        rows,
        hidden,
        features,
        to_stride,
        h0: checked("h0", &h0, &[batch, hidden], like)?,
        output: checked("output", &output, &[steps, batch, hidden], like)?,
        input: checked("input", &input, &[steps, batch, features], like)?,
        to: checked("to", &to, &[columns, to_stride], like)?,
    };
    start(&params, &to)?;
    Ok(to.f_narrow(1, 0, rows)?)
}

#[cfg(tch_extension_cuda)]
fn start(params: &Columns, to: &Tensor) -> Result<()> {
    // SAFETY: tensors of the sizes that the struct states, contiguous, checked by `columns`; what
    // is written is new.
    crate::cuda::launch(to.device(), |stream| unsafe {
        tch_extension_lltm_columns_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn start(_: &Columns, to: &Tensor) -> Result<()> {
    Err(crate::ffi::no_kernel("lltm", to.device()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{offset_of, size_of};

    unsafe extern "C" {
        /// Sizes and offsets as the C++ compiler sees them.
        static tch_extension_lltm_columns_layout: [usize; 10];
    }

    #[test]
    fn the_struct_agrees_with_the_c_side() {
        let ours = [
            size_of::<Columns>(),
            offset_of!(Columns, batch),
            offset_of!(Columns, rows),
            offset_of!(Columns, hidden),
            offset_of!(Columns, features),
            offset_of!(Columns, to_stride),
            offset_of!(Columns, h0),
            offset_of!(Columns, output),
            offset_of!(Columns, input),
            offset_of!(Columns, to),
        ];
        // SAFETY: a constant of this length in csrc/lltm/sequence.cpp.
        assert_eq!(ours, unsafe { tch_extension_lltm_columns_layout });
    }
}
