//! How rows are spread over the GPU's threads.

#[path = "plan/forward.rs"]
mod forward;

use crate::ops::kinds::{Device, Kind};

/// The ways to compute rows on CUDA. Each is named as the files of its kernels in `csrc/norm`.
/// A forward has `Registers`, `Cluster` and `Passes` only: it takes `Passes` if `FewPasses` is
/// forced, and `Registers` if another way of the backward is.
#[doc(hidden)]
#[repr(i32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// The plan chooses. Only then the plan depends on the number of rows.
    #[default]
    Automatic,
    /// A team of threads loads its row into registers. Falls back to `Passes` for rows that are too
    /// long for a block.
    Registers,
    /// The blocks of a cluster share a row. Falls back to `Passes` where the GPU lacks clusters.
    Cluster,
    /// Backward: rows pass through a ring buffer in shared memory, which is filled asynchronously.
    Ring,
    /// Backward: like `Ring`, for rows whose length is not a multiple of 16 bytes. They are read in
    /// place, 16 bytes at a time. All rows of a team begin at the same distance from a multiple of
    /// 16 bytes. Falls back to `Ring` for other rows.
    InPlace,
    /// Backward: one kernel for few rows, which computes dw and db directly from x and dy, without
    /// partial sums. Falls back to `FewPasses` for rows that are too long for a block.
    Few,
    /// One block per row, which reads the row again for each pass.
    Passes,
    /// Backward: dx as by `Passes`, dw and db as by `Few`.
    FewPasses,
}

crate::ops::way::ways!(Way);

/// How threads load the values of a row.
#[repr(i32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loads {
    /// One value at a time.
    Single,
    /// 16 bytes at a time, from multiples of 16 bytes.
    Vector,
    /// Forward: 8 bytes at a time, from multiples of 8 bytes.
    Narrow,
    /// As `Vector`, but rows may begin at any address: their vectors are shifted out of the loads.
    Shifted,
}

/// How rows are spread over threads on CUDA.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    pub(crate) way: Way,
    pub(crate) loads: Loads,
    /// Threads per row, or per part of a row if a cluster shares it: a power of two. If the row is
    /// read again for each pass, the team is the whole block.
    pub(crate) team: i32,
    /// Threads per block: one team or several.
    pub(crate) threads: i32,
    /// Blocks that share a row: 1 except for `Cluster`.
    pub(crate) cluster: i32,
    /// How many rows per team are in flight to shared memory; 0 if rows are loaded straight into
    /// registers.
    pub(crate) stages: i32,
    /// Whether the kernel that adds up the partial sums may start before the preceding kernel ends.
    pub(crate) early_finish: i32,
    pub(crate) reserved: i32,
}

/// What plans need to know about a GPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Gpu {
    /// The number of multiprocessors.
    pub(crate) processors: i32,
    /// The most shared memory that a block can have, in bytes.
    pub(crate) shared_memory: i32,
    /// Whether the GPU has clusters, whose blocks can share a row, and can start a kernel before
    /// the preceding one ends.
    pub(crate) clusters: i32,
}

const WARP: i64 = 32;
/// The number of threads of the largest block and, below, of the usual one.
const MOST_THREADS: i64 = 512;
const THREADS: i64 = 256;
const MOST_IN_CLUSTER: i64 = 8;
/// How many 16-byte loads a thread of the forward usually keeps: the same as kBytes in
/// csrc/norm/forward.h.
const FORWARD_LOADS: i64 = 4;
/// About how many values are under way at a time if threads read one value each.
const MOST_OF_VALUES: i64 = 1 << 17;
/// The same as kBytesOfRest in csrc/norm/backward_ring.h.
const BYTES_OF_REST: i64 = 128;

/// What a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    pub(crate) way: Way,
    pub(crate) rows: i64,
    pub(crate) columns: i64,
    pub(crate) kind: Kind,
    /// All arrays begin at multiples of this many bytes, and of a value's size. Plans only test whether
    /// it is 16 or 8.
    pub(crate) alignment: i64,
    /// Whether a backward computes the gradient of weight or bias. Forwards do not depend on it.
    pub(crate) has_sums: bool,
    pub(crate) gpu: Gpu,
}

