//! `cross_entropy` and `linear_cross_entropy`.

mod linear;
mod logits;

use crate::meta::contiguous;
use tch::{Kind, Reduction, Tensor};
use tch_extension::library::sizes;
use tch_extension::{Error, Result, check};

/// torch's name of a reduction.
fn reduction_of(op: &str, name: &str) -> Result<Reduction> {
    match name {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        _ => Err(Error::argument(op, "reduction", "none, mean or sum", name, "")),
    }
}

/// Checks the kind of a target.
fn classes(op: &str, target: &Tensor) -> Result<()> {
    check!(op, target).defined()?.kind_in(&[Kind::Int64])?;
    Ok(())
}

/// A fake loss.
fn loss(input: &Tensor, target: &Tensor, reduction: &str, kind: Kind) -> Result<Tensor> {
    let size = if reduction == "none" { sizes(target) } else { Vec::new() };
    contiguous(&size, kind, input)
}
