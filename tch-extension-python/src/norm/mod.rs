//! `layer_norm`, `rms_norm`, `add_layer_norm` and `add_rms_norm`.

mod rows;
mod sums;

use crate::meta::{compute_kind, contiguous, product};
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::library::sizes;

/// A fake result of the input's shape.
fn like(input: &Tensor, kind: Kind) -> Result<Tensor> {
    contiguous(&sizes(input), kind, input)
}

/// A fake number for each row of an input of this kind.
fn of_rows(input: &Tensor, dims: usize, kind: Kind) -> Result<Tensor> {
    let sizes = sizes(input);
    let leading = &sizes[..sizes.len().saturating_sub(dims)];
    contiguous(&[product(leading)], compute_kind(kind), input)
}

/// libtorch's number for a norm of tensors of this kind that is told none: the machine epsilon of the
/// kind in which it computes.
fn or_default(eps: Option<f64>, kind: Kind) -> f64 {
    eps.unwrap_or(match compute_kind(kind) {
        Kind::Double => f64::EPSILON,
        _ => f64::from(f32::EPSILON),
    })
}
