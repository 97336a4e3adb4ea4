//! Which way computes a layer.

use super::libtorch::are_flat_for_cudnn;
use super::products::{Call, HOST, Host, Products, STEP_OF_OURS};
use super::tf32::Tf32;
use super::{Arguments, Cell};
use crate::Result;
use crate::ops::recurrent::kernels::cuda::Kernel;
use crate::ops::recurrent::kernels::{cudnn, onednn};
use crate::ops::recurrent::plan::{
    Costs, Direction, Gpu, Pass, Sizes, Way, are_too_few_to_pack, is_onednn_faster,
};
use crate::ops::way::forced;
use std::cell::Cell as Slot;
use tch::{Device, Kind};

/// How much of a GPU a layer may fill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Room {
    #[default]
    Whole,
    /// Another layer of the same sizes runs at the same time.
    Half,
}

thread_local! {
    static ROOM: Slot<Room> = const { Slot::new(Room::Whole) };
}

/// Runs `body`. In it, layers that this thread calls are planned for half of a GPU, in both passes:
/// two kernels that each want all multiprocessors would only take turns.
pub(crate) fn with_half_of_the_gpu<T>(body: impl FnOnce() -> T) -> T {
    struct Restore(Room);
    impl Drop for Restore {
        fn drop(&mut self) {
            ROOM.set(self.0);
        }
    }
    let _restore = Restore(ROOM.replace(Room::Half));
    body()
}

/// What a call decides for both of its passes, whichever threads run them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choice {
    way: Way,
    room: Room,
}

impl Choice {
    /// The choice of this thread at this time.
    pub fn now() -> Choice {
        Choice { way: forced(), room: ROOM.get() }
    }

    /// Which products of a layer on CUDA are in tf32 at this time.
    pub fn tf32(self, kind: Kind, sizes: Sizes) -> Result<Tf32> {
        Tf32::of_layer(self.way, kind, sizes)
    }
}

/// Who computes a layer in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Library {
    /// Kernels of this crate.
    #[default]
    Ours,
    Cudnn,
    Onednn,
}

/// Chooses for a layer on the CPU, of which only the forward is needed unless `keep` is set.
pub(super) fn cpu_library<C: Cell>(
    Choice { way, .. }: Choice,
    sizes: Sizes,
    kind: Kind,
    keep: bool,
) -> Library {
    // libtorch calls it for LSTMs only, and it accepts no input without features.
    let has_onednn = !C::STATE_IS_H && kind == Kind::Float && sizes.features > 0;
    let is_onednn = match way {
        Way::Onednn => true,
        Way::Step | Way::Packed => false,
        _ => is_onednn_faster(sizes, keep),
    };
    if has_onednn && is_onednn && onednn::is_enabled() { Library::Onednn } else { Library::Ours }
}

/// Whether our kernels compute a layer on the CPU step by step.
pub(super) fn is_by_steps(Choice { way, .. }: Choice, sizes: Sizes) -> bool {
    match way {
        Way::Step => true,
        Way::Packed => false,
        _ => are_too_few_to_pack(sizes),
    }
}

/// Chooses for a layer on CUDA, of which only the forward is needed unless `keep` is set.
pub(super) fn library<C: Cell>(
    choice: Choice,
    sizes: Sizes,
    kind: Kind,
    device: Device,
    keep: bool,
    arguments: &Arguments<'_>,
) -> Result<Library> {
    let Choice { way, room } = choice;
    // cuDNN accepts no input without features.
    let may_be_cudnn = sizes.features > 0 && cudnn::is_enabled();
    Ok(match way {
        Way::Cudnn if may_be_cudnn => Library::Cudnn,
        Way::Automatic | Way::Packed | Way::Onednn if may_be_cudnn => {
            let is_flat = are_flat_for_cudnn(arguments)?;
            let gpu = Gpu::of(device)?;
            let products = Products::new(C::GATES, sizes, kind, choice.tf32(kind, sizes)?);
            let directions = [Direction::Forward, Direction::Backward];
            let directions = &directions[..if keep { 2 } else { 1 }];
            let ours = Call::of_all(directions, sizes.steps, |direction| {
                let (kernel, cost) = automatic(C::COSTS, direction, sizes, products, (gpu, room));
                (cost, if kernel == Kernel::Step { STEP_OF_OURS.of(direction) } else { 0.0 })
            });
            let cudnn = Call::of_all(directions, sizes.steps, |direction| {
                let [costs, host] = products.of_cudnn();
                (costs.of(direction), host.of(direction))
            });
            faster([ours, cudnn], &HOST[usize::from(keep)], is_flat)
        }
        _ => Library::Ours,
    })
}

/// The faster one for a call.
fn faster([ours, cudnn]: [Call; 2], host: &Host, is_flat: bool) -> Library {
    let flattening = if is_flat { 0.0 } else { host.flattening };
    let is_ours = ours.time(host.of_ours) <= cudnn.time(host.of_cudnn + flattening);
    if is_ours { Library::Ours } else { Library::Cudnn }
}

