//! The kernels that keep W_h on the chip for all steps: those that a cell has for some sizes, and what
//! a step of each costs.

use super::way::Way;
use super::{Direction, Sizes, block, cluster, grid, plain_grid, wide_grid};
use crate::Result;
use crate::ops::costs::{Each, Unit, Visit, multiprocessors};
use crate::ops::kinds::{Device, Kind};
use crate::ops::recurrent::kernels::cuda::{Kernel, Product};
use crate::ops::recurrent::kernels::device::{Clusters, Grid};

/// A cell's kernels, and what they cost.
#[derive(Clone, Debug)]
pub(in crate::ops) struct Costs {
    /// How many values of a column a step reads or writes: either gates or what is saved.
    pub values: i64,
    pub blocks: Vec<block::Entry>,
    pub clusters: Vec<cluster::Entry>,
    pub grids: Vec<grid::Entry>,
    pub plain_grids: Vec<plain_grid::Entry>,
    pub wide_grids: Vec<wide_grid::Entry>,
}

impl Each for Costs {
    fn each(&mut self, name: &str, unit: Unit, visit: &mut Visit<'_>) {
        fn all<T: Each>(of: &mut [T], name: String, unit: Unit, visit: &mut Visit<'_>) {
            of.iter_mut().for_each(|entry| entry.each(&name, unit, visit));
        }
        all(&mut self.blocks, format!("{name}.block"), unit, visit);
        all(&mut self.clusters, format!("{name}.cluster"), unit, visit);
        all(&mut self.grids, format!("{name}.grid"), unit, visit);
        all(&mut self.plain_grids, format!("{name}.plain_grid"), unit, visit);
        all(&mut self.wide_grids, format!("{name}.wide_grid"), unit, visit);
    }
}

/// How many clusters and blocks a GPU runs at a time, and its multiprocessors.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::ops) struct Gpu {
    pub clusters: Clusters,
    pub grid: Grid,
    pub processors: i64,
}

impl Gpu {
    #[cfg(test)]
    pub const H200: Gpu = Gpu { clusters: Clusters::H200, grid: Grid::H200, processors: 132 };

    pub fn of(device: Device) -> Result<Gpu> {
        Ok(Gpu {
            clusters: Clusters::of(device)?,
            grid: Grid::of(device)?,
            processors: multiprocessors(device)?,
        })
    }

    pub fn half(self) -> Gpu {
        let Clusters { of_8, of_16 } = self.clusters;
        Gpu {
            clusters: Clusters { of_8: of_8 / 2, of_16: of_16 / 2 },
            grid: Grid { blocks: self.grid.blocks / 2 },
            processors: self.processors / 2,
        }
    }
}

/// A direction of a sequence, for which kernels are looked up.
#[derive(Clone, Copy, Debug)]
pub(in crate::ops) struct Pass {
    pub direction: Direction,
    pub sizes: Sizes,
    /// Of W_h and h.
    pub kind: Kind,
    /// Whether products of `Float` may use tf32: they are then computed from scaled fp16 values, which are
    /// as exact.
    pub tf32: bool,
    pub gpu: Gpu,
}

impl Pass {
    fn product(&self) -> Product {
        if self.kind == Kind::Float && self.tf32 { Product::Scaled } else { Product::Plain }
    }
}

/// A kernel, and what a step costs.
pub(in crate::ops) type Priced = (Kernel, f64);

impl Costs {
    pub fn block(&self, pass: &Pass) -> Option<Priced> {
        let (blocks, step) = block::share(&self.blocks, pass)?;
        let sums_weights = block::sums_weights(pass.kind, pass.sizes);
        Some((Kernel::Block { blocks, sums_weights }, step))
    }

    pub fn cluster(&self, pass: &Pass) -> Option<Priced> {
        let found = cluster::Kernel::new((&self.clusters, self.values), pass)?;
        let (cluster, product) = (found.cluster as i32, pass.product());
        let kernel = Kernel::Cluster { cluster, alone: found.has_room, product };
        Some((kernel, found.cost(pass.sizes.batch)))
    }

    pub fn grid(&self, pass: &Pass) -> Option<Priced> {
        let found = grid::Share::new((&self.grids, self.values), pass)?;
        let ((columns, row_groups), product) = (found.counts(), pass.product());
        Some((Kernel::Grid { columns, row_groups, product }, found.cost))
    }

    pub fn plain_grid(&self, pass: &Pass) -> Option<Priced> {
        let found = plain_grid::share((&self.plain_grids, self.values), pass)?;
        let (columns, row_groups) = found.counts();
        Some((Kernel::PlainGrid { columns, row_groups }, found.cost))
    }

    pub fn wide_grid(&self, pass: &Pass) -> Option<Priced> {
        let found = wide_grid::share((&self.wide_grids, self.values), pass)?;
        let ((columns, row_groups), product) = (found.counts(), pass.product());
        Some((Kernel::WideGrid { columns, row_groups, product }, found.cost))
    }

    /// One kernel of each way that there is.
    pub fn all(&self, pass: &Pass) -> impl Iterator<Item = Priced> + Clone + use<> {
        let of_all = [
            self.block(pass),
            self.cluster(pass),
            self.grid(pass),
            self.plain_grid(pass),
            self.wide_grid(pass),
        ];
        of_all.into_iter().flatten()
    }

    /// The kernel of a way, if there is one.
    pub fn priced(&self, way: Way, pass: &Pass) -> Option<Priced> {
        let any_grid = || self.grid(pass).or_else(|| self.plain_grid(pass));
        match way {
            Way::Resident => self.cluster(pass).or_else(any_grid),
            Way::Block => self.block(pass),
            Way::Cluster => self.cluster(pass),
            Way::Grid | Way::CrowdedGrid => any_grid(),
            Way::PlainGrid => self.plain_grid(pass),
            Way::WideGrid => self.wide_grid(pass),
            _ => None,
        }
    }

    /// The kernel of a way that is forced, if there is one.
    pub fn forced(&self, way: Way, pass: &Pass) -> Option<Kernel> {
        /// Each row group has at least one block, and no GPU has this many multiprocessors.
        const CROWD: i32 = 1024;
        self.priced(way, pass).map(|(kernel, _)| match kernel {
            Kernel::Grid { columns, product, .. } if way == Way::CrowdedGrid => {
                Kernel::Grid { columns, row_groups: CROWD, product }
            }
            Kernel::PlainGrid { columns, .. } if way == Way::CrowdedGrid => {
                Kernel::PlainGrid { columns, row_groups: CROWD }
            }
            kernel => kernel,
        })
    }
}
