//! The kernels of `csrc/lltm_cell`.

pub(super) mod fused;
pub(super) mod pointwise;
