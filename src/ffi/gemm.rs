//! `csrc/gemm`: matrix products with what comes behind them, in one kernel.

/// Which way a product goes. For tests, to which each way is open: the fastest is what users have.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// What was measured to be fastest.
    #[default]
    Fastest,
    /// One call of cuBLASLt, by a plan.
    Plan,
    /// The kernel for small products.
    Small,
    /// The kernel for Hopper: a bias of full shape, in the half kinds.
    Hopper,
    /// Sums of products, for up to 4 columns or rows.
    Skinny,
    /// One call of cuBLASLt, of factors copied to rows that begin at multiples of 16 bytes.
    Padded,
    /// One call of cuBLASLt, with a kernel for the ReLU behind it.
    Pass,
    /// libtorch's product, with a kernel behind it.
    Composite,
}

/// What a thread's cache of plans did so far.
#[doc(hidden)]
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub hits: i64,
    pub misses: i64,
    /// Kept at the moment.
    pub plans: i64,
}

#[cfg(tch_extension_cuda)]
mod with_cuda {
    use super::{Counters, Path};
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
            path: i32,
            result: *mut *mut C_tensor,
        ) -> *mut c_char;
        fn tch_extension_gemm_linear(
            input: *const C_tensor,
            weight: *const C_tensor,
            bias: *const C_tensor,
            path: i32,
            result: *mut *mut C_tensor,
        ) -> *mut c_char;
        fn tch_extension_gemm_product(
            lhs: *const C_tensor,
            rhs: *const C_tensor,
            path: i32,
            result: *mut *mut C_tensor,
        ) -> *mut c_char;
        fn tch_extension_gemm_counters(result: *mut Counters);
    }

    /// This thread's.
    pub fn counters() -> Counters {
        let mut counters = Counters::default();
        // SAFETY: `counters` is written, and laid out as the C++ struct: three numbers of 64 bits.
        unsafe { tch_extension_gemm_counters(&mut counters) };
        counters
    }

    /// The number that C++ has for it; none where there is nothing for C++ to do.
    fn code(path: Path) -> Option<i32> {
        match path {
            Path::Fastest => Some(0),
            Path::Plan => Some(1),
            Path::Small => Some(2),
            Path::Hopper => Some(3),
            Path::Skinny => Some(4),
            Path::Padded => Some(5),
            Path::Pass => Some(6),
            Path::Composite => None,
        }
    }

    fn owned(message: *mut c_char, result: *mut C_tensor) -> Result<Option<Tensor>> {
        match take_message(message) {
            Some(message) => Err(Error::Torch(message)),
            None if result.is_null() => Ok(None),
            // SAFETY: a handle that C++ allocated for us.
            None => Ok(Some(unsafe { Tensor::from_ptr(result) })),
        }
    }

    pub(crate) fn matmul_add_relu(
        lhs: &Tensor,
        rhs: &Tensor,
        bias: &Tensor,
        path: Path,
    ) -> Result<Option<Tensor>> {
        let Some(code) = code(path) else { return Ok(None) };
        let mut result = null_mut();
        // SAFETY: borrowed from live tensors, which C++ checks; `result` is written on success.
        let message = unsafe {
            tch_extension_gemm_matmul_add_relu(
                lhs.as_ptr(),
                rhs.as_ptr(),
                bias.as_ptr(),
                code,
                &mut result,
            )
        };
        owned(message, result)
    }

    pub(crate) fn linear(
        input: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        path: Path,
    ) -> Result<Option<Tensor>> {
        let Some(code) = code(path) else { return Ok(None) };
        let bias = bias.map_or(null(), Tensor::as_ptr);
        let mut result = null_mut();
        // SAFETY: borrowed from live tensors, which C++ checks; a missing bias is null; `result` is
        // written on success.
        let message = unsafe {
            tch_extension_gemm_linear(input.as_ptr(), weight.as_ptr(), bias, code, &mut result)
        };
        owned(message, result)
    }

    pub(crate) fn product(lhs: &Tensor, rhs: &Tensor, path: Path) -> Result<Option<Tensor>> {
        let Some(code) = code(path) else { return Ok(None) };
        let mut result = null_mut();
        // SAFETY: borrowed from live tensors, which C++ checks; `result` is written on success.
        let message =
            unsafe { tch_extension_gemm_product(lhs.as_ptr(), rhs.as_ptr(), code, &mut result) };
        owned(message, result)
    }
}

/// The same names for a build without CUDA.
#[cfg(not(tch_extension_cuda))]
mod without_cuda {
    use super::{Counters, Path};
    use crate::Result;
    use tch::Tensor;

    /// None.
    pub fn counters() -> Counters {
        Counters::default()
    }

    pub(crate) fn matmul_add_relu(
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: Path,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    pub(crate) fn linear(
        _: &Tensor,
        _: &Tensor,
        _: Option<&Tensor>,
        _: Path,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }

    pub(crate) fn product(_: &Tensor, _: &Tensor, _: Path) -> Result<Option<Tensor>> {
        Ok(None)
    }
}

#[cfg(tch_extension_cuda)]
use with_cuda as ways;
#[cfg(not(tch_extension_cuda))]
use without_cuda as ways;

/// `relu(lhs @ rhs + bias)`; nothing where this way is not open: for other tensors than those of
/// one kind on one CUDA device, for a bias that enlarges the product, for layouts that would have
/// to be copied, for arguments that do not fit together.
pub(crate) use ways::matmul_add_relu;

/// `input @ weightᵀ + bias`, likewise.
pub(crate) use ways::linear;

/// `lhs @ rhs` by a kernel of ours, without a graph; nothing where libtorch's is faster.
pub(crate) use ways::product;

#[doc(hidden)]
pub use ways::counters;
