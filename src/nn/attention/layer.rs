//! Multi-head attention as a module.

use super::super::{Functional, Linear, linear};
use super::cache::{DecodeOptions, KvCache};
use super::functional::{AttentionOptions, Causal, f_scaled_dot_product_attention};
use super::packed::Packed;
use crate::{Error, Result, check};
use std::borrow::Borrow;
use tch::Tensor;
use tch::nn::{Init, LinearConfig, ModuleT, Path};

const OP: &str = "nn::Attention";

/// Which linear layers make queries, keys and values, and the names of their parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections {
    /// One layer for all three, as in GPT-2: `weight` is `[H·D + 2·Hkv·D, C]`, first the rows of
    /// the queries, then those of the keys, then those of the values.
    Packed {
        /// The layer's name, such as `c_attn`.
        qkv: &'static str,
    },
    /// A layer each, as in Llama.
    Separate {
        /// The name of the queries' layer, such as `q_proj`.
        q: &'static str,
        /// The name of the keys' layer, such as `k_proj`.
        k: &'static str,
        /// The name of the values' layer, such as `v_proj`.
        v: &'static str,
    },
}

/// Configuration of an [`Attention`] layer.
#[derive(Clone, Copy, Debug)]
pub struct AttentionConfig {
    /// The number of heads of keys and values, Hkv, which divides that of the queries. By default
    /// there are as many as of the queries.
    pub num_kv_heads: Option<i64>,
    /// The number of features of each head, D. By default `embed_dim / num_heads`.
    pub head_dim: Option<i64>,
    /// Whether the projections of queries, keys and values have a bias.
    pub bias: bool,
    /// Whether the output's projection has a bias.
    pub out_bias: bool,
    /// The probability with which a weight of attention is dropped in training.
    pub dropout: f64,
    /// Whether a token sees only itself and the tokens before it.
    pub causal: bool,
    /// What the products of queries and keys are multiplied with; by default `1 / sqrt(D)`.
    pub scale: Option<f64>,
    /// The layers for queries, keys and values.
    pub projections: Projections,
    /// The name of the output's layer.
    pub out: &'static str,
    /// The initial values of all weights.
    pub ws_init: Init,
    /// The initial values of all biases; by default as in tch's linear layer.
    pub bs_init: Option<Init>,
}

impl AttentionConfig {
    /// As in GPT-2: one layer `c_attn` and the output's `c_proj`, both with biases; causal. Hugging
    /// Face's GPT-2 keeps these two weights transposed;
    /// [`state_dict`](crate::nn::state_dict) says how to load them.
    pub fn gpt2() -> Self {
        AttentionConfig {
            num_kv_heads: None,
            head_dim: None,
            bias: true,
            out_bias: true,
            dropout: 0.0,
            causal: true,
            scale: None,
            projections: Projections::Packed { qkv: "c_attn" },
            out: "c_proj",
            ws_init: LinearConfig::default().ws_init,
            bs_init: None,
        }
    }

    /// As in Llama, Mistral and, with `bias`, Qwen2: layers `q_proj`, `k_proj`, `v_proj` and
    /// `o_proj` without biases; causal; `num_kv_heads` heads of keys and values.
    pub fn llama(num_kv_heads: i64) -> Self {
        AttentionConfig {
            num_kv_heads: Some(num_kv_heads),
            bias: false,
            out_bias: false,
            projections: Projections::Separate { q: "q_proj", k: "k_proj", v: "v_proj" },
            out: "o_proj",
            ..AttentionConfig::gpt2()
        }
    }
}

/// Changes queries and keys before attention, such as a rotary embedding. It gets q `[B, T, H, D]`,
/// k `[B, T, Hkv, D]` and the place of the first token in the sequence, and returns tensors of the
/// same shapes. Both are views of the projections' outputs, so it must not change them in place.
pub type QkTransform<'a> = &'a dyn Fn(&Tensor, &Tensor, i64) -> Result<(Tensor, Tensor)>;

