//! What the operators on whole sequences share.

pub(super) mod kernels;
pub(super) mod layer;
pub(super) mod plan;

pub(super) use kernels::{columns, product};
pub use layer::{RnnWeights, Way};
