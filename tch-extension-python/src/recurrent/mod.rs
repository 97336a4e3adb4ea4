//! `lstm`, `gru`, `lltm` and `lltm_cell`.
//!
//! What a sequence saves for its gradients depends on the kernels that compute it, so a trace cannot
//! know it. The operators `lstm_backward`, `gru_backward` and `lltm_backward` therefore compute the
//! forward pass once more: under torch.compile a training step costs one forward pass more than in eager
//! mode.

mod gru;
mod lltm;
mod lstm;

use crate::meta::contiguous;
use tch::{Kind, Tensor};
use tch_extension::Result;
use tch_extension::library::{SymInt, sizes};

/// A fake h of all steps.
fn output(input: &Tensor, h: &Tensor, kind: Kind) -> Result<Tensor> {
    let size: Vec<SymInt> = sizes(input).into_iter().take(1).chain(sizes(h)).collect();
    contiguous(&size, kind, input)
}

/// Three results as an operator returns them.
fn flat((output, (h, c)): (Tensor, (Tensor, Tensor))) -> (Tensor, Tensor, Tensor) {
    (output, h, c)
}
