//! A block of a transformer, and the residual stream between blocks.

mod decode;

use super::{
    Attention, AttentionCall, AttentionConfig, Functional, LayerNorm, LayerNormConfig, LayerNormOp,
    Linear, Mlp, MlpConfig, MlpOp, RmsNorm, RmsNormConfig, RmsNormOp, SwiGlu, SwiGluConfig,
    attention, layer_norm, mlp, rms_norm, swiglu,
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
    /// Adds the stream's branch, with its dropout, to its sum and normalises the sum. Returns the
    /// stream, whose branch is then added, and the norm.
    ///
    /// The norm has the kind of the branch. Under autocast it is therefore `Half` or `BFloat16` after
    /// a block, also at the end of the stream, where libtorch's norm of the sum, which is `Float`,
    /// would be `Float`.
    ///
    /// # Errors
    /// When the stream does not fit this norm; see [`add_layer_norm`](crate::ops::add_layer_norm()).
    pub fn f_forward(&self, stream: &Residual) -> Result<(Residual, Tensor)> {
        let Some((branch, dropout)) = &stream.branch else {
            let output = match self {
                Norm::Layer(norm) => norm.f_forward(&stream.sum)?,
                Norm::Rms(norm) => norm.f_forward(&stream.sum)?,
            };
            return Ok((Residual::new(stream.sum.shallow_clone()), output));
        };
        let (sum, output) = match self {
            Norm::Layer(norm) => norm.f_forward_add(branch, &stream.sum, *dropout)?,
            Norm::Rms(norm) => norm.f_forward_add(branch, &stream.sum, *dropout)?,
        };
        Ok((Residual::new(sum), output))
    }
}

impl Functional for Norm {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        match self {
            Norm::Layer(norm) => Norm::Layer(norm.with_tensors(replace)),
            Norm::Rms(norm) => Norm::Rms(norm.with_tensors(replace)),
        }
    }
}

/// The residual stream between two blocks: a sum, and the output of the last branch, which is not yet
/// added. The next norm adds it and normalises the sum in one pass over memory.
#[derive(Debug)]
pub struct Residual {
    /// The sum of what came before.
    pub sum: Tensor,
    /// What is still to be added, and the probability that a value of it is dropped then. The block
    /// that computes the branch says so: 0 unless it trains.
    pub branch: Option<(Tensor, f64)>,
}

impl Residual {
    /// A stream that begins with this sum, for example of embeddings.
    pub fn new(sum: Tensor) -> Residual {
        Residual { sum, branch: None }
    }

    /// The sum with the branch, with its dropout.
    ///
    /// # Errors
    /// If an operation of libtorch fails.
    pub fn f_total(&self) -> Result<Tensor> {
        match &self.branch {
            None => Ok(self.sum.shallow_clone()),
            Some((branch, 0.0)) => Ok(self.sum.f_add(branch)?),
            Some((branch, dropout)) => Ok(self.sum.f_add(&branch.f_dropout(*dropout, true)?)?),
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
    /// [`AttentionCall::transform`](AttentionCall) of each call. The norms' `eps` is 1e-5, as in
    /// Llama 2 and 3; that of the first Llama is 1e-6.
    pub fn llama(num_kv_heads: i64, hidden_dim: i64) -> Self {
        let norm = RmsNormConfig { eps: Some(1e-5), ..Default::default() };
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
    names: [&'static str; 4],
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
/// block passes the [`Residual`] stream on with its last branch not yet added, except where kernels of
/// generation add it to the product before.
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
/// let (_, output) = last_norm.f_forward(&stream)?;
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
        names: config.names,
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

    /// All linear layers with their names, such as `self_attn.q_proj`, for example for
    /// [`Linear::add_lora`](super::Linear::add_lora).
    pub fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let [_, attend, _, feed] = self.names;
        let attention = self.attention.linears_mut().into_iter();
        let feed_forward = match &mut self.feed_forward {
            FeedForward::Mlp(layer) => Vec::from(layer.linears_mut()),
            FeedForward::SwiGlu(layer) => Vec::from(layer.linears_mut()),
        };
        let feed_forward = feed_forward.into_iter().map(|(name, layer)| (feed, name, layer));
        let all = attention.map(|(name, layer)| (attend, name, layer)).chain(feed_forward);
        all.map(|(part, name, layer)| (format!("{part}.{name}"), layer)).collect()
    }

    /// Computes the block for a stream of tokens `[B, T, C]`, with what the call adds to attention: a
    /// mask, a cache, rotary positions, packed sequences. The call also says whether dropout is on, the returned
    /// stream's, too.
    ///
    /// # Errors
    /// When the stream does not fit this block, as for [`Attention::f_attend`], or if libtorch or CUDA
    /// fails. The call's cache is then as after an error of `f_attend`.
    pub fn f_forward(&self, stream: &Residual, mut call: AttentionCall<'_>) -> Result<Residual> {
        let before = call.cache.as_ref().map(|cache| cache.mark());
        let inner = AttentionCall { cache: call.cache.as_deref_mut(), ..call };
        let output = self.branches(stream, inner);
        if let (Err(_), Some(cache), Some(before)) = (&output, call.cache, before) {
            cache.rewind(before);
        }
        output
    }

    fn branches(&self, stream: &Residual, mut call: AttentionCall<'_>) -> Result<Residual> {
        if let Some(output) = self.f_decode(stream, &mut call)? {
            return Ok(output);
        }
        let dropout = if call.train { self.dropout } else { 0.0 };
        let (mut stream, normal) = self.norms[0].f_forward(stream)?;
        stream.branch = Some((self.attention.f_attend(&normal, call)?, dropout));
        let (mut stream, normal) = self.norms[1].f_forward(&stream)?;
        let output = match &self.feed_forward {
            FeedForward::Mlp(layer) => layer.f_forward(&normal)?,
            FeedForward::SwiGlu(layer) => layer.f_forward(&normal)?,
        };
        stream.branch = Some((output, dropout));
        Ok(stream)
    }

    /// Like [`ModuleT::forward_t`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// As for [`f_forward`](Self::f_forward).
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        let call = AttentionCall { train, ..Default::default() };
        self.f_forward(&Residual::new(input.shallow_clone()), call)?.f_total()
    }
}

impl Functional for TransformerBlock {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        TransformerBlock {
            norms: self.norms.each_ref().map(|norm| norm.with_tensors(replace)),
            attention: self.attention.with_tensors(replace),
            feed_forward: match &self.feed_forward {
                FeedForward::Mlp(layer) => FeedForward::Mlp(layer.with_tensors(replace)),
                FeedForward::SwiGlu(layer) => FeedForward::SwiGlu(layer.with_tensors(replace)),
            },
            ..*self
        }
    }
}

/// The block as a layer of its own: its last branch is added.
impl ModuleT for TransformerBlock {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
    }
}
