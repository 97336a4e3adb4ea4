//! The plans for an H200.

use super::*;
use crate::ops::recurrent::kernels::cpu::Team;
use crate::ops::recurrent::kernels::cuda::Product;
use crate::ops::recurrent::kernels::device::{Clusters, Grid};
use crate::ops::recurrent::plan::Priced;

fn pass(direction: Direction, sizes: Sizes, kind: Kind, tf32: bool) -> Pass {
    Pass { direction, sizes, kind, tf32, gpu: Gpu::H200 }
}

/// The columns of a block and the groups of rows.
fn counts((kernel, _): Priced) -> (i64, i64) {
    match kernel {
        Kernel::Grid { columns, row_groups, .. }
        | Kernel::WideGrid { columns, row_groups, .. }
        | Kernel::PlainGrid { columns, row_groups } => (columns.into(), row_groups.into()),
        Kernel::Cluster { cluster, .. } => (cluster.into(), 0),
        Kernel::Block { .. } | Kernel::Step => (0, 0),
    }
}

/// Sizes of a sequence with as many features as columns of h.
fn square(steps: i64, batch: i64, hidden: i64) -> Sizes {
    Sizes { steps, batch, features: hidden, hidden }
}

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
    let plan =
        |way, chip| Plan::new(way, Direction::Forward, sizes, (Kind::Double, Kind::Double), chip);
    let cpu = Chip::Cpu { threads: 4 };
    let one = Plan::Cpu(Team { row_groups: 1, column_groups: 1 });
    assert_eq!(plan(Way::Step, cpu), Plan::Kernel(Kernel::Step));
    assert_eq!(plan(Way::Packed, cpu), one);
    for way in [Way::Automatic, Way::Cells, Way::Fused, Way::Resident, Way::Grid] {
        assert_eq!(plan(way, cpu), one);
    }
    let gpu = Chip::Cuda { device: 0, hopper: Hopper::default() };
    assert_eq!(plan(Way::Step, gpu), Plan::Kernel(Kernel::Step));
    for way in [Way::Automatic, Way::Fused, Way::Packed, Way::Resident, Way::Grid] {
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
    let plan =
        |way, direction, kinds| Plan::on_hopper(way, direction, sizes, kinds, Hopper::h200(true));
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
    assert_eq!(plan(Way::Automatic, backward, 4, small, both), Plan::Fused { input_at_once: true });
    assert_eq!(plan(Way::Automatic, backward, 4, large, both), Plan::Kernel(Kernel::Step));
    // A forced way, and the fallback where a forced way is impossible.
    assert_eq!(plan(Way::Fused, forward, 8, large, both), Plan::Fused { input_at_once: true });
    let mixed = (Kind::BFloat16, Kind::Float);
    assert_eq!(plan(Way::Fused, forward, 8, small, mixed), Plan::Kernel(Kernel::Step));
}

