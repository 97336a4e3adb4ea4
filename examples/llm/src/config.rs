//! The sizes of a model, and what follows from them.

use crate::device::Precision;
use crate::family::{Llama, Member};
use crate::range;
use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};

/// The sizes of a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ModelConfig {
    /// The number of rows of the embedding: at least the number of tokens.
    pub vocabulary: i64,
    /// The longest sequence.
    pub context: i64,
    pub layers: i64,
    pub heads: i64,
    /// The number of features of a token.
    pub dim: i64,
    /// The probability of all dropouts.
    pub dropout: f64,
    /// Whether GPT-2's backward pass computes the activations of the feed-forward parts again, in place
    /// of keeping them. This and the next one change no numbers, and are not saved.
    #[serde(skip)]
    pub recompute: bool,
    /// Whether it computes whole layers again, of which only the inputs are kept.
    #[serde(skip)]
    pub recompute_layers: bool,
    /// What makes it a member of Llama's family. Without it, it is a GPT-2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub llama: Option<Llama>,
    /// Tokens after which a text ends, if the files say so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ends: Vec<i64>,
}

impl ModelConfig {
    /// Checks what the layers would otherwise panic about, and keeps products of sizes far from
    /// overflow.
    pub fn check(&self) -> Result<()> {
        range::check("--vocabulary-size", self.vocabulary, [1, 1 << 24])?;
        range::check("--context", self.context, [1, 1 << 20])?;
        range::check("--layers", self.layers, [1, 1 << 10])?;
        range::check("--heads", self.heads, [1, 1 << 10])?;
        range::check("--dim", self.dim, [1, 1 << 16])?;
        ensure!(
            self.llama.as_ref().is_some_and(|llama| llama.member != Member::Llama)
                || self.dim % self.heads == 0,
            "--dim {} is no multiple of --heads {}: give one",
            self.dim,
            self.heads
        );
        range::check_below_1("--dropout", self.dropout)?;
        self.llama.as_ref().map_or(Ok(()), |llama| llama.check(self))
    }

    /// The number of parameters.
    pub fn parameters(&self) -> i64 {
        let of_blocks_and_norm = match &self.llama {
            None => self.layers * (12 * self.dim * self.dim + 13 * self.dim) + 2 * self.dim,
            Some(llama) => self.layers * llama.parameters_of_block(self.dim, self.heads) + self.dim,
        };
        // The output layer, which may be the embedding.
        self.vocabulary * self.dim + self.looked_up() + of_blocks_and_norm
    }

    /// The parameters that are in no product: positions, or an embedding that is not the output layer.
    fn looked_up(&self) -> i64 {
        match &self.llama {
            None => self.context * self.dim,
            Some(llama) if llama.tied => 0,
            Some(_) => self.vocabulary * self.dim,
        }
    }

    /// The features of a head.
    fn head_dim(&self) -> i64 {
        self.llama.as_ref().map_or(self.dim / self.heads, |llama| llama.head_dim)
    }

    /// An estimate of the bytes that training takes: weights, gradients and AdamW's state unless the
    /// weights are frozen, and what the backward pass needs of each token. Weights are `Float` at first.
    pub fn training_bytes(&self, precision: Precision, tokens: i64, is_frozen: bool) -> u64 {
        let kept = match (self.layers as u64, self.recompute_layers) {
            (layers, false) => 16 * layers,
            // Those of the layer at work, and the inputs of all.
            (layers, true) => 16 + 2 * layers,
        } * self.dim as u64;
        let (each, of_feature) = match precision {
            Precision::F32 | Precision::Bf16Mixed => (16, 4),
            Precision::Bf16 => (16, 2),
            Precision::Bf16True => (8, 2),
        };
        let each = if is_frozen { 4 } else { each };
        each * self.parameters() as u64 + of_feature * tokens as u64 * kept
    }

    /// The operations of a training step per token: six for each parameter in a product, four if it is
    /// frozen, and those of attention, as if it were not causal. nanoGPT and PaLM count in the same way. Those of
    /// adapters are left out.
    pub fn flops_per_token(&self, is_frozen: bool) -> f64 {
        let each = if is_frozen { 4 } else { 6 };
        let products = each * (self.parameters() - self.looked_up());
        let of_attention = 12 * self.layers * self.heads * self.head_dim() * self.context;
        (products + of_attention) as f64
    }
}
