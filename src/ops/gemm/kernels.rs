//! Calls of the functions of `csrc/gemm`.

use super::{Counters, Way};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

unsafe extern "C" {
    fn tch_extension_gemm_matmul_add_relu(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        bias: *const C_tensor,
        way: Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_linear(
        input: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        way: Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_product(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        way: Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_counters(result: *mut Counters);
}

/// The counters of this thread's cache of plans.
pub fn counters() -> Counters {
    let mut counters = Counters::default();
    // SAFETY: C++ writes three 64-bit numbers; `counters` has the layout of the C++ struct.
    unsafe { tch_extension_gemm_counters(&mut counters) };
    counters
}

fn owned(message: *mut c_char, result: *mut C_tensor) -> Result<Option<Tensor>> {
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None if result.is_null() => Ok(None),
        // SAFETY: C++ allocated this handle for us, and nobody else owns it.
        None => Ok(Some(unsafe { Tensor::from_ptr(result) })),
    }
}

pub(crate) fn matmul_add_relu(
    lhs: &Tensor,
    rhs: &Tensor,
    bias: &Tensor,
    way: Way,
) -> Result<Option<Tensor>> {
    if way == Way::Composite {
        return Ok(None);
    }
    let mut result = null_mut();
    // SAFETY: the handles are borrowed from live tensors, which C++ checks. C++ writes `result` on
    // success.
    let message = unsafe {
        tch_extension_gemm_matmul_add_relu(
            lhs.as_ptr(),
            rhs.as_ptr(),
            bias.as_ptr(),
            way,
            &mut result,
        )
    };
    owned(message, result)
}

pub(crate) fn linear(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    way: Way,
) -> Result<Option<Tensor>> {
    if way == Way::Composite {
        return Ok(None);
    }
    let bias = bias.map_or(null(), Tensor::as_ptr);
    let mut result = null_mut();
    // SAFETY: the handles are borrowed from live tensors, which C++ checks; a missing bias is null.
    // C++ writes `result` on success.
    let message = unsafe {
        tch_extension_gemm_linear(input.as_ptr(), weight.as_ptr(), bias, way, &mut result)
    };
    owned(message, result)
}

pub(crate) fn product(lhs: &Tensor, rhs: &Tensor, way: Way) -> Result<Option<Tensor>> {
    if way == Way::Composite {
        return Ok(None);
    }
    let mut result = null_mut();
    // SAFETY: the handles are borrowed from live tensors, which C++ checks. C++ writes `result` on
    // success.
    let message =
        unsafe { tch_extension_gemm_product(lhs.as_ptr(), rhs.as_ptr(), way, &mut result) };
    owned(message, result)
}
