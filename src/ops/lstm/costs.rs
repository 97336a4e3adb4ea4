//! The LSTM's kernels. What they cost is in tables (`src/ops/costs`).

use crate::ops::costs::Place;
use crate::ops::recurrent::layer::Cudnn;
use crate::ops::recurrent::plan::{
    Costs, Direction, Line, Product, block, cluster, grid, wide_grid,
};

pub(in crate::ops) static COSTS: Place<Costs> = Place::new("lstm", kernels);
pub(in crate::ops) static CUDNN: Place<Cudnn> = Place::new("lstm_cudnn", Cudnn::default);

fn kernels() -> Costs {
    use Direction::{Backward, Forward};
    use Product::{Half, Scaled};
    let wide = |product| wide_grid::Entry::new((Forward, product), 16, 128);
    Costs {
        values: 4,
        blocks: block::Entry::all(),
        clusters: cluster::Entry::of_cells(512),
        grids: vec![
            grid::Entry {
                most_iterations: 14,
                full_vectors: 4,
                ..grid::Entry::new(Forward, 32, [2, 2])
            },
            grid::Entry::new(Forward, 16, [3, 2]),
            grid::Entry {
                scaled_iteration: Some(Line::default()),
                least: Some(Line::default()),
                most_iterations: 46, // those of scaled fp16 values
                full_vectors: 4,
                ..grid::Entry::new(Backward, 32, [2, 1])
            },
            grid::Entry {
                scaled_iteration: Some(Line::default()),
                least: Some(Line::default()),
                ..grid::Entry::new(Backward, 16, [2, 1])
            },
        ],
        plain_grids: Vec::new(),
        // Backward, the weights of four gates do not fit.
        wide_grids: vec![wide(Half), wide(Scaled)],
    }
}
