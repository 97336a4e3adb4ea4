//! The kernels of `csrc/lltm_cell`.

pub(crate) mod device;
pub(super) mod fused;
pub(super) mod pointwise;
pub(crate) mod sequence;
