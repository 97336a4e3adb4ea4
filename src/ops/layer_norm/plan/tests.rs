use super::*;

/// An H200.
const GPU: Gpu = Gpu { processors: 132, shared_memory: 227 << 10, clusters: 1 };
/// A GPU that has neither clusters nor much shared memory.
const OLD: Gpu = Gpu { processors: 40, shared_memory: 64 << 10, clusters: 0 };
const MANY: i64 = 1 << 20;

fn rows(way: Way, columns: i64, kind: Kind, alignment: i64) -> Rows {
    Rows { way, rows: MANY, columns, kind, alignment, gpu: GPU }
}

#[test]
fn forwards_suit_the_size() {
    let plan = |rows: i64, columns, kind| {
        let plan = Rows { rows, ..rows_of(columns, kind) }.forward();
        (plan.in_registers == 1).then_some((plan.team, plan.threads * plan.cluster))
    };
    fn rows_of(columns: i64, kind: Kind) -> Rows {
        rows(Way::Automatic, columns, kind, 16)
    }
    assert_eq!(plan(MANY, 256, Kind::BFloat16), Some((8, 64)));
    assert_eq!(plan(MANY, 256, Kind::Float), Some((16, 64)));
    assert_eq!(plan(MANY, 1024, Kind::BFloat16), Some((32, 64)));
    assert_eq!(plan(MANY, 4096, Kind::BFloat16), Some((128, 128)));
    assert_eq!(plan(MANY, 16384, Kind::Half), Some((512, 512)));
    assert_eq!(plan(MANY, 32768, Kind::Half), Some((512, 512)));
    assert_eq!(plan(MANY, 32776, Kind::Half), Some((512, 3 * 512)));
    assert_eq!(plan(MANY, 131_072, Kind::Half), Some((512, 8 * 512)));
    assert_eq!(plan(MANY, 131_080, Kind::Half), None);
    assert_eq!(plan(MANY, 16384, Kind::Float), Some((512, 512)));
    assert_eq!(plan(MANY, 16388, Kind::Float), Some((512, 2 * 512)));
    assert_eq!(plan(MANY, 65536, Kind::Float), Some((512, 4 * 512)));
    assert_eq!(plan(1, 65536, Kind::Float), Some((512, 8 * 512)));
    assert_eq!(plan(MANY, 131_076, Kind::Float), None);
    // Rows whose length is not a multiple of 16 bytes, too.
    assert_eq!(plan(MANY, 16385, Kind::Float), Some((512, 3 * 512)));
    assert_eq!(plan(MANY, 16383, Kind::Float), Some((512, 512)));
    assert_eq!(plan(MANY, 8191, Kind::Half), Some((256, 256)));
    assert_eq!(plan(MANY, 1, Kind::Half), Some((1, 64)));
    // Such rows are computed value by value if they are few, or if a team would be idle.
    assert_eq!(plan(16, 100, Kind::Half), None);
    assert_eq!(plan(MANY, 100, Kind::Half), Some((4, 64)));
    assert_eq!(plan(MANY, 1025, Kind::Float), None);
    assert_eq!(plan(MANY, 1023, Kind::Float), Some((64, 64)));
    assert_eq!(plan(MANY, 1025, Kind::Half), Some((64, 64)));
    // Few rows get more threads, but no thread is without a load.
    assert_eq!(plan(256, 1024, Kind::BFloat16), Some((128, 128)));
    assert_eq!(plan(1024, 1024, Kind::Float), Some((128, 128)));
    assert_eq!(plan(1, 8192, Kind::Float), Some((512, 512)));
    assert_eq!(plan(4, 64, Kind::Float), Some((16, 64)));
}

