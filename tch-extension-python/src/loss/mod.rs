//! `cross_entropy` and `linear_cross_entropy`.

mod linear;
mod logits;

use crate::meta::contiguous;
use tch::{Kind, Reduction, Tensor};
use tch_extension::library::sizes;
use tch_extension::{Error, Result};

/// torch's name of a reduction.
fn reduction_of(op: &str, name: &str) -> Result<Reduction> {
    match name {
        "none" => Ok(Reduction::None),
        "mean" => Ok(Reduction::Mean),
        "sum" => Ok(Reduction::Sum),
        _ => Err(Error::argument(op, "reduction", "none, mean or sum", name, "")),
    }
}

/// A fake loss.
fn loss(input: &Tensor, target: &Tensor, reduction: &str, kind: Kind) -> Result<Tensor> {
    let size = if reduction == "none" { sizes(target) } else { Vec::new() };
    contiguous(&size, kind, input)
}