#[test]
fn few_steps_are_computed_by_the_cell() {
    let steps = [0, 1, 2, 3];
    let loops = |way: Way, kind| steps.map(|steps| calls_the_cell(way, steps, kind));
    for kind in [Kind::Float, Kind::Double] {
        assert_eq!(loops(Way::Automatic, kind), [false, false, true, false]);
    }
    for kind in [Kind::Half, Kind::BFloat16] {
        assert_eq!(loops(Way::Automatic, kind), [false; 4]);
    }
    assert_eq!(loops(Way::Cells, Kind::Half), [false, true, true, true]);
    assert_eq!(loops(Way::Step, Kind::Float), [false; 4]);

    let is_one = |way: Way, kinds, device| {
        steps.map(|steps| is_one_step_of_the_cell(way, steps, kinds, device))
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

mod cluster {
    use super::*;

    const H200: Clusters = Clusters::H200;

    fn kernel(
        direction: Direction,
        sizes: Sizes,
        kind: Kind,
        tf32: bool,
        clusters: Clusters,
    ) -> Option<i64> {
        let pass =
            Pass { gpu: Gpu { clusters, ..Gpu::H200 }, ..pass(direction, sizes, kind, tf32) };
        COSTS.h200().cluster(&pass).map(|found| counts(found).0)
    }

    #[test]
    fn kernels_suit_the_size() {
        use Direction::{Backward, Forward};
        let of = |direction, batch, hidden| {
            kernel(direction, square(512, batch, hidden), Kind::Half, false, H200)
        };
        assert_eq!(of(Forward, 16, 128), Some(8));
        assert_eq!(of(Forward, 4096, 256), Some(8));
        assert_eq!(of(Forward, 56, 512), Some(16));
        assert_eq!(of(Forward, 57, 512), Some(8));
        assert_eq!(of(Backward, 120, 512), Some(8));
        assert_eq!(of(Forward, 57, 768), Some(16));
        let tf32 = |direction, batch, hidden| {
            kernel(direction, square(512, batch, hidden), Kind::Float, true, H200)
        };
        for direction in [Forward, Backward] {
            assert_eq!(tf32(direction, 16, 128), Some(8));
            assert_eq!(tf32(direction, 16, 512), Some(16));
            assert_eq!(tf32(direction, 57, 512), Some(8));
            assert_eq!(tf32(direction, 16, 768), Some(16));
            assert_eq!(tf32(direction, 16, 769), None);
        }
    }

    #[test]
    fn float_is_multiplied_in_tf32_where_that_is_allowed() {
        let of = |kind, tf32| {
            COSTS.h200().cluster(&pass(Direction::Forward, square(512, 16, 128), kind, tf32)).map(
                |(kernel, _)| matches!(kernel, Kernel::Cluster { product: Product::Scaled, .. }),
            )
        };
        assert_eq!(of(Kind::Float, true), Some(true));
        assert_eq!(of(Kind::Float, false), Some(false));
        assert_eq!(of(Kind::Double, true), Some(false));
        assert_eq!(of(Kind::BFloat16, true), Some(false));
    }

    #[test]
    fn what_may_not_be_rounded_has_larger_kernels_forward() {
        for kind in [Kind::Float, Kind::Double] {
            let of =
                |direction, hidden| kernel(direction, square(512, 16, hidden), kind, false, H200);
            assert_eq!(of(Direction::Forward, 128), Some(8));
            assert_eq!(of(Direction::Backward, 128), Some(8));
            assert_eq!(of(Direction::Forward, 129), Some(16));
            assert_eq!(of(Direction::Forward, 256), Some(16));
            assert_eq!(of(Direction::Backward, 129), None);
            assert_eq!(of(Direction::Forward, 257), None);
        }
    }

    #[test]
    fn they_are_taken_where_they_are_faster() {
        let faster = |direction, steps, batch, hidden, kind| {
            let pass = pass(direction, square(steps, batch, hidden), kind, false);
            COSTS.h200().cluster(&pass).is_some_and(|found| is_faster(&found, &pass))
        };
        for direction in [Direction::Forward, Direction::Backward] {
            assert!(faster(direction, 512, 16, 128, Kind::Double));
            assert!(faster(direction, 512, 120, 128, Kind::Float));
            assert!(faster(direction, 512, 1024, 128, Kind::Half));
            assert!(faster(direction, 512, 112, 768, Kind::Half));
            // Too few steps to pay for the weights.
            assert!(!faster(direction, 7, 16, 128, Kind::Half));
            assert!(!faster(direction, 512, 4096, 512, Kind::Half));
            // Clusters that run in several rounds, for a size at which per-step kernels take less
            // time.
            assert!(!faster(direction, 512, 2000, 5, Kind::Float));
        }
    }

    #[test]
    fn there_is_a_kernel_where_the_weights_fit() {
        let cluster = |clusters, batch, hidden| {
            kernel(Direction::Forward, square(512, batch, hidden), Kind::Half, false, clusters)
        };
        assert_eq!(cluster(H200, 57, 768), Some(16));
        assert_eq!(cluster(H200, 1, 769), None);
        // A GPU, or a part of one, without clusters of 16; and one without any clusters.
        let part = Clusters { of_8: 1, of_16: 0 };
        assert_eq!(cluster(part, 16, 512), Some(8));
        assert_eq!(cluster(part, 16, 513), None);
        assert_eq!(cluster(Clusters::default(), 16, 4), None);
        // As much as the kernel can count, more than that, and more than any memory holds.
        assert_eq!(cluster(H200, 1 << 18, 4), Some(8));
        assert_eq!(cluster(H200, 1 << 19, 4), None);
        assert_eq!(cluster(H200, i64::MAX, 4), None);
    }
}

mod grid {
    use super::*;

    const H200: Grid = Grid::H200;

    fn share(batch: i64, hidden: i64, kind: Kind, tf32: bool, grid: Grid) -> Option<(i64, i64)> {
        let pass = pass(Direction::Forward, square(512, batch, hidden), kind, tf32);
        COSTS.h200().grid(&Pass { gpu: Gpu { grid, ..Gpu::H200 }, ..pass }).map(counts)
    }

    #[test]
    fn there_is_a_share_where_the_weights_fit() {
        let of = |batch, hidden| share(batch, hidden, Kind::BFloat16, false, H200);
        assert_eq!(of(1, 8), Some((16, 1)));
        assert_eq!(of(64, 2048), Some((16, 1)));
        // Rows of h that are not whole vectors, more weights than registers hold, too many rows,
        // and nothing to compute.
        assert_eq!(of(64, 1023), None);
        assert_eq!(of(64, 2056), None);
        assert_eq!(of(1 << 12, 1024), None);
        assert_eq!(of(i64::MAX, 8), None);
        assert_eq!(of(0, 8), None);
        assert_eq!(of(8, 0), None);
        // A part of a GPU, and a GPU without these kernels.
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 33 }), Some((32, 1)));
        assert_eq!(share(64, 1024, Kind::Half, false, Grid { blocks: 31 }), None);
        assert_eq!(share(64, 8, Kind::Half, false, Grid::default()), None);
    }

    /// The share that was the fastest of those measured.
    #[test]
    fn shares_suit_the_size() {
        let of = |batch, hidden| share(batch, hidden, Kind::BFloat16, false, H200);
        assert_eq!(of(16, 512), Some((16, 1)));
        assert_eq!(of(16, 768), Some((16, 1)));
        assert_eq!(of(16, 1024), Some((16, 1)));
        assert_eq!(of(64, 512), Some((16, 4)));
        assert_eq!(of(64, 768), Some((32, 4)));
        assert_eq!(of(64, 1024), Some((32, 4)));
        assert_eq!(of(256, 512), Some((32, 8)));
        assert_eq!(of(256, 1024), Some((32, 4)));
    }

    #[test]
    fn blocks_are_wide_in_the_backward() {
        let of = |batch, hidden, kind| {
            COSTS
                .h200()
                .grid(&pass(Direction::Backward, square(512, batch, hidden), kind, true))
                .map(counts)
        };
        assert_eq!(of(16, 1024, Kind::Half), Some((32, 2)));
        assert_eq!(of(16, 512, Kind::Half), Some((32, 2)));
        assert_eq!(of(64, 1032, Kind::Half), Some((16, 2)));
        assert_eq!(of(16, 768, Kind::Float), Some((32, 2)));
        // With 65 blocks the last one would have no neighbour to form a pair with.
        assert_eq!(of(64, 1032, Kind::Float), Some((16, 2)));
        assert_eq!(of(64, 520, Kind::Half), Some((32, 4)));
    }

    #[test]
    fn it_is_taken_where_it_is_faster() {
        use Direction::{Backward, Forward};
        let faster = |direction, steps, batch, hidden, kind| {
            let pass = pass(direction, square(steps, batch, hidden), kind, true);
            COSTS.h200().grid(&pass).is_some_and(|found| is_faster(&found, &pass))
        };
        assert!(
            faster(Forward, 8, 16, 264, Kind::Half)
                && faster(Forward, 512, 256, 1024, Kind::BFloat16)
        );
        assert!(
            !faster(Forward, 7, 16, 1024, Kind::Half) && !faster(Forward, 512, 16, 256, Kind::Half)
        );
        assert!(
            !faster(Forward, 512, 512, 1024, Kind::Half)
                && !faster(Forward, 512, 64, 2048, Kind::Half)
        );
        assert!(
            faster(Backward, 512, 128, 1024, Kind::Half)
                && !faster(Backward, 512, 256, 1024, Kind::Half)
        );
        assert!(
            faster(Forward, 512, 16, 768, Kind::Float)
                && faster(Forward, 512, 256, 1024, Kind::Float)
        );
        assert!(
            faster(Backward, 512, 64, 1024, Kind::Float)
                && !faster(Backward, 512, 256, 1024, Kind::Float)
        );
    }

    #[test]
    fn float_is_for_those_who_allow_tf32() {
        assert_eq!(share(16, 512, Kind::Float, false, H200), None);
        assert_eq!(share(16, 512, Kind::Float, true, H200), Some((16, 1)));
        assert_eq!(
            share(16, 1032, Kind::Float, true, H200),
            share(16, 1032, Kind::Half, true, H200)
        );
        assert_eq!(share(16, 512, Kind::Double, true, H200), None);
    }
}

