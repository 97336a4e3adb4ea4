//! Which way computes a layer.

use super::Cell;
use super::products::{Cudnn, LAYER, LayerCosts, Products, of};
use super::tf32::Tf32;
use crate::Result;
use crate::ops::costs::{cheapest, is_clearly_cheaper};
use crate::ops::kinds::{Device, Kind};
use crate::ops::recurrent::kernels::cuda::Kernel;
use crate::ops::recurrent::kernels::{cudnn, onednn};
use crate::ops::recurrent::plan::{
    Costs, Direction, Gpu, Pass, Sizes, Way, are_too_few_to_pack, is_onednn_faster,
};
use crate::ops::way::forced;
use std::cell::Cell as Slot;

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

/// What a direction of a layer runs on.
#[derive(Clone, Copy)]
struct On {
    gpu: Gpu,
    room: Room,
    /// Whether gates are changed between the product with the input and the steps.
    is_padded: bool,
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

/// Chooses for a layer on CUDA, of which only the forward is needed unless `keep` is set. `is_flat` says
/// whether cuDNN takes the parameters as they are.
pub(super) fn library<C: Cell>(
    choice: Choice,
    sizes: Sizes,
    kind: Kind,
    device: Device,
    keep: bool,
    is_flat: impl FnOnce() -> Result<bool>,
) -> Result<Library> {
    let Choice { way, room } = choice;
    // cuDNN accepts no input without features.
    let may_be_cudnn = sizes.features > 0 && cudnn::is_enabled();
    Ok(match way {
        Way::Cudnn if may_be_cudnn => Library::Cudnn,
        Way::Automatic | Way::Packed | Way::Onednn if may_be_cudnn => {
            let (gpu, layer) = (Gpu::of(device)?, LAYER.of(device)?);
            let products = Products::new(layer, C::GATES, sizes, kind, choice.tf32(kind, sizes)?);
            let costs = C::COSTS.of(device)?;
            let on = On { gpu, room, is_padded: false };
            let directions = [Direction::Forward, Direction::Backward];
            let directions = &directions[..if keep { 2 } else { 1 }];
            let ours = directions
                .iter()
                .map(|&direction| automatic(costs, direction, sizes, products, on));
            let cudnn = C::CUDNN.of(device)?;
            let sum = |of: &dyn Fn(Direction) -> f64| directions.iter().copied().map(of).sum();
            let theirs = Theirs {
                gpu: sum(&|direction| products.of_cudnn(cudnn, direction)),
                flattening: match is_flat()? {
                    true => 0.0,
                    false => sum(&|direction| of(layer.flattening, direction)),
                },
                is_on_chip: directions.iter().any(|&of| products.on_chip(cudnn, of).is_some()),
                room,
            };
            faster(ours, &theirs)
        }
        _ => Library::Ours,
    })
}

/// What is known of cuDNN's layer.
struct Theirs {
    gpu: f64,
    /// The host's time to move the parameters to one piece of memory, in each call.
    flattening: f64,
    /// Whether one of its kernels keeps the weights on the chip for all steps.
    is_on_chip: bool,
    room: Room,
}

/// The faster one for a call, of which our kernels in each direction are known. The time of the GPU
/// decides, so that a replay computes what a call computes, unless cuDNN has to move parameters.
fn faster(ours: impl Iterator<Item = (Kernel, f64)>, theirs: &Theirs) -> Library {
    let Theirs { gpu, flattening, is_on_chip, room } = *theirs;
    let (mut is_by_steps, mut time) = (true, 0.0);
    for (kernel, cost) in ours {
        is_by_steps &= kernel == Kernel::Step;
        time += cost;
    }
    // A product and a kernel for each step are what cuDNN has for these sizes, too.
    let is_alike = is_by_steps && !is_on_chip && flattening == 0.0;
    let is_ours_faster = match room {
        Room::Whole => is_clearly_cheaper(time, gpu.max(flattening)),
        // The margin was measured for one layer at a time only.
        Room::Half => time < gpu.max(flattening),
    };
    if is_ours_faster && !is_alike { Library::Ours } else { Library::Cudnn }
}

/// The kernel for a direction of a layer that is ours; `is_padded` as in [`On`].
pub(super) fn kernel<C: Cell>(
    choice: Choice,
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    device: Device,
    is_padded: bool,
) -> Result<Kernel> {
    let Choice { way, room } = choice;
    let (gpu, costs) = (Gpu::of(device)?, C::COSTS.of(device)?);
    let tf32 = choice.tf32(kind, sizes)?;
    let products = Products::new(LAYER.of(device)?, C::GATES, sizes, kind, tf32);
    Ok(match way {
        Way::Automatic | Way::Packed | Way::Onednn => {
            automatic(costs, direction, sizes, products, On { gpu, room, is_padded }).0
        }
        Way::Block if is_padded => Kernel::Step,
        way => {
            let pass = Pass { direction, sizes, kind, tf32: tf32.steps(direction), gpu };
            costs.forced(way, &pass).unwrap_or(Kernel::Step)
        }
    })
}

/// Whether the cheapest of our kernels is one for each step in either direction. It depends on nothing that may
/// change between the two passes of a call: tf32 counts as allowed.
pub(super) fn is_step_cheapest<C: Cell>(sizes: Sizes, kind: Kind, device: Device) -> Result<bool> {
    let tf32 = if kind == Kind::Float { Tf32::ALL } else { Tf32::NONE };
    let costs = C::COSTS.of(device)?;
    let products = Products::new(LAYER.of(device)?, C::GATES, sizes, kind, tf32);
    let of = On { gpu: Gpu::of(device)?, room: Room::Whole, is_padded: false };
    let is_step = |direction| automatic(costs, direction, sizes, products, of).0 == Kernel::Step;
    Ok([Direction::Forward, Direction::Backward].into_iter().any(is_step))
}

/// The kernel with which all steps cost least, and what the direction costs the GPU with it and all products.
fn automatic(
    costs: &Costs,
    direction: Direction,
    sizes: Sizes,
    products: Products<'_>,
    On { gpu, room, is_padded }: On,
) -> (Kernel, f64) {
    let tf32 = products.tf32.steps(direction);
    let steps = sizes.steps as f64;
    let on = |gpu| {
        let pass = Pass { direction, sizes, kind: products.kind, tf32, gpu };
        let scaled = costs.all(&pass).map(move |(kernel, step)| (kernel, step, tf32));
        let exact = costs.cluster(&Pass { tf32: false, ..pass }).filter(|_| tf32);
        let all = scaled.chain(exact.map(|(kernel, step)| (kernel, step, false)));
        all.filter(move |(kernel, ..)| !(is_padded && matches!(kernel, Kernel::Block { .. })))
    };
    let halves = (room == Room::Half).then(|| on(gpu.half())).into_iter().flatten();
    // Kernels that fill the GPU take turns with the other layer's.
    let turns = if room == Room::Half { 2.0 } else { 1.0 };
    let whole = on(gpu).map(|(kernel, step, is_scaled)| (kernel, turns * step, is_scaled));
    let of_all = halves.chain(whole).map(|(kernel, step, is_scaled)| {
        (kernel, products.with(direction, (kernel, steps * step), is_scaled))
    });
    // The host may be slower than the GPU.
    let launches = of(products.costs.launches, direction);
    let of_step = products.step_by_step(direction);
    let at_once = products.at_once(direction);
    let by_step = (Kernel::Step, at_once + steps * of_step.max(launches));
    match cheapest([by_step].into_iter().chain(of_all)) {
        Some((kernel, cost)) if kernel != Kernel::Step => (kernel, cost),
        _ => (Kernel::Step, at_once + steps * of_step),
    }
}

/// A call of a layer, computed in a way that is forced.
#[derive(Clone, Copy)]
pub(in crate::ops) struct Forced {
    pub way: Way,
    pub sizes: Sizes,
    pub kind: Kind,
    /// Whether libtorch's switch allows it.
    pub tf32: bool,
    /// Whether the backward pass follows.
    pub keep: bool,
}

/// The GPU's time of a call by these costs; `None` if the way has no kernel for it.
pub(in crate::ops) fn predicted<C: Cell>(
    call: &Forced,
    (costs, cudnn, layer): (&Costs, &Cudnn, &LayerCosts),
    gpu: Gpu,
) -> Option<f64> {
    let Forced { way, sizes, kind, tf32, keep } = *call;
    let is_tf32 = tf32 && kind == Kind::Float;
    let tf32 = if is_tf32 { Tf32::on(way, sizes) } else { Tf32::NONE };
    let products = Products::new(layer, C::GATES, sizes, kind, tf32);
    let cost = |direction| {
        if way == Way::Cudnn {
            return Some(products.of_cudnn(cudnn, direction));
        }
        let tf32 = tf32.steps(direction);
        let pass = Pass { direction, sizes, kind, tf32, gpu };
        let steps = sizes.steps as f64;
        Some(match costs.priced(way, &pass) {
            Some((kernel, step)) => products.with(direction, (kernel, steps * step), tf32),
            None => steps * products.step_by_step(direction) + products.at_once(direction),
        })
    };
    let exists = [Way::Cudnn, Way::Step].contains(&way) || {
        let tf32 = tf32.steps(Direction::Forward);
        costs.priced(way, &Pass { direction: Direction::Forward, sizes, kind, tf32, gpu }).is_some()
    };
    let backward = if keep { cost(Direction::Backward)? } else { 0.0 };
    exists.then_some(cost(Direction::Forward)? + backward)
}

#[cfg(test)]
const H200: On = On { gpu: Gpu::H200, room: Room::Whole, is_padded: false };

/// The way of our kernels for these sizes on an H200.
#[cfg(test)]
pub(in crate::ops) fn way_on_h200<C: Cell>(
    direction: Direction,
    sizes: Sizes,
    kind: Kind,
    allows_tf32: bool,
) -> &'static str {
    let tf32 = if allows_tf32 { Tf32::where_allowed(sizes) } else { Tf32::NONE };
    let products = Products::new(LAYER.h200(), C::GATES, sizes, kind, tf32);
    automatic(C::COSTS.h200(), direction, sizes, products, H200).0.name()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::costs::CARDS;
    use crate::ops::recurrent::kernels::cuda::Product;
    use crate::ops::recurrent::plan::{
        Line, Product as Multiplied, block, cluster, grid, wide_grid,
    };

