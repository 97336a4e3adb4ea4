//! What fake kernels are made of. They read sizes as [`SymInt`]s, so that torch.compile makes one graph
//! for all sizes.

use crate::node::{Needs, is_needed};
use tch::{Kind, Tensor};
use tch_extension::library::{SymInt, empty, sizes};
use tch_extension::{Error, Result};

/// The kind in which tensors of this kind are computed.
pub fn compute_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { Kind::Double } else { Kind::Float }
}

/// A contiguous tensor of these sizes and this kind.
///
/// # Errors
/// An error of libtorch.
pub fn contiguous(sizes: &[SymInt], kind: Kind, like: &Tensor) -> Result<Tensor> {
    empty(sizes, kind, like)
}

/// In the place of a tensor that is absent.
///
/// # Errors
/// An error of libtorch.
pub fn nothing(like: &Tensor) -> Result<Tensor> {
    empty(&[SymInt::from(0)], like.f_kind()?, like)
}

/// The product of sizes, 1 for none.
pub fn product(sizes: &[SymInt]) -> SymInt {
    sizes.iter().cloned().fold(SymInt::from(1), |product, size| product * size)
}

/// As [`crate::node::returned`]: a contiguous tensor like each that needs a gradient.
///
/// # Errors
/// An error of libtorch.
pub fn likes<const N: usize>(tensors: [Option<&Tensor>; N], needs: Needs) -> Result<[Tensor; N]> {
    let first = tensors[0];
    let like = |(place, tensor): (usize, Option<&Tensor>)| match (tensor, first) {
        (Some(tensor), _) if is_needed(needs, place) => {
            contiguous(&sizes(tensor), tensor.f_kind()?, tensor)
        }
        (tensor, first) => match first.or(tensor) {
            Some(like) => nothing(like),
            None => Err(Error::msg("internal error: the first tensor is absent")),
        },
    };
    let made: Vec<Tensor> = tensors.into_iter().enumerate().map(like).collect::<Result<_>>()?;
    made.try_into().map_err(|_| Error::msg("internal error: the number changed"))
}

/// The sizes to which two lists of sizes broadcast.
///
/// # Errors
/// If they do not.
pub fn broadcast(a: &[SymInt], b: &[SymInt]) -> Result<Vec<SymInt>> {
    let dims = a.len().max(b.len());
    let of = |size: &[SymInt], dim: usize| {
        (dim + size.len()).checked_sub(dims).and_then(|place| size.get(place).cloned())
    };
    let one = SymInt::from(1);
    (0..dims)
        .map(|dim| match (of(a, dim), of(b, dim)) {
            (Some(a), None) => Ok(a),
            (None, Some(b)) => Ok(b),
            (Some(a), Some(b)) if b == one || a == b => Ok(a),
            (Some(a), Some(b)) if a == one => Ok(b),
            _ => Err(Error::msg("the sizes do not broadcast")),
        })
        .collect()
}
