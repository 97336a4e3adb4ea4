//! What the losses over classes share.

pub(super) mod kernels;
