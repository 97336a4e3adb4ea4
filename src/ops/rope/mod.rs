//! Rotary position embedding.

use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::tensor::plain;
use crate::operator::{
    Again, Args, Call, Dim, Gradients, Incoming, Made, Meta, Metas, Needs, Operator, Outputs,
    Second, Signature, Slots, call, metas_of,
};
use crate::ops::tch_kinds::compute_kind;
use crate::{Error, Result, check};
use kernels::MOST_HEADS;
use tch::{Kind, Tensor};
use tensors::{Tables, Work, is_readable, rotate};

mod in_place;
pub(crate) mod kernels;
mod tables;
mod tensors;

pub use tables::{RopeScaling, f_rope_tables, f_scaled_rope_tables, rope_tables};

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
/// For shapes that another order of the dimensions would explain.
const IF_HEADS_FIRST: &str = "transpose(1, 2) makes [B, T, H, D] of [B, H, T, D]";

/// What [`rope`] may be told besides its tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RopeOptions {
    /// Whether the pairs are (2i, 2i + 1), as in GPT-J, instead of (i, i + R / 2), as in Llama and
    /// GPT-NeoX.
    pub interleaved: bool,
    /// The position of the first token, which is the number of tokens in a key-value cache.
    pub offset: i64,
    /// Whether q and k themselves are changed, and returned. If a graph is recorded, both must be
    /// tensors that libtorch allows to be changed in place, which a leaf that requires grad is not,
    /// and neither is one of several views that `chunk` or `unbind` made. Elements of q, k and the
    /// tables must not share memory.
    pub in_place: bool,
}

/// Rotates pairs of values of each head of q and k by an angle that depends on the token's position.
///
/// ```text
/// a' = a cos[p, i] - b sin[p, i]      p = offset + t: the position of token t
/// b' = b cos[p, i] + a sin[p, i]      (a, b): values i and i + R / 2 of a head, or 2i and 2i + 1 if interleaved
/// ```
///
/// * `q`: `[B, T, H, D]`, of kind `Float`, `Double`, `Half` or `BFloat16`, on the CPU or CUDA
/// * `k`: `[B, T, Hk, D]`, of q's kind; Hk may be another number, as for grouped queries; 2²⁹ at most
/// * `cos`, `sin`: `[P, R / 2]` with P ≥ offset + T and R ≤ D, both of q's kind or both `Float`; see
///   [`rope_tables`](super::rope_tables()). Or `[B, T, R / 2]`: a row for each token, without an offset and
///   not in place, which copies memory `[B, H, T, D]`
///
/// Returns the rotated q and k, of the same shapes and kind. If R < D, the last D - R values of a head
/// stay as they are. Sizes are arbitrary, and tensors may be empty. Half kinds are computed in `Float`
/// and rounded once. Autocast changes nothing: a product of libtorch's would promote half kinds to the
/// tables' `Float`, whereas the results here have q's kind. On CUDA the operator is one launch for both
/// tensors, in each direction, and two if a graph is recorded in place; copies, where the next paragraph
/// and the one on tables name some, are launches of their own. It works on libtorch's current stream and
/// never waits for the GPU. It is deterministic.
///
/// Strides are arbitrary. Nothing is copied before it is read if the values of a head are adjacent in
/// memory. That includes slices of one product, such as `qkv.view([B, T, 3, H, D])`, and transposed
/// memory `[B, H, T, D]`. The results are dense; B, T and H have the order of the argument's strides, as
/// in the results of libtorch's elementwise operations, and the values of a head are adjacent. So q
/// whose memory is `[B, H, T, D]` gives a result that is contiguous in that order. Attention takes
/// either with `transpose(1, 2)`. Gradients are laid out in the same way, after the incoming gradient.
/// Where the values of a head are not adjacent, the argument is copied, and the result is row-major.
///
/// q and k have derivatives of any order, because the gradient is the inverse rotation, by the same
/// kernel. If a table requires grad while a graph is recorded, the result is that of
/// [`rope_reference`], which differentiates it.
///
/// The tables of Hugging Face's models have R columns, in which each angle is repeated. Pass
/// `cos.narrow(-1, 0, R / 2)`, a view that is read without a copy. Interleaved tables repeat neighbours:
/// make `cos.slice(-1, 0, None, 2).contiguous()` once and pass it, because every call copies the rows
/// that it uses of tables whose columns are not adjacent, and of `Float` tables for q of kind `Double`.
/// For positions that are not consecutive, pass rows of the tables: `cos.index_select(0, &positions)`, or,
/// with positions `[B, T]`, `cos.index(&[Some(&positions)])`.
///
/// Equivalent to:
/// ```
/// # use tch::{Kind, Device, Tensor};
/// # use tch_extension::ops::{RopeOptions, rope, rope_tables};
/// # let options = (Kind::Double, Device::Cpu);
/// # let (q, k) = (Tensor::randn([2, 5, 4, 8], options), Tensor::randn([2, 5, 1, 8], options));
/// let (cos, sin) = rope_tables(16, 8, 10000.0, options);
/// let rows = |table: &Tensor| table.narrow(0, 3, 5).unsqueeze(1); // 5 tokens from position 3 on
/// let rotated = |x: &Tensor| {
///     let [a, b] = &x.chunk(2, -1)[..] else { unreachable!() };
///     let (cos, sin) = (rows(&cos), rows(&sin));
///     Tensor::cat(&[a * &cos - b * &sin, b * &cos + a * &sin], -1)
/// };
///
/// let ours = rope(&q, &k, &cos, &sin, &RopeOptions { offset: 3, ..Default::default() });
/// assert!(ours.0.allclose(&rotated(&q), 1e-12, 1e-12, false));
/// assert!(ours.1.allclose(&rotated(&k), 1e-12, 1e-12, false));
/// ```
///
/// Source: Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding,
/// <https://arxiv.org/abs/2104.09864>.
///
/// # Panics
/// If [`f_rope`] returns an error.
pub fn rope(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RopeOptions,
) -> (Tensor, Tensor) {
    super::unwrap(f_rope(q, k, cos, sin, options))
}

