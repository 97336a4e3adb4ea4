//! Which way computes a layer.

use super::{Cell, Costs};
use crate::Result;
use crate::ffi::precision::rnn_allow_tf32;
use crate::ops::recurrent::kernels::cuda::{Kernel, Product};
use crate::ops::recurrent::kernels::cudnn;
use crate::ops::recurrent::kernels::device::{Clusters, Grid};
use crate::ops::recurrent::plan::{Direction, Sizes, cluster, grid, wide_grid};
use tch::{Device, Kind};

/// The ways to compute a layer of an LSTM or GRU on CUDA. Where a description begins with a name and
/// a colon, the kernels are in that folder of `csrc/recurrent`. On the CPU there is only one way:
/// `cpu`.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The plan chooses.
    #[default]
    Automatic,
    /// cuDNN's layer, as libtorch calls it.
    Cudnn,
    /// `step`: libtorch's product and one kernel for each step.
    Step,
    /// `cluster`: the blocks of a cluster share the weights, and each cluster has rows of its own.
    Cluster,
    /// `grid`: the blocks of the whole GPU share the weights.
    Grid,
    /// `wide_grid`: a grid whose blocks compute tiles of 64 rows at a time.
    WideGrid,
    /// A grid of more blocks than any GPU runs at once, as happens where other processes leave too
    /// few multiprocessors free. Only tests force it.
    CrowdedGrid,
}

crate::ops::way::ways!(Way);

impl Way {
    /// Whether a device has kernels for this way.
    ///
    /// # Errors
    /// When CUDA fails.
    pub fn is_on(self, device: Device) -> Result<bool> {
        Ok(match self {
            Way::Cluster => Clusters::of(device)?.are_there(),
            Way::Grid | Way::WideGrid | Way::CrowdedGrid => Grid::of(device)?.is_there(),
            Way::Cudnn => device.is_cuda() && cudnn::is_enabled(),
            Way::Step => device.is_cuda(),
            Way::Automatic => true,
        })
    }
}

/// V of `counts_in_32_bits`: a step has four values of a column, either gates or what is saved.
const VALUES: i64 = 4;

/// Who computes a layer in both directions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Library {
    /// Kernels of this crate.
    Ours,
    Cudnn,
}

/// Chooses for a layer on CUDA, of which only the forward is needed unless `keep` is set. `is_flat`
/// says that cuDNN takes the parameters as they are.
pub(super) fn library<C: Cell>(
    way: Way,
    sizes: Sizes,
    kind: Kind,
    device: Device,
    keep: bool,
    is_flat: bool,
) -> Result<Library> {
    // cuDNN accepts no input without features.
    let may_be_cudnn = sizes.features > 0 && cudnn::is_enabled();
    Ok(match way {
        _ if C::CUDA.is_none() || way == Way::Cudnn => Library::Cudnn,
        Way::Automatic if may_be_cudnn => {
            let gpu = Gpu::of(device)?;
            let products = Products::new(C::GATES, sizes, kind, is_tf32(kind)?);
            let directions = [Direction::Forward, Direction::Backward];
            let (mut ours, mut cudnn) = (0.0, 0.0);
            for direction in directions.into_iter().take(if keep { 2 } else { 1 }) {
                let steps = sizes.steps as f64;
                let (_, cost) = automatic(C::COSTS, direction, sizes, products, gpu);
                ours += steps * cost;
                let flattening = FLATTENING[usize::from(direction == Direction::Backward)];
                cudnn += if is_flat { 0.0 } else { flattening };
                cudnn += steps * products.of_cudnn(direction);
            }
            if ours <= cudnn { Library::Ours } else { Library::Cudnn }
        }
        _ => Library::Ours,
    })
}

/// Whether a layer's products on CUDA may be in tf32.
pub(super) fn is_tf32(kind: Kind) -> Result<bool> {
    Ok(kind == Kind::Float && rnn_allow_tf32()?)
}

/// What it costs to move the parameters to one piece of memory for cuDNN, in microseconds, forward
/// and backward.
const FLATTENING: [f64; 2] = [350.0, 500.0];

