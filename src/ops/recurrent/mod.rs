//! What the operators on whole sequences share.

pub(super) mod kernels;
pub(super) mod layer;
pub(super) mod operands;
pub(super) mod plan;

pub(crate) use kernels::cudnn::flatten as flatten_for_cudnn;
pub(super) use kernels::{columns, product};
pub use layer::{RnnOptions, RnnWeights};
pub(crate) use layer::{check_lengths, with_half_of_the_gpu};
pub use plan::Way;
