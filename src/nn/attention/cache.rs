//! Keys and values of what was generated before.

use super::functional::{AttentionOptions, f_scaled_dot_product_attention};
use crate::check::Check;
use crate::ops::attention::{self, Operands};
use crate::{Error, Result, check};
use tch::{Kind, Tensor};

const OP: &str = "nn::KvCache";

/// The keys and values of one layer of attention, so that generating the next token computes them
/// for that token only.
///
/// It has memory for `max_length` tokens, which the first [`f_append`](KvCache::f_append)
/// allocates, and never moves it. Keys and values are kept without their graphs, for inference
/// under [`tch::no_grad`].
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::nn::{AttentionOptions, Causal, KvCache, scaled_dot_product_attention};
///
/// let new = |t: i64| Tensor::randn([2, 4, t, 8], (Kind::Float, Device::Cpu));
/// let (q, k, v) = (new(5), new(5), new(5));
/// let options = AttentionOptions { causal: Some(Causal::LowerRight), ..Default::default() };
/// let whole = scaled_dot_product_attention(&q, &k, &v, &options);
///
/// let mut cache = KvCache::new(16);
/// for (from, count) in [(0, 2), (2, 3)] {
///     let part = |x: &Tensor| x.narrow(2, from, count);
///     let (keys, values) = cache.f_append(&part(&k), &part(&v))?;
///     let output = scaled_dot_product_attention(&part(&q), &keys, &values, &options);
///     assert!(output.allclose(&part(&whole), 1e-5, 1e-6, false));
/// }
/// assert_eq!(cache.len(), 5);
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    max_length: i64,
    len: i64,
    /// Keys and values, `[B, H, max_length, D]`.
    memory: Option<(Tensor, Tensor)>,
    /// What the kernel of [`f_decode`](KvCache::f_decode) counts its blocks with: zeros between calls.
    counters: Option<Tensor>,
}

/// A state of a cache. It holds as long as only tokens are appended.
#[derive(Clone, Copy)]
pub(in crate::nn) struct Mark {
    len: i64,
    has_memory: bool,
}

/// Options of [`KvCache::f_decode`].
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeOptions<'a> {
    /// What products of queries and keys are multiplied with; by default `1 / sqrt(D)`.
    pub scale: Option<f64>,
    /// Cosines and sines, `[B, 1, R / 2]` of kind `Float` each, without grad: the rows of
    /// [`rope_tables`](crate::ops::rope_tables()) at each row's place. The pairs (i, i + R / 2) of the query's
    /// and the new key's heads are rotated by these angles first, as by [`rope`](crate::ops::rope()).
    pub rope: Option<[&'a Tensor; 2]>,
}

impl KvCache {
    /// A cache for at most `max_length` tokens.
    ///
    /// # Panics
    /// When `max_length` is negative.
    pub fn new(max_length: i64) -> Self {
        assert!(max_length >= 0, "{OP}: max_length: expected at least 0, got {max_length}");
        KvCache { max_length, len: 0, memory: None, counters: None }
    }

    /// The number of tokens in the cache.
    pub fn len(&self) -> i64 {
        self.len
    }

    /// Whether there are no tokens in the cache.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The number of tokens that the cache can hold.
    pub fn max_length(&self) -> i64 {
        self.max_length
    }

    /// Forgets all tokens after the first `len`, for example those of a rejected draft. Keeps the
    /// memory. A `len` that is not smaller than the current one changes nothing.
    pub fn truncate(&mut self, len: i64) {
        self.len = self.len.min(len.max(0));
    }

    /// Forgets everything and frees the memory, so that tensors of other sizes may follow.
    pub fn clear(&mut self) {
        (self.len, self.memory, self.counters) = (0, None, None);
    }

