//! Layers in tch's style over [`ops`](crate::ops).

mod linear;
mod lltm;

pub use linear::{Linear, linear};
pub use lltm::{Lltm, LltmConfig, LltmOp, LltmState, lltm};