#[test]
fn backwards_suit_the_size() {
    use Kind::{BFloat16, Double, Float, Half};
    let table = [
        // kind, columns, alignment, (lanes, shifted, team, threads, cluster, stages)
        (Float, 0, 16, (4, 0, 1, 256, 1, 2)),
        (Float, 1, 16, (4, 1, 1, 256, 1, 2)),
        (Float, 8, 16, (4, 0, 1, 256, 1, 2)),
        (Float, 8, 8, (4, 1, 1, 256, 1, 2)),
        (Float, 36, 16, (4, 0, 4, 256, 1, 2)),
        (Float, 256, 16, (4, 0, 16, 256, 1, 2)),
        (Float, 511, 16, (4, 1, 32, 256, 1, 2)),
        (Float, 512, 16, (4, 0, 32, 256, 1, 2)),
        (Float, 513, 8, (4, 1, 64, 128, 1, 2)),
        (Float, 513, 16, (4, 0, 64, 512, 1, 2)),
        (Float, 516, 16, (4, 0, 64, 256, 1, 2)),
        (Float, 4096, 16, (4, 0, 256, 256, 1, 2)),
        (Float, 8192, 16, (4, 0, 512, 512, 1, 2)),
        (Float, 1025, 8, (4, 1, 64, 128, 1, 2)),
        (Float, 1025, 16, (4, 0, 64, 512, 1, 2)),
        (Float, 1057, 8, (4, 1, 128, 128, 1, 2)),
        (Float, 1057, 16, (4, 0, 128, 512, 1, 2)),
        (Float, 8193, 8, (4, 1, 512, 512, 1, 2)),
        (Float, 8193, 16, (4, 0, 512, 512, 1, 2)),
        (Float, 8225, 16, (4, 1, 256, 256, 3, 3)),
        (Float, 8196, 16, (4, 0, 256, 256, 3, 3)),
        (Float, 16384, 16, (4, 0, 256, 256, 4, 3)),
        (Float, 32768, 16, (4, 0, 256, 256, 8, 3)),
        (Float, 65536, 16, (4, 0, 512, 512, 8, 3)),
        (Float, 65540, 16, (4, 0, 512, 512, 1, 0)),
        (Half, 1024, 16, (8, 0, 64, 256, 1, 2)),
        (Half, 1023, 2, (8, 1, 64, 256, 1, 2)),
        (Half, 1023, 16, (8, 0, 64, 512, 1, 2)),
        (Half, 1025, 2, (8, 1, 64, 256, 1, 2)),
        (Half, 1025, 16, (8, 0, 64, 512, 1, 2)),
        (BFloat16, 100, 16, (8, 1, 8, 256, 1, 2)),
        (BFloat16, 8192, 16, (8, 0, 512, 512, 1, 2)),
        (BFloat16, 8192, 2, (8, 1, 512, 512, 1, 2)),
        (BFloat16, 8200, 16, (8, 0, 256, 256, 3, 3)),
        (BFloat16, 65535, 16, (8, 1, 512, 512, 8, 3)),
        (BFloat16, 65538, 16, (1, 0, 512, 512, 1, 0)),
        (Double, 258, 16, (2, 0, 64, 256, 1, 2)),
        (Double, 4096, 16, (2, 0, 512, 512, 1, 2)),
        (Double, 4098, 16, (2, 0, 256, 256, 3, 3)),
        (Double, 4097, 8, (2, 1, 512, 512, 1, 2)),
        (Double, 4097, 16, (2, 0, 512, 512, 1, 2)),
    ];
    for (kind, columns, alignment, expected) in table {
        let plan = rows(Way::Automatic, columns, kind, alignment).backward();
        let found = (plan.lanes, plan.shifted, plan.team, plan.threads, plan.cluster, plan.stages);
        assert_eq!(found, expected, "{kind:?} {columns} aligned to {alignment}");
        let is_odd = columns % i64::from(plan.lanes) != 0;
        let in_place = is_odd && alignment == 16 && plan.team > 32 && plan.stages == 2;
        assert_eq!(plan.in_place == 1, in_place, "{kind:?} {columns} aligned to {alignment}");
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
            (plan.threads, plan.stages, plan.in_place),
            (expected.0, expected.1, 1),
            "{columns}"
        );
    }
    // No block has room for two of these rows in place.
    let gpu = Gpu { shared_memory: 99 << 10, ..GPU };
    let plan = Rows { gpu, ..rows(Way::Automatic, 8191, Kind::Float, 16) }.backward();
    assert_eq!(plan.in_place, 0);
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
                    if plan.in_place == 1 {
                        let teams = i64::from(plan.threads / plan.team);
                        let step = rows.parts(&plan, Device::Cuda(0), 0) * teams;
                        assert!(step >= count || step * columns % i64::from(plan.lanes) == 0);
                    }
                }
            }
        }
    }
}

#[test]
fn few_rows_have_no_parts() {
    let by_columns = |way, rows, columns| {
        let plan =
            Rows { way, rows, columns, kind: Kind::Float, alignment: 16, gpu: GPU }.backward();
        (plan.by_columns, plan.stages)
    };
    assert_eq!(by_columns(Way::Automatic, 512, 1024), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 513, 1024), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 257, 4096), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 256, 1025), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 257, 1025), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 512, 1501), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 513, 1501), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 257, 2501), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 255, 4096), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 256, 4096), (0, 2));
    assert_eq!(by_columns(Way::Automatic, 256, 8192), (0, 2));
    assert_eq!(by_columns(Way::Block, 64, 1024), (0, 2));
    // Rows that are read in passes are summed by columns, too; rows that several blocks share are
    // not.
    assert_eq!(by_columns(Way::Automatic, 3, 70_000), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 257, 70_000), (0, 0));
    assert_eq!(by_columns(Way::Automatic, 512, 70_001), (1, 0));
    assert_eq!(by_columns(Way::Automatic, 3, 16_384), (0, 3));
    assert_eq!(by_columns(Way::Loop, 3, 64), (0, 0));
}

