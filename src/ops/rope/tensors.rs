//! Calls of the kernels of `csrc/rope` with tensors.

use super::kernels::{Heads, MOST_HEADS, Rotation};
use crate::ffi::kind_code;
use crate::ffi::tensor::{describe, is_in_memory};
use crate::overlap::overlaps;
use crate::{Error, Result};
use std::ffi::c_void;
use tch::{Device, Kind, Tensor};

/// The tables of all positions, `[P, R / 2]`, whose last stride is 1, and how they are used.
pub(super) struct Tables<'a> {
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
    /// The row of the first token.
    pub offset: i64,
    pub is_interleaved: bool,
    pub is_inverse: bool,
}

/// One tensor `[B, T, heads, D]`, whose last stride is 1.
pub(super) enum Work<'a> {
    InPlace(&'a mut Tensor),
    To { from: &'a Tensor, to: &'a mut Tensor },
}

impl Work<'_> {
    pub fn from(&self) -> &Tensor {
        match self {
            Work::InPlace(tensor) => tensor,
            Work::To { from, .. } => from,
        }
    }

    fn to(&self) -> &Tensor {
        match self {
            Work::InPlace(tensor) => tensor,
            Work::To { to, .. } => to,
        }
    }
}

/// Whether a kernel can read this tensor `[B, T, heads, D]` or this table `[P, R / 2]`: whether values
/// of the last dimension are adjacent, if there are several.
pub(super) fn is_readable(tensor: &Tensor) -> bool {
    are_adjacent(&tensor.size(), &tensor.stride()) && is_in_memory(tensor)
}

/// Whether values of the last dimension are adjacent, if there are several.
fn are_adjacent(size: &[i64], stride: &[i64]) -> bool {
    let last = size.last().zip(stride.last());
    last.is_none_or(|(&size, &stride)| size <= 1 || stride == 1) || size.contains(&0)
}

/// Rotates the heads of q, of k, or of both.
///
/// # Errors
/// When the tensors do not fit together, and when CUDA refuses the launch.
pub(super) fn rotate([q, k]: [Option<Work<'_>>; 2], tables: &Tables<'_>) -> Result<()> {
    let Some(first) = q.as_ref().or(k.as_ref()).map(Work::from) else { return Ok(()) };
    let like = (first.f_kind()?, first.device());
    let &[batch, tokens, _, head_size] = &first.size()[..] else {
        return Err(misfit("heads", first));
    };
    let rotated = 2 * tables.cos.size2()?.1;
    let is_in_place = |work: &Work<'_>| matches!(work, Work::InPlace(_));
    let copies = !q.iter().chain(&k).all(is_in_place);
    let size = [batch, tokens, head_size];
    let cos = table("cos", tables.cos, tables, like, tokens, head_size)?;
    let sin = table("sin", tables.sin, tables, like, tokens, head_size)?;
    let params = Rotation {
        batch,
        tokens,
        rotated,
        copied: if copies { head_size - rotated } else { 0 },
        cos_stride: cos.1,
        sin_stride: sin.1,
        kind: kind_code(like.0)?,
        table_kind: kind_code(tables.cos.f_kind()?)?,
        is_interleaved: tables.is_interleaved.into(),
        is_inverse: tables.is_inverse.into(),
        cos: cos.0,
        sin: sin.0,
        q: heads("q", q.as_ref(), &size, like)?,
        k: heads("k", k.as_ref(), &size, like)?,
    };
    // SAFETY: `heads` and `table` have checked kinds, device, sizes and strides. No two elements
    // that are written share memory: `heads` has checked it where heads are changed in place, and
    // elsewhere the results are new, dense tensors.
    unsafe { params.run(like.1.into()) }
}

/// The address of a table's row of the first token, and its stride.
fn table(
    name: &str,
    table: &Tensor,
    tables: &Tables<'_>,
    (kind, device): (Kind, Device),
    tokens: i64,
    head_size: i64,
) -> Result<(*const c_void, i64)> {
    let (rows, columns) = table.size2()?;
    let found = table.f_kind()?;
    let fits = is_readable(table)
        && table.device() == device
        && (found == kind || (found == Kind::Float && kind != Kind::Double))
        && found == tables.cos.f_kind()?
        && columns == tables.cos.size2()?.1
        && 2 * columns <= head_size
        && tables.offset >= 0
        && tables.offset.checked_add(tokens).is_some_and(|last| last <= rows);
    if !fits {
        return Err(misfit(name, table));
    }
    let stride = table.stride()[0];
    let bytes = tables.offset * stride * found.elt_size_in_bytes() as i64;
    // Wrapping, because the address is null if there are no elements.
    Ok((table.data_ptr().cast::<u8>().wrapping_offset(bytes as isize) as *const c_void, stride))
}

fn heads(
    name: &str,
    work: Option<&Work<'_>>,
    &[batch, tokens, head_size]: &[i64; 3],
    like: (Kind, Device),
) -> Result<Heads> {
    let Some(work) = work else { return Ok(Heads::NONE) };
    let (size, from_stride) = layout(name, work.from(), like)?;
    if size[..2] != [batch, tokens] || size[2] > MOST_HEADS || size[3] != head_size {
        return Err(misfit(name, work.from()));
    }
    let to_stride = match work {
        Work::InPlace(_) if overlaps(&size, &from_stride) => {
            return Err(misfit(name, work.from()));
        }
        Work::InPlace(_) => from_stride,
        Work::To { to, .. } => {
            let (to_size, stride) = layout(name, to, like)?;
            if to_size != size {
                return Err(misfit(name, to));
            }
            stride
        }
    };
    let outer = |[batch, token, head, _]: [i64; 4]| [batch, token, head];
    Ok(Heads {
        from: work.from().data_ptr(),
        to: work.to().data_ptr(),
        heads: size[2],
        from_strides: outer(from_stride),
        to_strides: outer(to_stride),
    })
}

/// The size and the strides of a tensor that a kernel can take.
fn layout(name: &str, tensor: &Tensor, like: (Kind, Device)) -> Result<([i64; 4], [i64; 4])> {
    let (size, stride) = (tensor.size(), tensor.stride());
    let fits = (tensor.f_kind()?, tensor.device()) == like
        && are_adjacent(&size, &stride)
        && is_in_memory(tensor);
    match (<[i64; 4]>::try_from(size), <[i64; 4]>::try_from(stride)) {
        (Ok(size), Ok(stride)) if fits => Ok((size, stride)),
        _ => Err(misfit(name, tensor)),
    }
}

fn misfit(name: &str, tensor: &Tensor) -> Error {
    let found = describe(tensor);
    Error::msg(format!("internal error: rope's kernel cannot take this {name}: {found}"))
}
