//! Several sequences in a row of tokens, which do not see one another.

use super::super::Functional;
use super::backend::SdpaBackend;
use super::functional::OP;
use crate::cuda::device_properties;
use crate::ffi::sdp_backends::SdpBackends;
use crate::library::{FromOutput, Operator, Outputs};
use crate::{Error, Result, args, check};
use std::sync::OnceLock;
use tch::{Device, Kind, Tensor};

const OF_NEW: &str = "nn::Packed::f_new";
const OF_LENGTHS: &str = "nn::Packed::f_from_lengths";
/// The most tokens that are counted in `Int`, and the most sequences of a launch.
const MOST_TOKENS: i64 = i32::MAX as i64;
const MOST_SEQUENCES: i64 = 65_535;

/// Where sequences begin in tokens `[B, T]`, whose rows are packed with several of them: for
/// [`AttentionOptions::packed`](super::AttentionOptions) and
/// [`AttentionCall::packed`](super::AttentionCall). A token then sees only tokens of its own sequence.
///
/// Tokens are counted row by row. A row's first token always begins a sequence, so none is longer than
/// T. All of it is computed on the device and waits for nothing, so a captured graph may make it of a
/// tensor whose values change between replays: make it within the step that is captured.
///
/// ```
/// use tch::{Device, Kind, Tensor};
/// use tch_extension::nn::{AttentionOptions, Causal, Packed, scaled_dot_product_attention};
///
/// // Two rows of 6 tokens: sequences of 2, 4, 5 and 1 token.
/// let packed = Packed::f_from_lengths(&[2, 4, 5, 1], [2, 6], Device::Cpu)?;
/// let places = [0_i64, 1, 0, 1, 2, 3, 0, 1, 2, 3, 4, 0];
/// assert_eq!(packed.f_positions()?, Tensor::from_slice(&places).view([2, 6]));
///
/// let [q, k, v] = [4, 2, 2].map(|heads| Tensor::randn([2, heads, 6, 8], (Kind::Float, Device::Cpu)));
/// let causal = AttentionOptions { causal: Some(Causal::UpperLeft), enable_gqa: true, ..Default::default() };
/// let options = AttentionOptions { packed: Some(&packed), ..causal };
/// let y = scaled_dot_product_attention(&q, &k, &v, &options);
///
/// let [q, k, v] = [q, k, v].map(|x| x.narrow(0, 0, 1).narrow(2, 2, 4)); // the second sequence
/// let alone = scaled_dot_product_attention(&q, &k, &v, &causal);
/// assert!(y.narrow(0, 0, 1).narrow(2, 2, 4).allclose(&alone, 1e-5, 1e-6, false));
/// # Ok::<(), tch_extension::Error>(())
/// ```
#[derive(Debug)]
pub struct Packed {
    /// `[N + 1]`, of kind Int: sorted, from 0 to B·T.
    cu_seqlens: Tensor,
    /// `[B·T]`, of kind Int64: which sequence each token is in, from 1 on.
    sequences: Tensor,
    size: [i64; 2],
    max_seqlen: i64,
}

impl Packed {
    /// Sequences that begin at these tokens.
    ///
    /// * `cu_seqlens`: `[N]`, of kind `Int` or `Int64`, on the device of the tokens: the sums of lengths,
    ///   as of FlashAttention: 0, the first sequence's length, that of the first two, …, B·T. In a graph N
    ///   cannot change; give B·T in the place of each one that is not needed.
    /// * `size`: B and T
    /// * `max_seqlen`: at least as many tokens as the longest sequence has. T is always enough;
    ///   FlashAttention is faster with less.
    ///
    /// Values on a device cannot be checked without waiting for it. So these are taken as a set, in any
    /// order: a number below 0 counts as 0, one above B·T as B·T, and both, and the rows' first tokens, need
    /// not be among them. If a sequence is longer than `max_seqlen`, FlashAttention leaves the output of
    /// its other tokens undefined, and all gradients.
    ///
    /// # Errors
    /// If the tensor has another kind or shape, if a size is negative, if there are 2³¹ tokens or more, or
    /// if libtorch fails.
    pub fn f_new(cu_seqlens: &Tensor, size: [i64; 2], max_seqlen: i64) -> Result<Packed> {
        check!(OF_NEW, cu_seqlens).defined()?.kind_in(&[Kind::Int, Kind::Int64])?.dim(1, "[N]")?;
        let ([b, t], total) = (size, total(OF_NEW, size)?);
        if max_seqlen < 0 || (max_seqlen == 0 && total > 0) {
            let expected = "the length of the longest sequence";
            return Err(Error::argument(
                OF_NEW,
                "max_seqlen",
                expected,
                max_seqlen.to_string(),
                "T is always enough",
            ));
        }
        let _guard = tch::no_grad_guard();
        let ints = (Kind::Int, cu_seqlens.device());
        let given = cu_seqlens.f_clamp(0, total)?.f_to_kind(Kind::Int)?;
        let rows = Tensor::f_arange(b + 1, ints)?.f_mul_scalar(t)?;
        let (cu_seqlens, _) = Tensor::f_cat(&[given, rows], 0)?.f_sort(0, false)?;
        let sequences = Tensor::f_arange(total, ints)?.f_bucketize(&cu_seqlens, false, true)?;
        Ok(Packed { cu_seqlens, sequences, size, max_seqlen: max_seqlen.min(t) })
    }