impl Rows {
    fn size(&self) -> i64 {
        self.kind.elt_size_in_bytes() as i64
    }

    /// How many values 16 bytes hold.
    fn wide(&self) -> i64 {
        16 / self.size()
    }

    /// How many values of a row a thread of the backward keeps: the same as kBackwardValues in
    /// csrc/norm/row_team.h.
    fn values(&self) -> i64 {
        if self.kind == Kind::Double { 8 } else { 16 }
    }

    /// How many bytes of a block's shared memory its rows can use.
    fn room(&self) -> i64 {
        i64::from(self.gpu.shared_memory) - 8 * 1024
    }

    /// Whether aligned loads of this many bytes, 8 or 16, can read every row.
    fn is_read_by(&self, bytes: i64) -> bool {
        self.columns % (bytes / self.size()) == 0 && self.alignment.max(self.size()) % bytes == 0
    }

    /// Whether aligned 16-byte loads can read every row.
    fn is_aligned(&self) -> bool {
        self.is_read_by(16)
    }

    /// Whether a forward has to shift rows in registers out of 16-byte loads. Rows of doubles never
    /// are: 8-byte loads read them.
    fn forward_shifts(&self) -> bool {
        !self.is_read_by(8)
    }

    /// How many 16-byte loads a row takes.
    fn loads(&self) -> i64 {
        (self.columns + self.wide() - 1) / self.wide()
    }

    /// A plan with blocks of one team, which load 16 bytes at a time.
    fn in_vectors(&self, way: Way, team: i64) -> Plan {
        let loads = if self.is_aligned() { Loads::Vector } else { Loads::Shifted };
        Plan::new(way, loads, team)
    }

    /// A plan that reads a row again for each pass.
    fn in_passes(&self, way: Way) -> Plan {
        let loads = if self.is_aligned() { Loads::Vector } else { Loads::Single };
        Plan::new(way, loads, MOST_THREADS)
    }

    /// Whether the plan is free to adapt to the number of rows.
    fn adapts(&self) -> bool {
        self.way == Way::Automatic
    }

    /// Whether dw and db are computed directly from x and dy, which is faster than partial sums if
    /// there are few rows. The CPU has no such kernel.
    fn is_few(&self) -> bool {
        // Measured on an H200 at 16 to 1024 rows: for long rows that 16-byte loads can read,
        // partial sums cost less.
        let is_long = || match self.is_aligned() {
            true => self.columns > 1024,
            false => self.is_long_in_place(),
        };
        let is_large =
            self.is_aligned() && self.rows.saturating_mul(self.columns) >= (4 << 20) / self.size();
        let is_wanted = match self.way {
            // Without dw and db, the kernel with the ring buffer has no partial sums either.
            Way::Automatic if !self.has_sums && self.is_aligned() => false,
            Way::Automatic => self.rows <= 512 && !is_large && (self.rows <= 256 || !is_long()),
            way => matches!(way, Way::Few | Way::FewPasses),
        };
        is_wanted && self.gpu.processors > 0
    }

    /// Whether there are no more rows than multiprocessors.
    fn is_spread(&self) -> bool {
        self.rows <= i64::from(self.gpu.processors)
    }

    /// Whether there are two multiprocessors for each row. Measured on an H200, sharing a long row then
    /// costs less than any other way, however many blocks share it.
    fn is_very_few(&self) -> bool {
        self.adapts() && self.rows <= i64::from(self.gpu.processors / 2)
    }

    /// Whether a backward without dw and db has so few rows that reading them again, value by value,
    /// costs less than shifting vectors.
    fn is_read_again(&self) -> bool {
        self.adapts() && !self.has_sums && !self.is_aligned() && self.is_spread()
    }

    /// The number of threads for a row that takes this many loads, `each` of them per thread. It is
    /// the smallest that can hold the row, because how much each thread loads at once decides the
    /// speed.
    fn team(&self, loads: i64, each: i64) -> Option<i64> {
        let is_possible = !matches!(self.way, Way::Cluster | Way::Passes | Way::FewPasses);
        let fits = is_possible && loads <= MOST_THREADS * each;
        fits.then(|| power_of_two((loads + each - 1) / each))
    }

