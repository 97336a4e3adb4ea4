//! How rows are spread over the GPU's threads.

use tch::{Device, Kind};

/// Which way the CUDA kernels take with a row. For tests, which prove each; users get the one that suits the size.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// What suits the size.
    #[default]
    Automatic,
    /// A warp or a part of one, if the row fits in its registers.
    Warp,
    /// A block, if the row fits in its registers.
    Block,
    /// Several blocks of a cluster in the backward, if the GPU has clusters.
    Cluster,
    /// What suits the size, but the backward's rows go straight to registers.
    Direct,
    /// A block that reads the row again for each pass.
    Loop,
}

/// How rows are spread over threads.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) in_registers: i32,
    pub(super) lanes: i32,
    pub(super) shifted: i32,
    pub(super) team: i32,
    pub(super) threads: i32,
    pub(super) cluster: i32,
    pub(super) stages: i32,
    pub(super) early_finish: i32,
    pub(super) by_columns: i32,
}

/// What plans ask of a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Gpu {
    pub(super) processors: i32,
    pub(super) shared_memory: i32,
    pub(super) clusters: i32,
}

const WARP: i64 = 32;
/// The largest block, and the usual one.
const MOST_THREADS: i64 = 512;
const THREADS: i64 = 256;
const MOST_IN_CLUSTER: i64 = 8;

/// What a plan is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    pub(super) path: Path,
    pub(super) rows: i64,
    pub(super) columns: i64,
    pub(super) kind: Kind,
    /// All arrays begin at multiples of so many bytes; only 16 counts.
    pub(super) alignment: i64,
    pub(super) gpu: Gpu,
}

impl Rows {
    fn size(&self) -> i64 {
        self.kind.elt_size_in_bytes() as i64
    }

    /// Values of 16 bytes.
    fn wide(&self) -> i64 {
        16 / self.size()
    }

    /// Whether loads of 16 bytes can read all as it lies. Otherwise rows in registers are shifted out of such loads.
    fn is_aligned(&self) -> bool {
        self.columns % self.wide() == 0 && self.alignment % 16 == 0
    }

    /// Loads of 16 bytes for a row.
    fn loads(&self) -> i64 {
        (self.columns + self.wide() - 1) / self.wide()
    }

    /// Of rows in registers.
    fn in_vectors(&self, team: i64) -> Plan {
        Plan { shifted: i32::from(!self.is_aligned()), ..Plan::new(self.wide(), Some(team)) }
    }

    /// A row that is read again for each pass.
    fn in_passes(&self) -> Plan {
        Plan::new(if self.is_aligned() { self.wide() } else { 1 }, None)
    }

    /// So few rows that the sums over them are read from x and dy again, in the same kernel that does the rows.
    fn by_columns(&self) -> bool {
        // Measured on an H200 at 16 to 1024 rows: parts of long rows that loads of 16 bytes can read cost less.
        let few = if self.is_aligned() && self.columns > 1024 { 256 } else { 512 };
        let is_large = self.is_aligned() && self.rows.saturating_mul(self.columns) > (4 << 20) / self.size();
        self.path == Path::Automatic && self.rows <= few && !is_large && self.gpu.processors > 0
    }

    /// The team for a row of so many loads, `each` a thread: as few threads as can hold it, because what a thread loads
    /// at once decides the speed.
    fn team(&self, loads: i64, each: i64) -> Option<i64> {
        let fits = |threads: i64| loads <= threads * each;
        let least = power_of_two((loads + each - 1) / each);
        match self.path {
            Path::Automatic | Path::Warp | Path::Direct if fits(WARP) => Some(least),
            Path::Automatic | Path::Warp | Path::Direct | Path::Block if fits(MOST_THREADS) => {
                Some(least.max(2 * WARP))
            }
            _ => None,
        }
    }

