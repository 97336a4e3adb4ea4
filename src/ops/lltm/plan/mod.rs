//! Which way computes a sequence.

mod cluster;
mod grid;
mod plain_grid;
mod step;
mod tensor_cores;
mod wide_grid;

pub(super) use crate::ops::recurrent::plan::{Direction, Sizes};

use crate::Result;
use crate::ffi::precision::matmul_allow_tf32;
use crate::ops::lltm_cell::kernels::device::TensorCores;
use crate::ops::lltm_cell::plan as cell;
use crate::ops::recurrent::kernels::cpu::Team;
use crate::ops::recurrent::kernels::cuda::{Kernel, Product};
use crate::ops::recurrent::kernels::device::{Clusters, Grid};
use crate::ops::recurrent::plan::cluster::Kernel as Clustered;
use crate::ops::recurrent::plan::grid::Share;
use crate::ops::recurrent::plan::{are_too_few_to_pack, is_half, team};
use tch::{Device, Kind};
use tensor_cores::Tiles;
use wide_grid::WideShare;

/// V of `counts_in_32_bits`: a column has three gates.
const VALUES: i64 = 3;

/// The ways to compute a sequence. Where a description begins with a name and a colon, the kernels
/// are in that folder of `csrc/recurrent`.
#[doc(hidden)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The plan chooses.
    #[default]
    Automatic,
    /// A loop of `lltm_cell`.
    Cells,
    /// `step`: libtorch's product and one kernel for each step.
    Step,
    /// On CUDA: one kernel of `csrc/lltm_cell` for each step.
    Fused,
    /// Forward on CUDA: one tensor-core kernel of `csrc/lltm_cell` for each step.
    TensorCores,
    /// `cpu`: weights are packed once, and threads stay together for all steps.
    Cpu,
    /// On CUDA: one kernel for all steps, whose blocks keep the weights on the chip. That is a
    /// cluster if there is one for the sizes, and otherwise a grid. Only tests and benchmarks force
    /// it.
    Resident,
    /// `cluster`: the blocks of a cluster share the weights, and each cluster has rows of its own.
    Cluster,
    /// `grid`: the blocks of the whole GPU share the weights; half kinds, or scaled fp16 values.
    Grid,
    /// `grid`: for Float and Double, without rounding them to a narrower kind.
    PlainGrid,
    /// `wide_grid`: a grid whose blocks compute 64 rows at a time.
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
            Way::Resident | Way::Cluster => Clusters::of(device)?.are_there(),
            Way::Grid | Way::PlainGrid | Way::WideGrid | Way::CrowdedGrid => {
                Grid::of(device)?.is_there()
            }
            Way::TensorCores => TensorCores::of(device)?.are_there(),
            Way::Cpu => device == Device::Cpu,
            Way::Fused => device.is_cuda(),
            Way::Automatic | Way::Cells | Way::Step => true,
        })
    }

    /// Whether this is one step, with products and state of these kinds, that the cell's kernels
    /// compute, because nothing is cheaper. On the CPU they do not if a sequence is computed in a
    /// wider kind than the cell.
    pub(crate) fn is_one_step_of_the_cell(
        self,
        steps: i64,
        (product, state): (Kind, Kind),
        device: Device,
    ) -> bool {
        let is_as_wide = product == state && !is_half(product);
        self == Way::Automatic && steps == 1 && (device.is_cuda() || is_as_wide)
    }

    /// Whether this is computed as a loop of the cell, for tensors of one kind: with two steps, the
    /// fixed cost of a sequence exceeds what it saves, and one step is the cell's anyway. That is not done where it would round sums
    /// that a sequence does not round, which are in half kinds those of the weight's gradient over
    /// steps.
    pub(crate) fn calls_the_cell(self, steps: i64, kind: Kind) -> bool {
        match self {
            Way::Cells => steps > 0,
            Way::Automatic => steps == 2 && !is_half(kind),
            _ => false,
        }
    }
}

/// The device that computes a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chip {
    Cpu { threads: i64 },
    Cuda { device: usize, hopper: Hopper },
}