/// What products cost, and what those ways cost that have no tables, all per step in microseconds.
/// These are lines through measurements on an H200 (docs/lab/lstm.md).
#[derive(Clone, Copy, Debug)]
struct Products {
    kind: Kind,
    is_tf32: bool,
    gates: i64,
    batch: f64,
    hidden: i64,
    /// The product with h in half kinds, forward. The one with the input takes as long if there are
    /// as many features; there are two of each, backward.
    one: f64,
    of_input: f64,
}

impl Products {
    fn new(gates: i64, sizes: Sizes, kind: Kind, is_tf32: bool) -> Products {
        const OPERATIONS: f64 = 550e6;
        let Sizes { batch, features, hidden, .. } = sizes;
        let column = 2.0 * batch as f64 * (gates * hidden) as f64 / OPERATIONS;
        Products {
            kind,
            is_tf32,
            gates,
            batch: batch as f64,
            hidden,
            one: column * hidden as f64,
            of_input: column * features as f64,
        }
    }

    /// What the kernels that keep W_h on the chip multiply.
    fn resident(self) -> Product {
        if self.is_tf32 { Product::Scaled } else { Product::Plain }
    }

    /// How many times as long libtorch's products take in this kind as in half kinds.
    fn slowdown(self) -> f64 {
        if matches!(self.kind, Kind::Half | Kind::BFloat16) { 1.0 } else { 12.0 }
    }

    /// Those over all steps at once.
    fn at_once(self, direction: Direction) -> f64 {
        let slowdown = if self.is_tf32 { 2.0 } else { self.slowdown() };
        match direction {
            Direction::Forward => slowdown * self.of_input,
            Direction::Backward => slowdown * (2.0 * self.of_input + self.one),
        }
    }

    /// A product and a kernel for each step, without what is done at once.
    fn step_by_step(self, direction: Direction) -> f64 {
        let product = self.slowdown() * self.one;
        match direction {
            Direction::Forward => (9.0 + product).max(14.0),
            Direction::Backward => (12.0 + product).max(18.0),
        }
    }

    /// cuDNN's whole step.
    fn of_cudnn(self, direction: Direction) -> f64 {
        let [forward, backward] = self.of_cudnns_persistent().unwrap_or_else(|| self.of_cudnns());
        if direction == Direction::Forward { forward } else { backward }
    }

    /// Its kernels that keep small weights on the chip, if it has any, forward and backward.
    fn of_cudnns_persistent(self) -> Option<[f64; 2]> {
        const NARROW: i64 = 128;
        const NARROWEST: i64 = 64;
        const WIDE: i64 = 1024;
        const FEW_ROWS: f64 = 32.0;
        let (rows, is_lstm) = (self.batch, self.gates == 4);
        match self.kind {
            Kind::Half if self.hidden <= NARROW => Some([1.0 + 4.0 * self.one, 2.4 + rows / 100.0]),
            Kind::Half if is_lstm && rows <= FEW_ROWS && self.hidden <= WIDE => {
                let columns = self.hidden as f64;
                Some([1.0 + columns / 1000.0, 2.5 + columns / 300.0])
            }
            Kind::Float if !self.is_tf32 || self.hidden > NARROW => None,
            Kind::Float if !is_lstm => Some([0.5 + rows / 200.0, 2.6 + rows / 24.0]),
            Kind::Float if self.hidden <= NARROWEST => {
                Some([0.45 + rows / 450.0, 3.7 + rows / 110.0])
            }
            Kind::Float => Some([2.0 + rows / 80.0, 2.0 + rows / 42.0]),
            _ => None,
        }
    }

    /// Its kernels for each step, forward and backward.
    fn of_cudnns(self) -> [f64; 2] {
        const SOME_ROWS: f64 = 128.0;
        let (rows, once) = (self.batch, self.one + self.of_input);
        match self.kind {
            Kind::Half if self.gates == 4 && rows < SOME_ROWS => [4.3 + once, 8.0 + 2.0 * once],
            Kind::Half | Kind::BFloat16 => {
                [(8.0 + once).max(10.5), (10.0 + 2.0 * once + rows / 100.0).max(16.0)]
            }
            Kind::Float if self.is_tf32 => [(8.0 + 2.2 * once).max(12.0), 18.0 + 5.0 * once],
            _ => [(8.0 + 12.0 * once).max(12.0), (24.0 * once).max(22.0)],
        }
    }
}

