//! What the losses over classes share.

pub(super) mod check;
pub(crate) mod kernels;
pub(super) mod tensors;