/// What a GPU offers to kernels with the instructions of compute capability 9.0.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Hopper {
    clusters: Clusters,
    grid: Grid,
    tensor_cores: TensorCores,
    /// Whether products of `Float` may use tf32.
    tf32: bool,
}

impl Hopper {
    #[cfg(test)]
    fn h200(tf32: bool) -> Hopper {
        Hopper { clusters: Clusters::H200, grid: Grid::H200, tensor_cores: TensorCores::H200, tf32 }
    }
}

impl Chip {
    /// The device, for products of this kind.
    pub fn of(device: Device, product: Kind) -> Result<Chip> {
        Ok(match device {
            Device::Cuda(index) => {
                let (clusters, grid) = (Clusters::of(device)?, Grid::of(device)?);
                let tensor_cores = TensorCores::of(device)?;
                let tf32 = product == Kind::Float && matmul_allow_tf32()?;
                Chip::Cuda { device: index, hopper: Hopper { clusters, grid, tensor_cores, tf32 } }
            }
            _ => Chip::Cpu { threads: i64::from(tch::get_num_threads()) },
        })
    }
}

/// A way together with its launch parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// A kernel of `csrc/recurrent`; `Step` also on the CPU.
    Kernel(Kernel),
    /// The cell's fused kernel for each step. `input_at_once`: whether the input is multiplied for all
    /// steps before the first one, rather than in each step.
    Fused { input_at_once: bool },
    /// The cell's tensor-core kernel, which multiplies the input, too.
    TensorCores,
    /// `csrc/recurrent/cpu`, by these threads.
    Cpu(Team),
}

impl Plan {
    /// The plan for a sequence of these sizes, whose products and state are of these kinds. Falls
    /// back to another way where the device lacks `way`, or lacks it for these kinds.
    pub fn new(
        way: Way,
        direction: Direction,
        sizes: Sizes,
        kinds: (Kind, Kind),
        chip: Chip,
    ) -> Plan {
        match (way, chip) {
            (Way::Step, _) => Plan::Kernel(Kernel::Step),
            (Way::Automatic, Chip::Cpu { .. }) if are_too_few_to_pack(sizes) => {
                Plan::Kernel(Kernel::Step)
            }
            (_, Chip::Cpu { threads }) => {
                let Sizes { steps, batch, hidden, .. } = sizes;
                Plan::Cpu(team([steps, batch, hidden], VALUES, kinds.1, threads))
            }
            (_, Chip::Cuda { device, hopper }) => {
                Plan::on_hopper(way, direction, sizes, kinds, hopper).unwrap_or_else(|| {
                    Plan::step_by_step(way, direction, sizes, kinds, (device, hopper.tf32))
                })
            }
        }
    }

