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
use tch_extension::library::{SymInt, sizes};
use tch_extension::{Error, Result};

/// What the fake kernels of a sequence check: `gates` are the names of so many times H.
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

/// Checks that there is a length for each sequence, from 1 to the number of steps.
fn check_lengths(op: &str, lengths: &[i64], shapes: &Shapes) -> Result<()> {
    let refuse =
        |expected: String, got: String| Err(Error::argument(op, "lengths", expected, got, ""));
    if let Some(batch) = shapes.known("B").filter(|batch| *batch != lengths.len() as i64) {
        return refuse(
            format!("B = {batch} lengths, one for each sequence"),
            lengths.len().to_string(),
        );
    }
    let most = shapes.known("T").unwrap_or(i64::MAX);
    match lengths.iter().find(|length| **length < 1 || **length > most) {
        Some(length) => refuse("numbers from 1 to T".to_string(), length.to_string()),
        None => Ok(()),
    }
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