    /// More threads for the same row, if all rows together would otherwise have fewer than
    /// `threads`.
    fn widened(&self, team: i64, loads: i64, threads: i64) -> i64 {
        let mut team = team;
        while self.adapts()
            && team < loads.min(MOST_THREADS)
            && self.rows.saturating_mul(team) < threads
        {
            team *= 2;
        }
        team
    }

    pub(crate) fn backward(&self) -> Plan {
        let values = self.values();
        let each = values / self.wide();
        let team = self.team(self.loads(), each);
        let plan = match (team, self.in_place(values)) {
            (Some(_), _) if self.is_read_again() => return self.in_passes(Way::Passes),
            (Some(team), _) if self.is_few() => return self.few(team),
            (Some(_), _) if self.way == Way::Registers => return self.direct(values),
            (_, Some(plan)) => plan,
            (Some(team), _) => self.ring(team, values),
            (None, _) if self.may_leave_a_rest(MOST_THREADS, values) => {
                self.in_vectors(Way::Ring, MOST_THREADS)
            }
            (None, _) => match self.cluster(self.threads_of_cluster(each), self.loads(), each) {
                Some(plan) => plan,
                None => return self.direct(values),
            },
        };
        // The ring buffer holds x and dy of two rows, or of three where blocks wait for one
        // another. For shifted rows each warp loads one vector more; so does each team that is
        // smaller than a warp.
        let is_shifted = plan.loads == Loads::Shifted;
        let groups =
            if is_shifted { i64::from(plan.threads) / i64::from(plan.team).min(WARP) } else { 0 };
        let more = if i64::from(plan.team) < WARP { 16 } else { 16 + BYTES_OF_REST };
        let row = 2 * (more * groups + values * self.size() * i64::from(plan.threads));
        let most = if plan.cluster > 1 { 3 } else { 2 };
        match (2..=most).rev().find(|&stages| i64::from(stages) * row <= self.room()) {
            Some(stages) => Plan { stages, early_finish: self.gpu.clusters, ..plan },
            None => self.direct(values),
        }
    }

    /// Whether the kernels of rows that are sums can be used: they read 16 bytes at a time.
    fn takes_sums(&self) -> bool {
        let is_possible = matches!(self.way, Way::Automatic | Way::Registers | Way::Ring);
        is_possible && self.is_aligned() && self.gpu.processors > 0
    }

    /// A forward plan for rows that are sums; `None` where no one kernel can compute them.
    pub(crate) fn forward_of_sum(&self) -> Option<Plan> {
        // The same as kBytesOfSum in csrc/norm/add_forward.h.
        let each = 2;
        let loads = self.loads();
        if !self.takes_sums() || loads > 2 * each * MOST_THREADS {
            return None;
        }
        let all = i64::from(self.gpu.processors) * MOST_THREADS;
        let team = match self.team(loads, each) {
            Some(team) => self.widened(team, loads, all),
            None => MOST_THREADS,
        };
        Some(Plan { threads: team.max(2 * WARP) as i32, ..self.in_vectors(Way::Registers, team) })
    }

    /// A backward plan for rows that are sums, whose elements take `stream` bytes; `None` where no one
    /// kernel can compute them. `kind` is that of the incoming gradient.
    pub(crate) fn backward_of_sum(&self, stream: i64) -> Option<Plan> {
        let values = self.values();
        if !self.takes_sums() {
            return None;
        }
        let mut plan = self.ring(self.team(self.loads(), values / self.wide())?, values);
        // The ring buffer holds h, dy and h's gradient of two rows.
        let stages = 2;
        let of_thread = i64::from(stages) * values * (self.size() + 2 * stream);
        while of_thread * i64::from(plan.threads) > self.room() {
            if plan.threads == plan.team || i64::from(plan.threads) <= WARP {
                return None;
            }
            plan.threads /= 2;
        }
        Some(Plan { stages, early_finish: self.gpu.clusters, ..plan })
    }