    /// A plan with kernels for compute capability 9.0. Of those that suit the sizes, it takes the
    /// one whose steps cost least, not counting the input's product.
    fn on_hopper(
        way: Way,
        direction: Direction,
        sizes: Sizes,
        (product, state): (Kind, Kind),
        hopper: Hopper,
    ) -> Option<Plan> {
        let clusters = cluster::new(direction, sizes, product, hopper.tf32, hopper.clusters);
        let grid = grid::new(direction, sizes, product, hopper.tf32, hopper.grid);
        /// Each row group has at least one block, and no GPU has this many multiprocessors.
        const CROWD: i64 = 1024;
        let is_scaled = product == Kind::Float && hopper.tf32;
        let multiplied = if is_scaled { Product::Scaled } else { Product::Plain };
        let of_clusters = |found: Clustered| {
            Plan::Kernel(Kernel::Cluster {
                cluster: found.cluster as i32,
                alone: found.has_room,
                product: multiplied,
            })
        };
        let of_grid = |share: Share| {
            let (columns, row_groups) = share.counts();
            Plan::Kernel(Kernel::Grid { columns, row_groups, product: multiplied })
        };
        let plain = plain_grid::new(direction, sizes, product, hopper.tf32, hopper.grid);
        let of_plain = |share: Share| {
            let (columns, row_groups) = share.counts();
            Plan::Kernel(Kernel::PlainGrid { columns, row_groups })
        };
        let wide = WideShare::new(direction, sizes, product, hopper.tf32, hopper.grid);
        let of_wide = |wide: WideShare| {
            let (columns, row_groups) = wide.share.counts();
            Plan::Kernel(Kernel::WideGrid { columns, row_groups, product: multiplied })
        };
        // Under autocast there are two kinds, and the tensor-core kernel takes only one.
        let is_for_tiles = direction == Direction::Forward && product == state;
        let tiles = is_for_tiles.then(|| Tiles::new(sizes, product, hopper.tensor_cores)).flatten();
        match way {
            Way::TensorCores => tiles.map(|_| Plan::TensorCores),
            Way::Resident => {
                clusters.map(of_clusters).or(grid.map(of_grid)).or(plain.map(of_plain))
            }
            Way::Cluster => clusters.map(of_clusters),
            Way::PlainGrid => plain.map(of_plain),
            Way::Grid => grid.map(of_grid).or(plain.map(of_plain)),
            Way::WideGrid => wide.map(of_wide).or(grid.map(of_grid)),
            Way::CrowdedGrid => grid
                .map(|share| of_grid(Share { row_groups: CROWD, ..share }))
                .or(plain.map(|share| of_plain(Share { row_groups: CROWD, ..share }))),
            Way::Automatic => {
                let clusters =
                    clusters.filter(|kernel| cluster::is_faster(kernel, direction, sizes, product));
                let grid = grid.filter(|share| grid::is_faster(share, direction, sizes));
                let plain =
                    plain.filter(|share| plain_grid::is_faster(share, direction, sizes, product));
                let wide = wide.filter(|share| share.is_faster(sizes));
                let tiles = tiles.filter(Tiles::are_faster);
                let all = [
                    clusters.map(|kernel| (kernel.cost(sizes.batch), of_clusters(kernel))),
                    grid.map(|share| (share.cost, of_grid(share))),
                    plain.map(|share| (share.cost, of_plain(share))),
                    wide.map(|wide| (wide.share.cost, of_wide(wide))),
                    tiles.map(|tiles| (tiles.cost_without_input(), Plan::TensorCores)),
                ];
                all.into_iter().flatten().min_by_key(|(cost, _)| *cost).map(|(_, plan)| plan)
            }
            _ => None,
        }
    }

    /// A plan with one or two kernels for each step. One kernel per step costs the host half of
    /// what a product and a kernel cost, and where everything waits for the host, only that counts.
    /// At larger sizes, libtorch computes the product faster.
    fn step_by_step(
        way: Way,
        direction: Direction,
        sizes: Sizes,
        (product, state): (Kind, Kind),
        (device, tf32): (usize, bool),
    ) -> Plan {
        /// With fewer steps or features, a separate product of the input costs more than it saves:
        /// a step of few columns takes as long as its chain of loads.
        const ENOUGH_STEPS: i64 = 8;
        const ENOUGH_FEATURES: i64 = 256;
        let enough =
            sizes.steps >= ENOUGH_STEPS && (way == Way::Fused || sizes.features >= ENOUGH_FEATURES);
        let way = if way == Way::Fused { cell::Way::Fused } else { cell::Way::Automatic };
        let device = Device::Cuda(device);
        let input_at_once = direction == Direction::Backward || enough;
        let features = if input_at_once { 0 } else { sizes.features };
        let step = cell::Sizes { batch: sizes.batch, features, hidden: sizes.hidden };
        let is_fused = match direction {
            Direction::Forward => step.fuse_forward_where(way, product, device, || tf32),
            Direction::Backward => step.fuse_backward(way, product, device),
        };
        // Under autocast there are two kinds, and the fused kernel takes only one.
        match is_fused && product == state {
            true => Plan::Fused { input_at_once },
            false => Plan::Kernel(Kernel::Step),
        }
    }
}

