use super::*;
use crate::ops::costs::CARDS;

/// An H200.
const GPU: Gpu = Gpu { processors: 132, shared_memory: 227 << 10, clusters: 1 };
/// A GPU that has neither clusters nor much shared memory.
const OLD: Gpu = Gpu { processors: 40, shared_memory: 64 << 10, clusters: 0 };
const MANY: i64 = 1 << 20;

fn rows(way: Way, columns: i64, kind: Kind, alignment: i64) -> Rows {
    Rows { way, rows: MANY, columns, kind, alignment, has_sums: true, gpu: GPU }
}

#[test]
fn forwards_suit_the_size() {
    let plan = |rows: i64, columns, kind| {
        let plan = Rows { rows, ..rows_of(columns, kind) }.forward();
        (plan.way != Way::Passes).then_some((plan.team, plan.threads * plan.cluster))
    };
    fn rows_of(columns: i64, kind: Kind) -> Rows {
        rows(Way::Automatic, columns, kind, 16)
    }
    assert_eq!(plan(MANY, 256, Kind::BFloat16), Some((8, 64)));
    assert_eq!(plan(MANY, 256, Kind::Float), Some((16, 64)));
    assert_eq!(plan(MANY, 1024, Kind::BFloat16), Some((32, 64)));
    assert_eq!(plan(MANY, 4096, Kind::BFloat16), Some((128, 128)));
    assert_eq!(plan(MANY, 16384, Kind::Half), Some((512, 512)));
    assert_eq!(plan(MANY, 16384, Kind::Float), Some((512, 512)));
    assert_eq!(plan(MANY, 16388, Kind::Float), Some((512, 2 * 512)));
    assert_eq!(plan(MANY, 65536, Kind::Float), Some((512, 4 * 512)));
    assert_eq!(plan(1, 65536, Kind::Float), Some((512, 8 * 512)));
    assert_eq!(plan(MANY, 131_076, Kind::Float), None);
    // Many long rows of other kinds are read again. Few are shared by clusters.
    assert_eq!(plan(MANY, 16392, Kind::Half), None);
    assert_eq!(plan(MANY, 131_072, Kind::Half), None);
    assert_eq!(plan(MANY, 4098, Kind::Double), None);
    assert_eq!(plan(67, 32776, Kind::Half), None);
    assert_eq!(plan(66, 32776, Kind::Half), Some((512, 3 * 512)));
    assert_eq!(plan(1, 16392, Kind::Half), Some((512, 8 * 512)));
    assert_eq!(plan(20, 8194, Kind::Double), Some((512, 6 * 512)));
    assert_eq!(plan(1, 131_080, Kind::Half), None);
    // Rows whose length is not a multiple of 16 bytes, too.
    assert_eq!(plan(MANY, 32767, Kind::Half), Some((512, 512)));
    assert_eq!(plan(MANY, 32775, Kind::Half), Some((512, 3 * 512)));
    assert_eq!(plan(MANY, 131_071, Kind::Half), Some((512, 8 * 512)));
    assert_eq!(plan(MANY, 131_073, Kind::Half), None);
    assert_eq!(plan(MANY, 16385, Kind::Float), Some((512, 3 * 512)));
    assert_eq!(plan(MANY, 16383, Kind::Float), Some((512, 512)));
    assert_eq!(plan(MANY, 8191, Kind::Half), Some((256, 256)));
    assert_eq!(plan(MANY, 1, Kind::Half), Some((1, 64)));
    // Such rows are computed value by value if they are few, or if a team would be idle.
    assert_eq!(plan(16, 101, Kind::Half), None);
    assert_eq!(plan(MANY, 101, Kind::Half), Some((4, 64)));
    assert_eq!(plan(MANY, 1025, Kind::Float), None);
    assert_eq!(plan(MANY, 1023, Kind::Float), Some((64, 64)));
    assert_eq!(plan(MANY, 1025, Kind::Half), Some((64, 64)));
    assert_eq!(plan(16, 3, Kind::Half), None);
    assert_eq!(plan(16, 3, Kind::Float), Some((1, 64)));
    // Those at multiples of 8 bytes are not.
    assert_eq!(plan(16, 100, Kind::Half), Some((16, 64)));
    assert_eq!(plan(MANY, 1026, Kind::Float), Some((128, 128)));
    assert_eq!(plan(MANY, 2068, Kind::BFloat16), Some((128, 128)));
    assert_eq!(plan(664, 11_572, Kind::Half), Some((512, 512)));
    assert_eq!(plan(MANY, 16_388, Kind::Half), None);
    assert_eq!(plan(MANY, 2049, Kind::Double), Some((512, 512)));
    assert_eq!(plan(MANY, 4095, Kind::Double), Some((512, 512)));
    assert_eq!(plan(MANY, 4097, Kind::Double), None);
    assert_eq!(plan(66, 4097, Kind::Double), Some((512, 2 * 512)));
    // Few rows get more threads, but no thread is without a load.
    assert_eq!(plan(256, 1024, Kind::BFloat16), Some((128, 128)));
    assert_eq!(plan(1024, 1024, Kind::Float), Some((128, 128)));
    assert_eq!(plan(1, 8192, Kind::Float), Some((512, 512)));
    assert_eq!(plan(4, 64, Kind::Float), Some((16, 64)));
}

