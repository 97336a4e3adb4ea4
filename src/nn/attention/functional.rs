//! libtorch's attention as a function.

use super::backend::{SdpaBackend, refusal};
use super::checks::{check_mask, check_options, check_packed, sizes};
use super::packed::Packed;
use crate::amp::{CastPolicy, autocast_inputs};
use crate::autograd::register_hook;
use crate::ffi::tensor::{copy_in_vectors, is_in_vectors};
use crate::{Result, check};
use tch::{Kind, Tensor};

pub(super) const OP: &str = "scaled_dot_product_attention";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

/// Which corner of the matrix of weights a causal mask begins at:
/// torch.nn.attention.bias.CausalVariant. They differ only if there are more keys than queries or
/// fewer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Causal {
    /// The first query sees the first key: query i sees the keys up to i. It is `is_causal=True` of
    /// torch.
    UpperLeft,
    /// The last query sees the last key: query i of L sees the keys up to `i + S - L`. It is right
    /// for new queries after keys of a [`KvCache`](super::KvCache).
    LowerRight,
}

/// Options of [`scaled_dot_product_attention`]. The default is no mask, no dropout, and torch's
/// scale.
///
/// ```
/// use tch_extension::nn::{AttentionOptions, Causal};
/// let options = AttentionOptions { causal: Some(Causal::UpperLeft), ..Default::default() };
/// # let _ = options;
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct AttentionOptions<'a> {
    /// Broadcasts to `[…, H, L, S]`. A `Bool` mask is true where a query sees a key; any other is
    /// added to the products of queries and keys, and has the query's kind or `Float`, which is
    /// rounded to the query's kind on CUDA. It may require grad.
    pub attn_mask: Option<&'a Tensor>,
    /// The probability that a weight is dropped.
    pub dropout_p: f64,
    /// Whether a query sees only the keys up to its own place. Next to `attn_mask` both hold, which
    /// torch refuses.
    pub causal: Option<Causal>,
    /// What the products of queries and keys are multiplied with; by default `1 / sqrt(E)`.
    pub scale: Option<f64>,
    /// Whether several heads of the query may share one head of key and value.
    pub enable_gqa: bool,
    /// Where sequences begin in the tokens, none of which sees another sequence's. There is no
    /// `attn_mask` then, and query, key and value are `[B, H, T, E]` with the same B and T.
    pub packed: Option<&'a Packed>,
}

/// Attention of queries to keys and values: torch.nn.functional.scaled_dot_product_attention, which
/// chooses among libtorch's back ends; see [`SdpaBackend`](super::SdpaBackend) and
/// [`sdpa_kernel`](super::sdpa_kernel).
///
/// ```text
/// y = dropout(softmax(scale · q kᵀ + mask)) v
/// ```
///
/// * `query`: q, `[…, H, L, E]`
/// * `key`: k, `[…, H, S, E]`
/// * `value`: v, `[…, H, S, Ev]`
/// * `options`: see [`AttentionOptions`]
///
/// Returns y, `[…, H, L, Ev]`. There may be any number of leading dimensions or none, but fused
/// back ends need exactly two. Leading dimensions broadcast. With `enable_gqa`, the heads of key
/// and of value divide those of the query: consecutive heads of the query share one. All three have
/// one kind, which is `Float`, `Double`, `Half` or `BFloat16`, and are on one device. Strides are
/// arbitrary, although some back ends need a last stride of 1, and tensors may be empty. Under
/// autocast all are first cast to autocast's kind, as libtorch's operator does. A query that sees
/// no key gets zeros.
///
/// There are first derivatives with respect to query, key, value and a mask that is not `Bool`.
/// Second derivatives exist with `SdpaBackend::Math` only; the fused back ends refuse them. On
/// CUDA the backward pass of a fused back end adds in an order that varies between runs.
///
/// With [`Causal::LowerRight`] and `1 < L != S`, a `Bool` mask `[L, S]` is made, which
/// FlashAttention does not take on CUDA. With `attn_mask` and `causal`, a mask is made that has
/// both. With `packed`, FlashAttention's kernels for sequences of different lengths compute half kinds on
/// CUDA from compute capability 8.0 on, with E = Ev a multiple of 8 up to 192, if that back end is
/// enabled; elsewhere a `Bool` mask `[B, 1, T, T]` is made. Some arguments that libtorch accepts without
/// a check are refused here: keys and values of different number, a scale that is not finite.
///
/// Equivalent to:
/// ```
/// # use tch::{Device, Kind, Tensor};
/// # use tch_extension::nn::{AttentionOptions, scaled_dot_product_attention};
/// # let make = |s: i64| Tensor::randn([2, 3, s, 8], (Kind::Double, Device::Cpu));
/// # let (q, k, v, mask) = (make(4), make(6), make(6), Tensor::randn([4, 6], (Kind::Double, Device::Cpu)));
/// let weights = (q.matmul(&k.transpose(-2, -1)) / 8_f64.sqrt() + &mask).softmax(-1, Kind::Double);
/// let composite = weights.matmul(&v);
///
/// let options = AttentionOptions { attn_mask: Some(&mask), ..Default::default() };
/// let fused = scaled_dot_product_attention(&q, &k, &v, &options);
/// assert!(fused.allclose(&composite, 1e-12, 1e-12, false));
/// ```
///
/// Source: `scaled_dot_product_attention` in
/// <https://pytorch.org/docs/stable/nn.functional.html>.
///
/// # Panics
/// If [`f_scaled_dot_product_attention`] returns an error.
pub fn scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Tensor {
    f_scaled_dot_product_attention(query, key, value, options)
        .unwrap_or_else(|error| panic!("{error}"))
}