/// The way for these sizes on an H200.
#[cfg(test)]
pub(in crate::ops) fn way_on_h200(
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    tf32: bool,
) -> &'static str {
    let kinds = (kind, kind);
    let plan = Plan::on_hopper(Way::Automatic, direction, sizes, kinds, Hopper::h200(tf32));
    let by_steps = || Plan::step_by_step(Way::Automatic, direction, sizes, kinds, (0, tf32));
    match plan.unwrap_or_else(by_steps) {
        Plan::Kernel(kernel) => kernel.name(),
        Plan::Fused { .. } => "fused",
        Plan::TensorCores => "tensor cores",
        Plan::Cpu(_) => "cpu",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan without what depends on how full the GPU is.
    fn resident(kernel: Kernel) -> Option<Plan> {
        Some(Plan::Kernel(kernel))
    }

    fn without_room(plan: Option<Plan>) -> Option<Plan> {
        plan.map(|plan| match plan {
            Plan::Kernel(Kernel::Cluster { cluster, product, .. }) => {
                Plan::Kernel(Kernel::Cluster { cluster, alone: false, product })
            }
            plan => plan,
        })
    }

    #[test]
    fn a_path_is_taken_where_it_can_be() {
        let sizes = Sizes { steps: 3, batch: 2, features: 4, hidden: 5 };
        let plan = |way, chip| {
            Plan::new(way, Direction::Forward, sizes, (Kind::Double, Kind::Double), chip)
        };
        let cpu = Chip::Cpu { threads: 4 };
        let one = Plan::Cpu(Team { row_groups: 1, column_groups: 1 });
        assert_eq!(plan(Way::Step, cpu), Plan::Kernel(Kernel::Step));
        assert_eq!(plan(Way::Cpu, cpu), one);
        for way in [Way::Automatic, Way::Cells, Way::Fused, Way::Resident, Way::Grid] {
            assert_eq!(plan(way, cpu), one);
        }
        let gpu = Chip::Cuda { device: 0, hopper: Hopper::default() };
        assert_eq!(plan(Way::Step, gpu), Plan::Kernel(Kernel::Step));
        for way in [Way::Automatic, Way::Fused, Way::Cpu, Way::Resident, Way::Grid] {
            assert_eq!(plan(way, gpu), Plan::Fused { input_at_once: false });
        }
    }

    /// The way whose steps were measured to cost least is taken, separately for each direction.
    #[test]
    fn on_hopper_the_cheapest_is_taken() {
        use Direction::{Backward, Forward};
        let plan = |direction, steps, batch, hidden, kind| {
            let hopper = Hopper::h200(kind == Kind::Float);
            let sizes = Sizes { steps, batch, features: hidden, hidden };
            without_room(Plan::on_hopper(Way::Automatic, direction, sizes, (kind, kind), hopper))
        };
        let of = |tf32| if tf32 { Product::Scaled } else { Product::Plain };
        let clusters =
            |cluster, tf32| resident(Kernel::Cluster { cluster, alone: false, product: of(tf32) });
        let strict = |direction, batch, hidden| {
            let hopper = Hopper::h200(false);
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            let kinds = (Kind::Float, Kind::Float);
            without_room(Plan::on_hopper(Way::Automatic, direction, sizes, kinds, hopper))
        };
        let plain = |columns, row_groups| resident(Kernel::PlainGrid { columns, row_groups });
        assert_eq!(strict(Forward, 16, 128), clusters(8, false));
        assert_eq!(strict(Forward, 16, 256), clusters(16, false));
        assert_eq!(strict(Forward, 64, 256), plain(16, 8));
        assert_eq!(strict(Forward, 16, 768), plain(6, 1));
        assert_eq!(strict(Backward, 16, 256), plain(16, 2));
        let grid = |columns, row_groups| {
            resident(Kernel::Grid { columns, row_groups, product: Product::Plain })
        };
        let half = |direction, batch, hidden| plan(direction, 512, batch, hidden, Kind::BFloat16);
        for direction in [Forward, Backward] {
            assert_eq!(half(direction, 16, 128), clusters(8, false));
            assert_eq!(half(direction, 16, 512), clusters(16, false));
            assert_eq!(half(direction, 64, 1024), grid(32, 4));
            // Rows of h that are not whole vectors, and too few steps.
            assert_eq!(half(direction, 64, 1023), None);
            assert_eq!(plan(direction, 7, 64, 1024, Kind::Half), None);
            assert_eq!(plan(direction, 512, 16, 512, Kind::Float), clusters(16, true));
            let scaled = Kernel::Grid { columns: 32, row_groups: 4, product: Product::Scaled };
            assert_eq!(plan(direction, 512, 64, 1024, Kind::Float), resident(scaled));
        }
        // Many rows, also with few steps.
        assert_eq!(half(Backward, 1024, 1024), None);
        for steps in [1, 512] {
            assert_eq!(plan(Forward, steps, 1024, 1024, Kind::Half), Some(Plan::TensorCores));
        }
        // Measured on an H200 with as many features as columns, and with 8.
        let of = |batch, features, hidden| {
            let sizes = Sizes { steps: 64, batch, features, hidden };
            let both = (Kind::BFloat16, Kind::BFloat16);
            let hopper = Hopper::h200(false);
            without_room(Plan::on_hopper(Way::Automatic, Forward, sizes, both, hopper))
        };
        let by_clusters = [
            (3840, 16, 16),
            (3600, 64, 64),
            (3600, 128, 128),
            (3360, 8, 128),
            (1680, 256, 256),
            (1680, 8, 256),
        ];
        let by_tensor_cores =
            [(4096, 64, 64), (4096, 128, 128), (4096, 8, 128), (1920, 256, 256), (1920, 8, 256)];
        let measured =
            [(&by_clusters[..], clusters(8, false)), (&by_tensor_cores, Some(Plan::TensorCores))];
        for (sizes, expected) in measured {
            for &(batch, features, hidden) in sizes {
                assert_eq!(of(batch, features, hidden), expected, "{batch} {features} {hidden}");
            }
        }
        assert_eq!(plan(Forward, 512, 4096, 512, Kind::Float), None);
        for direction in [Forward, Backward] {
            assert_eq!(half(direction, 64, 512), clusters(8, false));
            let wide = |row_groups| {
                resident(Kernel::WideGrid { columns: 32, row_groups, product: Product::Plain })
            };
            assert_eq!(half(direction, 256, 1024), wide(4));
            assert_eq!(half(direction, 256, 768), wide(4));
            assert_eq!(half(direction, 512, 512), wide(8));
            assert_eq!(half(direction, 96, 1024), grid(32, 4));
        }
    }

    /// Under autocast there are two kinds. The kernel takes only one, and exists only for the
    /// forward.
    #[test]
    fn tensor_cores_compute_one_kind_forward() {
        let sizes = Sizes { steps: 32, batch: 4096, features: 512, hidden: 512 };
        let plan = |way, direction, kinds| {
            Plan::on_hopper(way, direction, sizes, kinds, Hopper::h200(true))
        };
        let both = (Kind::Half, Kind::Half);
        for way in [Way::TensorCores, Way::Automatic] {
            assert_eq!(plan(way, Direction::Forward, both), Some(Plan::TensorCores));
            assert_eq!(plan(way, Direction::Forward, (Kind::Half, Kind::Float)), None);
            assert_eq!(plan(way, Direction::Forward, (Kind::Float, Kind::Float)), None);
            assert_eq!(plan(way, Direction::Backward, both), None);
        }
    }

    #[test]
    fn on_cuda_small_steps_are_one_kernel() {
        let gpu = Chip::Cuda { device: 0, hopper: Hopper::default() };
        let plan = |way, direction, steps, [batch, features, hidden]: [i64; 3], kinds| {
            Plan::new(way, direction, Sizes { steps, batch, features, hidden }, kinds, gpu)
        };
        let both = (Kind::BFloat16, Kind::BFloat16);
        let (small, large, wide) = ([16, 32, 128], [4096, 1024, 1024], [4, 512, 512]);
        let (forward, backward) = (Direction::Forward, Direction::Backward);
        let of = |steps, size| plan(Way::Automatic, forward, steps, size, both);
        assert_eq!(of(4, small), Plan::Fused { input_at_once: false });
        assert_eq!(of(512, small), Plan::Fused { input_at_once: false });
        assert_eq!(of(4, wide), Plan::Fused { input_at_once: false });
        assert_eq!(of(512, wide), Plan::Fused { input_at_once: true });
        assert_eq!(of(512, large), Plan::Kernel(Kernel::Step));
        assert_eq!(
            plan(Way::Automatic, backward, 4, small, both),
            Plan::Fused { input_at_once: true }
        );
        assert_eq!(plan(Way::Automatic, backward, 4, large, both), Plan::Kernel(Kernel::Step));
        // A forced way, and the fallback where a forced way is impossible.
        assert_eq!(plan(Way::Fused, forward, 8, large, both), Plan::Fused { input_at_once: true });
        let mixed = (Kind::BFloat16, Kind::Float);
        assert_eq!(plan(Way::Fused, forward, 8, small, mixed), Plan::Kernel(Kernel::Step));
    }

    #[test]
    fn few_steps_are_computed_by_the_cell() {
        let steps = [0, 1, 2, 3];
        let loops = |way: Way, kind| steps.map(|steps| way.calls_the_cell(steps, kind));
        for kind in [Kind::Float, Kind::Double] {
            assert_eq!(loops(Way::Automatic, kind), [false, false, true, false]);
        }
        for kind in [Kind::Half, Kind::BFloat16] {
            assert_eq!(loops(Way::Automatic, kind), [false; 4]);
        }
        assert_eq!(loops(Way::Cells, Kind::Half), [false, true, true, true]);
        assert_eq!(loops(Way::Step, Kind::Float), [false; 4]);

        let is_one = |way: Way, kinds, device| {
            steps.map(|steps| way.is_one_step_of_the_cell(steps, kinds, device))
        };
        let (yes, no, gpu) = ([false, true, false, false], [false; 4], Device::Cuda(0));
        for kind in [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16] {
            assert_eq!(is_one(Way::Automatic, (kind, kind), gpu), yes);
            assert_eq!(is_one(Way::Automatic, (kind, Kind::Double), gpu), yes);
            let expected = if is_half(kind) { no } else { yes };
            assert_eq!(is_one(Way::Automatic, (kind, kind), Device::Cpu), expected);
            assert_eq!(is_one(Way::Step, (kind, kind), gpu), no);
        }
        assert_eq!(is_one(Way::Automatic, (Kind::Float, Kind::Double), Device::Cpu), no);
    }

    /// The table in the documentation of `ops::lltm`.
    #[test]
    fn the_rows_that_the_docs_name_are_one_kernel_in_both_directions() {
        let is_one_kernel = |kind, tf32, batch, hidden| {
            let hopper = Hopper::h200(tf32);
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            [Direction::Forward, Direction::Backward]
                .iter()
                .map(|&direction| {
                    Plan::on_hopper(Way::Automatic, direction, sizes, (kind, kind), hopper)
                })
                .all(|plan| plan.is_some_and(|plan| plan != Plan::TensorCores))
        };
        let holds = |kind, tf32, rows: &[(i64, i64)]| {
            for &(hidden, most) in rows {
                for batch in 1..=most {
                    assert!(
                        is_one_kernel(kind, tf32, batch, hidden),
                        "{kind:?}, H = {hidden}, B = {batch}"
                    );
                }
            }
        };
        let half = [(128, 3600), (256, 1752), (512, 720), (768, 336), (1024, 256), (2048, 40)];
        let float = [(128, 1280), (256, 384), (512, 192), (768, 64), (1024, 64)];
        holds(Kind::Half, false, &half);
        holds(Kind::BFloat16, false, &half);
        holds(Kind::Float, true, &[(128, 3360)]);
        holds(Kind::Float, true, &half[1..]);
        holds(Kind::Float, false, &float);
        holds(Kind::Double, false, &[(128, 240)]);
        // Beyond these rows they are not, except for numbers of rows that fill the rounds of a
        // grid.
        for (hidden, most) in half {
            assert!(!is_one_kernel(Kind::Half, false, most + 1, hidden), "H = {hidden}");
        }
        for (hidden, most) in float {
            assert!(!is_one_kernel(Kind::Float, false, most + 1, hidden), "H = {hidden}");
        }
        assert!(!is_one_kernel(Kind::Double, false, 241, 128));
    }
}
