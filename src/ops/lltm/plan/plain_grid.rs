//! Sequences that `csrc/recurrent/grid` computes in one kernel, in `Float` and `Double` without
//! rounding them to a narrower kind.

use super::step::cost_step_by_step;
use crate::ops::recurrent::kernels::device::Grid;
use crate::ops::recurrent::plan::grid::{Share, are_for_a_grid};
use crate::ops::recurrent::plan::{Direction, Line, Sizes};
use tch::Kind;

/// Rows that a block computes at a time.
const ROWS: i64 = 8;

/// What a step of a kernel costs by its number of vectors, in hundredths of a microsecond, as
/// measured on an H200 (docs/lab/lltm.md).
struct Entry {
    direction: Direction,
    /// How many columns of h a block has. With few, a block's product is short, but more blocks
    /// wait for one another.
    columns: i64,
    /// The numbers of vectors for which the kernel is compiled.
    vectors: [i64; 2],
    /// A step's only iteration, which waits for all messages.
    only: Line,
    /// Each of several iterations.
    each: Line,
    /// How many iterations a step has at least. With few columns, two take no longer than one, in
    /// which all threads wait for messages, and need only half the blocks.
    fewest_iterations: i64,
}

/// The most vectors of a row of h that a warp can have if a block has 16 columns.
const MOST_VECTORS: i64 = 8;

const KERNELS: [Entry; 4] = [
    Entry {
        direction: Direction::Forward,
        columns: 16,
        vectors: [1, MOST_VECTORS],
        only: Line { fixed: 80, each: 40 },
        each: Line { fixed: 70, each: 22 },
        fewest_iterations: 1,
    },
    Entry {
        direction: Direction::Forward,
        columns: 4,
        vectors: [2, 4],
        only: Line { fixed: 80, each: 68 },
        each: Line { fixed: 28, each: 18 },
        fewest_iterations: 2,
    },
    Entry {
        direction: Direction::Forward,
        columns: 6,
        vectors: [5, 6],
        only: Line { fixed: 80, each: 48 },
        each: Line { fixed: 42, each: 15 },
        fewest_iterations: 2,
    },
    Entry {
        direction: Direction::Backward,
        columns: 16,
        vectors: [1, MOST_VECTORS],
        only: Line { fixed: 110, each: 50 },
        each: Line { fixed: 60, each: 31 },
        fewest_iterations: 1,
    },
];

/// The fastest share for these sizes, if the weights fit on the chip and the kernel can count
/// the values.
pub(super) fn new(
    direction: Direction,
    sizes: Sizes,
    product: Kind,
    tf32: bool,
    grid: Grid,
) -> Option<Share> {
    let Sizes { batch, hidden, .. } = sizes;
    let terms = match product {
        Kind::Float if !tf32 => 128,
        Kind::Double => 64,
        _ => return None,
    };
    if !are_for_a_grid(sizes, super::VALUES) {
        return None;
    }
    let vectors = (hidden - 1) / terms + 1;
    let tiles = (batch - 1) / ROWS + 1;
    let of = |kernel: &Entry| {
        let most = grid.blocks() / ((hidden - 1) / kernel.columns + 1);
        of_kernel(kernel, vectors, tiles, most)
    };
    KERNELS
        .iter()
        .filter(|kernel| kernel.direction == direction)
        .filter(|kernel| (kernel.vectors[0]..=kernel.vectors[1]).contains(&vectors))
        .filter_map(of)
        .min_by_key(|share| share.cost)
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
        _ => iterations * kernel.each.at(vectors),
    };
    let row_groups = (tiles - 1) / iterations + 1;
    let share = Share { columns: kernel.columns, row_groups, cost };
    (iterations <= MOST_ITERATIONS).then_some(share)
}

/// Whether it beats per-step kernels. `Double` has not been compared.
pub(super) fn is_faster(share: &Share, direction: Direction, sizes: Sizes, product: Kind) -> bool {
    /// Fewer steps are over before the weights have been loaded.
    const FEW: i64 = 8;
    /// The cost of loading the weights, which all steps together have to save.
    const ONCE: i64 = 2000;
    let saved = cost_step_by_step(direction, sizes) - share.cost;
    product == Kind::Float && sizes.steps >= FEW && sizes.steps.saturating_mul(saved) >= ONCE
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Grid = Grid::H200;

    fn sizes(batch: i64, hidden: i64) -> Sizes {
        Sizes { steps: 512, batch, features: hidden, hidden }
    }

    fn share(direction: Direction, batch: i64, hidden: i64, kind: Kind) -> Option<(i64, i64)> {
        let share = new(direction, sizes(batch, hidden), kind, false, H200);
        share.map(|share| (share.columns, share.row_groups))
    }

    /// The share that was the fastest of those measured.
    #[test]
    fn shares_suit_the_size() {
        use Direction::{Backward, Forward};
        let of = |direction, batch, hidden| share(direction, batch, hidden, Kind::Float);
        assert_eq!(of(Forward, 16, 128), Some((16, 2)));
        assert_eq!(of(Forward, 16, 256), Some((4, 1)));
        assert_eq!(of(Forward, 16, 512), Some((4, 1)));
        assert_eq!(of(Forward, 16, 768), Some((6, 1)));
        assert_eq!(of(Forward, 24, 768), Some((6, 1)));
        assert_eq!(of(Forward, 8, 768), Some((16, 1)));
        assert_eq!(of(Forward, 32, 768), Some((16, 2)));
        assert_eq!(of(Forward, 64, 128), Some((16, 8)));
        assert_eq!(of(Forward, 64, 512), Some((16, 4)));
        assert_eq!(of(Forward, 64, 1024), Some((16, 2)));
        assert_eq!(of(Backward, 16, 512), Some((16, 2)));
        assert_eq!(of(Backward, 64, 1024), Some((16, 2)));
    }

    #[test]
    fn not_all_sizes_have_one() {
        let of = |batch, hidden, kind| share(Direction::Forward, batch, hidden, kind);
        assert!(of(1, 8, Kind::Float).is_some() && of(9, 512, Kind::Double).is_some());
        assert_eq!(of(64, 1032, Kind::Float), None);
        assert_eq!(of(64, 520, Kind::Double), None);
        assert_eq!(of(64, 1020, Kind::Float), None);
        assert_eq!(of(64, 512, Kind::Half), None);
        assert_eq!(of(0, 8, Kind::Float), None);
        assert_eq!(of(8, 0, Kind::Float), None);
        assert_eq!(of(i64::MAX, 8, Kind::Float), None);
        assert_eq!(of(1 << 16, 8, Kind::Float), None);
        let tf32 = new(Direction::Forward, sizes(16, 512), Kind::Float, true, H200);
        assert_eq!(tf32, None);
    }

    #[test]
    fn it_is_taken_where_it_is_faster() {
        for direction in [Direction::Forward, Direction::Backward] {
            let faster = |steps, batch, hidden, kind| {
                let sizes = Sizes { steps, ..sizes(batch, hidden) };
                new(direction, sizes, kind, false, H200)
                    .is_some_and(|share| is_faster(&share, direction, sizes, kind))
            };
            for hidden in [128, 256, 512, 768, 1024] {
                assert!(faster(8, 16, hidden, Kind::Float) && faster(512, 64, hidden, Kind::Float));
                assert!(
                    !faster(7, 16, hidden, Kind::Float) && !faster(512, 16, hidden, Kind::Double)
                );
            }
            assert!(!faster(512, 512, 1024, Kind::Float));
        }
    }
}