/// The kernel for a direction of a layer that is ours.
pub(super) fn kernel<C: Cell>(
    choice: Choice,
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    device: Device,
) -> Result<Kernel> {
    let Choice { way, room } = choice;
    let gpu = Gpu::of(device)?;
    let products = Products::new(C::GATES, sizes, kind, choice.tf32(kind, sizes)?);
    Ok(match way {
        Way::Automatic | Way::Packed | Way::Onednn => {
            automatic(C::COSTS, direction, sizes, products, (gpu, room)).0
        }
        way => {
            let tf32 = products.tf32.steps(direction);
            let pass = Pass { direction, sizes, kind, tf32, gpu };
            C::COSTS.forced(way, &pass).unwrap_or(Kernel::Step)
        }
    })
}

/// Whether the cheapest of our kernels is one for each step in either direction. It depends on nothing that may
/// change between the two passes of a call: tf32 counts as allowed.
pub(super) fn is_step_cheapest<C: Cell>(sizes: Sizes, kind: Kind, device: Device) -> Result<bool> {
    let tf32 = if kind == Kind::Float { Tf32::ALL } else { Tf32::NONE };
    let products = Products::new(C::GATES, sizes, kind, tf32);
    let of = (Gpu::of(device)?, Room::Whole);
    let is_step = |direction| automatic(C::COSTS, direction, sizes, products, of).0 == Kernel::Step;
    Ok([Direction::Forward, Direction::Backward].into_iter().any(is_step))
}

/// The kernel whose steps cost least, and what one costs with its share of all products.
fn automatic(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products,
    (gpu, room): (Gpu, Room),
) -> (Kernel, f64) {
    /// Fewer steps are over before the wide grid's weights have been loaded.
    const FEW: i64 = 8;
    /// What one more launch takes the host, for scales: in few steps exact products are faster.
    const SCALING: f64 = 8.0;
    let tf32 = products.tf32.steps(direction);
    let on = |gpu| {
        let pass = Pass { direction, sizes, kind: products.kind, tf32, gpu };
        let is_worth =
            |kernel: &Kernel| sizes.steps >= FEW || !matches!(kernel, Kernel::WideGrid { .. });
        let scaling = if tf32 { SCALING / sizes.steps as f64 } else { 0.0 };
        let scaled = costs.all(&pass).filter(move |(kernel, _)| is_worth(kernel));
        let scaled = scaled.map(move |(kernel, cost)| (kernel, cost as f64 / 100.0 + scaling));
        let exact = costs.cluster(&Pass { tf32: false, ..pass }).filter(|_| tf32);
        scaled.chain(exact.map(|(kernel, cost)| (kernel, cost as f64 / 100.0)))
    };
    let halves = (room == Room::Half).then(|| on(gpu.half())).into_iter().flatten();
    // Kernels that fill the GPU take turns with the other layer's.
    let turns = if room == Room::Half { 2.0 } else { 1.0 };
    let of_all = halves.chain(on(gpu).map(|(kernel, cost)| (kernel, turns * cost)));
    let of_step = products.step_by_step(direction);
    // The host may be slower than the GPU.
    let by_step = (Kernel::Step, of_step.max(STEP_OF_OURS.of(direction)));
    let (kernel, cost) =
        of_all.fold(by_step, |best, other| if other.1 < best.1 { other } else { best });
    let cost = if kernel == Kernel::Step { of_step } else { cost };
    (kernel, cost + products.at_once(direction))
}

