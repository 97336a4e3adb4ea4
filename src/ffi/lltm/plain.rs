//! `csrc/lltm/grid.h`: a grid that multiplies `Float` and `Double` as they are.

use super::grid::Grid;
use super::persistent::counts_in_32_bits;
use super::{Direction, Sizes};
use tch::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// Who computes what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PlainShare {
    /// Columns of h of a block.
    pub columns: i64,
    /// Groups of blocks, each with some rows of the batch.
    pub row_groups: i64,
    /// What a step costs, in hundredths of a microsecond: about, as measured on an H200.
    pub cost: i64,
}

impl PlainShare {
    /// The fastest for these sizes, if the weights fit on chip, and the kernel can count.
    pub fn new(
        direction: Direction,
        sizes: Sizes,
        product: Kind,
        tf32: bool,
        grid: Grid,
    ) -> Option<PlainShare> {
        /// Vectors of a row of h for each warp, beside 16 columns.
        const MOST: i64 = 8;
        let Sizes { batch, hidden, .. } = sizes;
        let terms = match product {
            Kind::Float if !tf32 => 128,
            Kind::Double => 64,
            _ => return None,
        };
        if batch == 0 || hidden == 0 || hidden % 8 != 0 || !counts_in_32_bits(sizes) {
            return None;
        }
        let vectors = (hidden - 1) / terms + 1;
        let tiles = (batch - 1) / ROWS + 1;
        let of = |columns| {
            let most = grid.blocks() / ((hidden - 1) / columns + 1);
            PlainShare::of_columns(direction, columns, vectors, tiles, most)
        };
        // With few columns, there are blocks enough for few rows, and products are short.
        let widths: &[i64] = match direction {
            Direction::Forward if vectors <= 2 => &[16, 8, 4],
            Direction::Forward if vectors <= 4 => &[16, 8],
            _ => &[16],
        };
        let shares = widths.iter().copied().filter_map(of);
        shares.min_by_key(|share| share.cost).filter(|_| vectors <= MOST)
    }

    /// Each of up to `most` groups has some of the tiles of rows and works through them in turn.
    fn of_columns(
        direction: Direction,
        columns: i64,
        vectors: i64,
        tiles: i64,
        most: i64,
    ) -> Option<PlainShare> {
        /// What is kept of all rows of a block has to fit beside the rest.
        const MOST_TURNS: i64 = 32;
        if most == 0 {
            return None;
        }
        let turns = (tiles - 1) / most + 1;
        // Of one vector of 16 columns it is the kernel of two.
        let vectors = if columns == 16 { vectors.max(2) } else { vectors };
        // A product, which tensor cores make 16 rows of all gates at a time, and what one turn waits for messages.
        let tiles_of_block = match direction {
            Direction::Forward => (3 * columns - 1) / 16 + 1,
            Direction::Backward => 3,
        };
        let product = vectors * tiles_of_block * 9;
        let waiting = match direction {
            Direction::Forward => 95,
            Direction::Backward => 130,
        };
        let share = PlainShare {
            columns,
            row_groups: (tiles - 1) / turns + 1,
            cost: (product + waiting).max(turns * (product + 30)),
        };
        (turns <= MOST_TURNS).then_some(share)
    }

    /// Than one or two kernels for each step.
    pub fn is_faster(&self, direction: Direction, sizes: Sizes) -> bool {
        /// Fewer are over before the weights are on chip.
        const FEW: i64 = 8;
        // What those cost: launches, and products at 50 TFLOP/s.
        let launches = match direction {
            Direction::Forward => 480,
            Direction::Backward => 700,
        };
        let products = sizes.batch as f64 * sizes.hidden as f64 * sizes.hidden as f64 * 6.0 / 50e12 * 1e8;
        sizes.steps >= FEW && self.cost <= launches + products as i64
    }
}
