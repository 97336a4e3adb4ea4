//! Sequences that `csrc/recurrent/grid` computes in one kernel, in `Float` and `Double` without
//! rounding them to a narrower kind.

use super::grid::{Share, are_for_a_grid};
use super::resident::Pass;
use super::sizes::{Direction, Line, Sizes};
use crate::ops::costs::{Each, Unit, Visit};
use crate::ops::kinds::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// What a step of a kernel costs by its number of vectors.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Entry {
    pub direction: Direction,
    /// How many columns of h a block has. With few, a block's product is short, but more blocks
    /// wait for one another.
    pub columns: i64,
    /// The numbers of vectors for which the kernel is compiled.
    pub vectors: [i64; 2],
    /// A step's only iteration, which waits for all messages.
    pub only: Line,
    /// Each of several iterations.
    pub each: Line,
    /// How many iterations a step has at least. With few columns, two take no longer than one, in
    /// which all threads wait for messages, and need only half the blocks.
    pub fewest_iterations: i64,
}

impl Entry {
    pub fn new(
        direction: Direction,
        columns: i64,
        vectors: [i64; 2],
        fewest_iterations: i64,
    ) -> Entry {
        let (only, each) = Default::default();
        Entry { direction, columns, vectors, only, each, fewest_iterations }
    }
}

impl Each for Entry {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        let name = format!("{name}.{}_{}", self.direction.name(), self.columns);
        self.only.each(&format!("{name}.only"), unit, visit);
        self.each.each(&format!("{name}.each"), unit, visit);
    }
}

/// The fastest share for these sizes, if the weights fit on the chip and the kernel can count
/// the values. `kernels` are a cell's, and `values` is V of `counts_in_32_bits`.
pub(in crate::ops) fn share((kernels, values): (&[Entry], i64), pass: &Pass) -> Option<Share> {
    let Pass { direction, sizes, gpu, .. } = *pass;
    let Sizes { batch, hidden, .. } = sizes;
    let terms = match pass.kind {
        Kind::Float if !pass.tf32 => 128,
        Kind::Double => 64,
        _ => return None,
    };
    if !are_for_a_grid(sizes, values) {
        return None;
    }
    let vectors = (hidden - 1) / terms + 1;
    let tiles = (batch - 1) / ROWS + 1;
    let of = |kernel: &Entry| {
        let most = gpu.grid.blocks() / ((hidden - 1) / kernel.columns + 1);
        of_kernel(kernel, vectors, tiles, most)
    };
    let fitting = kernels
        .iter()
        .filter(|kernel| kernel.direction == direction)
        .filter(|kernel| (kernel.vectors[0]..=kernel.vectors[1]).contains(&vectors));
    Share::cheapest(fitting.filter_map(of))
}

/// The share by this kernel. Each of up to `most` groups has some of the tiles of rows, and
/// computes them in as many iterations per step.
fn of_kernel(kernel: &Entry, vectors: i64, tiles: i64, most: i64) -> Option<Share> {
    /// What a block keeps for all of its rows has to fit on the chip next to everything else.
    const MOST_ITERATIONS: i64 = 32;
    if most == 0 {
        return None;
    }
    let least = kernel.fewest_iterations.min(tiles);
    let iterations = ((tiles - 1) / most + 1).max(least);
    let cost = match iterations {
        1 => kernel.only.at(vectors),
        _ => iterations as f64 * kernel.each.at(vectors),
    };
    let row_groups = (tiles - 1) / iterations + 1;
    let share = Share { columns: kernel.columns, row_groups, cost };
    (iterations <= MOST_ITERATIONS).then_some(share)
}