/// What one call of [`Attention::f_attend`] may take in addition to the input.
#[derive(Default)]
pub struct AttentionCall<'a> {
    /// Whether dropout is on.
    pub train: bool,
    /// See [`AttentionOptions::attn_mask`]; it broadcasts to `[B, H, T, S]`, where S counts the
    /// tokens in the cache, too. In a layer with [`AttentionConfig::causal`] both hold: it may hide
    /// padding, and a token still sees none after it.
    pub attn_mask: Option<&'a Tensor>,
    /// Keys and values of the tokens before the input, to which those of the input are appended.
    pub cache: Option<&'a mut KvCache>,
    /// Changes queries and keys.
    pub transform: Option<QkTransform<'a>>,
    /// `[B]`: how many tokens of each row are in the cache, on the device. Then T is 1, and the tokens are
    /// put there and see what is before them; see [`KvCache::f_decode`]. The transform gets the cache's
    /// length, which stays.
    pub places: Option<&'a Tensor>,
    /// Next to places, the angles of [`DecodeOptions::rope`], in place of a transform that rotates.
    pub rope: Option<[&'a Tensor; 2]>,
    /// Where sequences begin in the rows of the input, none of which sees another one; see
    /// [`AttentionOptions::packed`]. There is no mask and no cache then.
    pub packed: Option<&'a Packed>,
}

#[derive(Debug)]
enum Qkv {
    Packed(Linear),
    Separate { q: Linear, k: Linear, v: Linear },
}

/// Multi-head self-attention. Made by [`attention`].
#[derive(Debug)]
pub struct Attention {
    qkv: Qkv,
    out: Linear,
    embed_dim: i64,
    num_heads: i64,
    num_kv_heads: i64,
    head_dim: i64,
    config: AttentionConfig,
}

/// Makes a layer of multi-head self-attention of tokens with `embed_dim` features, C, as in GPT-2
/// or Llama; see [`AttentionConfig`], which also has the names of the parameters. All products are
/// [`linear`](crate::nn::linear())'s, and the attention is
/// [`scaled_dot_product_attention`](super::scaled_dot_product_attention). Queries, keys and values
/// are views of the projections' outputs.
///
/// ```
/// use tch::{Device, Kind, Tensor, nn::{ModuleT, VarStore}};
/// use tch_extension::nn::{AttentionCall, AttentionConfig, KvCache, attention};
///
/// let vs = VarStore::new(Device::Cpu);
/// let config = AttentionConfig { dropout: 0.1, ..AttentionConfig::llama(2) };
/// let layer = attention(vs.root() / "self_attn", 32, 4, config);
/// let tokens = Tensor::randn([2, 7, 32], (Kind::Float, Device::Cpu)); // [B, T, C]
/// let trained_on = layer.forward_t(&tokens, true);
/// assert_eq!(trained_on.size(), [2, 7, 32]);
///
/// // Generation: first the prompt, then a token at a time.
/// let _guard = tch::no_grad_guard();
/// let mut cache = KvCache::new(64);
/// for (from, count) in [(0, 6), (6, 1)] {
///     let call = AttentionCall { cache: Some(&mut cache), ..Default::default() };
///     layer.f_attend(&tokens.narrow(1, from, count), call)?;
/// }
/// assert_eq!(cache.len(), 7);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Panics
/// When the numbers of features or heads are not positive or do not divide each other, or when the
/// dropout is no probability.
pub fn attention<'a, T: Borrow<Path<'a>>>(
    vs: T,
    embed_dim: i64,
    num_heads: i64,
    config: AttentionConfig,
) -> Attention {
    let vs = vs.borrow();
    let num_kv_heads = config.num_kv_heads.unwrap_or(num_heads);
    assert!(embed_dim >= 1, "{OP}: embed_dim: expected at least 1, got {embed_dim}");
    assert!(num_heads >= 1, "{OP}: num_heads: expected at least 1, got {num_heads}");
    assert!(
        num_kv_heads >= 1 && num_heads % num_kv_heads == 0,
        "{OP}: num_kv_heads: expected a divisor of the {num_heads} heads, got {num_kv_heads}"
    );
    assert!(
        config.head_dim.is_some() || embed_dim % num_heads == 0,
        "{OP}: embed_dim: expected a multiple of the {num_heads} heads, got {embed_dim}; or set head_dim"
    );
    let head_dim = config.head_dim.unwrap_or(embed_dim / num_heads);
    assert!(head_dim >= 1, "{OP}: head_dim: expected at least 1, got {head_dim}");
    assert!(
        (0.0..=1.0).contains(&config.dropout),
        "{OP}: dropout: expected a probability, got {}",
        config.dropout
    );
    let layer = |name: &str, from, to, bias| {
        let config = LinearConfig { ws_init: config.ws_init, bs_init: config.bs_init, bias };
        linear(vs / name, from, to, config)
    };
    let (of_q, of_kv) = (num_heads * head_dim, num_kv_heads * head_dim);
    let project = |name, to| layer(name, embed_dim, to, config.bias);
    let qkv = match config.projections {
        Projections::Packed { qkv } => Qkv::Packed(project(qkv, of_q + 2 * of_kv)),
        Projections::Separate { q, k, v } => {
            Qkv::Separate { q: project(q, of_q), k: project(k, of_kv), v: project(v, of_kv) }
        }
    };
    let out = layer(config.out, of_q, embed_dim, config.out_bias);
    Attention { qkv, out, embed_dim, num_heads, num_kv_heads, head_dim, config }
}