    /// A cell with one kernel of each way, whose costs are those of a GRU.
    fn costs() -> Costs {
        let cluster = |product, hidden, step: [f64; 2]| cluster::Entry {
            product,
            hidden,
            cluster: 8,
            share: [2, 2],
            step: step.map(Some),
        };
        let iteration = Line { fixed: 0.5, each: 0.12 };
        let mut wide = wide_grid::Entry::new((Direction::Forward, Multiplied::Half), 32, 64);
        wide.round = wide_grid::Round { fixed: 2.25, column: 0.0018, block: 0.0072 };
        Costs {
            values: 4,
            blocks: block::Entry::all(),
            clusters: vec![
                cluster(Multiplied::Half, 256, [0.96, 1.5]),
                cluster(Multiplied::Scaled, 128, [0.5, 0.95]),
                cluster(Multiplied::Float, 128, [0.9, 1.4]),
            ],
            grids: vec![grid::Entry {
                iteration,
                ..grid::Entry::new(Direction::Forward, 32, [2, 2])
            }],
            plain_grids: Vec::new(),
            wide_grids: vec![wide],
        }
    }

    fn layer() -> &'static LayerCosts {
        LAYER.h200()
    }

    fn planned(steps: i64, batch: i64, hidden: i64, room: Room) -> Kernel {
        let sizes = Sizes { steps, batch, features: hidden, hidden };
        let products = Products::new(layer(), 3, sizes, Kind::BFloat16, Tf32::NONE);
        automatic(&costs(), Direction::Forward, sizes, products, On { room, ..H200 }).0
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
        // One step is over before its weights have been loaded.
        assert_ne!(planned(1, 256, 1024, Room::Whole), wide(4));
        // No kernel holds these weights.
        assert_eq!(planned(512, 64, 2048, Room::Whole), Kernel::Step);
        // Rows that are no whole vectors.
        assert_eq!(planned(512, 64, 1001, Room::Whole), Kernel::Step);
    }

    /// On any card: none of its kernels is for one compute capability.
    #[test]
    fn small_layers_are_one_block() {
        for card in &CARDS {
            small_layers_are_one_block_on(card.multiprocessors.into());
        }
    }

    fn small_layers_are_one_block_on(processors: i64) {
        let gpu = Gpu { processors, ..Gpu::default() };
        let of = |hidden, is_padded| {
            let sizes = Sizes { steps: 20, batch: 5, features: 3, hidden };
            let products = Products::new(layer(), 3, sizes, Kind::BFloat16, Tf32::NONE);
            let on = On { gpu, room: Room::Whole, is_padded };
            automatic(&costs(), Direction::Backward, sizes, products, on)
        };
        let block = |sums_weights| Kernel::Block { blocks: 5, sums_weights };
        assert_eq!([of(16, false).0, of(64, false).0], [block(true), block(false)]);
        // The products for the weights' gradients follow.
        assert!(of(64, false).1 > of(16, false).1 + layer().block_products);
        assert_eq!([of(65, false).0, of(16, true).0], [Kernel::Step; 2]);
    }

    #[test]
    fn cards_without_kernels_for_all_steps_take_single_steps() {
        let cells = [costs(), costs()];
        for (steps, batch, hidden) in [(1, 1, 64), (512, 16, 128), (512, 256, 1024)] {
            for (kind, tf32) in [(Kind::Half, Tf32::NONE), (Kind::Float, Tf32::ALL)] {
                let sizes = Sizes { steps, batch, features: hidden, hidden };
                let products = Products::new(layer(), 4, sizes, kind, tf32);
                for (cell, room) in cells.iter().zip([Room::Whole, Room::Half]) {
                    for card in &CARDS {
                        let processors = card.multiprocessors.into();
                        let gpu = Gpu { processors, ..Gpu::default() };
                        for direction in [Direction::Forward, Direction::Backward] {
                            let of = On { gpu, room, is_padded: false };
                            let (kernel, cost) = automatic(cell, direction, sizes, products, of);
                            let is_block = matches!(kernel, Kernel::Block { .. });
                            assert!(kernel == Kernel::Step || hidden == 64 && is_block);
                            assert!(cost.is_finite() && cost > 0.0);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn cudnn_is_called_unless_ours_is_clearly_faster() {
        let grid = Kernel::Grid { columns: 32, row_groups: 1, product: Product::Plain };
        let theirs = |gpu| Theirs { gpu, flattening: 0.0, is_on_chip: false, room: Room::Whole };
        let of = |ours: &[(Kernel, f64)], theirs: &Theirs| faster(ours.iter().copied(), theirs);
        assert_eq!(of(&[(grid, 100.0)], &theirs(110.0)), Library::Cudnn);
        assert_eq!(of(&[(grid, 100.0)], &theirs(130.0)), Library::Ours);
        let half = Theirs { room: Room::Half, ..theirs(110.0) };
        assert_eq!(of(&[(grid, 100.0)], &half), Library::Ours);
        assert_eq!(of(&[(grid, 100.0), (Kernel::Step, 200.0)], &theirs(370.0)), Library::Ours);
        // Both launch a product and a kernel for each step, unless cuDNN keeps the weights on the chip or has
        // to move them.
        let by_steps = [(Kernel::Step, 100.0), (Kernel::Step, 200.0)];
        assert_eq!(of(&by_steps, &theirs(900.0)), Library::Cudnn);
        let on_chip = |gpu| Theirs { is_on_chip: true, ..theirs(gpu) };
        assert_eq!(of(&by_steps, &on_chip(900.0)), Library::Ours);
        assert_eq!(of(&by_steps, &on_chip(300.0)), Library::Cudnn);
        let moved = |gpu| Theirs { flattening: 850.0, ..theirs(gpu) };
        assert_eq!([1.0, 900.0].map(|gpu| of(&by_steps, &moved(gpu))), [Library::Ours; 2]);
        // The host moves them while the GPU still works.
        assert_eq!(of(&[(grid, 2000.0)], &moved(2100.0)), Library::Cudnn);
    }

    #[test]
    fn few_steps_in_tf32_are_computed_without_scales() {
        let product_of = |steps| {
            let sizes = Sizes { steps, batch: 16, features: 96, hidden: 96 };
            let products = Products::new(layer(), 3, sizes, Kind::Float, Tf32::ALL);
            automatic(&costs(), Direction::Forward, sizes, products, H200).0
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