#[test]
fn a_path_is_taken_where_it_can_be() {
    let plan = |way, columns| {
        let plan = rows(way, columns, Kind::Double, 16).backward();
        (plan.in_registers == 1, plan.team, plan.cluster, plan.stages)
    };
    assert_eq!(plan(Way::Block, 4), (true, 64, 1, 2));
    assert_eq!(plan(Way::Loop, 4), (false, 512, 1, 0));
    assert_eq!(plan(Way::Warp, 9), (true, 2, 1, 2));
    assert_eq!(plan(Way::Warp, 300), (true, 64, 1, 2));
    assert_eq!(plan(Way::Direct, 300), (true, 64, 1, 0));
    assert_eq!(plan(Way::Cluster, 4), (true, 256, 2, 3));
    assert_eq!(plan(Way::Cluster, 5), (true, 256, 2, 3));
    assert_eq!(plan(Way::Block, 100_000), (false, 512, 1, 0));
}

/// What the kernels rely on holds for every possible plan.
#[test]
fn every_plan_holds_its_row() {
    use Way::{Automatic, Block, Cluster, Direct, Loop, Warp};
    let sizes = || (0..9000).step_by(3).chain(16000..17000).chain(32760..32780).chain(65530..65550);
    for kind in [Kind::Half, Kind::Float, Kind::Double] {
        let size = kind.elt_size_in_bytes() as i64;
        for way in [Automatic, Warp, Block, Cluster, Direct, Loop] {
            for columns in sizes().chain([1 << 33]) {
                for (alignment, gpu, rows) in [
                    (16, GPU, MANY),
                    (4, GPU, MANY),
                    (2, GPU, 300),
                    (1, GPU, MANY),
                    (16, OLD, MANY),
                    (16, GPU, 1),
                    (16, GPU, 300),
                ] {
                    let shape = Rows { way, rows, columns, kind, alignment, gpu };
                    let rows = shape;
                    check(&rows.forward(), &rows);
                    let plan = rows.forward();
                    let is_wide = if plan.cluster == 1 {
                        plan.team > 32
                    } else {
                        kind == Kind::Float && plan.shifted == 0
                    };
                    let kept = if is_wide { 128 / size } else { 64 / size };
                    let threads = i64::from(plan.team) * i64::from(plan.cluster);
                    assert!(plan.in_registers == 0 || columns <= threads * kept);

                    let plan = rows.backward();
                    check(&plan, &rows);
                    let values = if kind == Kind::Double { 8 } else { 16 };
                    let (team, cluster) = (i64::from(plan.team), i64::from(plan.cluster));
                    let has_rest =
                        plan.stages > 0 && plan.shifted == 1 && cluster == 1 && team > 32;
                    let lead = 16 / size - 1;
                    let rest = match has_rest {
                        true => 32.min(128 / size),
                        false if plan.in_place == 1 => 32 - lead,
                        false => 0,
                    };
                    assert!(plan.in_registers == 0 || columns <= team * values * cluster + rest);
                    assert!(
                        plan.cluster == 1
                            || (gpu.clusters == 1 && plan.stages > 0 && plan.team == plan.threads)
                    );
                    assert!(
                        plan.stages == 0
                            || (i64::from(plan.lanes) * size == 16 && plan.in_registers == 1)
                    );
                    let groups = i64::from(plan.threads / plan.team.min(32) * plan.shifted);
                    let behind = if team < 32 { 16 } else { 144 };
                    let row = 2 * (values * size * i64::from(plan.threads) + behind * groups);
                    assert!(i64::from(plan.stages) * row <= i64::from(gpu.shared_memory));
                    for device in [Device::Cpu, Device::Cuda(0)] {
                        for rows in [0, 1, 1000, 1 << 40] {
                            let rows = Rows { rows, ..shape };
                            assert!((1..=2112).contains(&rows.parts(&plan, device, 60)));
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
    assert!(plan.in_registers == 1 || plan.team == plan.threads);
    let lanes = i64::from(plan.lanes);
    let size = rows.kind.elt_size_in_bytes() as i64;
    assert!(lanes == 1 || lanes * size == 16);
    assert!(
        plan.in_place == 0 || (plan.shifted == 0 && rows.alignment % 16 == 0 && plan.stages > 0)
    );
    let is_odd = plan.shifted == 1 || plan.in_place == 1;
    assert!(lanes == 1 || is_odd || (rows.columns % lanes == 0 && rows.alignment % 16 == 0));
    assert!(plan.by_columns == 0 || (rows.rows <= 512 && rows.way == Way::Automatic));
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
            for way in [Way::Automatic, Way::Warp, Way::Block, Way::Cluster, Way::Direct] {
                let plan = |alignment| {
                    Rows { rows: count, ..rows(way, columns, kind, alignment) }.backward()
                };
                let (aligned, anywhere) = (plan(16), plan(kind.elt_size_in_bytes() as i64));
                if aligned.in_place == 0 {
                    assert_eq!(aligned, anywhere, "{way:?} {count} {columns} {kind:?}");
                    continue;
                }
                let is_long = matches!(way, Way::Automatic | Way::Warp) && columns > 256;
                assert!(way == Way::Block || is_long, "{way:?} {count} {columns} {kind:?}");
                in_place += 1;
            }
        }
    }
    assert!(in_place > 0);
}
