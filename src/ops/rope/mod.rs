//! Rotary position embedding.

use crate::autograd::{Context, Function, Inputs, Saver, Tensors, apply, check_in_place};
use crate::check::Check;
use crate::ffi::autograd::tch_extension_grad_mode;
use crate::ffi::tensor::plain;
use crate::overlap::{overlaps, share_memory};
use crate::{Error, Result, check};
use kernels::{Tables, Work, is_readable, rotate};
use tch::{Device, Kind, Tensor};

mod kernels;
pub(super) mod parts;

const OP: &str = "rope";
const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];
/// The kernels count the heads of q and k in 32 bits.
const MOST_HEADS: i64 = 1 << 29;
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
///   [`rope_tables`](super::rope_tables())
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
/// For positions that are not consecutive, pass rows of the tables:
/// `cos.index_select(0, &positions)`.
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
    check_arguments([q, k], [cos, sin], options)?;
    if options.in_place {
        return rope_in_place([q, k], [cos, sin], options);
    }
    if [cos, sin].into_iter().any(is_recorded) {
        return rope_reference(q, k, cos, sin, options);
    }
    let function = Rope::new(options);
    let [q, k] = apply(function, &[Some(q), Some(k), Some(cos), Some(sin)])?.exactly()?;
    Ok((q, k))
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
    let (tokens, pairs) = (q.size4()?.1, cos.size2()?.1);
    let rows = |table: &Tensor| -> Result<Tensor> {
        let rows = table.f_narrow(0, options.offset, tokens)?;
        Ok(rows.f_to_kind(compute)?.f_unsqueeze(1)?)
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

/// The tables for [`rope`]: cosines and sines of the angles of each position.
///
/// ```text
/// cos[p, i] = cos(p / base^(2i / dim))      sin[p, i] = sin(p / base^(2i / dim))
/// ```
///
/// * `positions`: P, the number of positions, from 0 to P - 1
/// * `dim`: R, an even number: how many values of a head are rotated, mostly all D
/// * `base`: greater than 0; 10000 in the paper
/// * `options`: the kind of the tables, which is best `Float` also for q and k of half kinds, and their
///   device
///
/// Returns `cos` and `sin`, `[P, R / 2]`, contiguous, without gradients. The angles are computed in
/// `Double`, with errors of less than p / 2⁴⁸ at position p, which tables of the other kinds do not show.
/// Where a model computes them in `Float`, as Hugging Face's do, the errors are up to p / 2²⁴.
///
/// ```
/// # use tch::{Kind, Device};
/// # use tch_extension::ops::rope_tables;
/// let (cos, sin) = rope_tables(4096, 128, 10000.0, (Kind::Float, Device::Cpu));
/// assert_eq!((cos.size(), sin.size()), (vec![4096, 64], vec![4096, 64]));
/// assert_eq!(sin.double_value(&[7, 0]), f64::from(7_f64.sin() as f32));
/// ```
///
/// # Panics
/// If [`f_rope_tables`] returns an error.
pub fn rope_tables(
    positions: i64,
    dim: i64,
    base: f64,
    options: (Kind, Device),
) -> (Tensor, Tensor) {
    super::unwrap(f_rope_tables(positions, dim, base, options))
}

/// [`rope_tables`], with an error instead of a panic.
///
/// # Errors
/// If an argument is not what is stated (the error names it), or if libtorch or CUDA fails.
pub fn f_rope_tables(
    positions: i64,
    dim: i64,
    base: f64,
    (kind, device): (Kind, Device),
) -> Result<(Tensor, Tensor)> {
    const OP: &str = "rope_tables";
    let refuse = |argument: &str, expected: &str, got: String| {
        Err(Error::argument(OP, argument, expected, got, ""))
    };
    if positions < 0 {
        return refuse("positions", "a number that is not negative", positions.to_string());
    }
    if dim < 0 || dim % 2 != 0 {
        return refuse("dim", "an even number that is not negative", dim.to_string());
    }
    if !(base > 0.0 && base.is_finite()) {
        return refuse("base", "a finite number greater than 0", base.to_string());
    }
    if !KINDS.contains(&kind) {
        return refuse("options", "kind Float or Double or Half or BFloat16", format!("{kind:?}"));
    }
    let _no_grad = tch::no_grad_guard();
    let exact = (Kind::Double, device);
    let exponents = Tensor::f_arange(dim / 2, exact)?.f_mul_scalar(2.0 / dim.max(1) as f64)?;
    // base^-x as e^(-x log base).
    let frequencies = exponents.f_mul_scalar(-base.ln())?.f_exp()?;
    let angles = Tensor::f_arange(positions, exact)?.f_unsqueeze(1)?.f_mul(&frequencies)?;
    Ok((angles.f_cos()?.f_to_kind(kind)?, angles.f_sin()?.f_to_kind(kind)?))
}

/// The kind in which heads of this kind are rotated.
fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// Whether this argument will have a gradient.
fn is_recorded(tensor: &Tensor) -> bool {
    tensor.requires_grad() && tch_extension_grad_mode()
}

fn check_arguments(
    [q, k]: [&Tensor; 2],
    [cos, sin]: [&Tensor; 2],
    options: &RopeOptions,
) -> Result<()> {
    let q = check!(OP, q).defined()?.kind_in(&KINDS)?.supported_device()?.dim(4, "[B, T, H, D]")?;
    let &[batch, tokens, _, size] = &q.tensor().size()[..] else {
        return Err(Error::msg("internal error: the number of dimensions changed"));
    };
    let k = check!(OP, k).defined()?.like(&q)?.dim(4, "[B, T, Hk, D]")?;
    let &[k_batch, k_tokens, k_heads, k_size] = &k.tensor().size()[..] else {
        return Err(Error::msg("internal error: the number of dimensions changed"));
    };
    if [k_batch, k_tokens, k_size] != [batch, tokens, size] {
        let wanted = [batch, tokens, k_heads, size];
        let expected = format!("shape [B, T, Hk, D] = {wanted:?}");
        let got = format!("{:?}", [k_batch, k_tokens, k_heads, k_size]);
        return Err(k.refuse(expected, got, IF_HEADS_FIRST));
    }
    let kinds = [q.tensor().f_kind()?, Kind::Float];
    for each in [q, k] {
        let heads = each.tensor().size()[2];
        if heads > MOST_HEADS {
            return Err(each.refuse(format!("at most {MOST_HEADS} heads"), heads.to_string(), ""));
        }
    }
    let cos = check!(OP, cos).defined()?.same_device_as(&q)?.kind_in(&kinds)?;
    let (positions, pairs) = cos.dim(2, "[P, R / 2]")?.tensor().size2()?;
    if pairs > size / 2 {
        let expected = format!("at most D / 2 = {} columns, one for each pair", size / 2);
        let hint = "a table of full width repeats them: pass cos.narrow(-1, 0, R / 2)";
        return Err(cos.refuse(expected, format!("{pairs}"), hint));
    }
    if options.offset < 0 {
        let got = options.offset.to_string();
        return Err(Error::argument(OP, "offset", "a number that is not negative", got, ""));
    }
    if options.offset.checked_add(tokens).is_none_or(|end| end > positions) {
        let RopeOptions { offset, .. } = options;
        let expected = format!("at least offset + T = {offset} + {tokens} rows");
        let hint = format!("make the tables longer; {IF_HEADS_FIRST}");
        return Err(cos.refuse(expected, format!("{positions}"), hint));
    }
    let sin = check!(OP, sin).defined()?.same_device_as(&q)?;
    sin.kind_as(cos.tensor().f_kind()?, "cos")?.shape("[P, R / 2]", &[positions, pairs])?;
    Ok(())
}

/// Changes q and k themselves. Autograd's graph supports one view that is changed by a node, so each
/// has a node of its own if a graph is recorded.
fn rope_in_place(
    [q, k]: [&Tensor; 2],
    [cos, sin]: [&Tensor; 2],
    options: &RopeOptions,
) -> Result<(Tensor, Tensor)> {
    let [q, k] = [check!(OP, q), check!(OP, k)];
    for (name, table) in [("cos", cos), ("sin", sin)] {
        if is_recorded(table) {
            let hint = "its gradient needs the old values: call detach(), or leave in_place off";
            let expected = "a table without gradient, because of in_place";
            let table = Check::new(OP, name, table);
            return Err(table.refuse(expected, "one that requires grad", hint));
        }
        check_apart(Check::new(OP, name, table), [q, k])?;
    }
    for each in [q, k] {
        let (size, stride) = (each.tensor().size(), each.tensor().stride());
        if overlaps(&size, &stride) {
            let got = format!("strides {stride:?} for shape {size:?}");
            let expected = "elements that do not share memory, because of in_place";
            return Err(each.refuse(expected, got, "call contiguous()"));
        }
    }
    check_apart(k, [q])?;
    let [q, k] = [q.tensor(), k.tensor()];
    for (name, tensor) in [("q", q), ("k", k)] {
        if is_recorded(tensor) {
            check_in_place(OP, &format!("{name}: in_place"), tensor)?;
        }
    }
    let run = |q: Option<&Tensor>, k: Option<&Tensor>| {
        apply(Rope::new(options), &[q, k, Some(cos), Some(sin)])
    };
    if !is_recorded(q) && !is_recorded(k) {
        let [q, k] = run(Some(q), Some(k))?.exactly()?;
        return Ok((q, k));
    }
    let q = run(Some(q), None)?.single()?;
    let k = run(None, Some(k))?.single()?;
    Ok((q, k))
}

/// Refuses a tensor that has memory in common with another one, which is changed in place.
fn check_apart<const N: usize>(tensor: Check<'_>, others: [Check<'_>; N]) -> Result<()> {
    for other in others {
        if share_memory(tensor.tensor(), other.tensor())? {
            let expected = "memory of its own, because of in_place";
            return Err(tensor.refuse(expected, "elements that others have, too", "copy it"));
        }
    }
    Ok(())
}