    /// A plan for rows whose length is not a multiple of 16 bytes, in aligned arrays: the rows are
    /// read in place, by teams whose rows all begin at the same distance from a multiple of 16
    /// bytes. If a few columns do not fit, the lanes of a team's last warp take them.
    fn in_place(&self, values: i64) -> Option<Plan> {
        let is_odd = self.columns % self.wide() != 0 && self.alignment % 16 == 0;
        let has_warps = match self.way {
            Way::Automatic => self.columns > WARP * values,
            Way::InPlace => true,
            _ => false,
        };
        if !is_odd || !has_warps {
            return None;
        }
        // How many columns of the preceding row a row's first load may contain.
        let lead = self.wide() - 1;
        let fits = |&team: &i64| self.columns + lead <= team * values + WARP;
        let team = [2 * WARP, 4 * WARP, 8 * WARP, 16 * WARP].into_iter().find(fits)?;
        // Large blocks leave fewer partial sums, and the distances from a multiple of 16 bytes
        // repeat sooner. Smaller blocks are used where multiprocessors would be idle, or where
        // there is no room for two rows.
        let is_idle =
            |threads: i64| 2 * self.rows <= i64::from(self.gpu.processors) * (threads / team);
        let has_room = |threads: i64| 2 * 2 * values * self.size() * threads <= self.room();
        let mut threads = MOST_THREADS;
        while threads > team && (is_idle(threads) || !has_room(threads)) {
            threads /= 2;
        }
        if !has_room(threads) {
            return None;
        }
        Some(Plan { threads: threads as i32, ..Plan::new(Way::InPlace, Loads::Vector, team) })
    }

    /// Whether rows in place need smaller teams than rows that may begin at any address, or are
    /// longer than 2048 columns.
    fn is_long_in_place(&self) -> bool {
        let values = self.values();
        let from_anywhere = self.team(self.loads(), values / self.wide()).unwrap_or(MOST_THREADS);
        let in_place = self.in_place(values);
        in_place.is_some_and(|plan| self.columns > 2048 || i64::from(plan.team) < from_anywhere)
    }

