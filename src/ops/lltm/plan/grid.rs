//! Sequences that `csrc/recurrent/grid` computes in one kernel, in half kinds or scaled fp16 values.

use super::sizes::{Direction, Sizes, counts_in_32_bits};
use crate::ops::lltm::kernels::device::Grid;
use tch::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// Sizes that the kernels of a grid take: rows of h in whole vectors, and places that 32 bits can
/// count.
pub(super) fn are_for_a_grid(sizes: Sizes) -> bool {
    sizes.batch > 0 && sizes.hidden > 0 && sizes.hidden % 8 == 0 && counts_in_32_bits(sizes)
}

/// Who computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    /// Columns of h of a block.
    pub columns: i64,
    /// Groups of blocks, each with some rows of the batch.
    pub row_groups: i64,
    /// What a step costs, in hundredths of a microsecond: about, as measured on an H200.
    pub cost: i64,
}

impl Share {
    /// The fastest for these sizes, if the weights fit into registers, and the kernel can count.
    /// `tf32` is whether products of `Float` may be made in it: here they are made of halves then,
    /// which are as exact.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<Share> {
        let Sizes { batch, hidden, .. } = sizes;
        /// Terms of a row that a block's warps have with one vector each.
        const TERMS: i64 = 256;
        /// Columns of h whose messages lie side by side where they have scales: a group's blocks
        /// cover whole ones.
        const IN_PAIRS: i64 = 32;
        let is_scaled = product == Kind::Float && tf32;
        let fits = is_scaled || matches!(product, Kind::Half | Kind::BFloat16);
        if !fits || !are_for_a_grid(sizes) {
            return None;
        }
        // Of a row of h for each warp, at most 8 vectors in registers beside 16 columns, or 4
        // beside 32; of the gates' gradients three times as many.
        let vectors = (hidden - 1) / TERMS + 1;
        let tiles = (batch - 1) / ROWS + 1;
        let of = |columns| {
            let together = if is_scaled { IN_PAIRS } else { columns };
            let most = grid.blocks / (((hidden - 1) / together + 1) * (together / columns));
            Share::of_columns(direction, columns, vectors, tiles, most)
        };
        let fits = |columns: &i64| vectors * columns <= 128;
        [32, 16].into_iter().filter(fits).filter_map(of).min_by_key(|share| share.cost)
    }

    /// Each of up to `most` groups has some of the tiles of rows and works through them in turn.
    fn of_columns(
        direction: Direction,
        columns: i64,
        vectors: i64,
        tiles: i64,
        most: i64,
    ) -> Option<Share> {
        /// What is kept of all rows of a block has to fit beside the rest.
        const MOST_TURNS: i64 = 64;
        if most == 0 {
            return None;
        }
        let vectors = vectors.max(2);
        let turns = (tiles - 1) / most + 1;
        let (turns, cost) = match (direction, columns) {
            // Two turns take no longer than one, in which everybody waits, and half the blocks.
            // Of two vectors it is the kernel of three.
            (Direction::Forward, 16) => (turns.max(2), turns.max(2) * (58 + 8 * vectors.max(3))),
            (Direction::Forward, _) => (turns.max(2), turns.max(2) * (75 + 8 * vectors)),
            // One turn takes longer than its part of several: it waits for messages.
            (Direction::Backward, 16) => {
                (turns, (200 + 25 * vectors).max(turns * (94 + 15 * vectors)))
            }
            (Direction::Backward, _) => (turns, (200 + 25 * vectors).max(turns * 43 * vectors)),
        };
        let share = Share { columns, row_groups: (tiles - 1) / turns + 1, cost };
        (turns <= MOST_TURNS).then_some(share)
    }

    /// Whether it beats per-step kernels.
    pub fn is_faster(&self, direction: Direction, sizes: Sizes) -> bool {
        /// Fewer are over before the weights are on chip.
        const FEW: i64 = 8;
        /// What that takes, with messages that become unsent, in hundredths of a microsecond: all
        /// steps together save more.
        const BEFORE: i64 = 2000;
        /// Up to here clusters are faster.
        const NARROW: i64 = 256;
        // What those cost, without the products of all steps: forward with the most rows at which
        // they were measured to be slower, 256 of H = 1024.
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
        // Rows of h that are no whole vectors; more weights than registers; too many rows; none.
        assert_eq!(of(64, 1023), None);
        assert_eq!(of(64, 2056), None);
        assert_eq!(of(1 << 12, 1024), None);
        assert_eq!(of(i64::MAX, 8), None);
        assert_eq!(of(0, 8), None);
        assert_eq!(of(8, 0), None);
        // A part of a GPU, and another GPU.
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 33 }), Some((32, 1)));
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 31 }), None);
        assert_eq!(share(64, 8, Kind::Half, false, Grid::default()), None);
    }

    /// What was the fastest of those measured.
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
        // 65 blocks would have no neighbour for the last one.
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
