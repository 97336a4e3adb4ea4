//! Sequences that `csrc/recurrent/grid` computes in one kernel, in half kinds or scaled fp16 values.

use super::resident::Pass;
use super::sizes::{Direction, Line, Sizes, counts_in_32_bits, is_half};
use crate::ops::costs::{Each, Unit, Visit, cheapest};
use crate::ops::kinds::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;
/// How many iterations of a step a block has room for, unless its table says less.
const MOST_ITERATIONS: i64 = 64;

/// What a step of a kernel costs by its number of vectors.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Entry {
    pub direction: Direction,
    /// How many columns of h a block has.
    pub columns: i64,
    /// What each iteration of a step costs.
    pub iteration: Line,
    /// The same with scaled fp16 values, if it differs.
    pub scaled_iteration: Option<Line>,
    /// What a step costs at least, if it does: a single iteration takes longer than its share of
    /// several, because it waits for messages.
    pub least: Option<Line>,
    /// For fewer vectors, the kernel for this many is used.
    pub fewest_vectors: i64,
    /// How many iterations a step has at least. Two take no longer than one, in which all threads
    /// wait for messages, and need only half the blocks.
    pub fewest_iterations: i64,
    /// How many it has at most: what a block keeps for all of its rows has to fit on the chip next
    /// to everything else. Blocks with fewer vectors than `full_vectors` have room for 64.
    pub most_iterations: i64,
    pub full_vectors: i64,
}

impl Entry {
    /// A kernel with room for 64 iterations, of which a step has at least `fewest[1]` by a kernel of at least
    /// `fewest[0]` vectors.
    pub fn new(direction: Direction, columns: i64, fewest: [i64; 2]) -> Entry {
        Entry {
            direction,
            columns,
            iteration: Line::default(),
            scaled_iteration: None,
            least: None,
            fewest_vectors: fewest[0],
            fewest_iterations: fewest[1],
            most_iterations: MOST_ITERATIONS,
            full_vectors: 0,
        }
    }
}

impl Each for Entry {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        let name = format!("{name}.{}_{}", self.direction.name(), self.columns);
        self.iteration.each(&format!("{name}.iteration"), unit, visit);
        self.scaled_iteration.each(&format!("{name}.scaled_iteration"), unit, visit);
        self.least.each(&format!("{name}.least"), unit, visit);
    }
}

/// Whether the kernels of a grid accept these sizes: rows of h are whole vectors, and 32 bits can
/// count all values.
pub(in crate::ops) fn are_for_a_grid(sizes: Sizes, values: i64) -> bool {
    sizes.batch > 0 && sizes.hidden > 0 && sizes.hidden % 8 == 0 && counts_in_32_bits(sizes, values)
}

/// How the blocks of a grid share a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::ops) struct Share {
    /// How many columns of h a block has.
    pub columns: i64,
    /// How many groups of blocks there are, each with some rows of the batch.
    pub row_groups: i64,
    /// About what a step costs.
    pub cost: f64,
}

impl Share {
    /// The columns of a block and the groups of rows, as kernels count them.
    pub fn counts(self) -> (i32, i32) {
        let narrow = |count| i32::try_from(count).unwrap_or(1);
        (narrow(self.columns), narrow(self.row_groups))
    }

    /// `kernels` are a cell's, and `values` is V of [`counts_in_32_bits`]. This is
    /// the fastest share for these sizes, if the weights fit into registers and the kernel can
    /// count the values.
    pub fn new((kernels, values): (&[Entry], i64), pass: &Pass) -> Option<Share> {
        let Pass { direction, sizes, kind, tf32, gpu } = *pass;
        let Sizes { batch, hidden, .. } = sizes;
        /// How many terms of a row a block's warps take with one vector each.
        const TERMS: i64 = 256;
        /// With scales, the messages of this many columns of h are adjacent in memory, and the
        /// blocks of a group cover a whole multiple of it.
        const IN_PAIRS: i64 = 32;
        let is_scaled = kind == Kind::Float && tf32;
        let fits = is_scaled || is_half(kind);
        if !fits || !are_for_a_grid(sizes, values) {
            return None;
        }
        // Each warp has at most 8 vectors of a row of h in registers if a block has 16 columns, or
        // 4 if it has 32. Of the gates' gradients it has G times as many.
        let vectors = (hidden - 1) / TERMS + 1;
        let tiles = (batch - 1) / ROWS + 1;
        let of = |kernel: &Entry| {
            let columns = kernel.columns;
            let together = if is_scaled { IN_PAIRS } else { columns };
            let most = gpu.grid.blocks / (((hidden - 1) / together + 1) * (together / columns));
            Share::of_kernel(kernel, is_scaled, vectors, tiles, most)
        };
        let fitting = kernels
            .iter()
            .filter(|kernel| kernel.direction == direction && vectors * kernel.columns <= 128);
        Share::cheapest(fitting.filter_map(of))
    }

    pub fn cheapest(shares: impl Iterator<Item = Share> + Clone) -> Option<Share> {
        cheapest(shares.map(|share| (share, share.cost))).map(|(share, _)| share)
    }

    /// The share by this kernel. Each of up to `most` groups has some of the tiles of rows, and
    /// computes them in as many iterations per step.
    fn of_kernel(
        kernel: &Entry,
        is_scaled: bool,
        vectors: i64,
        tiles: i64,
        most: i64,
    ) -> Option<Share> {
        if most == 0 {
            return None;
        }
        let vectors = vectors.max(kernel.fewest_vectors);
        let iterations = ((tiles - 1) / most + 1).max(kernel.fewest_iterations);
        let scaled = kernel.scaled_iteration.filter(|_| is_scaled);
        let iteration = scaled.unwrap_or(kernel.iteration);
        let least = kernel.least.map_or(0.0, |least| least.at(vectors));
        let cost = (iterations as f64 * iteration.at(vectors)).max(least);
        let row_groups = (tiles - 1) / iterations + 1;
        let share = Share { columns: kernel.columns, row_groups, cost };
        let is_full = vectors >= kernel.full_vectors;
        let most = if is_full { kernel.most_iterations } else { MOST_ITERATIONS };
        (iterations <= most).then_some(share)
    }
}