    /// The same row over more threads, where there would be fewer than `threads` in all otherwise.
    fn widened(&self, team: i64, loads: i64, threads: i64) -> i64 {
        let mut team = team;
        while self.path == Path::Automatic
            && team < loads.min(MOST_THREADS)
            && self.rows.saturating_mul(team) < threads
        {
            team *= 2;
        }
        team
    }

    pub(super) fn forward(&self) -> Plan {
        // As kBytes in csrc/layer_norm/forward.h.
        let each = 4;
        let loads = self.loads();
        let team = match self.team(loads, each) {
            None if matches!(self.path, Path::Automatic | Path::Direct | Path::Block) => {
                // Twice as much of a row a thread, in the largest block.
                Some(MOST_THREADS).filter(|threads| loads <= threads * 2 * each)
            }
            team => {
                let all = i64::from(self.gpu.processors) * MOST_THREADS;
                team.map(|team| self.widened(team, loads, all))
            }
        };
        let Some(team) = team else { return self.in_passes() };
        // Small blocks: a new one starts as soon as one row is done.
        Plan { threads: team.max(2 * WARP) as i32, ..self.in_vectors(team) }
    }

    pub(super) fn backward(&self) -> Plan {
        // As kBackwardValues in csrc/layer_norm/row_team.h.
        let values = if self.kind == Kind::Double { 8 } else { 16 };
        let each = values / self.wide();
        let early_finish = self.gpu.clusters;
        let ring = match self.team(self.loads(), each) {
            Some(team) if self.by_columns() => return self.few(team),
            Some(_) if self.path == Path::Direct => return self.direct(values),
            Some(team) => Plan { threads: self.threads_that_stay(team) as i32, ..self.in_vectors(team) },
            None => match self.cluster(self.loads(), each) {
                Some(plan) => plan,
                None => return self.direct(values),
            },
        };
        // x and dy of two rows, of three where blocks wait for one another. Of shifted rows each warp has a vector more,
        // or each team within one.
        let groups = ring.threads / ring.team.min(WARP as i32) * ring.shifted;
        let row = 2 * (16 * groups + (values * self.size()) as i32 * ring.threads);
        let most = if ring.cluster > 1 { 3 } else { 2 };
        let room = self.gpu.shared_memory - 8 * 1024;
        match (2..=most).rev().find(|stages| stages * row <= room) {
            Some(stages) => Plan { stages, early_finish, ..ring },
            None => self.direct(values),
        }
    }

    /// One kernel for all: blocks of rows and blocks of columns beside one another.
    fn few(&self, team: i64) -> Plan {
        let processors = i64::from(self.gpu.processors);
        // So few rows that a block for each is no loss; otherwise one block a processor, or two where there are more
        // columns than that.
        let left = processors - self.columns / 16;
        let blocks = if left > 0 { left } else { processors };
        let most = if 8 * self.rows <= processors { i64::MAX } else { blocks * MOST_THREADS / 2 + 1 };
        let team = self.widened(team, self.loads(), most);
        Plan { threads: MOST_THREADS as i32, shifted: 1, by_columns: 1, ..self.in_vectors(team) }
    }

    /// The backward of one block a row, or less, without a ring: loads straight to registers are of 16 bytes or of
    /// single values.
    fn direct(&self, values: i64) -> Plan {
        let passes = self.in_passes();
        let lanes = i64::from(passes.lanes);
        let Some(team) = self.team(self.columns / lanes, values / lanes) else {
            // A kernel of its own makes the parts, if there are any.
            return Plan { by_columns: i32::from(self.by_columns()), ..passes };
        };
        let threads = self.threads_that_stay(team) as i32;
        Plan { threads, early_finish: self.gpu.clusters, ..Plan::new(lanes, Some(team)) }
    }

