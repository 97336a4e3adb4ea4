//! Bindings to `csrc/cuda/precision.cpp`, which needs no CUDA.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;

unsafe extern "C" {
    fn tch_extension_matmul_allow_tf32(result: *mut bool) -> *mut c_char;
    safe fn tch_extension_set_matmul_allow_tf32(allow: bool) -> *mut c_char;
}

pub(crate) fn matmul_allow_tf32() -> Result<bool> {
    let mut result = false;
    // SAFETY: C++ writes `result` on success.
    match take_message(unsafe { tch_extension_matmul_allow_tf32(&mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(result),
    }
}

pub(crate) fn set_matmul_allow_tf32(allow: bool) -> Result<()> {
    take_message(tch_extension_set_matmul_allow_tf32(allow))
        .map_or(Ok(()), |message| Err(Error::Torch(message)))
}
