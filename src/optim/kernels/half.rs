//! The kernels of Muon's iteration in `Half`, which are for CUDA alone.

use crate::Result;
use crate::ffi::checked;
use std::ffi::c_void;
use std::ptr::null;
use tch::{Device, Kind, Tensor};

/// `out = alpha · lhs rhsᵀ + beta · addend + diagonal · I` for each matrix, where the products are
/// known to be symmetric. All values are `Half`, and all matrices contiguous.
#[repr(C)]
struct Symmetric {
    /// `[batch, n, k]`, or `[batch, k, n]` if `is_across` is not 0.
    lhs: *const c_void,
    rhs: *const c_void,
    /// `[batch, n, n]`; may be null.
    addend: *const c_void,
    /// `[batch, n, n]`
    out: *mut c_void,
    batch: i64,
    n: i64,
    k: i64,
    alpha: f32,
    beta: f32,
    diagonal: f32,
    is_across: i32,
}

/// `to = scale · from / norms`, where each matrix has its norm.
#[repr(C)]
struct Normalize {
    /// `[batch, len]`, `BFloat16`
    from: *const c_void,
    /// `[batch]`, `BFloat16`
    norms: *const c_void,
    /// `[batch, len]`, `Half`
    to: *mut c_void,
    batch: i64,
    len: i64,
    scale: f32,
}

#[cfg(tch_extension_cuda)]
unsafe extern "C" {
    /// `is_started` becomes false if there is no kernel for these matrices or for this device; then
    /// nothing was launched.
    fn tch_extension_optim_symmetric_cuda(
        params: *const Symmetric,
        is_started: *mut bool,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
    fn tch_extension_optim_normalize_cuda(
        params: *const Normalize,
        stream: crate::cuda::cudaStream_t,
    ) -> crate::cuda::LaunchStatus;
}

/// What is computed with a product that is known to be symmetric: `alpha` times it, plus `beta` times a
/// matrix, plus `diagonal` on the diagonal.
#[derive(Clone, Copy)]
pub(in crate::optim) struct Terms<'a> {
    pub alpha: f64,
    pub addend: Option<(f64, &'a Tensor)>,
    pub diagonal: f64,
}

/// `terms` of `lhs rhsᵀ` of `[batch, n, k]`, or of `lhsᵀ rhs` of `[batch, k, n]` if `is_across`. Only the lower
/// half is computed. `None` if there is no kernel for these matrices or for this device.
pub(in crate::optim) fn symmetric(
    lhs: &Tensor,
    rhs: &Tensor,
    is_across: bool,
    terms: Terms<'_>,
) -> Result<Option<Tensor>> {
    let size = lhs.size3()?;
    let (batch, n, k) = if is_across { (size.0, size.2, size.1) } else { size };
    let like = (Kind::Half, lhs.device());
    let data = |name: &str, tensor: &Tensor, size: [i64; 3]| checked(name, tensor, &size, like);
    let of_factor = [size.0, size.1, size.2];
    let addend = terms.addend.map(|(_, addend)| data("addend", addend, [batch, n, n]));
    let out = Tensor::f_empty([batch, n, n], like)?;
    let params = Symmetric {
        lhs: data("lhs", lhs, of_factor)?.cast_const(),
        rhs: data("rhs", rhs, of_factor)?.cast_const(),
        addend: addend.transpose()?.map_or(null(), |addend| addend.cast_const()),
        out: out.data_ptr(),
        batch,
        n,
        k,
        alpha: terms.alpha as f32,
        beta: terms.addend.map_or(0.0, |(beta, _)| beta as f32),
        diagonal: terms.diagonal as f32,
        is_across: is_across.into(),
    };
    Ok(start_symmetric(like.1, &params)?.then_some(out))
}

/// `scale` times contiguous matrices of kind `BFloat16` over their norms `[batch, 1, 1]`, in `Half`.
pub(in crate::optim) fn normalize(from: &Tensor, norms: &Tensor, scale: f64) -> Result<Tensor> {
    let (batch, rows, columns) = from.size3()?;
    let like = (Kind::BFloat16, from.device());
    let to = Tensor::f_empty([batch, rows, columns], (Kind::Half, like.1))?;
    let params = Normalize {
        from: checked("directions", from, &[batch, rows, columns], like)?.cast_const(),
        norms: checked("norms", norms, &[batch, 1, 1], like)?.cast_const(),
        to: to.data_ptr(),
        batch,
        len: rows * columns,
        scale: scale as f32,
    };
    start_normalize(like.1, &params)?;
    Ok(to)
}

#[cfg(tch_extension_cuda)]
fn start_symmetric(device: Device, params: &Symmetric) -> Result<bool> {
    let mut is_started = false;
    // SAFETY: `symmetric` has checked shapes, kinds and devices; the output is new.
    crate::cuda::launch(device, |stream| unsafe {
        tch_extension_optim_symmetric_cuda(params, &mut is_started, stream)
    })?;
    Ok(is_started)
}

#[cfg(not(tch_extension_cuda))]
fn start_symmetric(_: Device, _: &Symmetric) -> Result<bool> {
    Ok(false)
}

#[cfg(tch_extension_cuda)]
fn start_normalize(device: Device, params: &Normalize) -> Result<()> {
    // SAFETY: `normalize` has checked shapes, kinds and devices; the output is new.
    crate::cuda::launch(device, |stream| unsafe {
        tch_extension_optim_normalize_cuda(params, stream)
    })
}

#[cfg(not(tch_extension_cuda))]
fn start_normalize(device: Device, _: &Normalize) -> Result<()> {
    Err(crate::kernels::no_kernel("optim::Muon", device))
}