#[test]
fn few_halves_that_are_not_aligned_are_read_value_by_value() {
    let way = |count, columns, kind, alignment| {
        Rows { rows: count, ..rows(Way::Automatic, columns, kind, alignment) }.forward().way
    };
    assert_eq!(way(132, 384, Kind::BFloat16, 2), Way::Passes);
    assert_eq!(way(133, 384, Kind::BFloat16, 2), Way::Registers);
    assert_eq!(way(132, 2120, Kind::BFloat16, 2), Way::Registers);
    assert_eq!(way(132, 384, Kind::BFloat16, 8), Way::Registers);
    assert_eq!(way(132, 384, Kind::BFloat16, 16), Way::Registers);
    assert_eq!(way(132, 384, Kind::Float, 4), Way::Registers);
}

#[test]
fn forwards_load_as_many_bytes_as_rows_allow() {
    use Kind::{BFloat16, Double, Float, Half};
    use Loads::{Narrow, Shifted, Vector};
    for (kind, columns, alignment, expected) in [
        (BFloat16, 2068, 16, Narrow),
        (BFloat16, 2068, 4, Shifted),
        (BFloat16, 2070, 16, Shifted),
        (BFloat16, 2072, 16, Vector),
        (Half, 4, 16, Narrow),
        (Half, 11_576, 16, Vector),
        (Half, 11_576, 8, Narrow),
        (Half, 11_576, 2, Shifted),
        (Half, 16_396, 8, Narrow),
        (Float, 2, 16, Narrow),
        (Float, 1022, 8, Narrow),
        (Float, 1022, 4, Shifted),
        (Float, 1023, 8, Shifted),
        (Float, 1024, 8, Narrow),
        (Float, 1024, 16, Vector),
        (Double, 1, 16, Narrow),
        (Double, 2066, 16, Vector),
        (Double, 2066, 8, Narrow),
        (Double, 28_377, 8, Narrow),
    ] {
        let rows = rows(Way::Automatic, columns, kind, alignment);
        assert_eq!(rows.forward().loads, expected, "{kind:?} {columns} aligned to {alignment}");
        assert_ne!(rows.backward().loads, Narrow);
        assert!(rows.forward_of_sum().is_none_or(|plan| plan.loads == Vector));
    }
}

#[test]
fn forwards_at_8_bytes_have_the_plan_of_rows_at_16() {
    use Way::{Automatic, Cluster, Passes, Registers};
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        for way in [Automatic, Registers, Cluster, Passes] {
            for pieces in (1..40).chain((41..40_000).step_by(97)) {
                for count in [1, 30, 300, MANY] {
                    let plan = |pieces: i64, alignment| {
                        let columns = pieces * 8 / kind.elt_size_in_bytes() as i64;
                        Rows { rows: count, ..rows(way, columns, kind, alignment) }.forward()
                    };
                    let whole = plan(pieces + pieces % 2, 16);
                    assert_eq!(whole.loads, Loads::Vector);
                    let expected = Plan { loads: Loads::Narrow, ..whole };
                    assert_eq!(plan(pieces, 8), expected, "{way:?} {count} {pieces} {kind:?}");
                }
            }
        }
    }
}