mod plain_grid {
    use super::*;

    fn share(direction: Direction, batch: i64, hidden: i64, kind: Kind) -> Option<(i64, i64)> {
        COSTS
            .h200()
            .plain_grid(&pass(direction, square(512, batch, hidden), kind, false))
            .map(counts)
    }

    /// The share that was the fastest of those measured.
    #[test]
    fn shares_suit_the_size() {
        use Direction::{Backward, Forward};
        let of = |direction, batch, hidden| share(direction, batch, hidden, Kind::Float);
        assert_eq!(of(Forward, 16, 128), Some((16, 2)));
        assert_eq!(of(Forward, 16, 256), Some((4, 1)));
        assert_eq!(of(Forward, 16, 512), Some((4, 1)));
        assert_eq!(of(Forward, 16, 768), Some((6, 1)));
        assert_eq!(of(Forward, 24, 768), Some((6, 1)));
        assert_eq!(of(Forward, 8, 768), Some((16, 1)));
        assert_eq!(of(Forward, 32, 768), Some((16, 2)));
        assert_eq!(of(Forward, 64, 128), Some((16, 8)));
        assert_eq!(of(Forward, 64, 512), Some((16, 4)));
        assert_eq!(of(Forward, 64, 1024), Some((16, 2)));
        assert_eq!(of(Backward, 16, 512), Some((16, 2)));
        assert_eq!(of(Backward, 64, 1024), Some((16, 2)));
    }