impl Attention {
    /// The linear layers with their names, for example for [`Linear::add_lora`].
    pub fn linears_mut(&mut self) -> Vec<(&'static str, &mut Linear)> {
        let AttentionConfig { projections, out, .. } = self.config;
        let mut all = match (&mut self.qkv, projections) {
            (Qkv::Separate { q, k, v }, Projections::Separate { q: of_q, k: of_k, v: of_v }) => {
                vec![(of_q, q), (of_k, k), (of_v, v)]
            }
            (Qkv::Packed(layer), Projections::Packed { qkv }) => vec![(qkv, layer)],
            _ => vec![],
        };
        all.push((out, &mut self.out));
        all
    }

    /// The number of features of a token, C.
    pub fn embed_dim(&self) -> i64 {
        self.embed_dim
    }

    /// The number of heads of the queries, H.
    pub fn num_heads(&self) -> i64 {
        self.num_heads
    }

    /// The number of heads of keys and values, Hkv.
    pub fn num_kv_heads(&self) -> i64 {
        self.num_kv_heads
    }

    /// The number of features of each head, D.
    pub fn head_dim(&self) -> i64 {
        self.head_dim
    }

    /// Like [`ModuleT::forward_t`], but returns an error instead of panicking.
    ///
    /// # Errors
    /// As for [`f_attend`](Self::f_attend).
    pub fn f_forward_t(&self, input: &Tensor, train: bool) -> Result<Tensor> {
        self.f_attend(input, AttentionCall { train, ..Default::default() })
    }

    /// The output `[B, T, C]` for tokens `[B, T, C]`, with what the call adds.
    ///
    /// # Errors
    /// When the input does not fit this layer, when the call's mask or cache does not fit the
    /// input, when the call's transform fails or changes a shape, or if libtorch or CUDA fails. The
    /// cache then holds what it held before, and an unused one takes tensors of other sizes.
    pub fn f_attend(&self, input: &Tensor, mut call: AttentionCall<'_>) -> Result<Tensor> {
        check!(OP, input).defined()?.dim(3, "[B, T, C]")?;
        let (b, t, _) = input.size3()?;
        check!(OP, input).shape("[B, T, C]", &[b, t, self.embed_dim])?;
        let before = call.cache.as_ref().map(|cache| cache.mark());
        let inner = AttentionCall { cache: call.cache.as_deref_mut(), ..call };
        let output = self
            .check_call(&inner, t)
            .and_then(|()| self.attended(self.project(input)?, inner))
            .and_then(|attended| self.out.f_forward(&attended));
        if let (Err(_), Some(cache), Some(before)) = (&output, call.cache, before) {
            cache.rewind(before);
        }
        output
    }

    /// What the output layer gets, `[B, T, H D]`, for projections `[B, T, …]`.
    pub(in crate::nn) fn attended(
        &self,
        projections: [Tensor; 3],
        call: AttentionCall<'_>,
    ) -> Result<Tensor> {
        let AttentionCall { train, attn_mask, mut cache, transform, places, rope, packed } = call;
        let (b, t, _) = projections[0].size3()?;
        let [mut q, mut k, v] = self.heads(projections)?;
        let first = cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(transform) = transform {
            (q, k) = transformed(transform, [q, k], first)?;
        }
        // [B, T, H, D] → [B, H, T, D]
        let (q, k, v) = (q.f_transpose(1, 2)?, k.f_transpose(1, 2)?, v.f_transpose(1, 2)?);
        let merged = |output: Tensor| {
            let size = [b, t, self.num_heads * self.head_dim];
            Ok(output.f_transpose(1, 2)?.f_reshape(size)?)
        };
        if let (Some(places), Some(cache)) = (places, cache.as_mut()) {
            let options = DecodeOptions { scale: self.config.scale, rope };
            return merged(cache.f_decode(&q, &k, &v, places, options)?);
        }
        let (k, v) = match cache.as_mut() {
            Some(cache) => cache.f_append(&k, &v)?,
            None => (k, v),
        };
        let options = AttentionOptions {
            attn_mask,
            dropout_p: if train { self.config.dropout } else { 0.0 },
            causal: self.config.causal.then_some(Causal::LowerRight),
            scale: self.config.scale,
            enable_gqa: self.num_kv_heads != self.num_heads,
            packed,
        };
        f_scaled_dot_product_attention(&q, &k, &v, &options).and_then(merged)
    }

