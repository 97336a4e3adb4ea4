//! What LLTM's grids cost, and when they are faster than other ways.

use crate::ops::recurrent::kernels::device::Grid;
use crate::ops::recurrent::plan::grid::{Entry, Share};
use crate::ops::recurrent::plan::{Direction, Line, Sizes};
use tch::Kind;

const KERNELS: [Entry; 4] = [
    Entry {
        direction: Direction::Forward,
        columns: 32,
        iteration: Line { fixed: 75, each: 8 },
        scaled_iteration: None,
        least: Line { fixed: 0, each: 0 },
        fewest_vectors: 2,
        fewest_iterations: 2,
        most_iterations: 64,
        full_vectors: 0,
    },
    Entry {
        direction: Direction::Forward,
        columns: 16,
        iteration: Line { fixed: 58, each: 8 },
        scaled_iteration: None,
        least: Line { fixed: 0, each: 0 },
        fewest_vectors: 3,
        fewest_iterations: 2,
        most_iterations: 64,
        full_vectors: 0,
    },
    Entry {
        direction: Direction::Backward,
        columns: 32,
        iteration: Line { fixed: 0, each: 43 },
        scaled_iteration: None,
        least: Line { fixed: 200, each: 25 },
        fewest_vectors: 2,
        fewest_iterations: 1,
        most_iterations: 64,
        full_vectors: 0,
    },
    Entry {
        direction: Direction::Backward,
        columns: 16,
        iteration: Line { fixed: 94, each: 15 },
        scaled_iteration: None,
        least: Line { fixed: 200, each: 25 },
        fewest_vectors: 2,
        fewest_iterations: 1,
        most_iterations: 64,
        full_vectors: 0,
    },
];

/// The fastest share for these sizes, if there is one.
pub(super) fn new(
    direction: Direction,
    sizes: Sizes,
    product: Kind,
    tf32: bool,
    grid: Grid,
) -> Option<Share> {
    Share::new((&KERNELS, super::VALUES), direction, sizes, product, tf32, grid)
}

/// Whether it beats per-step kernels.
pub(super) fn is_faster(share: &Share, direction: Direction, sizes: Sizes) -> bool {
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
    let saved = sizes.steps.saturating_mul(others - share.cost);
    sizes.steps >= FEW && sizes.hidden > NARROW && saved >= BEFORE
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: Grid = Grid::H200;

    fn share(batch: i64, hidden: i64, kind: Kind, tf32: bool, grid: Grid) -> Option<(i64, i64)> {
        let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
        new(Direction::Forward, sizes, kind, tf32, grid)
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
            let share = new(Direction::Backward, sizes, kind, true, H200)?;
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
            new(direction, sizes, kind, true, H200)
                .is_some_and(|share| is_faster(&share, direction, sizes))
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