/// [`scaled_dot_product_attention`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated (the error names the argument), if
/// an option is not acceptable, if no enabled back end takes the arguments, or if libtorch fails.
pub fn f_scaled_dot_product_attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    Prepared::new(query, key, value, options)?.run(options.packed)
}

/// [`scaled_dot_product_attention`] in plain tch operations, without checks of its own. It has no
/// dropout, and all derivatives.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn scaled_dot_product_attention_reference(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    let repeated = |tensor: &Tensor| -> Result<Tensor> {
        if !options.enable_gqa {
            return Ok(tensor.shallow_clone());
        }
        let heads = |tensor: &Tensor| tensor.size()[tensor.dim() - 3];
        Ok(tensor.f_repeat_interleave_self_int(heads(query) / heads(tensor).max(1), -3, None)?)
    };
    let (key, value) = (repeated(key)?, repeated(value)?);
    let [queries, keys] = [query, &key].map(|tensor| tensor.size()[tensor.dim() - 2]);
    let features = query.size().last().copied().unwrap_or(1) as f64;
    let scale = options.scale.unwrap_or(1.0 / features.sqrt());

    let mut scores = query.f_mul_scalar(scale)?.f_matmul(&key.f_transpose(-2, -1)?)?;
    let causal = options.causal.map(|causal| causal_mask(causal, [queries, keys], query));
    let packed = options.packed.map(|packed| packed.mask(false));
    let made = [causal.transpose()?, packed.transpose()?];
    for mask in options.attn_mask.into_iter().chain(made.iter().flatten()) {
        scores = match mask.f_kind()? {
            Kind::Bool => scores.f_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?,
            _ => scores.f_add(mask)?,
        };
    }
    // A row of -infinity becomes zeros.
    let weights = scores.f_internal_safe_softmax(-1, None)?.f_to_kind(query.f_kind()?)?;
    Ok(weights.f_matmul(&value)?)
}

/// True where a query sees a key, `[L, S]`.
fn causal_mask(causal: Causal, [queries, keys]: [i64; 2], like: &Tensor) -> Result<Tensor> {
    let diagonal = match causal {
        Causal::UpperLeft => 0,
        Causal::LowerRight => keys - queries,
    };
    Ok(Tensor::f_ones([queries, keys], (Kind::Bool, like.device()))?.f_tril(diagonal)?)
}

/// Whether libtorch is to make a causal mask itself, and the mask that it gets.
fn masks(
    options: &AttentionOptions<'_>,
    sizes: [i64; 2],
    query: &Tensor,
) -> Result<(bool, Option<Tensor>)> {
    if let Some(packed) = options.packed {
        return Ok((false, Some(packed.mask(options.causal.is_some())?)));
    }
    let [queries, keys] = sizes;
    // The last of the queries sees all keys, so one query needs no mask.
    let is_needed = |causal: &Causal| *causal == Causal::UpperLeft || queries != 1;
    let causal = options.causal.filter(is_needed);
    let Some(mask) = options.attn_mask else {
        return Ok(match causal {
            None => (false, None),
            Some(causal) if causal == Causal::UpperLeft || queries == keys => (true, None),
            Some(causal) => (false, Some(causal_mask(causal, sizes, query)?)),
        });
    };
    // libtorch's kernel for the CPU next to `Double`, and cuDNN next to half kinds, read a `Float` mask
    // as if it had the query's kind.
    let kind = query.f_kind()?;
    let may_be_misread = kind == Kind::Double || query.device().is_cuda();
    let is_cast = mask.f_kind()? == Kind::Float && kind != Kind::Float && may_be_misread;
    let mask = if is_cast { &mask.f_to_kind(kind)? } else { mask };
    let Some(causal) = causal else { return Ok((false, Some(mask.shallow_clone()))) };
    let seen = causal_mask(causal, sizes, query)?;
    Ok((
        false,
        Some(match mask.f_kind()? {
            Kind::Bool => mask.f_logical_and(&seen)?,
            _ => mask.f_masked_fill(&seen.f_logical_not()?, f64::NEG_INFINITY)?,
        }),
    ))
}

