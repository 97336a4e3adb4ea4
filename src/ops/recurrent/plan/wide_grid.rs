//! Sequences of many rows that `csrc/recurrent/wide_grid` computes in one kernel, in which a block
//! computes tiles of 64 rows at a time.

use super::grid::{Share, are_for_a_grid};
use super::resident::Pass;
use super::sizes::{Direction, Product, Sizes};

/// A kernel, and what a step costs in hundredths of a microsecond, as measured on an H200.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Entry {
    pub direction: Direction,
    pub product: Product,
    /// How many columns of h a block has.
    pub columns: i64,
    /// How many rows of the batch it computes at a time.
    pub rows: i64,
    /// One round of these rows: a fixed part, and what 100 hidden columns add and 100 blocks.
    pub round: [i64; 3],
}

/// How the blocks of a wide grid share a sequence, if the weights fit into shared memory and the
/// kernel can count the values. `kernels` are a cell's, and `values` is V of `counts_in_32_bits`.
pub(in crate::ops) fn share((kernels, values): (&[Entry], i64), pass: &Pass) -> Option<Share> {
    const WIDEST: i64 = 1024;
    let Pass { direction, sizes, kind, tf32, gpu } = *pass;
    let Sizes { batch, hidden, .. } = sizes;
    let product = Product::of(kind, tf32)?;
    let is_for_it = |of: &&Entry| of.direction == direction && of.product == product;
    let kernel = kernels.iter().find(is_for_it)?;
    if hidden > WIDEST || !are_for_a_grid(sizes, values) {
        return None;
    }
    let most = gpu.grid.blocks() / ((hidden - 1) / kernel.columns + 1);
    if most == 0 {
        return None;
    }
    let tiles = (batch - 1) / kernel.rows + 1;
    let rounds = (tiles - 1) / most + 1;
    // The padded hidden sizes for which kernels are compiled.
    let padded = match hidden {
        512 => 512,
        ..=768 => 768,
        _ => WIDEST,
    };
    // A group computes all steps of some rows, and then all steps of others.
    let row_groups = (tiles - 1) / rounds + 1;
    let blocks = row_groups * ((hidden - 1) / kernel.columns + 1);
    let [fixed, of_columns, of_blocks] = kernel.round;
    let whole = fixed + (padded * of_columns + blocks * of_blocks) / 100;
    // With padding, each vector of a row has to be checked.
    let a_round = if hidden == padded { whole } else { whole * 5 / 4 };
    Some(Share { columns: kernel.columns, row_groups, cost: rounds * a_round })
}
