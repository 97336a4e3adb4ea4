//! A block of a transformer, and the residual stream between blocks.

use super::{
    Attention, AttentionCall, AttentionConfig, LayerNorm, LayerNormConfig, LayerNormOp, Mlp,
    MlpConfig, MlpOp, RmsNorm, RmsNormConfig, RmsNormOp, SwiGlu, SwiGluConfig, attention,
    layer_norm, mlp, rms_norm, swiglu,
};
use crate::Result;
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{ModuleT, Path};

/// Which norm a block has.
#[derive(Clone, Copy, Debug)]
pub enum NormConfig {
    /// Layer normalisation, as in GPT-2.
    Layer(LayerNormConfig),
    /// RMS normalisation, as in Llama.
    Rms(RmsNormConfig),
}

/// A norm of the residual stream. Made by [`norm`].
#[derive(Debug)]
pub enum Norm {
    /// Layer normalisation.
    Layer(LayerNorm),
    /// RMS normalisation.
    Rms(RmsNorm),
}

/// Makes a norm over `dim` features, for example the one after the last block.
pub fn norm<'a, T: Borrow<Path<'a>>>(vs: T, dim: i64, config: NormConfig) -> Norm {
    match config {
        NormConfig::Layer(config) => Norm::Layer(layer_norm(vs, &[dim], config)),
        NormConfig::Rms(config) => Norm::Rms(rms_norm(vs, &[dim], config)),
    }
}

impl Norm {
    /// Adds the stream's branch to its sum and normalises the sum. Returns the stream, whose branch
    /// is then added, and the norm. `dropout` is the probability that a value of the branch is
    /// dropped; pass 0 in evaluation.
    ///
    /// # Errors
    /// When the stream does not fit this norm; see [`add_layer_norm`](crate::ops::add_layer_norm()).
    pub fn f_forward(&self, stream: &Residual, dropout: f64) -> Result<(Residual, Tensor)> {
        let Some(branch) = &stream.branch else {
            let output = match self {
                Norm::Layer(norm) => norm.f_forward(&stream.sum)?,
                Norm::Rms(norm) => norm.f_forward(&stream.sum)?,
            };
            return Ok((Residual::new(stream.sum.shallow_clone()), output));
        };
        let (sum, output) = match self {
            Norm::Layer(norm) => norm.f_forward_add(branch, &stream.sum, dropout)?,
            Norm::Rms(norm) => norm.f_forward_add(branch, &stream.sum, dropout)?,
        };
        Ok((Residual::new(sum), output))
    }
}

/// The residual stream between two blocks: a sum, and the output of the last branch, which is not yet
/// added. The next norm adds it and normalises the sum in one pass over memory.
#[derive(Debug)]
pub struct Residual {
    /// The sum of what came before.
    pub sum: Tensor,
    /// What is still to be added.
    pub branch: Option<Tensor>,
}

impl Residual {
    /// A stream that begins with this sum, for example of embeddings.
    pub fn new(sum: Tensor) -> Residual {
        Residual { sum, branch: None }
    }

    /// The sum with the branch, of whose values a share `dropout` is dropped.
    ///
    /// # Errors
    /// If an operation of libtorch fails.
    pub fn f_total(&self, dropout: f64) -> Result<Tensor> {
        match &self.branch {
            None => Ok(self.sum.shallow_clone()),
            Some(branch) if dropout == 0.0 => Ok(self.sum.f_add(branch)?),
            Some(branch) => Ok(self.sum.f_add(&branch.f_dropout(dropout, true)?)?),
        }
    }
}

/// Which feed-forward part a block has.
#[derive(Clone, Copy, Debug)]
pub enum FeedForwardConfig {
    /// Two layers with an activation between them, as in GPT-2.
    Mlp(MlpConfig),
    /// Three layers, as in Llama.
    SwiGlu(SwiGluConfig),
}

#[derive(Debug)]
enum FeedForward {
    Mlp(Mlp),
    SwiGlu(SwiGlu),
}

/// Configuration of a [`TransformerBlock`].
#[derive(Clone, Copy, Debug)]
pub struct TransformerBlockConfig {
    /// The attention, whose projections, heads and dropout it has.
    pub attention: AttentionConfig,
    /// Both norms.
    pub norm: NormConfig,
    /// The feed-forward part.
    pub feed_forward: FeedForwardConfig,
    /// The number of features between the layers of the feed-forward part; by default four times those
    /// of a token.
    pub hidden_dim: Option<i64>,
    /// The probability with which a value of a branch is dropped in training before it is added.
    pub dropout: f64,
    /// The names of the norm before attention, of attention, of the norm before the feed-forward part
    /// and of that part.
    pub names: [&'static str; 4],
}

impl TransformerBlockConfig {
    /// As in GPT-2, with Hugging Face's names: `ln_1`, `attn`, `ln_2` and `mlp`.
    pub fn gpt2() -> Self {
        TransformerBlockConfig {
            attention: AttentionConfig::gpt2(),
            norm: NormConfig::Layer(LayerNormConfig::default()),
            feed_forward: FeedForwardConfig::Mlp(MlpConfig::default()),
            hidden_dim: None,
            dropout: 0.0,
            names: ["ln_1", "attn", "ln_2", "mlp"],
        }
    }