/// [`rope`], with an error instead of a panic.
///
/// # Errors
/// If an argument has another kind, device or shape than stated, or is not what
/// [`in_place`](RopeOptions::in_place) needs (the error names the argument, and nothing was changed), or
/// if libtorch or CUDA fails.
pub fn f_rope(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RopeOptions,
) -> Result<(Tensor, Tensor)> {
    if cos.defined() && cos.dim() == 3 {
        return of_each_token([q, k], [cos, sin], options);
    }
    let RopeOptions { interleaved, offset, in_place } = *options;
    let (rope, of) = (Rope { interleaved, offset, inverse: false }, RopeIn { q, k, cos, sin });
    if in_place {
        return in_place::rotated(rope, &of);
    }
    let RopeOut { q, k } = call(rope, &of)?;
    Ok((q, k))
}

/// [`rope`] by tables `[B, T, R / 2]`: all tokens are one sequence of the kernel's.
fn of_each_token(
    [q, k]: [&Tensor; 2],
    [cos, sin]: [&Tensor; 2],
    options: &RopeOptions,
) -> Result<(Tensor, Tensor)> {
    const OP: &str = Rope::NAME;
    check!(OP, q).defined()?.dim(4, "[B, T, H, D]")?;
    check!(OP, k).defined()?.dim(4, "[B, T, Hk, D]")?;
    let ((b, t, _, size), heads) = (q.size4()?, k.size4()?.2);
    check!(OP, k).shape("[B, T, Hk, D]", &[b, t, heads, size])?;
    check!(OP, cos).shape("[B, T, R / 2]", &[b, t, cos.size3()?.2])?;
    check!(OP, sin).defined()?.shape("[B, T, R / 2]", &cos.size())?;
    if options.in_place || options.offset != 0 {
        let expected = "neither in_place nor an offset, because tokens have rows of their own";
        let got = format!("in_place {}, offset {}", options.in_place, options.offset);
        return Err(Error::argument(OP, "options", expected, got, "pass tables [P, R / 2]"));
    }
    let row = |heads: &Tensor| heads.f_flatten(0, 1)?.f_unsqueeze(0);
    let (cos, sin) = (cos.f_flatten(0, 1)?, sin.f_flatten(0, 1)?);
    let (new_q, new_k) = f_rope(&row(q)?, &row(k)?, &cos, &sin, options)?;
    Ok((new_q.f_view_as(q)?, new_k.f_view_as(k)?))
}

