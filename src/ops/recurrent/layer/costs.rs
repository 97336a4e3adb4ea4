//! What a cell's kernels cost: tables of measurements, from which plans choose.

use crate::ops::recurrent::plan::{cluster, grid, wide_grid};

/// A cell's tables. All were measured on an H200.
pub(in crate::ops) struct Costs {
    pub clusters: &'static [cluster::Entry],
    pub grids: &'static [grid::Entry],
    pub wide_grids: &'static [wide_grid::Entry],
}
