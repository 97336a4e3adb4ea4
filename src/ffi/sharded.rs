//! Bindings to `csrc/distributed/sharded.cpp`.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_take_gradient(
        leaf: *const C_tensor,
        into: *const C_tensor,
        factor: f64,
        adds: bool,
    ) -> *mut c_char;
}

/// Writes the gradient of a leaf, times `factor`, to `into`, or adds it there, and makes the leaf's
/// gradient undefined.
pub(crate) fn take_gradient(leaf: &Tensor, into: &Tensor, factor: f64, adds: bool) -> Result<()> {
    // SAFETY: both pointers are borrowed from live tensors. libtorch itself checks sizes and kinds.
    let message =
        unsafe { tch_extension_take_gradient(leaf.as_ptr(), into.as_ptr(), factor, adds) };
    take_message(message).map_or(Ok(()), |text| Err(Error::Torch(text)))
}
