//! Calls of the functions of `csrc/gemm`.

use super::plan::Description;
use super::{Counters, Described, InputNorm, Operands, Way, WithZ};
use crate::ffi::take_message;
use crate::{Error, Result};
use std::ffi::{c_char, c_void};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};
use tch::Tensor;
use torch_sys::C_tensor;

#[expect(dead_code, reason = "Rust only declares them")]
mod from_cpp;

unsafe extern "C" {
    /// Describes `lhs rhs + bias` or, if `is_linear`, `lhs rhsᵀ + bias`, whose bias may be null. What is
    /// not supported, wrong arguments included, is left to libtorch, which reports them.
    fn tch_extension_gemm_describe(
        lhs: *const C_tensor,
        rhs: *const C_tensor,
        bias: *const C_tensor,
        is_linear: bool,
        relu: bool,
        is_supported: *mut bool,
        result: *mut Description,
    ) -> *mut c_char;
    /// Allocates the output and computes it. The result is null if cuBLASLt or the driver refuses.
    fn tch_extension_gemm_run(
        described: *const Description,
        way: Way,
        result: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// Computes products of one lhs in one launch: all outputs, or with a gate silu(first) second. They
    /// are null if the driver refuses. The weight `[K]` of the RMS norm of lhs may be null.
    fn tch_extension_gemm_run_together(
        described: *const Description,
        count: i32,
        norm_weight: *const c_void,
        norm_eps: f32,
        is_gated: bool,
        results: *mut *mut C_tensor,
    ) -> *mut c_char;
    /// gelu(z) of the product z, with tanh, and z itself if it is wanted, by one call of cuBLASLt. Both
    /// are null if there is no such call.
    fn tch_extension_gemm_run_gelu(
        described: *const Description,
        wants_z: bool,
        result: *mut *mut C_tensor,
        z: *mut *mut C_tensor,
    ) -> *mut c_char;
    fn tch_extension_gemm_counters(result: *mut Counters);
}

/// The counters of this thread's cache of plans.
pub fn counters() -> Counters {
    let mut counters = Counters::default();
    // SAFETY: C++ writes four 64-bit numbers; `counters` has the layout of the C++ struct.
    unsafe { tch_extension_gemm_counters(&mut counters) };
    counters
}

/// `None` if the product is left to libtorch.
pub(super) fn describe(operands: Operands<'_>) -> Result<Option<Described<'_>>> {
    let Operands { lhs, rhs, bias, is_linear, relu } = operands;
    let bias = bias.map_or(null(), Tensor::as_ptr);
    let mut is_supported = false;
    let mut description = MaybeUninit::uninit();
    // SAFETY: the handles are borrowed from live tensors, which C++ checks; a missing bias is null.
    let message = unsafe {
        tch_extension_gemm_describe(
            lhs.as_ptr(),
            rhs.as_ptr(),
            bias,
            is_linear,
            relu,
            &mut is_supported,
            description.as_mut_ptr(),
        )
    };
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None if !is_supported => Ok(None),
        None => {
            // SAFETY: C++ has written the description, because it supports the product.
            let facts = unsafe { description.assume_init() };
            Ok(Some(Described { facts, operands: PhantomData }))
        }
    }
}

fn owned(message: *mut c_char, result: *mut C_tensor) -> Result<Option<Tensor>> {
    match take_message(message) {
        Some(message) => Err(Error::Torch(message)),
        None if result.is_null() => Ok(None),
        // SAFETY: C++ allocated this handle for us, and nobody else owns it.
        None => Ok(Some(unsafe { Tensor::from_ptr(result) })),
    }
}

/// `None` if cuBLASLt or the driver refuses the product.
pub(super) fn run(described: &Described<'_>, way: Way) -> Result<Option<Tensor>> {
    let mut result = null_mut();
    // SAFETY: the operands that were described are alive and have not changed. C++ writes `result` on
    // success.
    let message = unsafe { tch_extension_gemm_run(&described.facts, way, &mut result) };
    owned(message, result)
}

/// gelu(z) of the product z, with tanh. `None` if cuBLASLt has no such call.
pub(super) fn run_gelu(described: &Described<'_>, wants_z: bool) -> Result<Option<WithZ>> {
    let (mut result, mut z) = (null_mut(), null_mut());
    // SAFETY: as above; C++ also writes `z`.
    let message =
        unsafe { tch_extension_gemm_run_gelu(&described.facts, wants_z, &mut result, &mut z) };
    let output = owned(message, result)?;
    let z = owned(null_mut(), z)?;
    Ok(output.map(|output| WithZ { output, z }))
}

/// Products of one lhs that can be computed together. `None` if the driver refuses.
pub(super) fn run_together<const N: usize>(
    described: [&Described<'_>; N],
    norm: Option<InputNorm<'_>>,
    is_gated: bool,
) -> Result<[Option<Tensor>; N]> {
    let facts = described.map(|each| each.facts);
    let mut results = [null_mut(); N];
    let (weight, eps) =
        norm.map_or((null(), 0.0), |norm| (norm.weight.data_ptr().cast_const(), norm.eps as f32));
    // SAFETY: as in `run`; there is room for as many results as there are products, and `fits` has
    // checked the norm's weight.
    let message = unsafe {
        tch_extension_gemm_run_together(
            facts.as_ptr(),
            N as i32,
            weight,
            eps,
            is_gated,
            results.as_mut_ptr(),
        )
    };
    if let Some(message) = take_message(message) {
        return Err(Error::Torch(message));
    }
    // SAFETY: C++ allocated these handles for us, and nobody else owns them.
    Ok(results.map(|result| (!result.is_null()).then(|| unsafe { Tensor::from_ptr(result) })))
}