/// A tensor that fused kernels for CUDA can read 16 bytes at a time, if its rows are long enough: they
/// look at the stride of a row alone, and take for granted that the other strides fit it. Their check
/// of the address, if there is one, passes multiples of 4 or 8 bytes.
fn in_16_bytes(tensor: &Tensor) -> Result<Tensor> {
    if !tensor.device().is_cuda() {
        return Ok(tensor.shallow_clone());
    }
    let kind = tensor.f_kind()?;
    let bytes = kind.elt_size_in_bytes() as i64;
    let sizes = tensor.size();
    let strides = tensor.stride();
    let mut leading = sizes.iter().zip(&strides).take(sizes.len().saturating_sub(1));
    let has_odd_stride = leading.any(|(&size, stride)| size > 1 && stride * bytes % 16 != 0);
    let is_contiguous = tensor.is_contiguous();
    if is_in_vectors(tensor) && (is_contiguous || !has_odd_stride) {
        return Ok(tensor.shallow_clone());
    }
    // A product would keep an order of strides that does not fit, and make numbers of a `Bool` mask.
    let has_product = is_contiguous && kind != Kind::Bool;
    if has_product { copy_in_vectors(tensor) } else { Ok(Tensor::f_cat(&[tensor], 0)?) }
}

/// An incoming gradient that fused kernels for CUDA can read, as [`in_16_bytes`]. cuDNN (libtorch 2.11)
/// also gives wrong gradients if it is expanded.
fn readable_gradient(grad: &Tensor) -> Result<Tensor> {
    let is_expanded = grad.size().iter().zip(grad.stride()).any(|(&size, by)| size > 1 && by == 0);
    if is_expanded { Ok(grad.f_contiguous()?) } else { in_16_bytes(grad) }
}

/// True for a query that sees no key, `[…, L, 1]`.
fn hidden(mask: &Tensor) -> Result<Tensor> {
    let seen = match mask.f_kind()? {
        Kind::Bool => mask.shallow_clone(),
        _ => mask.f_detach()?.f_ne(f64::NEG_INFINITY)?,
    };
    Ok(seen.f_any_dim(-1, true)?.f_logical_not()?)
}

/// Whether the mask requires grad and the others do not.
fn is_alone_with_grad(mask: Option<&Tensor>, others: [&Tensor; 3]) -> bool {
    mask.is_some_and(Tensor::requires_grad) && !others.into_iter().any(Tensor::requires_grad)
}

/// Arguments that were checked and cast, in the form that libtorch takes.
pub(super) struct Prepared {
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Option<Tensor>,
    is_causal: bool,
    dropout_p: f64,
    scale: Option<f64>,
    enable_gqa: bool,
    /// Whether FlashAttention gets where sequences begin, in place of a mask.
    is_packed: bool,
    /// The size of the result.
    size: Vec<i64>,
}