    /// Appends the keys `[B, H, T, D]` and values `[B, H, T, Dv]` of T new tokens. Returns all keys
    /// and values in the cache, as views that hold until the cache changes.
    ///
    /// # Errors
    /// If the tensors do not fit each other or what is in the cache, if there is no room for them,
    /// or if they require grad. The cache is then unchanged.
    pub fn f_append(&mut self, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = self.checked(key, value)?;
        if new > self.max_length - self.len {
            let expected = format!("at most {} more tokens", self.max_length - self.len);
            let hint = "make the cache with a greater max_length";
            return Err(check!(OP, key).refuse(expected, new.to_string(), hint));
        }
        let (keys, values) = self.memory_for(key, value)?;
        {
            let _guard = tch::no_grad_guard();
            keys.f_narrow(2, self.len, new)?.f_copy_(key)?;
            values.f_narrow(2, self.len, new)?.f_copy_(value)?;
        }
        let len = self.len + new;
        let all = (keys.f_narrow(2, 0, len)?, values.f_narrow(2, 0, len)?);
        (self.len, self.memory) = (len, Some((keys, values)));
        Ok(all)
    }

    /// Attention of one new token of each row, whose place is on the device: the step of a captured graph
    /// that generates one token after the other.
    ///
    /// ```text
    /// keys[b, :, places[b]] = key[b]      values[b, :, places[b]] = value[b]
    /// y[b] = softmax(scale · q[b] keys[b, :, ..=places[b]]ᵀ) values[b, :, ..=places[b]]
    /// ```
    ///
    /// * `query`: q, `[B, H, 1, D]`, where the cache's heads may be fewer and then are shared
    /// * `key`, `value`: of the new tokens, `[B, Hkv, 1, D]` and `[B, Hkv, 1, Dv]`
    /// * `places`: `[B]`, of kind `Int64`, on the same device: how many tokens of each row are in the
    ///   cache. So rows may have prompts of different lengths: append them padded at their ends.
    /// * `options`: see [`DecodeOptions`]
    ///
    /// Returns y, `[B, H, 1, Dv]`. [`len`](KvCache::len) stays, because the host does not know the places, and a
    /// later [`f_append`](KvCache::f_append) writes over what was decoded. The first call makes memory that a
    /// graph must not make, so it comes before a capture.
    /// On CUDA, for `Half`, `BFloat16` and `Float` with D = Dv, a multiple of 16 bytes up to 512, and R / 2 values
    /// that are one, too, it is one kernel that reads the part of the cache that is in use, and never waits for
    /// the host; otherwise libtorch's operations on the whole memory. A place outside of the cache is an error on the CPU;
    /// on CUDA it changes nothing in the cache, and the row's output has no meaning.
    ///
    /// Equivalent to, for one row:
    /// ```
    /// # use tch::{Device, Kind, Tensor};
    /// # use tch_extension::nn::KvCache;
    /// # let new = |heads: i64, t: i64| Tensor::randn([1, heads, t, 8], (Kind::Float, Device::Cpu));
    /// # let (prompt, q, k, v) = (new(2, 5), new(4, 1), new(2, 1), new(2, 1));
    /// let mut cache = KvCache::new(16);
    /// cache.f_append(&prompt, &prompt)?;
    /// let y = cache.f_decode(&q, &k, &v, &Tensor::from_slice(&[5_i64]), Default::default())?;
    ///
    /// let (keys, values) = cache.f_append(&k, &v)?;
    /// let (keys, values) = (keys.repeat_interleave_self_int(2, 1, None), values.repeat_interleave_self_int(2, 1, None));
    /// let weights = (q.matmul(&keys.transpose(2, 3)) / 8_f64.sqrt()).softmax(-1, Kind::Float);
    /// assert!(y.allclose(&weights.matmul(&values), 1e-5, 1e-6, false));
    /// # Ok::<(), tch_extension::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the tensors do not fit each other or what is in the cache, or if they require grad: the cache is
    /// then unchanged. If the first call is captured, or if libtorch or CUDA fails.
    pub fn f_decode(
        &mut self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        places: &Tensor,
        options: DecodeOptions<'_>,
    ) -> Result<Tensor> {
        let DecodeOptions { scale, rope } = options;
        self.check_decode(query, key, value, places)?;
        check_rope(query, rope)?;
        let _guard = tch::no_grad_guard();
        let (keys, values) = self.memory_for(key, value)?;
        let (b, h, _, d) = query.size4()?;
        let like = (Kind::Int, query.device());
        let is_new = self.memory.is_none() || self.counters.is_none();
        if is_new && crate::cuda::is_capturing(OP, query.device())? {
            let hint = "decode a token before the capture";
            return Err(check!(OP, query).refuse("a step before the first capture", "none", hint));
        }
        let counters =
            match self.counters.as_ref().filter(|counters| counters.numel() as i64 >= b * h) {
                Some(counters) => counters.shallow_clone(),
                None => Tensor::f_zeros([b * h], like)?,
            };
        let scale = scale.unwrap_or(1.0 / (d as f64).sqrt());
        let rope =
            rope.map(|[cos, sin]| Ok::<_, Error>([cos.f_contiguous()?, sin.f_contiguous()?]));
        let rope = rope.transpose()?;
        let rope = rope.as_ref().map(|[cos, sin]| [cos, sin]);
        let output = attention::decode(&Operands {
            query,
            new: [key, value],
            cache: [&keys, &values],
            places: &places.f_contiguous()?,
            counters: &counters,
            rope,
            scale,
        });
        let output = match output {
            Ok(Some(output)) => Ok(output),
            Ok(None) => {
                let [query, key] = match rope {
                    Some(rope) => [rotated(query, rope)?, rotated(key, rope)?],
                    None => [query, key].map(Tensor::shallow_clone),
                };
                decode_by_operations(&query, [&key, value], [&keys, &values], places, scale)
            }
            Err(error) => Err(error),
        };
        if output.is_ok() || self.memory.is_some() {
            (self.memory, self.counters) = (Some((keys, values)), Some(counters));
        }
        output
    }