    /// Threads of a block that stays for many rows: as many as let a processor hold two blocks, fewer where some
    /// processors would have none.
    fn threads_that_stay(&self, team: i64) -> i64 {
        // Where measuring said so: more of 1024 floats, and of half kinds that have to be shifted and fill their threads.
        let is_float_1024 = self.size() == 4 && self.is_aligned() && team == 2 * WARP && self.rows > 8192;
        let is_shifted_half =
            self.size() == 2 && !self.is_aligned() && team >= 2 * WARP && self.loads() >= 2 * team;
        let mut threads = if is_float_1024 || is_shifted_half { MOST_THREADS } else { team.max(THREADS) };
        let blocks = |threads: i64| (self.rows + threads / team - 1) / (threads / team);
        while threads > team.max(WARP) && 2 * blocks(threads) <= i64::from(self.gpu.processors) {
            threads /= 2;
        }
        threads
    }

    /// Rows that are too long for one block, or for which a test wants several.
    fn cluster(&self, loads: i64, each: i64) -> Option<Plan> {
        if self.gpu.clusters == 0 || !matches!(self.path, Path::Automatic | Path::Cluster) {
            return None;
        }
        let blocks = |threads: i64| (loads + threads * each - 1) / (threads * each);
        let threads =
            [THREADS, MOST_THREADS].into_iter().find(|&threads| blocks(threads) <= MOST_IN_CLUSTER)?;
        let plan = self.in_vectors(threads);
        Some(Plan { cluster: blocks(threads).max(2) as i32, ..plan })
    }
}

impl Plan {
    /// Of one block a row; the block is the team, and reads again what it cannot hold, where there is none.
    fn new(lanes: i64, team: Option<i64>) -> Plan {
        let threads = team.unwrap_or(MOST_THREADS) as i32;
        Plan {
            in_registers: i32::from(team.is_some()),
            lanes: lanes as i32,
            shifted: 0,
            team: threads,
            threads,
            cluster: 1,
            stages: 0,
            early_finish: 0,
            by_columns: 0,
        }
    }

    /// Into how many the sums over rows are cut. Given by sizes, alignment and the device alone, so that the same arrays
    /// give the same bits. `clusters`: so many run at a time.
    pub(super) fn parts(&self, rows: i64, device: Device, gpu: Gpu, clusters: i64) -> i64 {
        let teams = i64::from((self.threads / self.team).max(1));
        let processors = i64::from(gpu.processors);
        let (rows_of_part, most) = match (device, self.in_registers, self.stages) {
            (Device::Cpu, ..) => (8, 128),
            (_, _, 1..) if self.cluster > 1 => (1, clusters),
            // A block's teams share a part. All blocks at a time: 512 threads a processor.
            (_, 1, _) => (teams, processors * MOST_THREADS / i64::from(self.threads)),
            _ => (16, 64),
        };
        ((rows + rows_of_part - 1) / rows_of_part).clamp(1, most.max(1))
    }
}

