//! The sum of a layer's two biases on CUDA.

use super::cuda::gates_kind;
use crate::Result;
use crate::ffi::facts::empty_of;
use crate::ffi::tensor::plain;
use crate::ffi::{checked, kind_code};
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use tch::Tensor;

/// Adds `b_ih` and `b_hh`. Separate rows, which are the last ones, are not added.
#[repr(C)]
struct Biases {
    rows: i64,
    separate_rows: i64,
    /// Of the biases.
    kind: i32,
    reserved: i32,
    /// `[rows]`, null for zeros.
    b_ih: *const c_void,
    /// `[rows]`, null for zeros.
    b_hh: *const c_void,
    /// `[rows]`, of the gates' kind.
    sums: *mut c_void,
    /// `[separate_rows]`, of the gates' kind: those of `b_hh`; null without any.
    separate: *mut c_void,
}

/// The bias of the product with the input, to which the rows of `b_hh` that are not separate are
/// added, and the separate rows of `b_hh`; both in the kind of the gates.
pub(crate) fn sum_of_biases(
    [b_ih, b_hh]: [Option<&Tensor>; 2],
    [rows, separate_rows]: [i64; 2],
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let Some(like) = b_ih.or(b_hh) else { return Ok((None, None)) };
    let (kind, device) = (like.f_kind()?, like.device());
    let [b_ih, b_hh] = [b_ih.map(plain).transpose()?, b_hh.map(plain).transpose()?];
    let pointer = |name: &str, bias: &Option<Tensor>| {
        let of = |bias: &Tensor| checked(name, bias, &[rows], (kind, device));
        bias.as_ref().map_or(Ok(null()), |bias| of(bias).map(<*mut c_void>::cast_const))
    };
    let empty = |rows: i64| empty_of(&[rows], (gates_kind(kind), device));
    let sums = empty(rows)?;
    let separate = (separate_rows > 0).then(|| empty(separate_rows)).transpose()?;
    let params = Biases {
        rows,
        separate_rows,
        kind: kind_code(kind)?,
        reserved: 0,
        b_ih: pointer("b_ih", &b_ih)?,
        b_hh: pointer("b_hh", &b_hh)?,
        sums: sums.data_ptr(),
        separate: separate.as_ref().map_or(null_mut(), Tensor::data_ptr),
    };
    start(&params, like)?;
    Ok((Some(sums), separate))
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    fn tch_extension_recurrent_biases_cuda(
        params: *const Biases,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

#[cfg(tch_extension_cuda)]
fn start(params: &Biases, on: &Tensor) -> Result<()> {
    // SAFETY: `sum_of_biases` checked what is read and allocated what is written.
    crate::cuda::launch(on.device(), |stream| unsafe {
        tch_extension_recurrent_biases_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn start(_: &Biases, on: &Tensor) -> Result<()> {
    Err(crate::ffi::no_kernel("recurrent", on.device()))
}