    /// The block sizes that are tried for a cluster.
    fn threads_of_cluster(&self, each: i64) -> &'static [i64] {
        // Two full blocks, if there are enough rows although fewer such clusters run at a time.
        let is_full =
            (15 * MOST_THREADS * each / 8..=2 * MOST_THREADS * each).contains(&self.loads());
        if self.size() == 2 && self.is_aligned() && is_full && self.rows >= 2048 {
            return &[MOST_THREADS];
        }
        &[THREADS, MOST_THREADS]
    }

    /// Whether a team of whole warps, whose threads keep `values` each, can hold a shifted row
    /// except for so few columns that the lanes of its last warp can take them.
    fn may_leave_a_rest(&self, team: i64, values: i64) -> bool {
        let most = (BYTES_OF_REST / self.size()).min(WARP);
        !self.is_aligned()
            && team >= 2 * WARP
            && matches!(self.way, Way::Automatic | Way::Ring | Way::InPlace | Way::Few)
            && self.columns <= team * values + most
    }

    /// The teams and blocks of the kernel with the ring buffer.
    fn ring(&self, team: i64, values: i64) -> Plan {
        let plan = |team: i64, threads: i64| Plan {
            threads: threads as i32,
            ..self.in_vectors(Way::Ring, team)
        };
        if self.may_leave_a_rest(team / 2, values) {
            return plan(team / 2, self.threads_that_stay(team / 2));
        }
        let processors = i64::from(self.gpu.processors);
        // If there are few rows, each gets twice the threads. Each block is then one team, which
        // waits for no other team.
        let is_few = self.adapts() && self.rows.saturating_mul(team) < processors * MOST_THREADS;
        // With very few, a row has a block of one warp, even if some lanes have no column: a block
        // of many teams adds up their dw and db one team after another.
        if self.is_aligned() && self.is_very_few() && team < WARP {
            return plan(WARP, WARP);
        }
        if self.is_aligned() && is_few && (2 * WARP..self.loads().min(MOST_THREADS)).contains(&team)
        {
            return plan(2 * team, 2 * team);
        }
        plan(team, self.threads_that_stay(team))
    }

    /// A plan for few rows: one kernel, some of whose blocks compute rows while others compute
    /// columns.
    fn few(&self, team: i64) -> Plan {
        let processors = i64::from(self.gpu.processors);
        // With very few rows, each may have a block of its own at no loss. Otherwise the rows get
        // the multiprocessors that the blocks of columns leave free or, if these leave none, one
        // block on every multiprocessor in addition.
        let left = processors - self.columns / 16;
        let blocks = if left > 0 { left } else { processors };
        let most =
            if 8 * self.rows <= processors { i64::MAX } else { blocks * MOST_THREADS / 2 + 1 };
        let team = self.widened(team, self.loads(), most);
        Plan { threads: MOST_THREADS as i32, ..Plan::new(Way::Few, Loads::Shifted, team) }
    }

    /// A backward without a ring buffer, with at most one block per row: it loads straight into
    /// registers, 16 bytes or one value at a time.
    fn direct(&self, values: i64) -> Plan {
        let (loads, lanes) =
            if self.is_aligned() { (Loads::Vector, self.wide()) } else { (Loads::Single, 1) };
        let Some(team) = self.team(self.columns / lanes, values / lanes) else {
            return self.in_passes(if self.is_few() { Way::FewPasses } else { Way::Passes });
        };
        let threads = self.threads_that_stay(team) as i32;
        let early_finish = self.gpu.clusters;
        Plan { threads, early_finish, ..Plan::new(Way::Registers, loads, team) }
    }

    /// The number of threads of a block that computes many rows: as many as let a multiprocessor
    /// hold two blocks, and fewer where some multiprocessors would have no block.
    fn threads_that_stay(&self, team: i64) -> i64 {
        let mut threads = team.max(THREADS);
        if self.is_shifted_float(team) {
            threads = if self.has_few_values(team) { team } else { team.max(4 * WARP) };
        }
        let blocks = |threads: i64| (self.rows + threads / team - 1) / (threads / team);
        while threads > team.max(WARP) && 2 * blocks(threads) <= i64::from(self.gpu.processors) {
            threads /= 2;
        }
        threads
    }

    /// The number of parts into which the sums over rows are cut. It depends only on sizes,
    /// alignment and the device, so that the same arrays give the same bits. `clusters` is how many
    /// clusters run at a time.
    pub(crate) fn parts(&self, plan: &Plan, device: Device, clusters: i64) -> i64 {
        let teams = i64::from((plan.threads / plan.team).max(1));
        let processors = i64::from(self.gpu.processors);
        let is_small =
            || self.is_shifted_float(plan.team.into()) && self.has_few_values(plan.team.into());
        let (rows_of_part, most) = match (device, plan.way) {
            (Device::Cpu, _) => (8, 128),
            (_, Way::Cluster) => (1, clusters),
            (_, Way::Passes | Way::FewPasses) => (16, 64),
            (_, Way::Ring) if self.is_one_block_enough(plan) => (teams, processors),
            (_, Way::Ring | Way::InPlace) if is_small() => {
                (teams, processors * (THREADS / i64::from(plan.threads)).max(1))
            }
            // A block's teams share a part. There are as many parts as blocks that run at a time,
            // at 512 threads per multiprocessor.
            _ => (teams, processors * MOST_THREADS / i64::from(plan.threads)),
        };
        let parts = ((self.rows + rows_of_part - 1) / rows_of_part).clamp(1, most.max(1));
        if plan.way != Way::InPlace || parts * teams >= self.rows {
            return parts;
        }
        // All rows of a team have to begin at the same distance from a multiple of 16 bytes.
        let is_alike = |parts: &i64| parts * teams % self.wide() * self.columns % self.wide() == 0;
        (1..=parts).rev().find(is_alike).unwrap_or(self.wide())
    }

    /// Whether one block per multiprocessor computes the ring buffer's rows as fast as two. It then
    /// leaves half as many partial sums to add up.
    fn is_one_block_enough(&self, plan: &Plan) -> bool {
        let (team, threads) = (i64::from(plan.team), i64::from(plan.threads));
        if !self.is_aligned() || threads != THREADS {
            return false;
        }
        // Measured on an H200: threads with nearly 16 floats each have enough bytes in flight; for
        // other rows one block is enough if each team has few rows.
        let at_a_time = 2 * i64::from(self.gpu.processors) * (threads / team);
        self.is_full_of_floats(team) || self.rows <= 6 * at_a_time
    }

    /// Whether the values are floats, nearly 16 per thread.
    fn is_full_of_floats(&self, team: i64) -> bool {
        self.size() == 4 && team >= WARP && 5 * self.columns > 4 * 16 * team
    }

    /// Whether rows of floats are shifted. Smaller blocks suit these, because a team then waits for
    /// no other team.
    fn is_shifted_float(&self, team: i64) -> bool {
        self.size() == 4 && !self.is_aligned() && team >= 2 * WARP
    }

    fn has_few_values(&self, team: i64) -> bool {
        self.rows.saturating_mul(team) <= 1 << 17
    }

    /// A plan for rows that are too long for one block, or for a test that forces several blocks.
    fn cluster(&self, threads: &[i64], loads: i64, each: i64) -> Option<Plan> {
        if self.gpu.clusters == 0 || !matches!(self.way, Way::Automatic | Way::Cluster) {
            return None;
        }
        let blocks = |threads: i64| (loads + threads * each - 1) / (threads * each);
        let threads =
            threads.iter().copied().find(|&threads| blocks(threads) <= MOST_IN_CLUSTER)?;
        let plan = self.in_vectors(Way::Cluster, threads);
        Some(Plan { cluster: blocks(threads).max(2) as i32, ..plan })
    }
}

