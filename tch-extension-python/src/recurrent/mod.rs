//! `lstm`, `gru`, `lltm` and `lltm_cell`.
//!
//! What a sequence saves for its gradients depends on the kernels that compute it, so a trace cannot
//! know it. The operators `lstm_backward`, `gru_backward` and `lltm_backward` therefore compute the
//! forward pass once more: under torch.compile a training step costs one forward pass more than in eager
//! mode.

mod gru;
mod lltm;
mod lstm;

use crate::meta::{Shapes, contiguous};
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::library::{SymInt, sizes};
use tch_extension::ops::parts;

/// What the fake kernels of a sequence check. `gates` is `4H` or `3H`, the rows of the weights.
fn check(
    op: &'static str,
    gates: &'static str,
    input: &Tensor,
    (h, c): (&Tensor, Option<&Tensor>),
    [w_ih, w_hh]: [&Tensor; 2],
    [b_ih, b_hh]: [Option<&Tensor>; 2],
) -> Result<Shapes> {
    Shapes::of(op, "input", input)?
        .has("input", input, &["T", "B", "F"])?
        .has("h", h, &["B", "H"])?
        .has("c", c, &["B", "H"])?
        .has("w_ih", w_ih, &[gates, "F"])?
        .has("w_hh", w_hh, &[gates, "H"])?
        .has("b_ih", b_ih, &[gates])?
        .has("b_hh", b_hh, &[gates])
}

/// Checks the lengths of the sequences, as far as sizes are known.
fn check_lengths(op: &str, lengths: Option<&[i64]>, shapes: &Shapes) -> Result<()> {
    let Some(lengths) = lengths else { return Ok(()) };
    let batch = shapes.known("B").unwrap_or(lengths.len() as i64);
    parts::check_lengths(op, lengths, shapes.known("T").unwrap_or(i64::MAX), batch)
}

/// A fake h of all steps.
fn output(input: &Tensor, h: &Tensor, kind: Kind) -> Result<Tensor> {
    let size: Vec<SymInt> = sizes(input).into_iter().take(1).chain(sizes(h)).collect();
    contiguous(&size, kind, input)
}

/// Three results as an operator returns them.
fn flat((output, (h, c)): (Tensor, (Tensor, Tensor))) -> (Tensor, Tensor, Tensor) {
    (output, h, c)
}