    fn check_decode(
        &self,
        query: &Tensor,
        key: &Tensor,
        value: &Tensor,
        places: &Tensor,
    ) -> Result<()> {
        let of_key = check!(OP, key).defined()?.dim(4, "[B, Hkv, 1, D]")?;
        let of_query = check!(OP, query).defined()?.dim(4, "[B, H, 1, D]")?.like(&of_key)?;
        let (b, kv_heads, t, d) = key.size4()?;
        of_key.shape("[B, Hkv, 1, D]", &[b, kv_heads, 1, d])?;
        self.checked(key, value)?;
        let heads = query.size4()?.1;
        of_query.shape("[B, H, 1, D]", &[b, heads, t, d])?;
        if kv_heads == 0 || heads % kv_heads != 0 {
            let expected = format!("a multiple of the cache's {kv_heads} heads");
            return Err(of_query.refuse(expected, format!("{heads} heads"), ""));
        }
        without_grad(&of_query)?;
        let of_places = check!(OP, places).defined()?.kind_in(&[Kind::Int64])?;
        of_places.same_device_as(&of_key)?.shape("[B]", &[b])?;
        Ok(())
    }

    /// The memory, which is new if nothing was appended yet.
    fn memory_for(&self, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        match &self.memory {
            Some((keys, values)) => Ok((keys.shallow_clone(), values.shallow_clone())),
            None => Ok((self.allocate(key)?, self.allocate(value)?)),
        }
    }

    /// What [`rewind`](Self::rewind) goes back to.
    pub(in crate::nn) fn mark(&self) -> Mark {
        Mark { len: self.len, has_memory: self.memory.is_some() }
    }

    /// Forgets what was appended since, and the memory, too, if there was none.
    pub(in crate::nn) fn rewind(&mut self, mark: Mark) {
        self.truncate(mark.len);
        if !mark.has_memory {
            self.clear();
        }
    }

    fn allocate(&self, new: &Tensor) -> Result<Tensor> {
        let mut size = new.size();
        size[2] = self.max_length;
        // Zeros, because memory that is not in use may be multiplied by weights of zero.
        Ok(Tensor::f_zeros(&size, (new.f_kind()?, new.device()))?)
    }

    /// The number of new tokens.
    fn checked(&self, key: &Tensor, value: &Tensor) -> Result<i64> {
        let key_checked = check!(OP, key).defined()?.dim(4, "[B, H, T, D]")?;
        let (b, h, t, _) = key.size4()?;
        let value_checked = check!(OP, value).defined()?.dim(4, "[B, H, T, Dv]")?;
        let shape = [b, h, t, value.size()[3]];
        value_checked.like(&key_checked)?.shape("[B, H, T, Dv]", &shape)?;
        for argument in [&key_checked, &value_checked] {
            without_grad(argument)?;
        }
        if let Some((keys, values)) = &self.memory {
            for (argument, memory) in [(key_checked, keys), (value_checked, values)] {
                let mut shape = memory.size();
                shape[2] = t;
                argument.like(&check!(OP, "cache", memory))?.shape("[B, H, T, D]", &shape)?;
            }
        }
        Ok(t)
    }
}

