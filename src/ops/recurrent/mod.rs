//! What the operators on whole sequences share.

mod kernels;

pub(super) use kernels::columns;