/// The rotation, and with `is_inverse` its gradient.
struct Rope {
    options: RopeOptions,
    is_inverse: bool,
    /// Whether q and k are there, which the forward pass finds out.
    is_there: [bool; 2],
}

/// The positions of the inputs. The outputs are those of q and k that are there.
mod place {
    pub const Q: usize = 0;
    pub const K: usize = 1;
    pub const COS: usize = 2;
    pub const SIN: usize = 3;
}

impl Function for Rope {
    const NAME: &'static str = OP;
    const DOUBLE_BACKWARD: bool = true;
    const WITHOUT_AUTOCAST: bool = true;

    fn forward(&mut self, saver: &mut Saver<'_>, inputs: Inputs<'_>) -> Result<Tensors> {
        let tables = [inputs.get(place::COS)?, inputs.get(place::SIN)?];
        tables.into_iter().for_each(|table| saver.save(table));
        saver.set_materialize_grads(false);
        let tensors = [place::Q, place::K].map(|place| inputs.optional(place));
        self.is_there = tensors.map(|tensor| tensor.is_some());
        let outputs = if self.options.in_place {
            let mut changed = [None, None];
            for place in (place::Q..=place::K).filter(|&place| self.is_there[place]) {
                changed[place] = Some(saver.in_place(place)?);
            }
            self.change(&changed, tables)?;
            changed
        } else {
            self.rotated(tensors, tables)?
        };
        Ok(outputs.into_iter().flatten().collect::<Vec<_>>().into())
    }