    #[test]
    fn not_all_sizes_have_one() {
        let of = |batch, hidden, kind| share(Direction::Forward, batch, hidden, kind);
        assert!(of(1, 8, Kind::Float).is_some() && of(9, 512, Kind::Double).is_some());
        assert_eq!(of(64, 1032, Kind::Float), None);
        assert_eq!(of(64, 520, Kind::Double), None);
        assert_eq!(of(64, 1020, Kind::Float), None);
        assert_eq!(of(64, 512, Kind::Half), None);
        assert_eq!(of(0, 8, Kind::Float), None);
        assert_eq!(of(8, 0, Kind::Float), None);
        assert_eq!(of(i64::MAX, 8, Kind::Float), None);
        assert_eq!(of(1 << 16, 8, Kind::Float), None);
        let tf32 = pass(Direction::Forward, square(512, 16, 512), Kind::Float, true);
        assert_eq!(COSTS.h200().plain_grid(&tf32), None);
    }

    #[test]
    fn it_is_taken_where_it_is_faster() {
        for direction in [Direction::Forward, Direction::Backward] {
            let faster = |steps, batch, hidden, kind| {
                let pass = pass(direction, square(steps, batch, hidden), kind, false);
                COSTS.h200().plain_grid(&pass).is_some_and(|found| is_faster(&found, &pass))
            };
            for hidden in [128, 256, 512, 768, 1024] {
                assert!(faster(8, 16, hidden, Kind::Float) && faster(512, 64, hidden, Kind::Float));
                assert!(
                    !faster(7, 16, hidden, Kind::Float) && !faster(512, 16, hidden, Kind::Double)
                );
            }
            assert!(!faster(512, 512, 1024, Kind::Float));
        }
    }
}