    /// Checks what the parts of a call may have next to each other, for so many tokens of each row.
    pub(in crate::nn) fn check_call(&self, call: &AttentionCall<'_>, tokens: i64) -> Result<()> {
        if call.packed.is_some() && (call.cache.is_some() || call.attn_mask.is_some()) {
            let expected = "packed sequences without a cache and a mask";
            let got = if call.cache.is_some() { "a cache" } else { "a mask" };
            return Err(Error::argument(OP, "packed", expected, got, "leave one of them out"));
        }
        let Some(places) = call.places else {
            return match call.rope {
                None => Ok(()),
                Some([cos, _]) => {
                    let hint = "rotate in the call's transform";
                    Err(check!(OP, "rope", cos).refuse("places next to it", "none", hint))
                }
            };
        };
        let places = check!(OP, places);
        let drops = call.train && self.config.dropout > 0.0;
        if call.cache.is_none() || call.attn_mask.is_some() || drops || !self.config.causal {
            let expected =
                "places only in a causal layer with a cache, and without a mask and dropout";
            return Err(places.refuse(expected, "places", "leave them out"));
        }
        if tokens != 1 {
            let hint = "append the prompt without places";
            return Err(places.refuse("one token of each row", tokens.to_string(), hint));
        }
        Ok(())
    }

    /// The projections of the input `[B, T, C]` to queries, keys and values.
    fn project(&self, input: &Tensor) -> Result<[Tensor; 3]> {
        match &self.qkv {
            Qkv::Packed(layer) => {
                let (of_q, of_kv) =
                    (self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim);
                layer.f_forward_parts(input, [of_q, of_kv, of_kv])
            }
            Qkv::Separate { q, k, v } => Linear::f_forward_each([q, k, v], input),
        }
    }

    /// The layers of the three projections and of the output; `None` if one layer makes all projections.
    #[cfg(all(feature = "norm", feature = "mlp"))]
    pub(in crate::nn) fn layers(&self) -> Option<([&Linear; 3], &Linear)> {
        match &self.qkv {
            Qkv::Separate { q, k, v } => Some(([q, k, v], &self.out)),
            Qkv::Packed(_) => None,
        }
    }

    /// Queries `[B, T, H, D]`, keys and values `[B, T, Hkv, D]`.
    fn heads(&self, [q, k, v]: [Tensor; 3]) -> Result<[Tensor; 3]> {
        let split = |tensor: &Tensor, heads: i64| -> Result<Tensor> {
            let (b, t, _) = tensor.size3()?;
            Ok(tensor.f_view([b, t, heads, self.head_dim])?)
        };
        Ok([
            split(&q, self.num_heads)?,
            split(&k, self.num_kv_heads)?,
            split(&v, self.num_kv_heads)?,
        ])
    }
}

fn transformed(
    transform: QkTransform<'_>,
    [q, k]: [Tensor; 2],
    first: i64,
) -> Result<(Tensor, Tensor)> {
    let (new_q, new_k) = transform(&q, &k, first)?;
    for (name, new, old) in [("transform's q", &new_q, &q), ("transform's k", &new_k, &k)] {
        if !new.defined() || new.size() != old.size() {
            let expected = format!("shape [B, T, H, D] = {:?}", old.size());
            let got = if new.defined() {
                format!("{:?}", new.size())
            } else {
                "an undefined tensor".into()
            };
            return Err(Error::argument(OP, name, expected, got, ""));
        }
    }
    Ok((new_q, new_k))
}

impl Functional for Attention {
    fn with_tensors(&self, replace: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let qkv = match &self.qkv {
            Qkv::Packed(layer) => Qkv::Packed(layer.with_tensors(replace)),
            Qkv::Separate { q, k, v } => {
                let [q, k, v] = [q, k, v].map(|layer| layer.with_tensors(replace));
                Qkv::Separate { q, k, v }
            }
        };
        Attention { qkv, out: self.out.with_tensors(replace), ..*self }
    }
}

impl ModuleT for Attention {
    fn forward_t(&self, input: &Tensor, train: bool) -> Tensor {
        self.f_forward_t(input, train).unwrap_or_else(|error| panic!("{error}"))
    }
}