/// The way of our kernels for these sizes on an H200.
#[cfg(test)]
pub(in crate::ops) fn way_on_h200<C: Cell>(
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    allows_tf32: bool,
) -> &'static str {
    let tf32 = if allows_tf32 { Tf32::where_allowed(sizes) } else { Tf32::NONE };
    let products = Products::new(C::GATES, sizes, kind, tf32);
    automatic(C::COSTS, direction, sizes, products, (Gpu::H200, Room::Whole)).0.name()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::recurrent::kernels::cuda::Product;
    use crate::ops::recurrent::plan::{Line, Product as Multiplied, cluster, grid, wide_grid};

    const H200: Gpu = Gpu::H200;

    /// A cell with one kernel of each way, whose costs are those of a GRU.
    const COSTS: Costs = Costs {
        values: 4,
        clusters: &[cluster::Entry::new(Multiplied::Half, 256, 8, [2, 2], [Some(96), Some(150)])],
        grids: &[grid::Entry::new(Direction::Forward, 32, Line { fixed: 50, each: 12 }, [2, 2])],
        plain_grids: &[],
        wide_grids: &[wide_grid::Entry {
            direction: Direction::Forward,
            product: Multiplied::Half,
            columns: 32,
            rows: 64,
            round: [225, 18, 72],
        }],
    };

    fn planned(steps: i64, batch: i64, hidden: i64, room: Room) -> Kernel {
        let sizes = Sizes { steps, batch, features: hidden, hidden };
        let products = Products::new(3, sizes, Kind::BFloat16, Tf32::NONE);
        automatic(&COSTS, Direction::Forward, sizes, products, (H200, room)).0
    }

    #[test]
    fn the_way_suits_the_sizes() {
        let product = Product::Plain;
        let cluster = |alone| Kernel::Cluster { cluster: 8, alone, product };
        assert_eq!(planned(512, 16, 256, Room::Whole), cluster(true));
        // 16 clusters, of which 15 would run at a time without sharing multiprocessors.
        assert_eq!(planned(512, 120, 256, Room::Whole), cluster(true));
        assert_eq!(planned(512, 128, 256, Room::Whole), cluster(false));
        let grid = |row_groups| Kernel::Grid { columns: 32, row_groups, product };
        assert_eq!(planned(512, 64, 512, Room::Whole), grid(4));
        let wide = |row_groups| Kernel::WideGrid { columns: 32, row_groups, product };
        assert_eq!(planned(512, 256, 1024, Room::Whole), wide(4));
        assert_ne!(planned(7, 256, 1024, Room::Whole), wide(4));
        // No kernel holds these weights.
        assert_eq!(planned(512, 64, 2048, Room::Whole), Kernel::Step);
        // Rows that are no whole vectors.
        assert_eq!(planned(512, 64, 1001, Room::Whole), Kernel::Step);
    }

    #[test]
    fn cudnn_is_called_where_it_is_faster() {
        let [forward, _] = &HOST;
        let gpu = |gpu| Call { gpu, launches: 0.0 };
        assert_eq!(faster([gpu(2000.0), gpu(1900.0)], forward, true), Library::Cudnn);
        assert_eq!(faster([gpu(1900.0), gpu(2000.0)], forward, true), Library::Ours);
        // Few steps are over before the host has made another call.
        assert_eq!(faster([gpu(20.0), gpu(10.0)], forward, true), Library::Ours);
        assert_eq!(faster([gpu(100.0), gpu(70.0)], forward, true), Library::Cudnn);
        assert_eq!(faster([gpu(100.0), gpu(70.0)], forward, false), Library::Ours);
        // Launches of single steps take the host longer than the GPU takes to run them.
        let by_step = |launches| Call { gpu: 20.0, launches };
        assert_eq!(faster([by_step(88.0), by_step(56.0)], forward, true), Library::Cudnn);
        assert_eq!(faster([by_step(22.0), by_step(14.0)], forward, true), Library::Ours);
    }

    #[test]
    fn few_steps_in_tf32_are_computed_without_scales() {
        const CLUSTERS: [cluster::Entry; 2] = [
            cluster::Entry::new(Multiplied::Scaled, 128, 8, [2, 2], [Some(50), Some(95)]),
            cluster::Entry::new(Multiplied::Float, 128, 8, [2, 1], [Some(90), Some(140)]),
        ];
        let costs = Costs { clusters: &CLUSTERS, ..COSTS };
        let product_of = |steps| {
            let sizes = Sizes { steps, batch: 16, features: 64, hidden: 64 };
            let products = Products::new(3, sizes, Kind::Float, Tf32::ALL);
            automatic(&costs, Direction::Forward, sizes, products, (H200, Room::Whole)).0
        };
        let product = |steps| match product_of(steps) {
            Kernel::Cluster { product, .. } => Some(product),
            _ => None,
        };
        assert_eq!([product(4), product(512)], [Some(Product::Plain), Some(Product::Scaled)]);
    }

    #[test]
    fn two_layers_at_a_time_share_the_gpu() {
        let product = Product::Plain;
        // Half of the blocks take twice as many rows each, and less than twice as long.
        let sixteen_blocks_each = Kernel::Grid { columns: 32, row_groups: 4, product };
        assert_eq!(planned(512, 64, 512, Room::Half), sixteen_blocks_each);
        let [whole, half] = [Room::Whole, Room::Half].map(|room| planned(512, 128, 512, room));
        assert_eq!(whole, Kernel::Grid { columns: 32, row_groups: 8, product });
        assert_eq!(half, Kernel::Grid { columns: 32, row_groups: 4, product });
        // 8 clusters are more than run in half of the GPU without sharing multiprocessors.
        let alone = |room| match planned(512, 64, 256, room) {
            Kernel::Cluster { alone, .. } => Some(alone),
            _ => None,
        };
        assert_eq!([alone(Room::Whole), alone(Room::Half)], [Some(true), Some(false)]);
    }

    #[test]
    fn half_of_the_gpu_is_for_the_body_only() {
        let room = || Choice::now().room;
        let inside = with_half_of_the_gpu(|| (room(), std::thread::spawn(room).join().ok()));
        assert_eq!((inside, room()), ((Room::Half, Some(Room::Whole)), Room::Whole));
        let panicked = std::panic::catch_unwind(|| with_half_of_the_gpu(|| panic!("inside")));
        assert!(panicked.is_err());
        assert_eq!(room(), Room::Whole);
    }
}