    /// The inverse rotation of the gradients that came and are needed.
    fn backward(&self, ctx: &Context<'_>, grads: &Tensors) -> Result<Tensors> {
        let outputs = [0, usize::from(self.is_there[place::Q])];
        let wanted = [place::Q, place::K].map(|place| {
            let is_needed = self.is_there[place] && ctx.needs_input_grad(place);
            grads.optional(outputs[place]).filter(|_| is_needed)
        });
        let mut gradients = vec![None, None, None, None];
        if wanted.iter().flatten().next().is_none() {
            return Ok(gradients.into());
        }
        // The tables are constants, even if they require grad by now.
        let [cos, sin] = [ctx.saved(0)?.f_detach()?, ctx.saved(1)?.f_detach()?];
        let options = RopeOptions { in_place: false, ..self.options };
        let inverse = Rope { is_inverse: !self.is_inverse, ..Rope::new(&options) };
        let mut found =
            apply(inverse, &[wanted[0], wanted[1], Some(&cos), Some(&sin)])?.into_vec().into_iter();
        for (gradient, wanted) in gradients.iter_mut().zip(wanted) {
            *gradient = wanted.and_then(|_| found.next().flatten());
        }
        Ok(gradients.into())
    }
}

impl Rope {
    fn new(options: &RopeOptions) -> Self {
        Rope { options: *options, is_inverse: false, is_there: [false; 2] }
    }

    /// The rotated tensors that are there.
    fn rotated(&self, tensors: [Option<&Tensor>; 2], tables: [&Tensor; 2]) -> Result<Pair> {
        let from = each(tensors, readable)?;
        let mut to = each(from.each_ref().map(Option::as_ref), dense_like)?;
        let [q, k] = &mut to;
        let work = [from[0].as_ref().zip(q.as_mut()), from[1].as_ref().zip(k.as_mut())];
        self.rotate(work.map(|pair| pair.map(|(from, to)| Work::To { from, to })), tables)?;
        Ok(to)
    }

    /// Rotates the tensors that are there in place. One that a kernel cannot read is copied there and
    /// back.
    fn change(&self, tensors: &Pair, tables: [&Tensor; 2]) -> Result<()> {
        let mut own = each(tensors.each_ref().map(Option::as_ref), readable)?;
        let work = own.each_mut().map(|tensor| tensor.as_mut().map(Work::InPlace));
        self.rotate(work, tables)?;
        for (tensor, own) in tensors.iter().zip(&own) {
            if let (Some(tensor), Some(own)) = (tensor, own)
                && !is_readable(tensor)
            {
                tensor.f_detach()?.f_copy_(own)?;
            }
        }
        Ok(())
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
        let RopeOptions { interleaved: is_interleaved, offset, .. } = self.options;
        let tables = |cos, sin, offset| {
            let is_inverse = self.is_inverse;
            Tables { cos, sin, offset, is_interleaved, is_inverse }
        };
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

/// Of q and of k.
type Pair = [Option<Tensor>; 2];

fn each([q, k]: [Option<&Tensor>; 2], of: fn(&Tensor) -> Result<Tensor>) -> Result<Pair> {
    Ok([q.map(of).transpose()?, k.map(of).transpose()?])
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
