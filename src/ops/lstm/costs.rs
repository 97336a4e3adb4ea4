//! What the LSTM's kernels cost, in hundredths of a microsecond, as measured on an H200.

use crate::ops::recurrent::plan::cluster::Entry;
use crate::ops::recurrent::plan::{Costs, Direction, Line, Product, grid, wide_grid};

pub(super) const COSTS: Costs = Costs {
    values: 4,
    #[rustfmt::skip]
    clusters: {
        use Product::{Double, Float, Half, Scaled};
        &[
            Entry::new(Half,   128, 8, [2, 2], [Some(57), Some(95)]),
            Entry::new(Half,   256, 8, [2, 2], [Some(105), Some(140)]),
            Entry::new(Half,   512, 16, [1, 1], [Some(130), Some(140)]),
            Entry::new(Half,   512, 8, [1, 1], [Some(216), Some(265)]),
            Entry::new(Scaled, 128, 8, [2, 2], [Some(58), Some(95)]),
            Entry::new(Scaled, 256, 8, [2, 2], [Some(108), Some(145)]),
            Entry::new(Scaled, 512, 16, [1, 1], [Some(140), Some(150)]),
            Entry::new(Scaled, 512, 8, [1, 1], [Some(230), Some(280)]),
            Entry::new(Float,  128, 8, [2, 1], [Some(114), Some(174)]),
            Entry::new(Double, 128, 8, [2, 1], [Some(219), Some(359)]),
        ]
    },
    #[rustfmt::skip]
    grids: {
        use Direction::{Backward, Forward};
        &[
            grid::Entry {
                most_iterations: 14,
                full_vectors: 4,
                ..grid::Entry::new(Forward, 32, Line { fixed: 38, each: 27 }, [2, 2])
            },
            grid::Entry::new(Forward, 16, Line { fixed: 50, each: 10 }, [3, 2]),
            grid::Entry {
                scaled_iteration: Some(Line { fixed: 100, each: 55 }),
                least: Line { fixed: 200, each: 30 },
                most_iterations: 46, // those of scaled fp16 values
                full_vectors: 4,
                ..grid::Entry::new(Backward, 32, Line { fixed: 0, each: 43 }, [2, 1])
            },
            grid::Entry {
                scaled_iteration: Some(Line { fixed: 60, each: 30 }),
                least: Line { fixed: 200, each: 30 },
                ..grid::Entry::new(Backward, 16, Line { fixed: 60, each: 15 }, [2, 1])
            },
        ]
    },
    plain_grids: &[],
    // Backward, the weights of four gates do not fit.
    #[rustfmt::skip]
    wide_grids: {
        use Direction::Forward;
        use Product::{Half, Scaled};
        &[
            wide_grid::Entry { direction: Forward, product: Half,   columns: 16, rows: 128, round: [130, 33, 360] },
            wide_grid::Entry { direction: Forward, product: Scaled, columns: 16, rows: 128, round: [150, 36, 360] },
        ]
    },
};
