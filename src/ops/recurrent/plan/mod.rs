//! Which way computes a sequence, as far as that is the same for all cells. What a cell's kernels
//! cost is in tables of its own.

pub(in crate::ops) mod block;
pub(in crate::ops) mod cluster;
mod cpu;
pub(in crate::ops) mod grid;
pub(in crate::ops) mod plain_grid;
mod resident;
mod sizes;
mod way;
pub(in crate::ops) mod wide_grid;

pub(in crate::ops) use cpu::{are_too_few_to_pack, is_onednn_faster, multiplies_input, team};
pub(in crate::ops) use resident::{Costs, Gpu, Pass, Priced};
pub(in crate::ops) use sizes::{Direction, Line, Product, Sizes, is_half};
pub use way::Way;
