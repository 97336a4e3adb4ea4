//! `rope`: rotary positions.

use super::Answer;
use super::arguments::{Argument, Result};
use super::arrays::{Array, Of};
use super::call::Call;
use crate::ops::kinds::{Kind, compute_kind};
use crate::ops::rope::kernels::{Heads, MOST_HEADS, Rotation};

/// The sizes of heads: `[B, T, heads, D]`.
fn heads_of(array: &Array<'_>) -> Result<[i64; 4]> {
    let sizes = <[i64; 4]>::try_from(array.shape).ok().filter(|sizes| sizes[2] <= MOST_HEADS);
    let got = || format!("shape {:?}", array.shape);
    sizes.ok_or_else(|| array.refuse("shape [B, T, heads, D], with at most 2²⁹ heads", got(), ""))
}

/// The strides of an array whose last dimension has adjacent values.
fn strides_of<const N: usize>(array: &Array<'_>) -> Result<[i64; N]> {
    let strides = array.strides();
    let is_adjacent =
        array.shape.last().is_none_or(|last| *last <= 1) || strides.last() == Some(&1);
    let strides = <[i64; N]>::try_from(strides).ok().filter(|_| is_adjacent || array.is_empty());
    let got = || format!("strides {:?}", array.strides());
    strides.ok_or_else(|| array.refuse("adjacent values in the last dimension", got(), "copy it"))
}

/// One tensor, and where it goes.
fn rotated<'a>(
    call: &mut Call<'a>,
    output: Argument<'a>,
    from: Array<'a>,
    kind: Kind,
) -> Result<Heads> {
    let [_, _, heads, _] = heads_of(&from)?;
    let to = call.written(output, from.shape, &[kind])?.array;
    let outer = |[batch, token, head, _]: [i64; 4]| [batch, token, head];
    Ok(Heads {
        from: from.address,
        to: to.address,
        heads,
        from_strides: outer(strides_of(&from)?),
        to_strides: outer(strides_of(&to)?),
    })
}

/// A table `[P, R / 2]` from the row `offset` on, and its stride.
fn table<'a>(
    call: &mut Call<'a>,
    argument: Argument<'a>,
    kinds: &[Kind],
) -> Result<(Of<'a>, [i64; 2])> {
    let array = call.strided(argument)?;
    let refuse = || array.refuse("shape [positions, R / 2]", format!("{:?}", array.shape), "");
    <[i64; 2]>::try_from(array.shape).map_err(|_| refuse())?;
    let strides = strides_of(&array)?;
    Ok((array.one_of(kinds)?, strides))
}

pub fn rope(
    [q_output, k_output, q, k, cos, sin, offset, interleaved, inverse]: [Argument<'_>; 9],
) -> Answer {
    let (mut call, of_q) = Call::of_strided(q)?;
    let from = call.strided(q)?;
    let (kind, [batch, tokens, _, head_size]) = (of_q.kind, heads_of(&from)?);
    let of_k = match k.is_none() {
        true => None,
        false => Some(call.strided(k)?),
    };
    if let Some(of_k) = &of_k {
        let sizes = heads_of(of_k)?;
        let expected = [batch, tokens, sizes[2], head_size];
        of_k.of_shape(&expected)?.one_of(&[kind])?;
    }
    let (of_cos, cos_strides) = table(&mut call, cos, &[kind, compute_kind(kind)])?;
    let (of_sin, sin_strides) = table(&mut call, sin, &[of_cos.kind])?;
    of_sin.array.of_shape(of_cos.array.shape)?;
    let [positions, half] = [of_cos.array.shape[0], of_cos.array.shape[1]];
    if half > head_size / 2 {
        let expected = format!("at most D / 2 = {} columns", head_size / 2);
        return Err(of_cos.array.refuse(expected, half, ""));
    }
    let first = offset.integer(0)?;
    if first.checked_add(tokens).is_none_or(|end| end > positions) {
        let expected = format!("at most {} for {tokens} tokens", positions.saturating_sub(tokens));
        let way_out = "make tables of more positions";
        return Err(offset.refuse("ValueError", expected, first, way_out));
    }
    let (is_interleaved, is_inverse) = (interleaved.flag()?, inverse.flag()?);
    let to_q = rotated(&mut call, q_output, from, kind)?;
    let to_k = match of_k {
        Some(of_k) => rotated(&mut call, k_output, of_k, kind)?,
        None if k_output.is_none() => Heads::NONE,
        None => return Err(k_output.refuse("ValueError", "None, as k", "an array", "")),
    };
    call.check_overlaps()?;
    if from.is_empty() && of_k.is_none_or(|of_k| of_k.is_empty()) {
        return Ok(None);
    }
    let row = |of: &Of<'_>, stride: i64| {
        // A table without columns is never read, and may have any stride.
        let bytes = first.wrapping_mul(stride).wrapping_mul(of.kind.elt_size_in_bytes() as i64);
        of.array.address.wrapping_byte_offset(bytes as isize).cast_const()
    };
    let params = Rotation {
        batch,
        tokens,
        rotated: 2 * half,
        copied: head_size - 2 * half,
        cos_stride: cos_strides[0],
        sin_stride: sin_strides[0],
        kind: kind.code(),
        table_kind: of_cos.kind.code(),
        is_interleaved: is_interleaved.into(),
        is_inverse: is_inverse.into(),
        cos: row(&of_cos, cos_strides[0]),
        sin: row(&of_sin, sin_strides[0]),
        q: to_q,
        k: to_k,
    };
    // SAFETY: the arrays were checked to have these sizes, strides and kinds, and to be on this device. The
    // results are contiguous and overlap no other array.
    call.run(|| unsafe { params.run(call.device) })?;
    Ok(None)
}