fn without_grad(argument: &Check<'_>) -> Result<()> {
    if argument.tensor().requires_grad() {
        let hint = "generate under tch::no_grad";
        return Err(argument.refuse("a tensor without grad", "one that requires grad", hint));
    }
    Ok(())
}

/// The tables' rows fit the query `[B, H, 1, D]`.
fn check_rope(query: &Tensor, rope: Option<[&Tensor; 2]>) -> Result<()> {
    let (batch, _, _, head_dim) = query.size4()?;
    let Some([cos, sin]) = rope else { return Ok(()) };
    let of_cos = check!(OP, "rope's cos", cos).defined()?.dim(3, "[B, 1, R/2]")?;
    let half = cos.size3()?.2;
    if half == 0 || 2 * half > head_dim {
        let expected = format!("1 or more columns, and no more than half of a head's {head_dim}");
        return Err(of_cos.refuse(expected, half.to_string(), ""));
    }
    for table in [of_cos, check!(OP, "rope's sin", sin).defined()?] {
        table.shape("[B, 1, R/2]", &[batch, 1, half])?.kind_in(&[Kind::Float])?;
        table.same_device_as(&check!(OP, query))?;
        without_grad(&table)?;
    }
    Ok(())
}

/// Heads `[B, H, 1, D]`, whose pairs (i, i + R / 2) are rotated by the angles of their row.
fn rotated(heads: &Tensor, [cos, sin]: [&Tensor; 2]) -> Result<Tensor> {
    let (batch, _, half) = cos.size3()?;
    let part = |from, count| heads.f_narrow(-1, from, count);
    let [cos, sin] = [cos.f_view([batch, 1, 1, half])?, sin.f_view([batch, 1, 1, half])?];
    let [a, b] = [part(0, half)?, part(half, half)?];
    let first = a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?;
    let second = b.f_mul(&cos)?.f_add(&a.f_mul(&sin)?)?;
    let kind = heads.f_kind()?;
    let rest = part(2 * half, heads.size4()?.3 - 2 * half)?;
    Ok(Tensor::f_cat(&[first.f_to_kind(kind)?, second.f_to_kind(kind)?, rest], -1)?)
}

/// [`KvCache::f_decode`] for what the kernel does not do.
fn decode_by_operations(
    query: &Tensor,
    new: [&Tensor; 2],
    cache: [&Tensor; 2],
    places: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let mut length = cache[0].size4()?.2;
    if !places.device().is_cuda() && places.numel() > 0 {
        let most = places.f_max()?.f_int64_value(&[])?;
        let least = places.f_min()?.f_int64_value(&[])?;
        if least < 0 || most >= length {
            let expected = format!("numbers from 0 to {}", length - 1);
            let hint = "make the cache with a greater max_length";
            return Err(check!(OP, places).refuse(expected, format!("{least} to {most}"), hint));
        }
        length = most + 1;
    }
    let tokens = Tensor::f_arange(length, (Kind::Int64, places.device()))?;
    let places = places.f_view([-1, 1, 1, 1])?;
    let part = |memory: &Tensor, new: &Tensor| -> Result<Tensor> {
        let mut part = memory.f_narrow(2, 0, length)?;
        let is_here = tokens.f_view([1, 1, -1, 1])?.f_eq_tensor(&places)?;
        part.f_copy_(&new.f_where_self(&is_here, &part)?)?;
        Ok(part)
    };
    let (keys, values) = (part(cache[0], new[0])?, part(cache[1], new[1])?);
    let mask = tokens.f_view([1, 1, 1, -1])?.f_le_tensor(&places)?;
    let enable_gqa = query.size4()?.1 != keys.size4()?.1;
    let options = AttentionOptions {
        attn_mask: Some(&mask),
        scale: Some(scale),
        enable_gqa,
        ..Default::default()
    };
    f_scaled_dot_product_attention(query, &keys, &values, &options)
}
