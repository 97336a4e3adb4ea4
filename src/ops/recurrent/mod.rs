//! What the operators on whole sequences share.

pub(super) mod kernels;
pub(super) mod layer;
pub(super) mod plan;

pub(crate) use kernels::cudnn::flatten as flatten_for_cudnn;
pub(super) use kernels::{columns, product};
pub(crate) use layer::check_lengths;
pub use layer::{RnnWeights, Way};
