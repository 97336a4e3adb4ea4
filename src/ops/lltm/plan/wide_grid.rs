//! Sequences of many rows that `csrc/recurrent/wide_grid` computes in one kernel, in which a block
//! computes 64 rows at a time.

use crate::ops::recurrent::kernels::device::Grid;
use crate::ops::recurrent::plan::grid::Share;
use crate::ops::recurrent::plan::wide_grid::{Entry, share};
use crate::ops::recurrent::plan::{Direction, Product, Sizes};
use tch::Kind;

/// A kernel, and what it is compared with, in hundredths of a microsecond, as measured on an H200
/// (docs/lab/lltm.md).
struct Compared {
    kernel: Entry,
    /// Per-step kernels: a fixed part.
    others: i64,
    /// How much B·H² adds one hundredth to `others`. Half kinds have not been compared at more
    /// rows; `Float` has been, in several rounds, too.
    work: Option<i64>,
    /// What all steps together have to save: the scales of W_h are computed before the first step.
    once: i64,
}

#[rustfmt::skip]
const COSTS: [Compared; 4] = {
    use Direction::{Backward, Forward};
    use Product::{Half, Scaled};
    const fn kernel(direction: Direction, product: Product, round: [i64; 3]) -> Entry {
        Entry { direction, product, columns: WideShare::COLUMNS, rows: WideShare::ROWS, round }
    }
    [
        Compared { kernel: kernel(Forward, Half, [215, 31, 0]), others: 700, work: None, once: 0 },
        Compared { kernel: kernel(Backward, Half, [93, 90, 0]), others: 1100, work: None, once: 0 },
        Compared { kernel: kernel(Forward, Scaled, [250, 31, 0]), others: 900, work: Some(500_000), once: 2000 },
        Compared { kernel: kernel(Backward, Scaled, [15, 115, 0]), others: 1600, work: Some(625_000), once: 2000 },
    ]
};

/// How the blocks of a wide grid share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WideShare {
    pub share: Share,
    /// What a step costs with per-step kernels, in the same unit.
    limit: i64,
    /// What all steps together have to save.
    once: i64,
}

impl WideShare {
    /// How many columns of h a block has.
    const COLUMNS: i64 = 32;
    /// How many rows of the batch a block computes at a time.
    const ROWS: i64 = 64;

    /// The share for these sizes, if there is one.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<WideShare> {
        let Sizes { batch, hidden, .. } = sizes;
        let of_product = Product::of(product, tf32)?;
        let is_for_it =
            |of: &&Compared| of.kernel.direction == direction && of.kernel.product == of_product;
        let Compared { kernel, others, work, once } = COSTS.iter().find(is_for_it)?;
        let kernels = (std::slice::from_ref(kernel), super::VALUES);
        let share = share(kernels, direction, sizes, product, tf32, grid)?;
        let limit = others + work.map_or(0, |work| batch * hidden * hidden / work);
        Some(WideShare { share, limit, once: *once })
    }

    /// Whether it beats per-step kernels.
    pub fn is_faster(&self, sizes: Sizes) -> bool {
        /// Fewer steps are over before the weights have been loaded.
        const FEW: i64 = 8;
        /// Up to this hidden size, clusters are faster.
        const NARROW: i64 = 256;
        sizes.steps >= FEW
            && sizes.hidden > NARROW
            && sizes.steps * (self.limit - self.share.cost) >= self.once
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row_groups(
        direction: Direction,
        batch: i64,
        hidden: i64,
        kind: Kind,
        grid: Grid,
    ) -> Option<i64> {
        let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
        WideShare::new(direction, sizes, kind, false, grid).map(|wide| wide.share.row_groups)
    }

    #[test]
    fn groups_share_the_rows() {
        let of =
            |batch, hidden| row_groups(Direction::Forward, batch, hidden, Kind::Half, Grid::H200);
        assert_eq!(of(1, 8), Some(1));
        assert_eq!(of(64, 1024), Some(1));
        assert_eq!(of(65, 1024), Some(2));
        assert_eq!(of(256, 1024), Some(4));
        // The groups compute the tiles of rows in two rounds, with equal numbers in each.
        assert_eq!(of(320, 1024), Some(3));
        assert_eq!(of(512, 1024), Some(4));
        assert_eq!(of(512, 512), Some(8));
    }

    #[test]
    fn it_is_taken_where_it_was_measured() {
        for direction in [Direction::Forward, Direction::Backward] {
            let faster = |steps, batch, hidden| {
                let sizes = Sizes { steps, batch, features: hidden, hidden };
                WideShare::new(direction, sizes, Kind::Half, false, Grid::H200)
                    .is_some_and(|share| share.is_faster(sizes))
            };
            assert!(faster(512, 256, 1024) && faster(8, 512, 512) && faster(512, 320, 768));
            assert!(!faster(7, 256, 1024) && !faster(512, 256, 256) && !faster(512, 320, 1024));
            assert_eq!(faster(512, 256, 1000), direction == Direction::Forward);
        }
    }

    #[test]
    fn float_is_for_those_who_allow_tf32() {
        let faster = |direction, batch, hidden, tf32| {
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            WideShare::new(direction, sizes, Kind::Float, tf32, Grid::H200)
                .map(|share| share.is_faster(sizes))
        };
        for direction in [Direction::Forward, Direction::Backward] {
            for (batch, hidden) in [(256, 1024), (512, 1024), (1024, 512), (1536, 512)] {
                assert_eq!(faster(direction, batch, hidden, true), Some(true));
                assert_eq!(faster(direction, batch, hidden, false), None);
            }
            // Three rounds, with which the backward pass is slower than per-step kernels.
            for (batch, hidden) in [(768, 1024), (1024, 768)] {
                assert_eq!(
                    faster(direction, batch, hidden, true),
                    Some(direction == Direction::Forward)
                );
            }
            // Where W_h is small, per-step kernels are fast.
            assert_eq!(faster(direction, 1792, 264, true), Some(false));
        }
        assert_eq!(faster(Direction::Backward, 896, 520, true), Some(false));
    }

    #[test]
    fn not_all_sizes_have_one() {
        let of =
            |batch, hidden| row_groups(Direction::Forward, batch, hidden, Kind::Half, Grid::H200);
        assert_eq!(of(256, 1032), None);
        assert_eq!(of(256, 1020), None);
        assert_eq!(of(256, 0), None);
        assert_eq!(of(0, 1024), None);
        assert_eq!(of(i64::MAX, 1024), None);
        assert_eq!(row_groups(Direction::Forward, 256, 512, Kind::Float, Grid::H200), None);
        assert_eq!(row_groups(Direction::Backward, 256, 512, Kind::Half, Grid::default()), None);
    }
}
