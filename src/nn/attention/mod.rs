//! Attention, by libtorch's back ends.

mod backend;
mod cache;
mod checks;
mod functional;
#[cfg(feature = "gemm")]
mod layer;
mod packed;

pub use backend::{
    SdpaBackend, enabled_sdpa_backends, f_sdpa_backend, sdpa_kernel, sdpa_kernel_by_priority,
};
pub use cache::{DecodeOptions, KvCache};
pub use functional::{
    AttentionOptions, Causal, f_scaled_dot_product_attention, scaled_dot_product_attention,
    scaled_dot_product_attention_reference,
};
#[cfg(feature = "gemm")]
pub use layer::{Attention, AttentionCall, AttentionConfig, Projections, QkTransform, attention};
pub use packed::Packed;
