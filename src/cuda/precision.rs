//! The precision of matrix products.

use crate::Result;
use crate::ffi::precision as ffi;

/// Whether products of `Float` matrices on CUDA may be computed in TF32, which has a mantissa of 10
/// bits instead of 23 and is several times as fast. It is `torch.backends.cuda.matmul.allow_tf32`
/// in Python, which tch lacks.
///
/// # Errors
/// libtorch's error when its newer and older precision settings contradict each other.
pub fn matmul_allow_tf32() -> Result<bool> {
    ffi::matmul_allow_tf32()
}

/// Sets [`matmul_allow_tf32`]. The setting holds for the whole process, from the next product on;
/// it is initially `false`. This crate's operators obey it, too; the documentation of
/// `ops::lltm` says how it multiplies then.
///
/// ```
/// use tch_extension::cuda::{matmul_allow_tf32, set_matmul_allow_tf32};
///
/// set_matmul_allow_tf32(true)?;
/// assert!(matmul_allow_tf32()?);
/// # set_matmul_allow_tf32(false)?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error of libtorch.
pub fn set_matmul_allow_tf32(allow: bool) -> Result<()> {
    ffi::set_matmul_allow_tf32(allow)
}
