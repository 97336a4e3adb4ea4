//! Sequences that `csrc/recurrent/grid` computes in one kernel, in half kinds or scaled fp16 values.

use super::sizes::{Direction, Line, Sizes, counts_in_32_bits};
use crate::ops::lltm::kernels::device::Grid;
use tch::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// What a step of a kernel costs by its number of vectors, in hundredths of a microsecond, as
/// measured on an H200 (docs/lab/lltm.md).
struct Entry {
    direction: Direction,
    /// How many columns of h a block has.
    columns: i64,
    /// What each iteration of a step costs.
    iteration: Line,
    /// What a step costs at least: a single iteration takes longer than its share of several,
    /// because it waits for messages.
    least: Line,
    /// For fewer vectors, the kernel for this many is used.
    fewest_vectors: i64,
    /// How many iterations a step has at least. Two take no longer than one, in which all threads
    /// wait for messages, and need only half the blocks.
    fewest_iterations: i64,
}

const KERNELS: [Entry; 4] = [
    Entry {
        direction: Direction::Forward,
        columns: 32,
        iteration: Line { fixed: 75, each: 8 },
        least: Line { fixed: 0, each: 0 },
        fewest_vectors: 2,
        fewest_iterations: 2,
    },
    Entry {
        direction: Direction::Forward,
        columns: 16,
        iteration: Line { fixed: 58, each: 8 },
        least: Line { fixed: 0, each: 0 },
        fewest_vectors: 3,
        fewest_iterations: 2,
    },
    Entry {
        direction: Direction::Backward,
        columns: 32,
        iteration: Line { fixed: 0, each: 43 },
        least: Line { fixed: 200, each: 25 },
        fewest_vectors: 2,
        fewest_iterations: 1,
    },
    Entry {
        direction: Direction::Backward,
        columns: 16,
        iteration: Line { fixed: 94, each: 15 },
        least: Line { fixed: 200, each: 25 },
        fewest_vectors: 2,
        fewest_iterations: 1,
    },
];

/// Whether the kernels of a grid accept these sizes: rows of h are whole vectors, and 32 bits can
/// count all values.
pub(super) fn are_for_a_grid(sizes: Sizes) -> bool {
    sizes.batch > 0 && sizes.hidden > 0 && sizes.hidden % 8 == 0 && counts_in_32_bits(sizes)
}

/// How the blocks of a grid share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// How many columns of h a block has.
    pub columns: i64,
    /// How many groups of blocks there are, each with some rows of the batch.
    pub row_groups: i64,
    /// About what a step costs, in hundredths of a microsecond, as measured on an H200.
    pub cost: i64,
}

