//! Keys and values of what was generated before.

use crate::{Result, check};
use tch::Tensor;

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
}

/// A state of a cache. It holds as long as only tokens are appended.
#[derive(Clone, Copy)]
pub(in crate::nn) struct Mark {
    len: i64,
    has_memory: bool,
}

impl KvCache {
    /// A cache for at most `max_length` tokens.
    ///
    /// # Panics
    /// When `max_length` is negative.
    pub fn new(max_length: i64) -> Self {
        assert!(max_length >= 0, "{OP}: max_length: expected at least 0, got {max_length}");
        KvCache { max_length, len: 0, memory: None }
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
        (self.len, self.memory) = (0, None);
    }

    /// Appends the keys `[B, H, T, D]` and values `[B, H, T, Dv]` of T new tokens. Returns all keys
    /// and values in the cache, as views that hold until the cache changes.
    ///
    /// # Errors
    /// If the tensors do not fit each other or what is in the cache, if there is no room for them,
    /// or if they require grad. The cache is then unchanged.
    pub fn f_append(&mut self, key: &Tensor, value: &Tensor) -> Result<(Tensor, Tensor)> {
        let new = self.checked(key, value)?;
        let (keys, values) = match &self.memory {
            Some((keys, values)) => (keys.shallow_clone(), values.shallow_clone()),
            None => (self.allocate(key)?, self.allocate(value)?),
        };
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
        Ok(Tensor::f_empty(&size, (new.f_kind()?, new.device()))?)
    }

    /// The number of new tokens.
    fn checked(&self, key: &Tensor, value: &Tensor) -> Result<i64> {
        let key_checked = check!(OP, key).defined()?.dim(4, "[B, H, T, D]")?;
        let (b, h, t, _) = key.size4()?;
        let value_checked = check!(OP, value).defined()?.dim(4, "[B, H, T, Dv]")?;
        let shape = [b, h, t, value.size()[3]];
        value_checked.like(&key_checked)?.shape("[B, H, T, Dv]", &shape)?;
        for argument in [key_checked, value_checked] {
            if argument.tensor().requires_grad() {
                let hint = "generate under tch::no_grad";
                return Err(argument.refuse(
                    "a tensor without grad",
                    "one that requires grad",
                    hint,
                ));
            }
        }
        if let Some((keys, values)) = &self.memory {
            for (argument, memory) in [(key_checked, keys), (value_checked, values)] {
                let mut shape = memory.size();
                shape[2] = t;
                argument.like(&check!(OP, "cache", memory))?.shape("[B, H, T, D]", &shape)?;
            }
        }
        if t > self.max_length - self.len {
            let expected = format!("at most {} more tokens", self.max_length - self.len);
            let hint = "make the cache with a greater max_length";
            return Err(key_checked.refuse(expected, t.to_string(), hint));
        }
        Ok(t)
    }
}
