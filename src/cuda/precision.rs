//! The precision of matrix products.

use crate::Result;
use crate::ffi::precision as ffi;

/// Whether products of `Float` matrices on CUDA may be computed in TF32, which has 10 bits of
/// digits instead of 23 and is several times as fast: `torch.backends.cuda.matmul.allow_tf32` in
/// Python, which tch lacks.
///
/// # Errors
/// libtorch's, when its newer and older settings of precision contradict one another.
pub fn matmul_allow_tf32() -> Result<bool> {
    ffi::matmul_allow_tf32()
}

/// Sets [`matmul_allow_tf32`]. It holds for the process, from the next product on; libtorch begins
/// with `false`. Our own operators obey it, too; [`lltm`](crate::ops::lltm) says how it multiplies
/// then.
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
/// libtorch's.
pub fn set_matmul_allow_tf32(allow: bool) -> Result<()> {
    ffi::set_matmul_allow_tf32(allow)
}