impl Share {
    /// The fastest share for these sizes, if the weights fit into registers and the kernel can
    /// count the values. `tf32` says whether products of `Float` may use tf32: they are then
    /// computed from scaled fp16 values, which are as exact.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<Share> {
        let Sizes { batch, hidden, .. } = sizes;
        /// How many terms of a row a block's warps take with one vector each.
        const TERMS: i64 = 256;
        /// With scales, the messages of this many columns of h are adjacent in memory, and the
        /// blocks of a group cover a whole multiple of it.
        const IN_PAIRS: i64 = 32;
        let is_scaled = product == Kind::Float && tf32;
        let fits = is_scaled || matches!(product, Kind::Half | Kind::BFloat16);
        if !fits || !are_for_a_grid(sizes) {
            return None;
        }
        // Each warp has at most 8 vectors of a row of h in registers if a block has 16 columns, or
        // 4 if it has 32. Of the gates' gradients it has three times as many.
        let vectors = (hidden - 1) / TERMS + 1;
        let tiles = (batch - 1) / ROWS + 1;
        let of = |kernel: &Entry| {
            let columns = kernel.columns;
            let together = if is_scaled { IN_PAIRS } else { columns };
            let most = grid.blocks / (((hidden - 1) / together + 1) * (together / columns));
            Share::of_kernel(kernel, vectors, tiles, most)
        };
        KERNELS
            .iter()
            .filter(|kernel| kernel.direction == direction && vectors * kernel.columns <= 128)
            .filter_map(of)
            .min_by_key(|share| share.cost)
    }

    /// The share by this kernel. Each of up to `most` groups has some of the tiles of rows, and
    /// computes them in as many iterations per step.
    fn of_kernel(kernel: &Entry, vectors: i64, tiles: i64, most: i64) -> Option<Share> {
        /// What a block keeps for all of its rows has to fit on the chip next to everything else.
        const MOST_ITERATIONS: i64 = 64;
        if most == 0 {
            return None;
        }
        let vectors = vectors.max(kernel.fewest_vectors);
        let iterations = ((tiles - 1) / most + 1).max(kernel.fewest_iterations);
        let cost = (iterations * kernel.iteration.at(vectors)).max(kernel.least.at(vectors));
        let row_groups = (tiles - 1) / iterations + 1;
        let share = Share { columns: kernel.columns, row_groups, cost };
        (iterations <= MOST_ITERATIONS).then_some(share)
    }

    /// Whether it beats per-step kernels.
    pub fn is_faster(&self, direction: Direction, sizes: Sizes) -> bool {
        /// Fewer steps are over before the weights have been loaded.
        const FEW: i64 = 8;
        /// The cost of loading the weights and marking all messages as unsent, in hundredths of a
        /// microsecond. All steps together have to save more than this.
        const BEFORE: i64 = 2000;
        /// Up to this hidden size, clusters are faster.
        const NARROW: i64 = 256;
        // What per-step kernels cost, without the products over all steps. The forward's value
        // comes from the most rows at which they were measured to be slower: 256 at H = 1024.
        let others = match direction {
            Direction::Forward => 950,
            Direction::Backward => 1100,
        };
        let saved = sizes.steps.saturating_mul(others - self.cost);
        sizes.steps >= FEW && sizes.hidden > NARROW && saved >= BEFORE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Grid = Grid::H200;

    fn share(batch: i64, hidden: i64, kind: Kind, tf32: bool, grid: Grid) -> Option<(i64, i64)> {
        let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
        Share::new(Direction::Forward, sizes, kind, tf32, grid)
            .map(|share| (share.columns, share.row_groups))
    }

    #[test]
    fn there_is_a_share_where_the_weights_fit() {
        let of = |batch, hidden| share(batch, hidden, Kind::BFloat16, false, H200);
        assert_eq!(of(1, 8), Some((16, 1)));
        assert_eq!(of(64, 2048), Some((16, 1)));
        // Rows of h that are not whole vectors, more weights than registers hold, too many rows,
        // and nothing to compute.
        assert_eq!(of(64, 1023), None);
        assert_eq!(of(64, 2056), None);
        assert_eq!(of(1 << 12, 1024), None);
        assert_eq!(of(i64::MAX, 8), None);
        assert_eq!(of(0, 8), None);
        assert_eq!(of(8, 0), None);
        // A part of a GPU, and a GPU without these kernels.
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 33 }), Some((32, 1)));
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 31 }), None);
        assert_eq!(share(64, 8, Kind::Half, false, Grid::default()), None);
    }

    /// The share that was the fastest of those measured.
    #[test]
    fn shares_suit_the_size() {
        let of = |batch, hidden| share(batch, hidden, Kind::BFloat16, false, H200);
        assert_eq!(of(16, 512), Some((16, 1)));
        assert_eq!(of(16, 768), Some((16, 1)));
        assert_eq!(of(16, 1024), Some((16, 1)));
        assert_eq!(of(64, 512), Some((16, 4)));
        assert_eq!(of(64, 768), Some((32, 4)));
        assert_eq!(of(64, 1024), Some((32, 4)));
        assert_eq!(of(256, 512), Some((32, 8)));
        assert_eq!(of(256, 1024), Some((32, 4)));
    }

    #[test]
    fn blocks_are_wide_in_the_backward() {
        let of = |batch, hidden, kind| {
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            let share = Share::new(Direction::Backward, sizes, kind, true, H200)?;
            Some((share.columns, share.row_groups))
        };
        assert_eq!(of(16, 1024, Kind::Half), Some((32, 2)));
        assert_eq!(of(16, 512, Kind::Half), Some((32, 2)));
        assert_eq!(of(64, 1032, Kind::Half), Some((16, 2)));
        assert_eq!(of(16, 768, Kind::Float), Some((32, 2)));
        // With 65 blocks the last one would have no neighbour to form a pair with.
        assert_eq!(of(64, 1032, Kind::Float), Some((16, 2)));
        assert_eq!(of(64, 520, Kind::Half), Some((32, 4)));
    }

    #[test]
    fn it_is_taken_where_it_is_faster() {
        use Direction::{Backward, Forward};
        let faster = |direction, steps, batch, hidden, kind| {
            let sizes = Sizes { steps, batch, features: hidden, hidden };
            Share::new(direction, sizes, kind, true, H200)
                .is_some_and(|share| share.is_faster(direction, sizes))
        };
        assert!(
            faster(Forward, 8, 16, 264, Kind::Half)
                && faster(Forward, 512, 256, 1024, Kind::BFloat16)
        );
        assert!(
            !faster(Forward, 7, 16, 1024, Kind::Half) && !faster(Forward, 512, 16, 256, Kind::Half)
        );
        assert!(
            !faster(Forward, 512, 512, 1024, Kind::Half)
                && !faster(Forward, 512, 64, 2048, Kind::Half)
        );
        assert!(
            faster(Backward, 512, 128, 1024, Kind::Half)
                && !faster(Backward, 512, 256, 1024, Kind::Half)
        );
        assert!(
            faster(Forward, 512, 16, 768, Kind::Float)
                && faster(Forward, 512, 256, 1024, Kind::Float)
        );
        assert!(
            faster(Backward, 512, 64, 1024, Kind::Float)
                && !faster(Backward, 512, 256, 1024, Kind::Float)
        );
    }

    #[test]
    fn float_is_for_those_who_allow_tf32() {
        assert_eq!(share(16, 512, Kind::Float, false, H200), None);
        assert_eq!(share(16, 512, Kind::Float, true, H200), Some((16, 1)));
        assert_eq!(
            share(16, 1032, Kind::Float, true, H200),
            share(16, 1032, Kind::Half, true, H200)
        );
        assert_eq!(share(16, 512, Kind::Double, true, H200), None);
    }
}
