//! Sequences of many rows that `csrc/recurrent/wide_grid` computes in one kernel, 64 rows per block at
//! a time.

use super::grid::are_for_a_grid;
use super::sizes::{Direction, Sizes};
use crate::ops::lltm::kernels::device::Grid;
use tch::Kind;

/// Who computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WideShare {
    /// Groups of blocks, each with some rows of the batch.
    pub row_groups: i64,
    /// What a step costs, in hundredths of a microsecond: about, as measured on an H200.
    pub cost: i64,
    /// What a step by itself costs, likewise.
    limit: i64,
    /// What is to be saved by all steps.
    once: i64,
}

impl WideShare {
    /// Of h, of a block.
    pub const COLUMNS: i64 = 32;
    /// That a block computes at a time.
    const ROWS: i64 = 64;

    /// If the weights fit into shared memory, and the kernel can count. `tf32` is whether products
    /// of `Float` may be made in it: they are made of halves with scales.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<WideShare> {
        const WIDEST: i64 = 1024;
        let Sizes { batch, hidden, .. } = sizes;
        let is_scaled = match product {
            Kind::Half | Kind::BFloat16 => false,
            Kind::Float if tf32 => true,
            _ => return None,
        };
        if hidden > WIDEST || !are_for_a_grid(sizes) {
            return None;
        }
        let most = grid.blocks() / ((hidden - 1) / WideShare::COLUMNS + 1);
        if most == 0 {
            return None;
        }
        let tiles = (batch - 1) / WideShare::ROWS + 1;
        let turns = (tiles - 1) / most + 1;
        // What there are kernels for.
        let padded = match hidden {
            512 => 512,
            ..=768 => 768,
            _ => WIDEST,
        };
        // With more rows of half kinds it has not been compared; of `Float`, more turns were.
        let work = batch * hidden * hidden;
        let (whole, limit) = match (direction, is_scaled) {
            (Direction::Forward, false) => (215 + padded * 31 / 100, 700),
            (Direction::Backward, false) => (93 + padded * 90 / 100, 1100),
            (Direction::Forward, true) => (250 + padded * 31 / 100, 900 + work / 500_000),
            (Direction::Backward, true) => (15 + padded * 115 / 100, 1600 + work / 625_000),
        };
        // Each vector of a row has to be looked at.
        let a_turn = if hidden == padded { whole } else { whole * 5 / 4 };
        // The scales are found first.
        let once = if is_scaled { 2000 } else { 0 };
        // All steps of some rows, and then all steps of others.
        Some(WideShare { row_groups: (tiles - 1) / turns + 1, cost: turns * a_turn, limit, once })
    }

    /// Whether it beats per-step kernels.
    pub fn is_faster(&self, sizes: Sizes) -> bool {
        /// Fewer are over before the weights are on chip.
        const FEW: i64 = 8;
        /// Up to here clusters are faster.
        const NARROW: i64 = 256;
        sizes.steps >= FEW
            && sizes.hidden > NARROW
            && sizes.steps * (self.limit - self.cost) >= self.once
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
        WideShare::new(direction, sizes, kind, false, grid).map(|share| share.row_groups)
    }

    #[test]
    fn groups_share_the_rows() {
        let of =
            |batch, hidden| row_groups(Direction::Forward, batch, hidden, Kind::Half, Grid::H200);
        assert_eq!(of(1, 8), Some(1));
        assert_eq!(of(64, 1024), Some(1));
        assert_eq!(of(65, 1024), Some(2));
        assert_eq!(of(256, 1024), Some(4));
        // One after the other: as many each time.
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
            // Three turns, with which the way back is slower than step by step.
            for (batch, hidden) in [(768, 1024), (1024, 768)] {
                assert_eq!(
                    faster(direction, batch, hidden, true),
                    Some(direction == Direction::Forward)
                );
            }
            // Where W_h is small, so are steps.
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