    /// Sequences of these lengths, one after the other, in tokens `[B, T]` on a device. Lengths may be
    /// zero. A sequence that is longer than the rest of its row is cut there.
    ///
    /// # Errors
    /// If a length is negative, if their sum is not B·T, as for [`f_new`](Packed::f_new), and if libtorch
    /// or CUDA fails.
    pub fn f_from_lengths(lengths: &[i64], size: [i64; 2], device: Device) -> Result<Packed> {
        let total = total(OF_LENGTHS, size)?;
        let refuse = |expected: String, got: String| {
            Err(Error::argument(OF_LENGTHS, "lengths", expected, got, ""))
        };
        let (mut sum, mut ends) = (0_i64, vec![]);
        for &length in lengths {
            if length < 0 {
                return refuse("lengths that are not negative".into(), length.to_string());
            }
            sum = sum.saturating_add(length);
            ends.push(sum);
        }
        if sum != total {
            return refuse(format!("lengths whose sum is B·T = {total}"), sum.to_string());
        }
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let ends = Tensor::f_from_slice(&ends)?.f_to_device(device)?;
        Packed::f_new(&ends, size, longest)
    }

    /// The sums of lengths, `[N + 1]`, of kind `Int`: sorted, from 0 to B·T, with the first token of each
    /// row. Numbers may repeat. It is a copy.
    pub fn cu_seqlens(&self) -> Tensor {
        self.cu_seqlens.copy()
    }

    /// The most tokens of a sequence.
    pub fn max_seqlen(&self) -> i64 {
        self.max_seqlen
    }

    /// Each token's place in its sequence, `[B, T]`, of kind `Int64`, for example for
    /// [`Rope::f_at`](crate::nn::Rope) or an embedding of positions. They are less than T.
    ///
    /// # Errors
    /// If libtorch or CUDA fails.
    pub fn f_positions(&self) -> Result<Tensor> {
        let _guard = tch::no_grad_guard();
        let tokens = Tensor::f_arange(self.size[0] * self.size[1], (Kind::Int64, self.device()))?;
        let first = self.cu_seqlens.f_index_select(0, &self.sequences.f_sub_scalar(1)?)?;
        Ok(tokens.f_sub(&first)?.f_view(self.size)?)
    }

    fn device(&self) -> Device {
        self.cu_seqlens.device()
    }

    /// True where a query sees a key, `[B, 1, T, T]`.
    pub(super) fn mask(&self, is_causal: bool) -> Result<Tensor> {
        let sequences = self.sequences.f_view(self.size)?;
        let is_same = sequences.f_unsqueeze(2)?.f_eq_tensor(&sequences.f_unsqueeze(1)?)?;
        let seen = if is_causal { is_same.f_tril(0)? } else { is_same };
        Ok(seen.f_unsqueeze(1)?)
    }

