//! The GRU's kernels. What they cost is in tables (`src/ops/costs`).

use crate::ops::costs::Place;
use crate::ops::recurrent::layer::Cudnn;
use crate::ops::recurrent::plan::{Costs, Direction, Line, block, cluster, grid, wide_grid};

pub(in crate::ops) static COSTS: Place<Costs> = Place::new("gru", kernels);
pub(in crate::ops) static CUDNN: Place<Cudnn> = Place::new("gru_cudnn", Cudnn::default);

fn kernels() -> Costs {
    use Direction::{Backward, Forward};
    let backward = |columns| grid::Entry {
        scaled_iteration: Some(Line::default()),
        least: Some(Line::default()),
        ..grid::Entry::new(Backward, columns, [2, 1])
    };
    Costs {
        values: 4,
        blocks: block::Entry::all(),
        clusters: cluster::Entry::of_cells(768),
        grids: vec![
            grid::Entry::new(Forward, 32, [2, 2]),
            grid::Entry::new(Forward, 16, [3, 2]),
            backward(32),
            backward(16),
        ],
        plain_grids: Vec::new(),
        wide_grids: wide_grid::Entry::of_both_directions(),
    }
}