impl Prepared {
    pub(super) fn new(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Self> {
        check!(OP, query).defined()?;
        check!(OP, key).defined()?;
        check!(OP, value).defined()?;
        options.attn_mask.map(|mask| check!(OP, "attn_mask", mask).defined()).transpose()?;
        let inputs = [Some(query), Some(key), Some(value), options.attn_mask];
        if let Some(cast) = autocast_inputs(CastPolicy::LowerPrecision, &inputs)? {
            let [Some(query), Some(key), Some(value), mask] = &cast[..] else {
                unreachable!("as many as came")
            };
            let options = AttentionOptions { attn_mask: mask.as_ref(), ..*options };
            return Self::checked(query, key, value, &options);
        }
        Self::checked(query, key, value, options)
    }

    fn checked(
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        options: &AttentionOptions<'_>,
    ) -> Result<Self> {
        let query_checked = check!(OP, query).kind_in(&KINDS)?;
        check!(OP, key).like(&query_checked)?;
        check!(OP, value).like(&query_checked)?;
        let size = sizes(query, key, value, options.enable_gqa)?;
        check_options(options)?;
        let [queries, keys] = [query, key].map(|tensor| tensor.size()[tensor.dim() - 2]);
        if let Some(mask) = options.attn_mask {
            check_mask(check!(OP, "attn_mask", mask), &query_checked, &size, keys)?;
        }
        let is_packed = match options.packed {
            Some(packed) => {
                check_packed(packed, [query, key, value], options)?;
                packed.takes_flash([query, key, value], options.enable_gqa)?
            }
            None => false,
        };
        let (is_causal, mask) = match is_packed {
            true => (options.causal.is_some(), None),
            false => masks(options, [queries, keys], query)?,
        };
        let mut query = match is_alone_with_grad(mask.as_ref(), [query, key, value]) {
            // EfficientAttention's backward pass reads memory that is not its own if nothing but the
            // mask requires grad (libtorch 2.11, CUDA).
            true => query.f_detach()?.f_set_requires_grad(true)?,
            false => query.shallow_clone(),
        };
        let mut scale = options.scale;
        if let Some(negative) = scale.filter(|&scale| scale < 0.0) {
            // Fused kernels look for the largest product before they scale.
            (query, scale) = (query.f_neg()?, Some(-negative));
        }
        Ok(Prepared {
            query: in_16_bytes(&query)?,
            key: in_16_bytes(key)?,
            value: in_16_bytes(value)?,
            mask: mask.as_ref().map(in_16_bytes).transpose()?,
            is_causal,
            dropout_p: options.dropout_p,
            scale,
            enable_gqa: options.enable_gqa,
            is_packed,
            size,
        })
    }

    /// `packed` is that of the options.
    pub(super) fn run(&self, packed: Option<&Packed>) -> Result<Tensor> {
        // If all weights are dropped, fused kernels for CUDA multiply zeros by infinity.
        if self.is_empty() || self.dropout_p == 1.0 {
            return self.zeros();
        }
        let (inputs, dropout_p) = ([&self.query, &self.key, &self.value], self.dropout_p);
        let output = match packed.filter(|_| self.is_packed) {
            Some(packed) => packed.flash(inputs, dropout_p, self.is_causal, self.scale)?,
            None => self.dense()?,
        };
        if output.device().is_cuda() && output.requires_grad() {
            // A fused backward pass reads the incoming gradient as it reads the inputs.
            register_hook(&output, |grad| readable_gradient(grad).map(Some))?.forget();
        }
        self.without_hidden_rows(output)
    }

    fn dense(&self) -> Result<Tensor> {
        Tensor::f_scaled_dot_product_attention(
            &self.query,
            &self.key,
            &self.value,
            self.mask.as_ref(),
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
        )
        .map_err(refusal)
    }

    /// The output with zeros for queries that see no key. cuDNN (libtorch 2.11) gives them the mean of
    /// some values, which also gets gradients; zeros in their place stop these gradients, too.
    fn without_hidden_rows(&self, output: Tensor) -> Result<Tensor> {
        let Some(mask) = self.mask.as_ref().filter(|_| output.device().is_cuda()) else {
            return Ok(output);
        };
        if self.choice()? != Some(SdpaBackend::CudnnAttention.number() as i64) {
            return Ok(output);
        }
        Ok(output.f_masked_fill(&hidden(mask)?, 0.0)?)
    }

    /// The number of the back end, in `at::SDPBackend`. `None` if nothing has to be computed.
    pub(super) fn choice(&self) -> Result<Option<i64>> {
        if self.is_empty() || self.dropout_p == 1.0 {
            return Ok(None);
        }
        if self.is_packed {
            return Ok(Some(SdpaBackend::FlashAttention.number() as i64));
        }
        Tensor::f_internal_fused_sdp_choice(
            &self.query,
            &self.key,
            &self.value,
            self.mask.as_ref(),
            self.dropout_p,
            self.is_causal,
            self.scale,
            self.enable_gqa,
        )
        .map(Some)
        .map_err(refusal)
    }

    fn is_empty(&self) -> bool {
        self.size.contains(&0)
    }

    /// A result of zeros or without elements, whose gradients are zeros. libtorch's kernel for the CPU
    /// divides by the number of heads, which ends the process if there are none.
    fn zeros(&self) -> Result<Tensor> {
        let kind = self.query.f_kind()?;
        let mut result = Tensor::f_zeros(&self.size, (kind, self.query.device()))?;
        for tensor in [&self.query, &self.key, &self.value].into_iter().chain(&self.mask) {
            // The sum of none of its elements is a zero that depends on it.
            let none = tensor.f_reshape([-1])?.f_narrow(0, 0, 0)?;
            result = result.f_add(&none.f_sum(kind)?)?;
        }
        Ok(result)
    }
}