fn power_of_two(at_least: i64) -> i64 {
    at_least.max(1).unsigned_abs().next_power_of_two() as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An H200.
    const GPU: Gpu = Gpu { processors: 132, shared_memory: 227 << 10, clusters: 1 };
    /// One that has neither clusters nor much shared memory.
    const OLD: Gpu = Gpu { processors: 40, shared_memory: 64 << 10, clusters: 0 };
    const MANY: i64 = 1 << 20;

    fn rows(path: Path, columns: i64, kind: Kind, alignment: i64) -> Rows {
        Rows { path, rows: MANY, columns, kind, alignment, gpu: GPU }
    }

    #[test]
    fn forwards_suit_the_size() {
        let plan = |rows: i64, columns, kind| {
            let plan = Rows { rows, ..rows_of(columns, kind) }.forward();
            (plan.in_registers == 1).then_some((plan.team, plan.threads))
        };
        fn rows_of(columns: i64, kind: Kind) -> Rows {
            rows(Path::Automatic, columns, kind, 16)
        }
        assert_eq!(plan(MANY, 256, Kind::BFloat16), Some((8, 64)));
        assert_eq!(plan(MANY, 256, Kind::Float), Some((16, 64)));
        assert_eq!(plan(MANY, 1024, Kind::BFloat16), Some((32, 64)));
        assert_eq!(plan(MANY, 4096, Kind::BFloat16), Some((128, 128)));
        assert_eq!(plan(MANY, 16384, Kind::Half), Some((512, 512)));
        assert_eq!(plan(MANY, 32768, Kind::Half), Some((512, 512)));
        assert_eq!(plan(MANY, 32776, Kind::Half), None);
        assert_eq!(plan(MANY, 16384, Kind::Float), Some((512, 512)));
        assert_eq!(plan(MANY, 16388, Kind::Float), None);
        // Odd rows, too.
        assert_eq!(plan(MANY, 16385, Kind::Float), None);
        assert_eq!(plan(MANY, 16383, Kind::Float), Some((512, 512)));
        assert_eq!(plan(MANY, 8191, Kind::Half), Some((256, 256)));
        assert_eq!(plan(MANY, 1, Kind::Half), Some((1, 64)));
        // Few rows get more threads, but none without a load.
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
            (Float, 513, 16, (4, 1, 64, 256, 1, 2)),
            (Float, 516, 16, (4, 0, 64, 512, 1, 2)),
            (Float, 4096, 16, (4, 0, 256, 256, 1, 2)),
            (Float, 8192, 16, (4, 0, 512, 512, 1, 2)),
            (Float, 8193, 16, (4, 1, 256, 256, 3, 3)),
            (Float, 8196, 16, (4, 0, 256, 256, 3, 3)),
            (Float, 16384, 16, (4, 0, 256, 256, 4, 3)),
            (Float, 32768, 16, (4, 0, 256, 256, 8, 3)),
            (Float, 65536, 16, (4, 0, 512, 512, 8, 3)),
            (Float, 65540, 16, (4, 0, 512, 512, 1, 0)),
            (Half, 1024, 16, (8, 0, 64, 256, 1, 2)),
            (Half, 1023, 16, (8, 1, 64, 512, 1, 2)),
            (Half, 1025, 16, (8, 1, 128, 256, 1, 2)),
            (BFloat16, 100, 16, (8, 1, 8, 256, 1, 2)),
            (BFloat16, 8192, 16, (8, 0, 512, 512, 1, 2)),
            (BFloat16, 8192, 2, (8, 1, 512, 512, 1, 2)),
            (BFloat16, 8200, 16, (8, 0, 256, 256, 3, 3)),
            (BFloat16, 65535, 16, (8, 1, 512, 512, 8, 3)),
            (BFloat16, 65538, 16, (1, 0, 512, 512, 1, 0)),
            (Double, 258, 16, (2, 0, 64, 256, 1, 2)),
            (Double, 4096, 16, (2, 0, 512, 512, 1, 2)),
            (Double, 4098, 16, (2, 0, 256, 256, 3, 3)),
            (Double, 4097, 16, (2, 1, 256, 256, 3, 3)),
        ];
        for (kind, columns, alignment, expected) in table {
            let plan = rows(Path::Automatic, columns, kind, alignment).backward();
            let found = (plan.lanes, plan.shifted, plan.team, plan.threads, plan.cluster, plan.stages);
            assert_eq!(found, expected, "{kind:?} {columns} aligned to {alignment}");
        }
    }

    #[test]
    fn few_rows_have_no_parts() {
        let by_columns = |path, rows, columns| {
            let plan = Rows { path, rows, columns, kind: Kind::Float, alignment: 16, gpu: GPU }.backward();
            (plan.by_columns, plan.stages)
        };
        assert_eq!(by_columns(Path::Automatic, 512, 1024), (1, 0));
        assert_eq!(by_columns(Path::Automatic, 513, 1024), (0, 2));
        assert_eq!(by_columns(Path::Automatic, 257, 4096), (0, 2));
        assert_eq!(by_columns(Path::Automatic, 512, 1025), (1, 0));
        assert_eq!(by_columns(Path::Automatic, 513, 1025), (0, 2));
        assert_eq!(by_columns(Path::Automatic, 256, 4096), (1, 0));
        assert_eq!(by_columns(Path::Automatic, 256, 8192), (0, 2));
        assert_eq!(by_columns(Path::Block, 64, 1024), (0, 2));
        // Where the rows are in passes, too; not where blocks share them.
        assert_eq!(by_columns(Path::Automatic, 3, 70_000), (1, 0));
        assert_eq!(by_columns(Path::Automatic, 257, 70_000), (0, 0));
        assert_eq!(by_columns(Path::Automatic, 512, 70_001), (1, 0));
        assert_eq!(by_columns(Path::Automatic, 3, 16_384), (0, 3));
        assert_eq!(by_columns(Path::Loop, 3, 64), (0, 0));
    }

    #[test]
    fn a_path_is_taken_where_it_can_be() {
        let plan = |path, columns| {
            let plan = rows(path, columns, Kind::Double, 16).backward();
            (plan.in_registers == 1, plan.team, plan.cluster, plan.stages)
        };
        assert_eq!(plan(Path::Block, 4), (true, 64, 1, 2));
        assert_eq!(plan(Path::Loop, 4), (false, 512, 1, 0));
        assert_eq!(plan(Path::Warp, 9), (true, 2, 1, 2));
        assert_eq!(plan(Path::Warp, 300), (true, 64, 1, 2));
        assert_eq!(plan(Path::Direct, 300), (true, 64, 1, 0));
        assert_eq!(plan(Path::Cluster, 4), (true, 256, 2, 3));
        assert_eq!(plan(Path::Cluster, 5), (true, 256, 2, 3));
        assert_eq!(plan(Path::Block, 100_000), (false, 512, 1, 0));
    }

    /// What the kernels take for granted, for every plan there is.
    #[test]
    fn every_plan_holds_its_row() {
        use Path::{Automatic, Block, Cluster, Direct, Loop, Warp};
        let sizes = || (0..9000).step_by(3).chain(16000..17000).chain(32760..32780).chain(65530..65550);
        for kind in [Kind::Half, Kind::Float, Kind::Double] {
            let size = kind.elt_size_in_bytes() as i64;
            for path in [Automatic, Warp, Block, Cluster, Direct, Loop] {
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
                        let rows = Rows { path, rows, columns, kind, alignment, gpu };
                        check(&rows.forward(), &rows);
                        let plan = rows.forward();
                        let kept = if plan.team <= 32 { 64 / size } else { 128 / size };
                        assert!(plan.in_registers == 0 || columns <= i64::from(plan.team) * kept);

                        let plan = rows.backward();
                        check(&plan, &rows);
                        let values = if kind == Kind::Double { 8 } else { 16 };
                        let (team, cluster) = (i64::from(plan.team), i64::from(plan.cluster));
                        assert!(plan.in_registers == 0 || columns <= team * values * cluster);
                        assert!(
                            plan.cluster == 1
                                || (gpu.clusters == 1 && plan.stages > 0 && plan.team == plan.threads)
                        );
                        assert!(
                            plan.stages == 0
                                || (i64::from(plan.lanes) * size == 16 && plan.in_registers == 1)
                        );
                        let groups = i64::from(plan.threads / plan.team.min(32) * plan.shifted);
                        let row = 2 * (values * size * i64::from(plan.threads) + 16 * groups);
                        assert!(i64::from(plan.stages) * row <= i64::from(gpu.shared_memory));
                        for device in [Device::Cpu, Device::Cuda(0)] {
                            for rows in [0, 1, 1000, 1 << 40] {
                                assert!((1..=2112).contains(&plan.parts(rows, device, gpu, 60)));
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
        assert!(lanes == 1 || plan.shifted == 1 || (rows.columns % lanes == 0 && rows.alignment % 16 == 0));
        assert!(plan.by_columns == 0 || (rows.rows <= 512 && rows.path == Path::Automatic));
    }
}