#[test]
fn backwards_suit_the_size() {
    use Kind::{BFloat16, Double, Float, Half};
    use Loads::{Shifted, Single, Vector};
    use Way::{Cluster, InPlace, Passes, Ring};
    let table = [
        // kind, columns, alignment, (way, loads, team, threads, cluster, stages)
        (Float, 0, 16, (Ring, Vector, 1, 256, 1, 2)),
        (Float, 1, 16, (Ring, Shifted, 1, 256, 1, 2)),
        (Float, 8, 16, (Ring, Vector, 1, 256, 1, 2)),
        (Float, 8, 8, (Ring, Shifted, 1, 256, 1, 2)),
        (Float, 36, 16, (Ring, Vector, 4, 256, 1, 2)),
        (Float, 256, 16, (Ring, Vector, 16, 256, 1, 2)),
        (Float, 511, 16, (Ring, Shifted, 32, 256, 1, 2)),
        (Float, 512, 16, (Ring, Vector, 32, 256, 1, 2)),
        (Float, 513, 8, (Ring, Shifted, 64, 128, 1, 2)),
        (Float, 513, 16, (InPlace, Vector, 64, 512, 1, 2)),
        (Float, 516, 16, (Ring, Vector, 64, 256, 1, 2)),
        (Float, 4096, 16, (Ring, Vector, 256, 256, 1, 2)),
        (Float, 8192, 16, (Ring, Vector, 512, 512, 1, 2)),
        (Float, 1025, 8, (Ring, Shifted, 64, 128, 1, 2)),
        (Float, 1025, 16, (InPlace, Vector, 64, 512, 1, 2)),
        (Float, 1057, 8, (Ring, Shifted, 128, 128, 1, 2)),
        (Float, 1057, 16, (InPlace, Vector, 128, 512, 1, 2)),
        (Float, 8193, 8, (Ring, Shifted, 512, 512, 1, 2)),
        (Float, 8193, 16, (InPlace, Vector, 512, 512, 1, 2)),
        (Float, 8225, 16, (Cluster, Shifted, 256, 256, 3, 3)),
        (Float, 8196, 16, (Cluster, Vector, 256, 256, 3, 3)),
        (Float, 16384, 16, (Cluster, Vector, 256, 256, 4, 3)),
        (Float, 32768, 16, (Cluster, Vector, 256, 256, 8, 3)),
        (Float, 65536, 16, (Cluster, Vector, 512, 512, 8, 3)),
        (Float, 65540, 16, (Passes, Vector, 512, 512, 1, 0)),
        (Half, 1024, 16, (Ring, Vector, 64, 256, 1, 2)),
        (Half, 1023, 2, (Ring, Shifted, 64, 256, 1, 2)),
        (Half, 1023, 16, (InPlace, Vector, 64, 512, 1, 2)),
        (Half, 1025, 2, (Ring, Shifted, 64, 256, 1, 2)),
        (Half, 1025, 16, (InPlace, Vector, 64, 512, 1, 2)),
        (BFloat16, 100, 16, (Ring, Shifted, 8, 256, 1, 2)),
        (BFloat16, 8192, 16, (Ring, Vector, 512, 512, 1, 2)),
        (BFloat16, 8192, 2, (Ring, Shifted, 512, 512, 1, 2)),
        (BFloat16, 8200, 16, (Cluster, Vector, 256, 256, 3, 3)),
        (BFloat16, 65535, 16, (Cluster, Shifted, 512, 512, 8, 3)),
        (BFloat16, 65538, 16, (Passes, Single, 512, 512, 1, 0)),
        (Double, 258, 16, (Ring, Vector, 64, 256, 1, 2)),
        (Double, 4096, 16, (Ring, Vector, 512, 512, 1, 2)),
        (Double, 4098, 16, (Cluster, Vector, 256, 256, 3, 3)),
        (Double, 4097, 8, (Ring, Shifted, 512, 512, 1, 2)),
        (Double, 4097, 16, (InPlace, Vector, 512, 512, 1, 2)),
    ];
    for (kind, columns, alignment, expected) in table {
        let plan = rows(Way::Automatic, columns, kind, alignment).backward();
        let found = (plan.way, plan.loads, plan.team, plan.threads, plan.cluster, plan.stages);
        assert_eq!(found, expected, "{kind:?} {columns} aligned to {alignment}");
    }
}

#[test]
fn rows_in_place_keep_their_ring_where_blocks_have_less_memory() {
    for (columns, shared_memory, expected) in [
        (1025, 227 << 10, (512, 2)),
        (1025, 99 << 10, (256, 2)),
        (1025, 64 << 10, (128, 2)),
        (4099, 99 << 10, (256, 2)),
    ] {
        let gpu = Gpu { shared_memory, ..GPU };
        let plan = Rows { gpu, ..rows(Way::Automatic, columns, Kind::Float, 16) }.backward();
        assert_eq!(
            (plan.threads, plan.stages, plan.way),
            (expected.0, expected.1, Way::InPlace),
            "{columns}"
        );
    }
    // No block has room for two of these rows in place.
    let gpu = Gpu { shared_memory: 99 << 10, ..GPU };
    let plan = Rows { gpu, ..rows(Way::Automatic, 8191, Kind::Float, 16) }.backward();
    assert_eq!(plan.way, Way::Registers);
}