mod wide_grid {
    use super::*;

    fn row_groups(
        direction: Direction,
        batch: i64,
        hidden: i64,
        kind: Kind,
        grid: Grid,
    ) -> Option<i64> {
        let pass = pass(direction, square(512, batch, hidden), kind, false);
        let found = COSTS.h200().wide_grid(&Pass { gpu: Gpu { grid, ..Gpu::H200 }, ..pass });
        found.map(|found| counts(found).1)
    }

    #[test]
    fn groups_share_the_rows() {
        let of =
            |batch, hidden| row_groups(Direction::Forward, batch, hidden, Kind::Half, Grid::H200);
        assert_eq!(of(1, 8), Some(1));
        assert_eq!(of(64, 1024), Some(1));
        assert_eq!(of(65, 1024), Some(2));
        assert_eq!(of(256, 1024), Some(4));
        // The groups compute the tiles of rows in two rounds, with equal numbers in each.
        assert_eq!(of(320, 1024), Some(3));
        assert_eq!(of(512, 1024), Some(4));
        assert_eq!(of(512, 512), Some(8));
    }

    #[test]
    fn it_is_taken_where_it_was_measured() {
        for direction in [Direction::Forward, Direction::Backward] {
            let faster = |steps, batch, hidden| {
                let pass = pass(direction, square(steps, batch, hidden), Kind::Half, false);
                COSTS.h200().wide_grid(&pass).is_some_and(|found| is_faster(&found, &pass))
            };
            assert!(faster(512, 256, 1024) && faster(8, 512, 512) && faster(512, 320, 768));
            assert!(!faster(7, 256, 1024) && !faster(512, 256, 256) && !faster(512, 320, 1024));
            assert_eq!(faster(512, 256, 1000), direction == Direction::Forward);
        }
    }

    #[test]
    fn float_is_for_those_who_allow_tf32() {
        let faster = |direction, batch, hidden, tf32| {
            let pass = pass(direction, square(512, batch, hidden), Kind::Float, tf32);
            COSTS.h200().wide_grid(&pass).map(|found| is_faster(&found, &pass))
        };
        for direction in [Direction::Forward, Direction::Backward] {
            for (batch, hidden) in [(256, 1024), (512, 1024), (1024, 512), (1536, 512)] {
                assert_eq!(faster(direction, batch, hidden, true), Some(true));
                assert_eq!(faster(direction, batch, hidden, false), None);
            }
            // Three rounds, with which the backward pass is slower than per-step kernels.
            for (batch, hidden) in [(768, 1024), (1024, 768)] {
                assert_eq!(
                    faster(direction, batch, hidden, true),
                    Some(direction == Direction::Forward)
                );
            }
            // Where W_h is small, per-step kernels are fast.
            assert_eq!(faster(direction, 1792, 264, true), Some(false));
        }
        assert_eq!(faster(Direction::Backward, 896, 520, true), Some(false));
    }

    #[test]
    fn not_all_sizes_have_one() {
        let of =
            |batch, hidden| row_groups(Direction::Forward, batch, hidden, Kind::Half, Grid::H200);
        assert_eq!(of(256, 1032), None);
        assert_eq!(of(256, 1020), None);
        assert_eq!(of(256, 0), None);
        assert_eq!(of(0, 1024), None);
        assert_eq!(of(i64::MAX, 1024), None);
        assert_eq!(row_groups(Direction::Forward, 256, 512, Kind::Float, Grid::H200), None);
        assert_eq!(row_groups(Direction::Backward, 256, 512, Kind::Half, Grid::default()), None);
    }
}