impl Plan {
    /// What the CPU's kernels get, which ignore it.
    pub(crate) fn of_cpu() -> Plan {
        Plan::new(Way::Passes, Loads::Single, MOST_THREADS)
    }

    /// A plan with blocks of one team, each of which has one row.
    fn new(way: Way, loads: Loads, team: i64) -> Plan {
        let threads = team as i32;
        Plan {
            way,
            loads,
            team: threads,
            threads,
            cluster: 1,
            stages: 0,
            early_finish: 0,
            reserved: 0,
        }
    }
}

fn power_of_two(at_least: i64) -> i64 {
    at_least.max(1).unsigned_abs().next_power_of_two() as i64
}

/// Tables of the ways on an H200, for `docs/ways.md`.
#[cfg(test)]
pub(in crate::ops) fn ways_on_h200(page: &mut String) -> std::fmt::Result {
    use std::fmt::Write;
    const COLUMNS: [i64; 14] =
        [64, 100, 768, 1000, 1024, 2048, 4096, 5000, 8192, 12288, 16384, 32768, 65536, 262_144];
    const ROWS: [i64; 3] = [128, 1024, 65536];
    let gpu = Gpu { processors: 132, shared_memory: 227 << 10, clusters: 1 };
    writeln!(
        page,
        "\n## layer_norm, rms_norm\n\n\
         The ways of `NormWay` for M rows of N columns that begin at multiples of 16 bytes, forward and backward. In the backward pass,\n\
         `csrc/norm/finish.cu` adds up dw and db of parts that the kernel wrote. The kernels are in `csrc/norm`, in files named for the way.\n"
    )?;
    write!(page, "| N, kind |")?;
    ROWS.iter().try_for_each(|rows| write!(page, " M = {rows} |"))?;
    write!(page, "\n|---|")?;
    ROWS.iter().try_for_each(|_| write!(page, "---|"))?;
    for columns in COLUMNS {
        for (name, kind) in [("half", Kind::BFloat16), ("`Float`", Kind::Float)] {
            write!(page, "\n| {columns}, {name} |")?;
            for rows in ROWS {
                let alignment = 16;
                let way = Way::Automatic;
                let of = Rows { way, rows, columns, kind, alignment, has_sums: true, gpu };
                let (forward, backward) = (of.forward(), of.backward());
                let loads = |plan: &Plan| match plan.loads {
                    Loads::Vector => "",
                    Loads::Narrow => " (8 bytes)",
                    Loads::Shifted => " (shifted)",
                    Loads::Single => " (single values)",
                };
                write!(
                    page,
                    " {:?}{}, {:?}{} |",
                    forward.way,
                    loads(&forward),
                    backward.way,
                    loads(&backward)
                )?;
            }
        }
    }
    writeln!(page)
}

#[cfg(test)]
#[path = "plan/tests.rs"]
mod tests;
