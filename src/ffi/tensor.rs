//! `csrc/tensor/tensor.cpp`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_is_plain(tensor: *const C_tensor) -> bool;
    fn tch_extension_is_strided(tensor: *const C_tensor) -> bool;
    fn tch_extension_plain(tensor: *const C_tensor, result: *mut *mut C_tensor) -> *mut c_char;
}

/// Whether a kernel may read the tensor's memory row by row.
pub(crate) fn is_plain(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { tch_extension_is_plain(tensor.as_ptr()) }
}

/// Whether the tensor is dense.
pub(crate) fn is_strided(tensor: &Tensor) -> bool {
    // SAFETY: borrowed from a live tensor.
    unsafe { tch_extension_is_strided(tensor.as_ptr()) }
}

/// The tensor itself if a kernel may read its memory row by row, otherwise a copy of which that is true. More
/// than `contiguous`: that keeps a pending negation, and zeros that have no memory.
pub(crate) fn plain(tensor: &Tensor) -> Result<Tensor> {
    let mut result = std::ptr::null_mut();
    // SAFETY: borrowed from a live tensor; on success the handle becomes ours.
    match take_message(unsafe { tch_extension_plain(tensor.as_ptr(), &mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        // SAFETY: a handle that C++ allocated for us.
        None => Ok(unsafe { Tensor::from_ptr(result) }),
    }
}