#[test]
fn teams_in_place_have_rows_that_begin_alike() {
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        for columns in (257..8200).step_by(7) {
            for count in [513, 2000, MANY] {
                for processors in [4, 40, 132] {
                    let gpu = Gpu { processors, ..GPU };
                    let of_kind = rows(Way::Automatic, columns, kind, 16);
                    let rows = Rows { rows: count, gpu, ..of_kind };
                    let plan = rows.backward();
                    if plan.way == Way::InPlace {
                        let teams = i64::from(plan.threads / plan.team);
                        let step = rows.parts(&plan, Device::Cuda(0), 0) * teams;
                        assert!(step >= count || step * columns % rows.wide() == 0);
                    }
                }
            }
        }
    }
}

#[test]
fn few_rows_have_no_parts() {
    use Way::{Automatic, Cluster, Few, FewPasses, InPlace, Passes, Ring};
    let of = |way, columns| rows(way, columns, Kind::Float, 16);
    let way = |way, rows, columns| Rows { rows, ..of(way, columns) }.backward().way;
    assert_eq!(way(Automatic, 512, 1024), Few);
    assert_eq!(way(Automatic, 513, 1024), Ring);
    assert_eq!(way(Automatic, 257, 4096), Ring);
    assert_eq!(way(Automatic, 256, 1025), Few);
    assert_eq!(way(Automatic, 257, 1025), InPlace);
    assert_eq!(way(Automatic, 512, 1501), Few);
    assert_eq!(way(Automatic, 513, 1501), InPlace);
    assert_eq!(way(Automatic, 257, 2501), InPlace);
    assert_eq!(way(Automatic, 255, 4096), Few);
    assert_eq!(way(Automatic, 256, 4096), Ring);
    assert_eq!(way(Automatic, 256, 8192), Ring);
    assert_eq!(way(Ring, 64, 1024), Ring);
    // Rows that are read in passes are summed by columns, too; rows that several blocks share are
    // not.
    assert_eq!(way(Automatic, 3, 70_000), FewPasses);
    assert_eq!(way(Automatic, 257, 70_000), Passes);
    assert_eq!(way(Automatic, 512, 70_001), FewPasses);
    assert_eq!(way(Automatic, 3, 16_384), Cluster);
    assert_eq!(way(Passes, 3, 64), Passes);
    // Without dw and db there are no parts anyway.
    let alone =
        |way, rows, columns| Rows { rows, has_sums: false, ..of(way, columns) }.backward().way;
    assert_eq!(alone(Automatic, 64, 1024), Ring);
    assert_eq!(alone(Automatic, 132, 1025), Passes);
    assert_eq!(alone(Automatic, 133, 1025), Few);
    assert_eq!(alone(Few, 64, 1024), Few);
    assert_eq!(alone(Ring, 64, 1025), Ring);
}

#[test]
fn a_way_is_taken_where_it_exists() {
    use Way::{Cluster, Few, FewPasses, InPlace, Passes, Registers, Ring};
    let plan = |way, columns| {
        let plan = rows(way, columns, Kind::Double, 16).backward();
        (plan.way, plan.team, plan.cluster, plan.stages)
    };
    assert_eq!(plan(InPlace, 5), (InPlace, 64, 1, 2));
    assert_eq!(plan(InPlace, 4), (Ring, 1, 1, 2));
    assert_eq!(plan(Passes, 4), (Passes, 512, 1, 0));
    assert_eq!(plan(FewPasses, 4), (FewPasses, 512, 1, 0));
    assert_eq!(plan(Ring, 9), (Ring, 2, 1, 2));
    assert_eq!(plan(Ring, 300), (Ring, 64, 1, 2));
    assert_eq!(plan(Ring, 301), (Ring, 64, 1, 2));
    assert_eq!(plan(Registers, 300), (Registers, 64, 1, 0));
    assert_eq!(plan(Few, 300), (Few, 64, 1, 0));
    assert_eq!(plan(Cluster, 4), (Cluster, 256, 2, 3));
    assert_eq!(plan(Cluster, 5), (Cluster, 256, 2, 3));
    assert_eq!(plan(Ring, 100_000), (Passes, 512, 1, 0));
    assert_eq!(plan(Few, 100_000), (FewPasses, 512, 1, 0));
    // The CPU has no such kernel.
    let on_the_cpu = Rows { gpu: Gpu::default(), ..rows(Few, 4, Kind::Double, 16) };
    assert!(!matches!(on_the_cpu.backward().way, Few | FewPasses));

    let forward = |way, columns| rows(way, columns, Kind::Double, 16).forward().way;
    for way in [Registers, Ring, InPlace, Few] {
        assert_eq!((forward(way, 4), forward(way, 100_000)), (Registers, Passes));
    }
    assert_eq!((forward(Cluster, 4), forward(Cluster, 100_000)), (Cluster, Passes));
    assert_eq!((forward(Passes, 4), forward(FewPasses, 4)), (Passes, Passes));
}

