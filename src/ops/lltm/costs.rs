//! What LLTM's kernels cost, in hundredths of a microsecond, as measured on an H200 (docs/lab/lltm.md),
//! and when those of all steps beat those of each step.

use crate::ops::recurrent::kernels::cuda::{Kernel, Product as Multiplied};
use crate::ops::recurrent::plan::{
    Costs, Direction, Line, Pass, Priced, Product, Sizes, cluster, grid, plain_grid, wide_grid,
};
use tch::Kind;

/// The most vectors of a row of h that a warp can have if a block of a plain grid has 16 columns.
const MOST_VECTORS: i64 = 8;

pub(super) const COSTS: Costs = Costs {
    values: 3,
    // In strict `Float` and `Double`, two blocks per multiprocessor have not been measured in the
    // backward pass.
    #[rustfmt::skip]
    clusters: {
        use Product::{Double, Float, Half, Scaled};
        use cluster::Entry;
        &[
            Entry::new(Half,   128, 8,  [2, 2], [Some(48),  Some(68)]),
            Entry::new(Half,   256, 8,  [2, 2], [Some(112), Some(95)]),
            Entry::new(Half,   512, 16, [1, 1], [Some(109), Some(98)]),
            Entry::new(Half,   512, 8,  [1, 1], [Some(150), Some(139)]),
            Entry::new(Half,   768, 16, [1, 1], [Some(174), Some(160)]),
            Entry::new(Scaled, 128, 8,  [2, 2], [Some(50),  Some(77)]),
            Entry::new(Scaled, 256, 8,  [2, 2], [Some(109), Some(109)]),
            Entry::new(Scaled, 512, 16, [1, 1], [Some(115), Some(107)]),
            Entry::new(Scaled, 512, 8,  [1, 1], [Some(156), Some(166)]),
            Entry::new(Scaled, 768, 16, [1, 1], [Some(175), Some(182)]),
            Entry::new(Float,  128, 8,  [2, 1], [Some(91),  Some(139)]),
            Entry::new(Float,  256, 16, [1, 1], [Some(112), None]),
            Entry::new(Double, 128, 8,  [2, 1], [Some(175), Some(287)]),
            Entry::new(Double, 256, 16, [1, 1], [Some(181), None]),
        ]
    },
    #[rustfmt::skip]
    grids: {
        use Direction::{Backward, Forward};
        &[
            grid::Entry::new(Forward, 32, Line { fixed: 75, each: 8 }, [2, 2]),
            grid::Entry::new(Forward, 16, Line { fixed: 58, each: 8 }, [3, 2]),
            grid::Entry {
                least: Line { fixed: 200, each: 25 },
                ..grid::Entry::new(Backward, 32, Line { fixed: 0, each: 43 }, [2, 1])
            },
            grid::Entry {
                least: Line { fixed: 200, each: 25 },
                ..grid::Entry::new(Backward, 16, Line { fixed: 94, each: 15 }, [2, 1])
            },
        ]
    },
    #[rustfmt::skip]
    plain_grids: {
        use Direction::{Backward, Forward};
        use plain_grid::Entry;
        &[
            Entry::new(Forward,  16, [1, MOST_VECTORS], Line { fixed: 80,  each: 40 }, Line { fixed: 70, each: 22 }, 1),
            Entry::new(Forward,  4,  [2, 4],            Line { fixed: 80,  each: 68 }, Line { fixed: 28, each: 18 }, 2),
            Entry::new(Forward,  6,  [5, 6],            Line { fixed: 80,  each: 48 }, Line { fixed: 42, each: 15 }, 2),
            Entry::new(Backward, 16, [1, MOST_VECTORS], Line { fixed: 110, each: 50 }, Line { fixed: 60, each: 31 }, 1),
        ]
    },
    #[rustfmt::skip]
    wide_grids: {
        use Direction::{Backward, Forward};
        use Product::{Half, Scaled};
        &[
            wide_grid::Entry { direction: Forward,  product: Half,   columns: 32, rows: 64, round: [215, 31, 0] },
            wide_grid::Entry { direction: Backward, product: Half,   columns: 32, rows: 64, round: [93, 90, 0] },
            wide_grid::Entry { direction: Forward,  product: Scaled, columns: 32, rows: 64, round: [250, 31, 0] },
            wide_grid::Entry { direction: Backward, product: Scaled, columns: 32, rows: 64, round: [15, 115, 0] },
        ]
    },
};

/// Whether a kernel for all steps beats per-step kernels.
pub(super) fn is_faster(&(kernel, cost): &Priced, pass: &Pass) -> bool {
    /// Fewer steps are over before the weights have been loaded.
    const FEW: i64 = 8;
    /// Up to this hidden size, clusters are faster than a grid.
    const NARROW: i64 = 256;
    /// Loading the weights and marking all messages as unsent, or computing scales: all steps together
    /// have to save more.
    const ONCE: i64 = 2000;
    let Sizes { steps, batch, hidden, .. } = pass.sizes;
    let of = |both: [i64; 2]| both[usize::from(pass.direction == Direction::Backward)];
    let is_float = pass.kind == Kind::Float;
    // What a step costs the others at least, in two launches; with so many rows that the GPU takes longer
    // than the host, clusters take longer, too.
    let (others, narrow, once) = match kernel {
        Kernel::Cluster { product: Multiplied::Plain, .. }
            if is_float || pass.kind == Kind::Double =>
        {
            (cost_step_by_step(pass), 0, 0)
        }
        Kernel::Cluster { .. } => (of([900, 1100]), 0, 0),
        // The forward's value comes from the most rows at which they were measured to be slower: 256 at
        // H = 1024.
        Kernel::Grid { .. } => (of([950, 1100]), NARROW, ONCE),
        Kernel::PlainGrid { .. } if is_float => (cost_step_by_step(pass), 0, ONCE),
        // Half kinds have not been compared at more rows; `Float` has been, in several rounds, too.
        Kernel::WideGrid { product: Multiplied::Plain, .. } => (of([700, 1100]), NARROW, 0),
        Kernel::WideGrid { product: Multiplied::Scaled, .. } => {
            let work = batch * hidden * hidden / of([500_000, 625_000]);
            (of([900, 1600]) + work, NARROW, ONCE)
        }
        // `Double` has not been compared.
        Kernel::PlainGrid { .. } | Kernel::Step => return false,
    };
    steps >= FEW && hidden > narrow && steps.saturating_mul(others - cost) >= once
}

/// What a step costs if it has one or two kernels of its own, in hundredths of a microsecond.
fn cost_step_by_step(pass: &Pass) -> i64 {
    /// With more rows, libtorch's products are twice as fast.
    const FEW_ROWS: i64 = 64;
    let Sizes { batch, hidden, .. } = pass.sizes;
    let launches = match pass.direction {
        Direction::Forward => 480,
        Direction::Backward => 700,
    };
    // Operations per hundredth of a microsecond.
    let speed = if batch <= FEW_ROWS { 25e4 } else { 50e4 };
    let products = 6.0 * batch as f64 * hidden as f64 * hidden as f64 / speed;
    launches + products as i64
}
