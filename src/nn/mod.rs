//! Layers in tch's style over [`ops`](crate::ops).

mod lltm;

pub use lltm::{Lltm, LltmConfig, LltmOp, LltmState, lltm};
