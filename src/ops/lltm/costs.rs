//! LLTM's kernels, and when those of all steps beat those of each step. What the former cost is in tables
//! (`src/ops/costs`).

use crate::ops::costs::Place;
use crate::ops::kinds::Kind;
use crate::ops::recurrent::kernels::cuda::{Kernel, Product as Multiplied};
use crate::ops::recurrent::plan::{
    Costs, Direction, Line, Pass, Priced, Product, Sizes, cluster, grid, plain_grid, wide_grid,
};

/// The most vectors of a row of h that a warp can have if a block of a plain grid has 16 columns.
const MOST_VECTORS: i64 = 8;
/// How many values of a column a step reads or writes.
pub(super) const VALUES: i64 = 3;

pub(in crate::ops) static COSTS: Place<Costs> = Place::unscaled("lltm", kernels);

fn kernels() -> Costs {
    use Direction::{Backward, Forward};
    use Product::{Double, Float};
    let backward = |columns| grid::Entry {
        least: Some(Line::default()),
        ..grid::Entry::new(Backward, columns, [2, 1])
    };
    Costs {
        values: VALUES,
        blocks: Vec::new(),
        // In strict `Float` and `Double`, two blocks per multiprocessor have not been measured in the
        // backward pass.
        clusters: cluster::Entry::of_cells(768)
            .into_iter()
            .chain([
                cluster::Entry::new((Float, 256, 16), [1, 1], &[Forward]),
                cluster::Entry::new((Double, 256, 16), [1, 1], &[Forward]),
            ])
            .collect(),
        grids: vec![
            grid::Entry::new(Forward, 32, [2, 2]),
            grid::Entry::new(Forward, 16, [3, 2]),
            backward(32),
            backward(16),
        ],
        plain_grids: vec![
            plain_grid::Entry::new(Forward, 16, [1, MOST_VECTORS], 1),
            plain_grid::Entry::new(Forward, 4, [2, 4], 2),
            plain_grid::Entry::new(Forward, 6, [5, 6], 2),
            plain_grid::Entry::new(Backward, 16, [1, MOST_VECTORS], 1),
        ],
        wide_grids: wide_grid::Entry::of_both_directions(),
    }
}

/// Whether a kernel for all steps beats per-step kernels.
pub(super) fn is_faster(&(kernel, cost): &Priced, pass: &Pass) -> bool {
    /// Fewer steps are over before the weights have been loaded.
    const FEW: i64 = 8;
    /// Up to this hidden size, clusters are faster than a grid.
    const NARROW: i64 = 256;
    /// Loading the weights and marking all messages as unsent, or computing scales: all steps together
    /// have to save more.
    const ONCE: f64 = 20.0;
    let Sizes { steps, batch, hidden, .. } = pass.sizes;
    let of = |both: [f64; 2]| both[usize::from(pass.direction == Direction::Backward)];
    let is_float = pass.kind == Kind::Float;
    // What a step costs the others at least, in two launches; with so many rows that the GPU takes longer
    // than the host, clusters take longer, too.
    let (others, narrow, once) = match kernel {
        Kernel::Cluster { product: Multiplied::Plain, .. }
            if is_float || pass.kind == Kind::Double =>
        {
            (cost_step_by_step(pass), 0, 0.0)
        }
        Kernel::Cluster { .. } => (of([9.0, 11.0]), 0, 0.0),
        // The forward's value comes from the most rows at which they were measured to be slower: 256 at
        // H = 1024.
        Kernel::Grid { .. } => (of([9.5, 11.0]), NARROW, ONCE),
        Kernel::PlainGrid { .. } if is_float => (cost_step_by_step(pass), 0, ONCE),
        // Half kinds have not been compared at more rows; `Float` has been, in several rounds, too.
        Kernel::WideGrid { product: Multiplied::Plain, .. } => (of([7.0, 11.0]), NARROW, 0.0),
        Kernel::WideGrid { product: Multiplied::Scaled, .. } => {
            let work = (batch * hidden * hidden) as f64 / of([50e6, 62.5e6]);
            (of([9.0, 16.0]) + work, NARROW, ONCE)
        }
        // `Double` has not been compared.
        Kernel::Block { .. } | Kernel::PlainGrid { .. } | Kernel::Step => return false,
    };
    steps >= FEW && hidden > narrow && steps as f64 * (others - cost) >= once
}

/// What a step costs if it has one or two kernels of its own.
fn cost_step_by_step(pass: &Pass) -> f64 {
    /// With more rows, libtorch's products are twice as fast.
    const FEW_ROWS: i64 = 64;
    let Sizes { batch, hidden, .. } = pass.sizes;
    let launches = match pass.direction {
        Direction::Forward => 4.8,
        Direction::Backward => 7.0,
    };
    // Operations per microsecond.
    let speed = if batch <= FEW_ROWS { 25e6 } else { 50e6 };
    let products = 6.0 * batch as f64 * hidden as f64 * hidden as f64 / speed;
    launches + products
}