/// How many clusters and blocks a GPU runs at a time.
#[derive(Clone, Copy, Debug)]
struct Gpu {
    clusters: Clusters,
    grid: Grid,
}

impl Gpu {
    fn of(device: Device) -> Result<Gpu> {
        Ok(Gpu { clusters: Clusters::of(device)?, grid: Grid::of(device)? })
    }
}

/// The kernel for a direction of a layer that is ours.
pub(super) fn kernel<C: Cell>(
    way: Way,
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    device: Device,
) -> Result<Kernel> {
    /// Each row group has at least one block, and no GPU has this many multiprocessors.
    const CROWD: i32 = 1024;
    let gpu = Gpu::of(device)?;
    let products = Products::new(C::GATES, sizes, kind, is_tf32(kind)?);
    let grid = || of_grid(C::COSTS, direction, sizes, products, gpu).map(|(kernel, _)| kernel);
    let kernel = match way {
        Way::Cluster => of_clusters(C::COSTS, direction, sizes, products, gpu).map(|of| of.0),
        Way::Grid => grid(),
        Way::WideGrid => of_wide_grid(C::COSTS, direction, sizes, products, gpu).map(|of| of.0),
        Way::CrowdedGrid => grid().map(|kernel| match kernel {
            Kernel::Grid { columns, product, .. } => {
                Kernel::Grid { columns, row_groups: CROWD, product }
            }
            kernel => kernel,
        }),
        Way::Automatic => Some(automatic(C::COSTS, direction, sizes, products, gpu).0),
        Way::Step | Way::Cudnn => None,
    };
    Ok(kernel.unwrap_or(Kernel::Step))
}

/// The kernel whose steps cost least, and what one costs with its share of all products.
fn automatic(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products,
    gpu: Gpu,
) -> (Kernel, f64) {
    /// Fewer steps are over before the wide grid's weights have been loaded.
    const FEW: i64 = 8;
    let resident = [
        of_clusters(costs, direction, sizes, products, gpu),
        of_grid(costs, direction, sizes, products, gpu),
        of_wide_grid(costs, direction, sizes, products, gpu).filter(|_| sizes.steps >= FEW),
    ];
    let by_step = (Kernel::Step, products.step_by_step(direction));
    let of_all = resident.into_iter().flatten().map(|(kernel, cost)| (kernel, cost as f64 / 100.0));
    let (kernel, cost) =
        of_all.fold(by_step, |best, other| if other.1 < best.1 { other } else { best });
    (kernel, cost + products.at_once(direction))
}

/// A kernel, and what a step costs in hundredths of a microsecond.
type Priced = (Kernel, i64);

fn of_clusters(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products,
    gpu: Gpu,
) -> Option<Priced> {
    let table = (costs.clusters, VALUES);
    let Products { kind, is_tf32, .. } = products;
    let found = cluster::Kernel::new(table, direction, sizes, kind, is_tf32, gpu.clusters)?;
    let kernel = Kernel::Cluster { cluster: found.cluster as i32, product: products.resident() };
    Some((kernel, found.cost(sizes.batch)))
}

fn of_grid(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products,
    gpu: Gpu,
) -> Option<Priced> {
    let table = (costs.grids, VALUES);
    let Products { kind, is_tf32, .. } = products;
    let found = grid::Share::new(table, direction, sizes, kind, is_tf32, gpu.grid)?;
    let kernel = Kernel::Grid {
        columns: narrow(found.columns),
        row_groups: narrow(found.row_groups),
        product: products.resident(),
    };
    Some((kernel, found.cost))
}

fn of_wide_grid(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products,
    gpu: Gpu,
) -> Option<Priced> {
    let table = (costs.wide_grids, VALUES);
    let Products { kind, is_tf32, .. } = products;
    let found = wide_grid::Share::new(table, direction, sizes, kind, is_tf32, gpu.grid)?;
    let kernel = Kernel::WideGrid {
        columns: narrow(found.columns),
        row_groups: narrow(found.row_groups),
        product: products.resident(),
    };
    Some((kernel, found.cost))
}

fn narrow(count: i64) -> i32 {
    i32::try_from(count).unwrap_or(1)
}