/// What the kernels rely on holds for every possible plan.
#[test]
fn every_plan_holds_its_row() {
    use Way::{Automatic, Cluster, Few, FewPasses, InPlace, Passes, Registers, Ring};
    let ways = [Automatic, Registers, Cluster, Ring, InPlace, Few, Passes, FewPasses];
    let sizes = || (0..9000).step_by(3).chain(16000..17000).chain(32760..32780).chain(65530..65550);
    let cards = CARDS.map(|card| Gpu {
        processors: card.multiprocessors as i32,
        shared_memory: card.shared_memory,
        clusters: card.clusters.into(),
    });
    let on_cards =
        || cards.into_iter().flat_map(|gpu| [(16, gpu, MANY, true), (2, gpu, 300, true)]);
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        let size = kind.elt_size_in_bytes() as i64;
        for way in ways {
            for columns in sizes().chain([1 << 33]) {
                let on_h200 = [
                    (16, GPU, MANY, true),
                    (4, GPU, MANY, true),
                    (2, GPU, 300, true),
                    (1, GPU, MANY, true),
                    (16, OLD, MANY, true),
                    (16, GPU, 1, true),
                    (16, GPU, 300, true),
                    (16, GPU, 30, false),
                    (2, GPU, 30, false),
                ];
                for (alignment, gpu, rows, has_sums) in on_h200.into_iter().chain(on_cards()) {
                    let shape = Rows { way, rows, columns, kind, alignment, has_sums, gpu };
                    let rows = shape;
                    check(&rows.forward(), &rows);
                    let plan = rows.forward();
                    assert!(matches!(plan.way, Registers | Cluster | Passes) && plan.stages == 0);
                    let is_wide = if plan.way == Cluster {
                        kind == Kind::Float && plan.loads != Loads::Shifted
                    } else {
                        plan.team > 32
                    };
                    let kept = if is_wide { 128 / size } else { 64 / size };
                    let threads = i64::from(plan.team) * i64::from(plan.cluster);
                    assert!(plan.way == Passes || columns <= threads * kept);

                    let plan = rows.backward();
                    check(&plan, &rows);
                    assert_ne!(plan.loads, Loads::Narrow);
                    let values = if kind == Kind::Double { 8 } else { 16 };
                    let (team, cluster) = (i64::from(plan.team), i64::from(plan.cluster));
                    let is_shifted = plan.loads == Loads::Shifted;
                    let lead = 16 / size - 1;
                    let rest = match plan.way {
                        Ring if is_shifted && team > 32 => 32.min(128 / size),
                        InPlace => 32 - lead,
                        _ => 0,
                    };
                    let is_read_again = matches!(plan.way, Passes | FewPasses);
                    assert!(is_read_again || columns <= team * values * cluster + rest);
                    assert!(plan.way != Cluster || gpu.clusters == 1);
                    assert_eq!(plan.stages > 0, matches!(plan.way, Ring | InPlace | Cluster));
                    let groups =
                        i64::from(is_shifted) * i64::from(plan.threads / plan.team.min(32));
                    let more = if team < 32 { 16 } else { 144 };
                    let row = 2 * (values * size * i64::from(plan.threads) + more * groups);
                    assert!(i64::from(plan.stages) * row <= i64::from(gpu.shared_memory));
                    for device in [Device::Cpu, Device::Cuda(0)] {
                        for rows in [0, 1, 1000, 1 << 40] {
                            let rows = Rows { rows, ..shape };
                            let most = 16 * i64::from(gpu.processors).max(8);
                            assert!((1..=most).contains(&rows.parts(&plan, device, 60)));
                        }
                    }
                }
            }
        }
    }
}

