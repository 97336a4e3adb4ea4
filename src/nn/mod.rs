//! Layers in tch's style that use the operators in [`ops`](crate::ops).

mod layer_norm;
mod linear;
mod lltm;
mod lltm_layer;

pub use layer_norm::{LayerNorm, LayerNormConfig, LayerNormOp, layer_norm};
pub use linear::{Linear, linear};
pub use lltm::{Lltm, LltmConfig, LltmOp, LltmState, lltm};
pub use lltm_layer::{LltmLayer, LltmLayerConfig, lltm_layer};
