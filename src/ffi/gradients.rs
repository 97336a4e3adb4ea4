//! Bindings to `csrc/tensor/gradients.cpp`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_set_gradients(
        tensors: *const *const C_tensor,
        gradients: *const *const C_tensor,
        len: usize,
        changed: bool,
    ) -> *mut c_char;
    fn tch_extension_zero(tensors: *const *const C_tensor, len: usize) -> *mut c_char;
    fn tch_extension_copy(to: *const C_tensor, from: *const C_tensor) -> *mut c_char;
    fn tch_extension_snapshot(tensor: *const C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
}

fn check(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |text| Err(Error::Torch(text)))
}

fn pointers(tensors: &[Tensor]) -> Vec<*const C_tensor> {
    tensors.iter().map(Tensor::as_ptr).collect()
}

/// Makes each gradient the `grad` of the tensor at the same place; an undefined one removes it.
/// Shapes, kinds and devices must fit: pass only what was read from the same tensors' `grad`. With
/// `changed`, autograd is told that the tensors' values change.
pub(crate) fn set_gradients(tensors: &[Tensor], gradients: &[Tensor], changed: bool) -> Result<()> {
    if tensors.len() != gradients.len() {
        return Err(Error::msg("internal error: not one gradient for each parameter"));
    }
    let (tensors, gradients) = (pointers(tensors), pointers(gradients));
    // SAFETY: all pointers are borrowed from live tensors, and both arrays have this length.
    check(unsafe {
        tch_extension_set_gradients(tensors.as_ptr(), gradients.as_ptr(), tensors.len(), changed)
    })
}

/// Removes the `grad` of each tensor.
pub(crate) fn remove_gradients(tensors: &[Tensor]) -> Result<()> {
    let (tensors, none) = (pointers(tensors), vec![std::ptr::null(); tensors.len()]);
    // SAFETY: as in `set_gradients`; null pointers stand for absent gradients.
    check(unsafe {
        tch_extension_set_gradients(tensors.as_ptr(), none.as_ptr(), tensors.len(), false)
    })
}

/// Sets all defined tensors among these to zero, in place.
pub(crate) fn zero(tensors: &[Tensor]) -> Result<()> {
    let defined: Vec<_> =
        tensors.iter().filter(|tensor| tensor.defined()).map(Tensor::as_ptr).collect();
    // SAFETY: all pointers are borrowed from live tensors.
    check(unsafe { tch_extension_zero(defined.as_ptr().cast(), defined.len()) })
}

/// Copies the values of `from` to `to`. The host waits for no GPU, unless memory on the CPU that is
/// not pinned must first be read.
pub(crate) fn copy(to: &Tensor, from: &Tensor) -> Result<()> {
    // SAFETY: both pointers are borrowed from live tensors. libtorch itself checks sizes and kinds.
    check(unsafe { tch_extension_copy(to.as_ptr(), from.as_ptr()) })
}

/// A copy with memory of its own and without a graph.
pub(crate) fn snapshot(tensor: &Tensor) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    // SAFETY: the pointer is borrowed from a live tensor, and C++ writes `result` on success.
    check(unsafe { tch_extension_snapshot(tensor.as_ptr(), &mut result) })?;
    // SAFETY: on success, `result` is a handle that we own.
    Ok(unsafe { Tensor::from_ptr(result) })
}