/// [`rope`] in plain tch operations, without checks of its own, and never in place. Half kinds are
/// computed in `Float`.
///
/// # Errors
/// If an operation of libtorch fails.
pub fn rope_reference(
    q: &Tensor,
    k: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    options: &RopeOptions,
) -> Result<(Tensor, Tensor)> {
    let compute = compute_kind(q.f_kind()?);
    let (tokens, pairs) = (q.size4()?.1, cos.size().last().copied().unwrap_or_default());
    let rows = |table: &Tensor| -> Result<Tensor> {
        let rows = match table.dim() {
            3 => table.shallow_clone(),
            _ => table.f_narrow(0, options.offset, tokens)?,
        };
        Ok(rows.f_to_kind(compute)?.f_unsqueeze(-2)?)
    };
    let (cos, sin) = (rows(cos)?, rows(sin)?);
    let rotated = |x: &Tensor| -> Result<Tensor> {
        let (kind, values) = (x.f_kind()?, x.f_to_kind(compute)?);
        let part = |begin, len| values.f_narrow(-1, begin, len);
        let (a, b) = if options.interleaved {
            let turned = part(0, 2 * pairs)?;
            (turned.f_slice(-1, 0, None, 2)?, turned.f_slice(-1, 1, None, 2)?)
        } else {
            (part(0, pairs)?, part(pairs, pairs)?)
        };
        let (first, second) =
            (a.f_mul(&cos)?.f_sub(&b.f_mul(&sin)?)?, b.f_mul(&cos)?.f_add(&a.f_mul(&sin)?)?);
        let turned = if options.interleaved {
            Tensor::f_stack(&[first, second], -1)?.f_flatten(-2, -1)?
        } else {
            Tensor::f_cat(&[first, second], -1)?
        };
        let rest = part(2 * pairs, x.size4()?.3 - 2 * pairs)?;
        Ok(Tensor::f_cat(&[turned, rest], -1)?.f_to_kind(kind)?)
    };
    Ok((rotated(q)?, rotated(k)?))
}

/// Whether this argument will have a gradient.
fn is_recorded(tensor: &Tensor) -> bool {
    tensor.requires_grad() && tch_extension_grad_mode()
}

crate::signature! {
    /// Rotary positions of q and k, in one call; the results are new tensors.
    ///
    /// q `[B, T, H, D]`, k `[B, T, Hk, D]`, cos and sin `[P, R / 2]` with P ≥ offset + T and R ≤ D: the first R
    /// values of each head are rotated. Positions come before heads: a `[B, H, T, D]` has to be transposed
    /// (`q.transpose(1, 2)`, which copies nothing). Where H = Hk and P ≥ offset + H, nothing tells it from a
    /// `[B, T, H, D]`, and its heads would be taken for positions.
    ///
    /// Pairs are values i and i + R / 2, or 2 i and 2 i + 1 if interleaved. A graph of torch.compile holds for
    /// one offset: in a loop of single tokens pass `cos[offset:]` and `sin[offset:]` in its place.
    pub Rope: RopeIn -> RopeOut =
        "rope"(q, k, cos!, sin!, interleaved: bool = false, offset: i64 = 0) -> (q, k) {
        /// Whether the angles are negative: the gradient is this rotation.
        inverse: bool,
    }
}

impl Operator for Rope {
    type Kept = ();
    type Plan = ();

    const SECOND: Second = Second::Linear;
    const MUST_BE_CONSTANT: Option<&'static str> =
        Some("a table without gradient where an inner level differentiates q or k");
    const LAID_OUT_LIKE: &'static [(usize, usize)] = &[(0, 0), (1, 1)];

    /// [`rope_reference`] where a table has a gradient.
    fn composed(&self, of: &Args<'_, Self>, is_traced: bool) -> Result<Option<Outputs<Self>>> {
        if ![of.cos, of.sin].into_iter().any(is_recorded) {
            return Ok(None);
        }
        if !is_traced {
            self.check(of)?;
        }
        self.reference(of).map(Some)
    }

