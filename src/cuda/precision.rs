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

/// Whether recurrent layers of `Float` on CUDA may be computed in TF32: cuDNN's, and those of
/// `ops::lstm` and `ops::gru`. It is `torch.backends.cudnn.rnn.fp32_precision == "tf32"` in Python.
///
/// # Errors
/// An error of libtorch.
pub fn rnn_allow_tf32() -> Result<bool> {
    ffi::rnn_allow_tf32()
}

/// Sets [`rnn_allow_tf32`]. The setting holds for the whole process, from the next layer on. It is
/// initially `true`, unlike the one for products.
///
/// ```
/// use tch_extension::cuda::{rnn_allow_tf32, set_rnn_allow_tf32};
///
/// assert!(rnn_allow_tf32()?);
/// set_rnn_allow_tf32(false)?;
/// assert!(!rnn_allow_tf32()?);
/// # set_rnn_allow_tf32(true)?;
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// An error of libtorch.
pub fn set_rnn_allow_tf32(allow: bool) -> Result<()> {
    ffi::set_rnn_allow_tf32(allow)
}
