//! Layers in tch's style that use the operators in [`ops`](crate::ops), attention by libtorch's back
//! ends, and weights in PyTorch's files.

mod attention;
mod checkpoint;
mod embedding;
mod kernels;
#[cfg(feature = "norm")]
mod layer_norm;
#[cfg(feature = "gemm")]
mod linear;
#[cfg(feature = "recurrent")]
mod lltm;
#[cfg(feature = "recurrent")]
mod lltm_layer;
#[cfg(feature = "mlp")]
mod mlp;
#[cfg(feature = "norm")]
mod rms_norm;
#[cfg(feature = "recurrent")]
mod rnn;
#[cfg(feature = "rope")]
mod rope;
#[cfg(feature = "recurrent")]
mod side_stream;
pub mod state_dict;
#[cfg(all(feature = "norm", feature = "mlp"))]
mod transformer;

#[cfg(feature = "gemm")]
pub use attention::{
    Attention, AttentionCall, AttentionConfig, Projections, QkTransform, attention,
};
pub use attention::{
    AttentionOptions, Causal, DecodeOptions, KvCache, Packed, SdpaBackend, enabled_sdpa_backends,
    f_scaled_dot_product_attention, f_sdpa_backend, scaled_dot_product_attention,
    scaled_dot_product_attention_reference, sdpa_kernel, sdpa_kernel_by_priority,
};
pub use checkpoint::{Functional, checkpoint};
pub use embedding::{Embedding, embedding};
#[cfg(feature = "norm")]
pub use layer_norm::{LayerNorm, LayerNormConfig, LayerNormOp, layer_norm};
#[cfg(feature = "gemm")]
pub use linear::{Linear, Lora, linear};
#[cfg(feature = "recurrent")]
pub use lltm::{Lltm, LltmConfig, LltmOp, LltmState, lltm};
#[cfg(feature = "recurrent")]
pub use lltm_layer::{LltmLayer, LltmLayerConfig, lltm_layer};
#[cfg(feature = "mlp")]
pub use mlp::{Mlp, MlpConfig, MlpOp, SwiGlu, SwiGluConfig, mlp, swiglu};
#[cfg(feature = "norm")]
pub use rms_norm::{RmsNorm, RmsNormConfig, RmsNormOp, rms_norm};
#[cfg(feature = "recurrent")]
pub use rnn::{Gru, Lstm, gru, lstm};
#[cfg(feature = "rope")]
pub use rope::{Rope, RopeConfig, RopeOp, rope};
#[cfg(all(feature = "norm", feature = "mlp"))]
pub use transformer::{
    FeedForwardConfig, Norm, NormConfig, Residual, TransformerBlock, TransformerBlockConfig, norm,
    transformer_block,
};
