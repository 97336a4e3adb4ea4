//! What the GRU's kernels cost, in hundredths of a microsecond, as measured on an H200.

use crate::ops::recurrent::plan::cluster::Entry;
use crate::ops::recurrent::plan::{Costs, Direction, Line, Product, grid, wide_grid};

pub(super) const COSTS: Costs = Costs {
    values: 4,
    #[rustfmt::skip]
    clusters: {
        use Product::{Double, Float, Half, Scaled};
        &[
            Entry::new(Half,   128, 8, [2, 2], [Some(50), Some(95)]),
            Entry::new(Half,   256, 8, [2, 2], [Some(96), Some(150)]),
            Entry::new(Half,   512, 16, [1, 1], [Some(108), Some(120)]),
            Entry::new(Half,   512, 8, [1, 1], [Some(140), Some(190)]),
            Entry::new(Half,   768, 16, [1, 1], [Some(168), Some(185)]),
            Entry::new(Scaled, 128, 8, [2, 2], [Some(52), Some(95)]),
            Entry::new(Scaled, 256, 8, [2, 2], [Some(90), Some(140)]),
            Entry::new(Scaled, 512, 16, [1, 1], [Some(115), Some(130)]),
            Entry::new(Scaled, 512, 8, [1, 1], [Some(142), Some(200)]),
            Entry::new(Scaled, 768, 16, [1, 1], [Some(180), Some(195)]),
            Entry::new(Float,  128, 8, [2, 1], [Some(96), Some(146)]),
            Entry::new(Double, 128, 8, [2, 1], [Some(184), Some(301)]),
        ]
    },
    #[rustfmt::skip]
    grids: {
        use Direction::{Backward, Forward};
        &[
            grid::Entry::new(Forward, 32, Line { fixed: 50, each: 12 }, [2, 2]),
            grid::Entry::new(Forward, 16, Line { fixed: 55, each: 7 }, [3, 2]),
            grid::Entry {
                scaled_iteration: Some(Line { fixed: 100, each: 55 }),
                least: Line { fixed: 200, each: 30 },
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
    #[rustfmt::skip]
    wide_grids: {
        use Direction::{Backward, Forward};
        use Product::{Half, Scaled};
        &[
            wide_grid::Entry { direction: Forward,  product: Half,   columns: 32, rows: 64, round: [225, 18, 72] },
            wide_grid::Entry { direction: Backward, product: Half,   columns: 32, rows: 64, round: [190, 75, 220] },
            wide_grid::Entry { direction: Forward,  product: Scaled, columns: 32, rows: 64, round: [225, 18, 72] },
            wide_grid::Entry { direction: Backward, product: Scaled, columns: 32, rows: 64, round: [0, 105, 680] },
        ]
    },
};