    /// Checks that query, key and value are `[B, H, T, E]` with this B and T, on this device.
    pub(super) fn check(&self, inputs: [&Tensor; 3]) -> Result<()> {
        let [b, t] = self.size;
        for (name, input) in ["query", "key", "value"].into_iter().zip(inputs) {
            let argument = check!(OP, name, input);
            argument.same_device_as(&check!(OP, "packed", self.cu_seqlens))?;
            let size = input.size();
            if !matches!(size[..], [of_b, _, of_t, _] if [of_b, of_t] == [b, t]) {
                let expected = format!("[B, H, T, E] with B = {b} and T = {t}, as packed");
                return Err(argument.refuse(expected, format!("{size:?}"), ""));
            }
        }
        Ok(())
    }

    /// Whether FlashAttention can and may compute this: whether `scaled_dot_product_attention` could choose
    /// it, of whose conditions these are some.
    pub(super) fn takes_flash(&self, [q, k, v]: [&Tensor; 3], enable_gqa: bool) -> Result<bool> {
        let (of_q, of_k, of_v) = (q.size4()?, k.size4()?, v.size4()?);
        let fits = q.device().is_cuda()
            && matches!(q.f_kind()?, Kind::Half | Kind::BFloat16)
            // Beyond 192 the backward pass is not for every card.
            && of_q.3 % 8 == 0 && of_q.3 <= 192 && of_v.3 == of_q.3
            && of_k.1 == of_v.1 && (enable_gqa || of_k.1 == of_q.1)
            && self.cu_seqlens.size1()? <= MOST_SEQUENCES;
        let is_enabled = || SdpBackends::get().map(|now| now.enabled);
        Ok(fits
            && is_enabled()?[SdpaBackend::FlashAttention.number()]
            && device_properties(q.device()).is_ok_and(|found| found.major >= 8))
    }

    /// Attention by FlashAttention's kernels for sequences of different lengths.
    pub(super) fn flash(
        &self,
        inputs: [&Tensor; 3],
        dropout_p: f64,
        is_causal: bool,
        scale: Option<f64>,
    ) -> Result<Tensor> {
        static FLASH: OnceLock<Operator> = OnceLock::new();
        let flash = match FLASH.get() {
            Some(flash) => flash,
            None => {
                let found = Operator::find("aten::_flash_attention_forward")?;
                FLASH.get_or_init(|| found)
            }
        };
        // [B, H, T, E] → [B·T, H, E]
        let rows = |input: &Tensor| -> Result<Tensor> {
            let rows = input.f_transpose(1, 2)?.f_flatten(0, 1)?;
            let is_readable = rows.stride()[2] == 1;
            Ok(if is_readable { rows } else { rows.f_contiguous()? })
        };
        let [query, key, value] = inputs;
        // At 1, it would take the number of sequences for that of tokens if heads are shared.
        let (cu, most, debug) = (&self.cu_seqlens, self.max_seqlen.max(2), false);
        let (query, key, value) = (rows(query)?, rows(key)?, rows(value)?);
        let Outputs(outputs) = flash.call(args![
            &query,
            &key,
            &value,
            cu,
            cu,
            most,
            most,
            dropout_p,
            is_causal,
            debug,
            scale = scale
        ])?;
        let first = outputs.into_iter().next().and_then(|first| Tensor::from_output(first).ok());
        let output = first.ok_or_else(|| Error::msg(format!("{OP}: libtorch gave no tensor")))?;
        let ([b, t], (_, heads, features)) = (self.size, output.size3()?);
        Ok(output.f_view([b, t, heads, features])?.f_transpose(1, 2)?)
    }
}

/// Its tensors are constants. Others could lead out of memory, so it keeps its own.
impl Functional for Packed {
    fn with_tensors(&self, _: &mut dyn FnMut(&Tensor) -> Tensor) -> Self {
        let [cu_seqlens, sequences] =
            [&self.cu_seqlens, &self.sequences].map(Tensor::shallow_clone);
        Packed { cu_seqlens, sequences, ..*self }
    }
}

/// The number of tokens, B·T.
fn total(op: &str, [b, t]: [i64; 2]) -> Result<i64> {
    // Also if there are no tokens, sizes must be of that kind.
    let most = b.max(1).checked_mul(t.max(1)).filter(|most| *most <= MOST_TOKENS);
    most.filter(|_| b >= 0 && t >= 0).map(|_| b * t).ok_or_else(|| {
        let expected = "B and T that are not negative, with less than 2³¹ tokens";
        Error::argument(op, "size", expected, format!("[{b}, {t}]"), "")
    })
}
