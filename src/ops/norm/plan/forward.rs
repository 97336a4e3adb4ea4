//! The forward pass of rows that are no sums.

use super::{
    FORWARD_LOADS, Loads, MOST_IN_CLUSTER, MOST_OF_VALUES, MOST_THREADS, Plan, Rows, WARP, Way,
    power_of_two,
};

impl Rows {
    /// Rows at multiples of 8 bytes have the same plan as those at multiples of 16, but twice as many
    /// loads of half the size: shifting costs more than these.
    pub(crate) fn forward(&self) -> Plan {
        let plan = self.forward_of_16_bytes();
        match self.is_aligned() || self.forward_shifts() {
            true => plan,
            false => Plan { loads: Loads::Narrow, ..plan },
        }
    }

    /// A plan that loads 16 bytes at a time where possible.
    fn forward_of_16_bytes(&self) -> Plan {
        let loads = self.loads();
        let Some(team) = self.team(loads, FORWARD_LOADS) else { return self.forward_of_long() };
        if let Some(threads) = self.value_by_value(team) {
            return Plan::new(Way::Passes, Loads::Single, threads);
        }
        let all = i64::from(self.gpu.processors) * MOST_THREADS;
        let team = self.widened(team, loads, all);
        // Blocks are small, so that a new one starts as soon as one row is done.
        Plan { threads: team.max(2 * WARP) as i32, ..self.in_vectors(Way::Registers, team) }
    }

    /// A plan for rows of which the threads of the largest block need more than the usual number of
    /// loads, or for ways that keep no row in one block.
    fn forward_of_long(&self) -> Plan {
        // Twice as many loads per thread. Not with a forced cluster, which fits no team.
        let fits = self.team(self.loads(), 2 * FORWARD_LOADS).is_some();
        let is_kept = !self.adapts() || self.is_kept_when_long();
        match self.cluster_of_forward() {
            Some(plan) if self.is_very_few() || !fits && is_kept => plan,
            _ if is_kept && fits => self.in_vectors(Way::Registers, MOST_THREADS),
            _ => self.in_passes(Way::Passes),
        }
    }

    /// Whether long rows are kept in registers although there are many: measured on an H200, floats
    /// and shifted halves are. Reading other long rows again, mostly from the L2 cache, takes 0.44 to
    /// 1 of the time.
    fn is_kept_when_long(&self) -> bool {
        match self.size() {
            2 => self.forward_shifts(),
            size => size == 4,
        }
    }

    /// A plan for rows that are too long for one block's registers. A cluster has as few blocks as
    /// can hold a row, or more if there are not enough rows.
    fn cluster_of_forward(&self) -> Option<Plan> {
        // The same as kClusterBytes in csrc/norm/forward_registers.h, and for shifted rows as
        // kBytes.
        let is_wide = self.size() == 4 && !self.forward_shifts();
        let each = if is_wide { 2 * FORWARD_LOADS } else { FORWARD_LOADS };
        let mut plan = self.cluster(&[MOST_THREADS], self.loads(), each)?;
        let processors = i64::from(self.gpu.processors);
        while self.adapts()
            && 2 * i64::from(plan.cluster) <= MOST_IN_CLUSTER
            && 2 * self.rows.saturating_mul(plan.cluster.into()) <= processors
        {
            plan.cluster *= 2;
        }
        Some(plan)
    }

    /// The number of threads for rows that aligned loads cannot read, where reading value by value is
    /// faster than shifting vectors; `None` elsewhere.
    fn value_by_value(&self, team: i64) -> Option<i64> {
        if !self.adapts() || !self.forward_shifts() {
            return None;
        }
        if self.has_few_values_per_thread() {
            let threads = power_of_two(self.columns).clamp(2 * WARP, MOST_THREADS);
            return Some(threads.min(MOST_OF_VALUES / power_of_two(self.rows)));
        }
        // Teams that were doubled to hold one more vector are mostly idle. For floats, shifting
        // then costs more than it saves.
        let is_odd = self.columns % self.wide() != 0;
        let is_idle = 10 * self.loads() < 6 * FORWARD_LOADS * team;
        let threads = power_of_two(self.columns / 20).clamp(4 * WARP, MOST_THREADS);
        (self.size() == 4 && is_odd && team >= 2 * WARP && is_idle).then_some(threads)
    }

    /// Whether the rows are so few and short that each thread has one value or a few.
    fn has_few_values_per_thread(&self) -> bool {
        if self.columns > 4 * MOST_THREADS + 2 * WARP {
            return false;
        }
        // Shifting halves takes the most instructions.
        if self.size() == 2 && self.is_spread() {
            return true;
        }
        let elements = self.rows.saturating_mul(self.columns);
        self.columns % self.wide() != 0
            && self.columns >= 2 * WARP
            && self.rows <= 1024
            && elements <= 9 * MOST_OF_VALUES
    }
}
