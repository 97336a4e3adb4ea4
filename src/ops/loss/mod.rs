//! What the losses over classes share.

pub(super) mod check;
pub(super) mod kernels;