    /// As in Llama, with Hugging Face's names: `input_layernorm`, `self_attn`,
    /// `post_attention_layernorm` and `mlp`. Rotary positions are
    /// [`AttentionCall::transform`](AttentionCall) of each call.
    pub fn llama(num_kv_heads: i64, hidden_dim: i64) -> Self {
        let norm = RmsNormConfig { eps: Some(1e-6), ..Default::default() };
        TransformerBlockConfig {
            attention: AttentionConfig::llama(num_kv_heads),
            norm: NormConfig::Rms(norm),
            feed_forward: FeedForwardConfig::SwiGlu(SwiGluConfig::default()),
            hidden_dim: Some(hidden_dim),
            dropout: 0.0,
            names: ["input_layernorm", "self_attn", "post_attention_layernorm", "mlp"],
        }
    }

    /// The same with norms and feed-forward part in plain tch operations, for comparison.
    pub fn composite(mut self) -> Self {
        match &mut self.norm {
            NormConfig::Layer(config) => config.op = LayerNormOp::Composite,
            NormConfig::Rms(config) => config.op = RmsNormOp::Composite,
        }
        match &mut self.feed_forward {
            FeedForwardConfig::Mlp(config) => config.op = MlpOp::Composite,
            FeedForwardConfig::SwiGlu(config) => config.op = MlpOp::Composite,
        }
        self
    }
}

/// A block of a transformer with norms before its two branches. Made by [`transformer_block`].
#[derive(Debug)]
pub struct TransformerBlock {
    norms: [Norm; 2],
    attention: Attention,
    feed_forward: FeedForward,
    dropout: f64,
}

/// Makes a block of a transformer of tokens with `embed_dim` features:
///
/// ```text
/// h = x + drop(attention(norm₁(x)))
/// y = h + drop(feed_forward(norm₂(h)))
/// ```
///
/// Each sum is computed with the norm that follows it, by
/// [`add_layer_norm`](crate::ops::add_layer_norm()) or [`add_rms_norm`](crate::ops::add_rms_norm()). So a
/// block passes the [`Residual`] stream on with its last branch not yet added.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::VarStore};
/// use tch_extension::nn::{Residual, TransformerBlockConfig, norm, transformer_block};
///
/// let vs = VarStore::new(Device::Cpu);
/// let config = TransformerBlockConfig::gpt2();
/// let blocks: Vec<_> =
///     (0..2).map(|index| transformer_block(vs.root() / "h" / index, 32, 4, config)).collect();
/// let last_norm = norm(vs.root() / "ln_f", 32, config.norm);
///
/// let mut stream = Residual::new(Tensor::randn([2, 7, 32], (Kind::Float, Device::Cpu)));
/// for block in &blocks {
///     stream = block.f_forward(&stream, Default::default())?;
/// }
/// let (_, output) = last_norm.f_forward(&stream, 0.0)?;
/// assert_eq!(output.size(), [2, 7, 32]);
/// assert!(vs.variables().contains_key("h.1.mlp.c_fc.weight"));
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Panics
/// When the numbers of features or heads are not positive or do not divide each other, or when a
/// dropout is no probability.
pub fn transformer_block<'a, T: Borrow<Path<'a>>>(
    vs: T,
    embed_dim: i64,
    num_heads: i64,
    config: TransformerBlockConfig,
) -> TransformerBlock {
    assert!(
        (0.0..=1.0).contains(&config.dropout),
        "nn::TransformerBlock: dropout: expected a probability, got {}",
        config.dropout
    );
    let [first, attend, second, feed] = config.names.map(|name| vs.borrow() / name);
    let hidden = config.hidden_dim.unwrap_or(4 * embed_dim);
    TransformerBlock {
        norms: [norm(first, embed_dim, config.norm), norm(second, embed_dim, config.norm)],
        attention: attention(attend, embed_dim, num_heads, config.attention),
        feed_forward: match config.feed_forward {
            FeedForwardConfig::Mlp(config) => {
                FeedForward::Mlp(mlp(feed, embed_dim, hidden, config))
            }
            FeedForwardConfig::SwiGlu(config) => {
                FeedForward::SwiGlu(swiglu(feed, embed_dim, hidden, config))
            }
        },
        dropout: config.dropout,
    }
}

impl TransformerBlock {
    /// The attention, for example to make a cache for its heads.
    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// Computes the block for a stream of tokens `[B, T, C]`, with what the call adds to attention: a
    /// mask, a cache, rotary positions. The call also says whether dropout is on.
    ///
    /// # Errors
    /// When the stream does not fit this block, as for [`Attention::f_attend`], or if libtorch or CUDA
    /// fails.
    pub fn f_forward(&self, stream: &Residual, call: AttentionCall<'_>) -> Result<Residual> {
        let dropout = if call.train { self.dropout } else { 0.0 };
        let (mut stream, normal) = self.norms[0].f_forward(stream, dropout)?;
        stream.branch = Some(self.attention.f_attend(&normal, call)?);
        let (mut stream, normal) = self.norms[1].f_forward(&stream, dropout)?;
        stream.branch = Some(match &self.feed_forward {
            FeedForward::Mlp(layer) => layer.f_forward(&normal)?,
            FeedForward::SwiGlu(layer) => layer.f_forward(&normal)?,
        });
        Ok(stream)
    }

    /// Like [`ModuleT::forward_t`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// As for [`f_forward`](Self::f_forward).
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let call = AttentionCall { train, ..Default::default() };
        let stream = self.f_forward(&Residual::new(input.shallow_clone()), call)?;
        stream.f_total(if train { self.dropout } else { 0.0 })
    }
}

/// The block as a layer of its own: its last branch is added.
impl ModuleT for TransformerBlock {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
    }
}
