//! `csrc/lltm/grid.h`: a grid for many rows, whose blocks compute 64 of them at a time.

use super::grid::Grid;
use super::persistent::counts_in_32_bits;
use super::{Direction, Sizes};
use tch::Kind;

/// Who computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WideShare {
    /// Groups of blocks, each with some rows of the batch.
    pub row_groups: i64,
    /// What a step costs, in hundredths of a microsecond: about, as measured on an H200.
    pub cost: i64,
}

impl WideShare {
    /// Of h, of a block.
    pub const COLUMNS: i64 = 32;
    /// That a block computes at a time.
    const ROWS: i64 = 64;

    /// If the weights fit into shared memory, and the kernel can count. There is none for the way back.
    pub fn new(direction: Direction, sizes: Sizes, product: Kind, grid: Grid) -> Option<WideShare> {
        const WIDEST: i64 = 1024;
        let Sizes { batch, hidden, .. } = sizes;
        let is_half = matches!(product, Kind::Half | Kind::BFloat16);
        let fits = (1..=WIDEST).contains(&hidden) && hidden % 8 == 0 && counts_in_32_bits(sizes);
        if direction != Direction::Forward || !is_half || !fits || batch == 0 {
            return None;
        }
        let most = grid.blocks() / ((hidden - 1) / WideShare::COLUMNS + 1);
        if most == 0 {
            return None;
        }
        let tiles = (batch - 1) / WideShare::ROWS + 1;
        let turns = (tiles - 1) / most + 1;
        // All steps of some rows, and then all steps of others.
        Some(WideShare { row_groups: (tiles - 1) / turns + 1, cost: turns * (200 + hidden * 35 / 100) })
    }
}
