//! Which way computes a sequence.

mod tensor_cores;
#[cfg(test)]
mod tests;

pub(super) use crate::ops::recurrent::plan::{Direction, Sizes, Way};

use super::costs::{COSTS, VALUES, is_faster};
use crate::Result;
use crate::ffi::precision::matmul_allow_tf32;
use crate::ops::kinds::{Device, Kind};
use crate::ops::lltm_cell::kernels::device::TensorCores;
use crate::ops::lltm_cell::plan as cell;
use crate::ops::recurrent::kernels::cpu::Team;
use crate::ops::recurrent::kernels::cuda::Kernel;
use crate::ops::recurrent::plan::{Costs, Gpu, Pass, are_too_few_to_pack, is_half, team};
use tensor_cores::Tiles;

/// Whether this is one step, with products and state of these kinds, that the cell's kernels
/// compute, because nothing is cheaper. On the CPU they do not if a sequence is computed in a
/// wider kind than the cell.
pub(super) fn is_one_step_of_the_cell(
    way: Way,
    steps: i64,
    (product, state): (Kind, Kind),
    device: Device,
) -> bool {
    let is_as_wide = product == state && !is_half(product);
    way == Way::Automatic && steps == 1 && (device.is_cuda() || is_as_wide)
}

/// Whether this is computed as a loop of the cell, for tensors of one kind: with two steps, the
/// fixed cost of a sequence exceeds what it saves, and one step is the cell's anyway. That is not done
/// where it would round sums that a sequence does not round, which are in half kinds those of the weight's
/// gradient over steps.
pub(super) fn calls_the_cell(way: Way, steps: i64, kind: Kind) -> bool {
    match way {
        Way::Cells => steps > 0,
        Way::Automatic => steps == 2 && !is_half(kind),
        _ => false,
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
    gpu: Gpu,
    tensor_cores: TensorCores,
    costs: Option<&'static Costs>,
    /// Whether products of `Float` may use tf32.
    tf32: bool,
}

impl Hopper {
    #[cfg(test)]
    fn h200(tf32: bool) -> Hopper {
        let costs = Some(COSTS.h200());
        Hopper { gpu: Gpu::H200, tensor_cores: TensorCores::H200, costs, tf32 }
    }
}

impl Chip {
    /// The device, for products of this kind. `threads` says how many a CPU's kernel gets.
    pub fn of(device: Device, product: Kind, threads: impl FnOnce() -> i64) -> Result<Chip> {
        Ok(match device {
            Device::Cuda(index) => {
                let (gpu, tensor_cores) = (Gpu::of(device)?, TensorCores::of(device)?);
                let tf32 = product == Kind::Float && matmul_allow_tf32()?;
                let costs = Some(COSTS.of(device)?);
                Chip::Cuda { device: index, hopper: Hopper { gpu, tensor_cores, costs, tf32 } }
            }
            _ => Chip::Cpu { threads: threads() },
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
        let Hopper { gpu, tensor_cores, costs, tf32 } = hopper;
        let costs = costs?;
        let pass = Pass { direction, sizes, kind: product, tf32, gpu };
        // Under autocast there are two kinds, and the tensor-core kernel takes only one.
        let is_for_tiles = direction == Direction::Forward && product == state;
        let tiles = is_for_tiles.then(|| Tiles::new(sizes, product, tensor_cores)).flatten();
        match way {
            Way::TensorCores => tiles.map(|_| Plan::TensorCores),
            Way::Automatic => {
                let kernels = costs.all(&pass).filter(|kernel| is_faster(kernel, &pass));
                let kernels = kernels.map(|(kernel, cost)| (Plan::Kernel(kernel), cost));
                let tiles = tiles.filter(Tiles::are_faster);
                let tiles = tiles.map(|tiles| (Plan::TensorCores, tiles.cost_without_input()));
                let all = kernels.chain(tiles);
                all.min_by(|(_, one), (_, other)| one.total_cmp(other)).map(|(plan, _)| plan)
            }
            Way::WideGrid => {
                let grid = || costs.grid(&pass).map(|(kernel, _)| kernel);
                costs.forced(way, &pass).or_else(grid).map(Plan::Kernel)
            }
            _ => costs.forced(way, &pass).map(Plan::Kernel),
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
