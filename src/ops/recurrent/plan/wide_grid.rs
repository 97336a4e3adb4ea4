//! Sequences of many rows that `csrc/recurrent/wide_grid` computes in one kernel, in which a block
//! computes tiles of 64 rows at a time.

use super::grid::{Share, are_for_a_grid};
use super::resident::Pass;
use super::sizes::{Direction, Product, Sizes};
use crate::ops::costs::{Each, Unit, Visit, coefficients};

coefficients! {
    /// One round of a kernel's rows: a fixed part, and what a hidden column adds and a block.
    #[derive(Copy, Default)]
    pub(in crate::ops) struct Round {
        Latency fixed: f64,
        Latency column: f64,
        Latency block: f64,
    }
}

/// A kernel, and what a step costs.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Entry {
    pub direction: Direction,
    pub product: Product,
    /// How many columns of h a block has.
    pub columns: i64,
    /// How many rows of the batch it computes at a time.
    pub rows: i64,
    pub round: Round,
}

impl Entry {
    /// Those of both directions, in half kinds and of scaled values.
    pub fn of_both_directions() -> Vec<Entry> {
        let directions = [Direction::Forward, Direction::Backward].into_iter();
        let of = |direction| {
            [Product::Half, Product::Scaled].map(|product| Entry::new((direction, product), 32, 64))
        };
        directions.flat_map(of).collect()
    }

    pub fn new((direction, product): (Direction, Product), columns: i64, rows: i64) -> Entry {
        Entry { direction, product, columns, rows, round: Round::default() }
    }
}

impl Each for Entry {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        let name = format!("{name}.{}_{}", self.direction.name(), self.product.name());
        self.round.each(&name, unit, visit);
    }
}

/// How the blocks of a wide grid share a sequence, if the weights fit into shared memory and the
/// kernel can count the values. `kernels` are a cell's, and `values` is V of `counts_in_32_bits`.
pub(in crate::ops) fn share((kernels, values): (&[Entry], i64), pass: &Pass) -> Option<Share> {
    const WIDEST: i64 = 1024;
    let Pass { direction, sizes, kind, tf32, gpu } = *pass;
    let Sizes { batch, hidden, .. } = sizes;
    let product = Product::of(kind, tf32);
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
    let Round { fixed, column, block } = kernel.round;
    let whole = fixed + padded as f64 * column + blocks as f64 * block;
    // With padding, each vector of a row has to be checked.
    let a_round = if hidden == padded { whole } else { whole * 1.25 };
    Some(Share { columns: kernel.columns, row_groups, cost: rounds as f64 * a_round })
}