    fn rule<D: Dim>(&self, of: &Metas<Self, D>, _: &Needs<Self>) -> Result<Made<Self, Meta<D>>> {
        let q = of.q.kind_in(&KINDS)?.supported_device()?.dim(4, "[B, T, H, D]")?;
        let k = of.k.like(q)?.dim(4, "[B, T, Hk, D]")?;
        let [batch, tokens, _, size] = [0, 1, 2, 3].map(|dim| q.sizes()[dim].clone());
        let wanted = [batch, tokens.clone(), k.sizes()[2].clone(), size.clone()];
        if wanted.iter().zip(k.sizes()).any(|(wanted, found)| wanted.differs(found)) {
            let expected = format!("shape [B, T, Hk, D] = {wanted:?}");
            return Err(k.refuse(expected, format!("{:?}", k.sizes()), IF_HEADS_FIRST));
        }
        for each in [q, k] {
            if let Some(heads) = each.sizes()[2].number().filter(|heads| *heads > MOST_HEADS) {
                let expected = format!("at most {MOST_HEADS} heads");
                return Err(each.refuse(expected, heads.to_string(), ""));
            }
        }
        let cos = of.cos.same_device_as(q)?.kind_in(&[q.kind(), Kind::Float])?;
        cos.dim(2, "[P, R / 2]")?;
        let [positions, pairs] = [0, 1].map(|dim| cos.sizes()[dim].number());
        if let Some((pairs, size)) = pairs.zip(size.number()).filter(|(of, size)| *of > size / 2) {
            let expected = format!("at most D / 2 = {} columns, one for each pair", size / 2);
            let hint = "a table of full width repeats them: pass cos.narrow(-1, 0, R / 2)";
            return Err(cos.refuse(expected, pairs.to_string(), hint));
        }
        let offset = self.offset;
        if offset < 0 {
            let expected = "a number that is not negative";
            return Err(Error::argument(Self::NAME, "offset", expected, offset.to_string(), ""));
        }
        let is_short = |(tokens, positions): &(i64, i64)| {
            offset.checked_add(*tokens).is_none_or(|end| end > *positions)
        };
        if let Some((tokens, positions)) = tokens.number().zip(positions).filter(is_short) {
            let expected = format!("at least offset + T = {offset} + {tokens} rows");
            let hint = format!("make the tables longer; {IF_HEADS_FIRST}");
            return Err(cos.refuse(expected, positions.to_string(), hint));
        }
        let sin = of.sin.same_device_as(q)?.kind_as(cos.kind(), "cos")?;
        sin.shape("[P, R / 2]", cos.sizes())?;
        Ok(Made::only(RopeOut { q: q.clone(), k: k.clone() }))
    }

    fn reads(&self, _: &Needs<Self>) -> Needs<Self> {
        RopeIn { q: false, k: false, cos: true, sin: true }
    }

    fn forward(&self, call: &Call<'_, Self>) -> Result<Made<Self, Tensor>> {
        call.check()?;
        let RopeIn { q, k, cos, sin } = call.of;
        let from = [readable(q)?, readable(k)?];
        let mut to = [dense_like(&from[0])?, dense_like(&from[1])?];
        let [to_q, to_k] = &mut to;
        let work = [(&from[0], to_q), (&from[1], to_k)];
        self.rotate(work.map(|(from, to)| Some(Work::To { from, to })), [cos, sin])?;
        let [q, k] = to;
        Ok(Made::only(RopeOut { q, k }))
    }

    fn backward(&self, grads: Incoming<Self>, again: Again<'_, Self>) -> Result<Gradients<Self>> {
        let Again { of: RopeIn { cos, sin, .. }, needs, .. } = again;
        let wanted = [grads.q.filter(|_| needs.q), grads.k.filter(|_| needs.k)];
        let [q, k] = match (cos, sin) {
            (Some(cos), Some(sin)) => self.gradients(wanted, [&cos, &sin])?,
            _ => return Err(Error::msg("internal error: the tables were not saved")),
        };
        Ok(RopeIn { q, k, cos: None, sin: None })
    }

    fn reference(&self, of: &Args<'_, Self>) -> Result<Outputs<Self>> {
        let Rope { interleaved, offset, inverse } = *self;
        let RopeIn { q, k, cos, sin } = *of;
        let options = RopeOptions { interleaved, offset, in_place: false };
        let negative = inverse.then(|| sin.f_neg()).transpose()?;
        let (q, k) = rope_reference(q, k, cos, negative.as_ref().unwrap_or(sin), &options)?;
        Ok(RopeOut { q, k })
    }
}

impl Rope {
    /// Checks the arguments, as a call does.
    fn check(&self, of: &Args<'_, Self>) -> Result<()> {
        let metas = metas_of::<Self>(RopeIn::tensors(of).as_ref())?;
        self.rule(&metas, &RopeIn::each(|_| false)).map(|_| ())
    }

    /// The inverse rotation of the incoming gradients that are there, which are the gradients. It is a
    /// part of the graph if one is recorded.
    fn gradients(
        &self,
        grads: [Option<Tensor>; 2],
        [cos, sin]: [&Tensor; 2],
    ) -> Result<[Option<Tensor>; 2]> {
        let [q, k] = grads.each_ref().map(Option::as_ref);
        let Some(first) = q.or(k) else { return Ok([None, None]) };
        // In the place of one that is absent.
        let no_heads = first.f_narrow(2, 0, 0)?;
        let [q, k] = [q, k].map(|grad| grad.unwrap_or(&no_heads));
        // The tables are constants, even if they require grad by now.
        let (cos, sin) = (&cos.f_detach()?, &sin.f_detach()?);
        let inverse = Rope { inverse: !self.inverse, ..*self };
        let RopeOut { q, k } = call(inverse, &RopeIn { q, k, cos, sin })?;
        let [of_q, of_k] = grads.map(|grad| grad.is_some());
        Ok([of_q.then_some(q), of_k.then_some(k)])
    }