fn check(plan: &Plan, rows: &Rows) {
    assert!(plan.team.count_ones() == 1 && plan.threads.count_ones() == 1);
    assert!((1..=plan.threads).contains(&plan.team) && (32..=512).contains(&plan.threads));
    assert!((1..=8).contains(&plan.cluster));
    let is_read_again = matches!(plan.way, Way::Passes | Way::FewPasses);
    assert!(!(is_read_again || plan.way == Way::Cluster) || plan.team == plan.threads);
    assert_eq!(plan.cluster > 1, plan.way == Way::Cluster);
    let is_odd = !rows.is_aligned();
    match plan.loads {
        Loads::Single => assert!(is_read_again || plan.way == Way::Registers),
        Loads::Vector => {
            assert!(!is_odd || (plan.way == Way::InPlace && rows.alignment % 16 == 0));
        }
        Loads::Narrow => assert!(is_odd && rows.is_read_by(8)),
        Loads::Shifted => assert!(!is_read_again && (is_odd || plan.way == Way::Few)),
    }
    let is_few = matches!(plan.way, Way::Few | Way::FewPasses);
    assert!(!is_few || rows.way != Way::Automatic || rows.rows <= 512);
}

/// The GPU tests demand the same bits wherever such rows begin.
#[test]
fn odd_rows_that_do_not_go_in_place_have_one_plan_wherever_they_begin() {
    let mut in_place = 0;
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        for (count, columns) in [
            (5, 1),
            (6, 3),
            (40, 17),
            (37, 255),
            (300, 41),
            (9, 1029),
            (3, 4097),
            (5, 8223),
            (3, 9001),
        ] {
            use Way::{Automatic, Cluster, InPlace, Registers, Ring};
            let ways = [Automatic, Ring, InPlace, Cluster, Registers];
            for (way, has_sums) in ways.into_iter().flat_map(|way| [(way, true), (way, false)]) {
                let plan = |alignment| {
                    let of = rows(way, columns, kind, alignment);
                    Rows { rows: count, has_sums, ..of }.backward()
                };
                let (aligned, anywhere) = (plan(16), plan(kind.elt_size_in_bytes() as i64));
                if aligned.way != Way::InPlace {
                    assert_eq!(aligned, anywhere, "{way:?} {count} {columns} {kind:?}");
                    continue;
                }
                let is_long = way == Way::Automatic && columns > 256;
                assert!(way == Way::InPlace || is_long, "{way:?} {count} {columns} {kind:?}");
                in_place += 1;
            }
        }
    }
    assert!(in_place > 0);
}

#[test]
fn sums_have_one_kernel_where_two_rows_fit() {
    use Kind::{BFloat16, Double, Float};
    let of = |gpu: Gpu, columns, kind, stream: i64| {
        let rows = Rows { gpu, ..rows(Way::Automatic, columns, kind, 16) };
        let (forward, backward) = (rows.forward_of_sum(), rows.backward_of_sum(stream));
        (forward.map(|plan| plan.team), backward.map(|plan| (plan.team, plan.threads)))
    };
    assert_eq!(of(GPU, 768, BFloat16, 2), (Some(64), Some((64, 256))));
    assert_eq!(of(GPU, 4096, BFloat16, 4), (Some(256), Some((256, 256))));
    assert_eq!(of(GPU, 8192, Float, 4), (Some(512), Some((512, 512))));
    assert_eq!(of(GPU, 4096, Double, 8), (Some(512), Some((512, 512))));
    // Longer rows have a forward kernel alone.
    assert_eq!(of(GPU, 16_384, BFloat16, 2), (Some(512), None));
    assert_eq!(of(GPU, 32_768, BFloat16, 2), (None, None));
    assert_eq!(of(GPU, 1001, BFloat16, 2), (None, None));
    // Each of very few rows has a block of one warp.
    let few = |count| {
        let plan = Rows { rows: count, ..rows(Way::Automatic, 8, BFloat16, 16) };
        plan.backward_of_sum(2).map(|plan| (plan.team, plan.threads))
    };
    assert_eq!((few(66), few(67)), (Some((32, 32)), Some((1, 32))));
    // A block with less shared memory is smaller.
    let small = Gpu { shared_memory: 99 << 10, ..OLD };
    assert_eq!(of(small, 1024, Float, 4).1, Some((64, 128)));
    assert_eq!(of(small, 8192, Float, 4).1, None);
    assert_eq!(of(OLD, 1024, BFloat16, 4).1, Some((64, 128)));
}
