//! What the ways cost on a card. Plans compare their candidates by these costs and remember no
//! numbers themselves: `cargo xtask tune` measures a card and writes its table ([`table`]), and a card
//! without a table gets the costs of the H200, changed by what is known of the card ([`facts`]).
//!
//! All costs are in microseconds: of a launch, of a step, of a million operations or bytes.

#[cfg(test)]
mod cards;
mod choose;
mod coefficients;
mod facts;
mod place;
mod table;
mod tuning;

use crate::Result;
#[cfg(test)]
pub(in crate::ops) use cards::CARDS;
pub(in crate::ops) use choose::{cheapest, is_clearly_cheaper};
pub(in crate::ops) use coefficients::{Each, Unit, Visit, coefficients};
pub(in crate::ops) use facts::Facts;
pub(in crate::ops) use place::{Named, Place};
pub(in crate::ops) use table::Table;
pub use tuning::{CostSource, Tuning};
pub(in crate::ops) use tuning::{Loaded, multiprocessors};

/// Which costs a CUDA device has.
///
/// # Errors
/// When `device` is not an existing CUDA device, or this build has no CUDA.
pub fn tuning(device: tch::Device) -> Result<Tuning> {
    tuning::loaded(device.into()).map(|loaded| loaded.tuning.clone())
}