    /// Calls the kernel with tables that it can read: mostly those that came, or copies of the rows that
    /// are used.
    fn rotate(&self, work: [Option<Work<'_>>; 2], [cos, sin]: [&Tensor; 2]) -> Result<()> {
        let Some(heads) = work.iter().flatten().map(Work::from).next() else { return Ok(()) };
        // Without elements, the product of the other sizes may exceed 64 bits.
        if work.iter().flatten().all(|work| work.from().numel() == 0) {
            return Ok(());
        }
        let (kind, tokens) = (heads.f_kind()?, heads.size()[1]);
        let Rope { interleaved: is_interleaved, offset, inverse: is_inverse } = *self;
        let tables = |cos, sin, offset| Tables { cos, sin, offset, is_interleaved, is_inverse };
        let is_wide = kind == Kind::Double && cos.f_kind()? != kind;
        if !is_wide && is_readable(cos) && is_readable(sin) {
            return rotate(work, &tables(cos, sin, offset));
        }
        let rows = |table: &Tensor| -> Result<Tensor> {
            let rows = table.f_narrow(0, offset, tokens)?;
            plain(&if is_wide { rows.f_to_kind(kind)? } else { rows })
        };
        rotate(work, &tables(&rows(cos)?, &rows(sin)?, 0))
    }
}

/// The tensor itself, or a copy that a kernel can read.
fn readable(tensor: &Tensor) -> Result<Tensor> {
    if is_readable(tensor) { Ok(tensor.shallow_clone()) } else { plain(tensor) }
}

/// A new tensor for the result: dense, with adjacent values of a head and the other dimensions in the
/// order of the argument's strides.
fn dense_like(tensor: &Tensor) -> Result<Tensor> {
    let (size, stride) = (tensor.size(), tensor.stride());
    let options = (tensor.f_kind()?, tensor.device());
    Ok(Tensor::f_empty_strided(&size, dense_strides(&size, &stride), options)?)
}

/// Dimensions of one element, and those that are expanded, stay where they are. Without elements, the
/// strides say nothing, and may be too large for 64 bits.
fn dense_strides(size: &[i64], stride: &[i64]) -> Vec<i64> {
    let last = size.len().saturating_sub(1);
    let is_ordered = |dim: usize| size[dim] > 1 && stride[dim] > 0 && !size.contains(&0);
    let places: Vec<usize> = (0..last).filter(|&dim| is_ordered(dim)).collect();
    let mut sorted = places.clone();
    sorted.sort_by_key(|&dim| std::cmp::Reverse(stride[dim]));
    let mut order: Vec<usize> = (0..size.len()).collect();
    for (place, dim) in places.into_iter().zip(sorted) {
        order[place] = dim;
    }
    let mut dense = vec![1; size.len()];
    let mut len = 1;
    for dim in order.into_iter().rev() {
        dense[dim] = len;
        len = i64::saturating_mul(len, size[dim].max(1));
    }
    dense
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_dense_in_the_order_of_the_strides() {
        let (b, t, h, d) = (2, 3, 4, 8);
        let of = |stride: [i64; 4]| dense_strides(&[b, t, h, d], &stride);
        let row_major = [t * h * d, h * d, d, 1];
        assert_eq!(of(row_major), row_major);
        // A third of a packed projection, memory [B, H, T, D], an expanded tensor, and one whose heads
        // are outermost.
        assert_eq!(of([t * 3 * h * d, 3 * h * d, d, 1]), row_major);
        assert_eq!(of([h * t * d, d, t * d, 1]), [h * t * d, d, t * d, 1]);
        assert_eq!(of([0, h * d, d, 1]), row_major);
        assert_eq!(of([1, b * d * h, b * d, b]), [d, b * h * d, b * d, 1]);
        assert_eq!(of([t * d, d, b * t * d, 1]), [t * d, d, b * t * d, 1]);
        // The stride of a dimension of one element says nothing.
        assert_eq!(dense_strides(&[1, 3, 4, 8], &[0, 32, 8, 1]), [96, 32, 8, 1]);
        assert_eq!(dense_strides(&[2, 0, 4, 8], &[0, 32, 8, 1]), [32, 32, 8, 1]);
        let huge = [0, 1 << 40, 1 << 20, 8];
        assert_eq!(dense_strides(&huge, &[0, 0, 0, 1]), [i64::MAX, 1 << 23, 8, 1]);
    }
}
