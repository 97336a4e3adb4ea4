//! Bindings to `csrc/cuda/precision.cpp`, which needs no CUDA.

use super::take_message;
use crate::{Error, Result};
use std::ffi::c_char;

unsafe extern "C" {
    fn tch_extension_matmul_allow_tf32(result: *mut bool) -> *mut c_char;
    safe fn tch_extension_set_matmul_allow_tf32(allow: bool) -> *mut c_char;
    fn tch_extension_rnn_allow_tf32(result: *mut bool) -> *mut c_char;
    safe fn tch_extension_set_rnn_allow_tf32(allow: bool) -> *mut c_char;
}

fn read(switch: unsafe extern "C" fn(*mut bool) -> *mut c_char) -> Result<bool> {
    let mut result = false;
    // SAFETY: C++ writes `result` on success.
    match take_message(unsafe { switch(&mut result) }) {
        Some(message) => Err(Error::Torch(message)),
        None => Ok(result),
    }
}

fn done(message: *mut c_char) -> Result<()> {
    take_message(message).map_or(Ok(()), |message| Err(Error::Torch(message)))
}

pub(crate) fn matmul_allow_tf32() -> Result<bool> {
    read(tch_extension_matmul_allow_tf32)
}

pub(crate) fn set_matmul_allow_tf32(allow: bool) -> Result<()> {
    done(tch_extension_set_matmul_allow_tf32(allow))
}

pub(crate) fn rnn_allow_tf32() -> Result<bool> {
    read(tch_extension_rnn_allow_tf32)
}

pub(crate) fn set_rnn_allow_tf32(allow: bool) -> Result<()> {
    done(tch_extension_set_rnn_allow_tf32(allow))
}
