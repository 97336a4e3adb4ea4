//! Calls of the functions of `csrc/gemm`.

use super::plan::{Facts, Padding, Product, Skinny, choose};
use super::{Counters, Way, WithZ};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::c_char;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

#[expect(dead_code, reason = "Rust only declares them")]
mod from_cpp;

unsafe extern "C" {
    fn tch_extension_gemm_matmul_add_relu(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        bias: *const C_tensor,
        way: Way,
        choose: extern "C" fn(&Product) -> Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_linear(
        input: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        way: Way,
        choose: extern "C" fn(&Product) -> Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_product(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        way: Way,
        choose: extern "C" fn(&Product) -> Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_linear_gelu(
        input: *const C_tensor,
        weight: *const C_tensor,
        bias: *const C_tensor,
        wants_z: bool,
        result: *mut *mut C_tensor,
        z: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_counters(result: *mut Counters);
    fn tch_extension_gemm_allows_tf32() -> bool;
    fn tch_extension_gemm_padding(product: *const Product, result: *mut Padding) -> bool;

    /// Whether M or N is small, and the other side's operand is contiguous in one dimension; and
    /// how the kernels would then read the product.
    fn tch_extension_gemm_skinny_facts_cuda(product: *const Product, result: *mut Skinny) -> bool;
    /// Whether this is a product with a bias of full shape, bulk copies support its addresses and
    /// strides, and the kernel was compiled for the current device.
    fn tch_extension_gemm_hopper_can_cuda(product: *const Product) -> bool;
}

/// Tells C++, which has described a product, the way to compute it.
extern "C" fn choose_way(product: &Product) -> Way {
    choose(product, &Described(product))
}

/// The answers of `csrc/gemm` about a product that it has described.
struct Described<'a>(&'a Product);

impl Facts for Described<'_> {
    fn tf32(&self) -> bool {
        // SAFETY: the function only reads libtorch's settings.
        unsafe { tch_extension_gemm_allows_tf32() }
    }

    fn skinny(&self) -> Option<Skinny> {
        let mut answer = Skinny::default();
        // SAFETY: the function reads the description, but no matrix, and fills the answer.
        unsafe { tch_extension_gemm_skinny_facts_cuda(self.0, &mut answer) }.then_some(answer)
    }

    fn padding(&self) -> Option<Padding> {
        let mut answer = Padding::default();
        // SAFETY: as above.
        unsafe { tch_extension_gemm_padding(self.0, &mut answer) }.then_some(answer)
    }

    fn hopper(&self) -> bool {
        // SAFETY: the function reads the description, but no matrix.
        unsafe { tch_extension_gemm_hopper_can_cuda(self.0) }
    }
}

/// The counters of this thread's cache of plans.
pub fn counters() -> Counters {
    let mut counters = Counters::default();
    // SAFETY: C++ writes four 64-bit numbers; `counters` has the layout of the C++ struct.
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
            choose_way,
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
        tch_extension_gemm_linear(
            input.as_ptr(),
            weight.as_ptr(),
            bias,
            way,
            choose_way,
            &mut result,
        )
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
    let message = unsafe {
        tch_extension_gemm_product(lhs.as_ptr(), rhs.as_ptr(), way, choose_way, &mut result)
    };
    owned(message, result)
}

pub(crate) fn linear_gelu(
    input: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    wants_z: bool,
) -> Result<Option<WithZ>> {
    let bias = bias.map_or(null(), Tensor::as_ptr);
    let (mut result, mut z) = (null_mut(), null_mut());
    // SAFETY: the handles are borrowed from live tensors, which C++ checks; a missing bias is null. C++
    // writes `result` and `z` on success.
    let message = unsafe {
        tch_extension_gemm_linear_gelu(
            input.as_ptr(),
            weight.as_ptr(),
            bias,
            wants_z,
            &mut result,
            &mut z,
        )
    };
    let output = owned(message, result)?;
    let z = owned(null_mut(), z)?;
    Ok(output.map(|output| WithZ { output, z }))
}
