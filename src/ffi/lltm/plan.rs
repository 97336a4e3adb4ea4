//! Which way a sequence takes.

use tch::Kind;

/// A way through a sequence. For tests and benches, which force each; users get the one that suits the sizes.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Path {
    /// What suits the sizes.
    #[default]
    Automatic,
    /// libtorch's product and one kernel for each step.
    PerStep,
    /// On the CPU: weights packed once, and threads that stay together for all steps.
    Packed,
    /// On CUDA: one kernel for all steps, whose blocks keep the weights on chip.
    Persistent,
}

/// What there is to compute.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub steps: i64,
    pub batch: i64,
    pub features: i64,
    pub hidden: i64,
}

/// What computes it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Chip {
    Cpu { threads: i64 },
    Cuda(Clusters),
}

/// How many clusters of large blocks a GPU runs at a time; zeros where it has none, or no code for them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Clusters {
    pub of_8: i64,
    pub of_16: i64,
}

/// A way, with all that it leaves open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    PerStep,
    /// How many groups of threads share the rows of the batch, and how many threads of each group the columns.
    Packed {
        row_groups: i64,
        column_groups: i64,
    },
    /// How many blocks share a group of rows.
    Persistent {
        cluster: i64,
    },
}

impl Plan {
    /// The way for a sequence of these sizes, whose product is of this kind. A path that a chip does not have, or not for
    /// these sizes, is one that it has.
    pub fn new(path: Path, sizes: Sizes, kind: Kind, chip: Chip) -> Plan {
        match (path, chip) {
            (Path::PerStep, _) => Plan::PerStep,
            (_, Chip::Cpu { threads }) => Plan::packed(sizes, kind, threads),
            (path, Chip::Cuda(clusters)) => match Persistent::new(sizes, kind, clusters) {
                Some(persistent) if path == Path::Persistent || persistent.is_faster(sizes) => {
                    Plan::Persistent { cluster: persistent.cluster }
                }
                _ => Plan::PerStep,
            },
        }
    }

    fn packed(sizes: Sizes, kind: Kind, threads: i64) -> Plan {
        /// Below, one thread is done before another is awake.
        const WORTH_A_THREAD: f64 = (1 << 18) as f64;
        /// Below, a step is done before the others of the row's threads know that the one before is.
        const WORTH_WAITING: f64 = (1 << 17) as f64;
        /// Rows that are multiplied with a weight each time it is read.
        const ROWS: i64 = 8;
        /// Columns that are computed together.
        const PANEL: i64 = 16;
        /// Weights that stay in a core's cache beside all else.
        const NEAR: i64 = 1 << 20;

        let Sizes { steps, batch, hidden, .. } = sizes;
        let work = steps as f64 * batch as f64 * hidden as f64 * hidden as f64;
        let threads = threads.clamp(1, ((work / WORTH_A_THREAD) as i64).saturating_add(1));
        let a_step = (batch as f64 * hidden as f64 * hidden as f64 / WORTH_WAITING) as i64;
        let (most_rows, most_columns) = ((batch / ROWS).max(1), (hidden / PANEL).min(a_step).max(1));
        let size = kind.elt_size_in_bytes() as i64;
        let near =
            hidden.checked_mul(hidden).and_then(|n| n.checked_mul(3 * size)).is_some_and(|n| n <= NEAR);
        if near {
            // Threads with rows of their own never wait for one another.
            let row_groups = most_rows.min(threads);
            Plan::Packed { row_groups, column_groups: most_columns.min(threads / row_groups) }
        } else {
            // Each weight in one core's cache only.
            let column_groups = most_columns.min(threads);
            Plan::Packed { row_groups: most_rows.min(threads / column_groups), column_groups }
        }
    }
}

/// Rows that a cluster computes.
const ROWS: i64 = 8;

/// A persistent kernel, and what it takes.
struct Persistent {
    cluster: i64,
    /// How many clusters run at a time.
    at_a_time: i64,
    /// What a step of one costs, forward and backward, in tenths of a microsecond, as measured on an H200.
    step: i64,
}

impl Persistent {
    /// The kernel for these sizes, if there is one: the weights have to fit on chip, and the kernel counts in 32 bits.
    fn new(sizes: Sizes, kind: Kind, clusters: Clusters) -> Option<Persistent> {
        let Sizes { steps, batch, hidden, .. } = sizes;
        let values = [batch, hidden, 3].iter().try_fold(steps, |product, &size| product.checked_mul(size))?;
        if i32::try_from(values).is_err() {
            return None;
        }
        let groups = batch.saturating_add(ROWS - 1) / ROWS;
        let half = matches!(kind, Kind::Half | Kind::BFloat16);
        // Of the smallest, several blocks share a multiprocessor.
        let of_8 = |share, step| Persistent { cluster: 8, at_a_time: share * clusters.of_8, step };
        let of_16 = |step| Persistent { cluster: 16, at_a_time: clusters.of_16, step };
        let found = match (half, hidden) {
            (false, ..=128) => of_8(2, 50),
            (true, ..=128) => of_8(2, 15),
            (true, ..=256) => of_8(1, 25),
            (true, ..=512) if groups <= clusters.of_16 => of_16(33),
            (true, ..=512) => of_8(1, 50),
            (true, ..=768) => of_16(60),
            _ => return None,
        };
        (found.at_a_time > 0).then_some(found)
    }

    /// Than a product and a kernel for each step.
    fn is_faster(&self, sizes: Sizes) -> bool {
        /// Steps that are over before the weights are on chip.
        const FEW: i64 = 4;
        /// What each step of the per-step plan costs at least, forward and backward, in the same tenths.
        const PER_STEP: i64 = 100;

        let groups = sizes.batch.saturating_add(ROWS - 1) / ROWS;
        let turns = groups.saturating_add(self.at_a_time - 1) / self.at_a_time;
        sizes.steps >= FEW && turns.saturating_mul(self.step) <= PER_STEP
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(batch: i64, hidden: i64, kind: Kind, threads: i64) -> (i64, i64) {
        let sizes = Sizes { steps: 128, batch, features: hidden, hidden };
        match Plan::new(Path::Automatic, sizes, kind, Chip::Cpu { threads }) {
            Plan::Packed { row_groups, column_groups } => (row_groups, column_groups),
            plan => panic!("{plan:?}"),
        }
    }

    #[test]
    fn plans_suit_the_size() {
        // Rows first, while each thread has enough of them and the weights are near.
        assert_eq!(packed(16, 128, Kind::Float, 2), (2, 1));
        assert_eq!(packed(16, 128, Kind::Float, 1), (1, 1));
        assert_eq!(packed(15, 128, Kind::Float, 2), (1, 1));
        assert_eq!(packed(15, 256, Kind::Float, 2), (1, 2));
        assert_eq!(packed(64, 256, Kind::Float, 16), (8, 2));
        assert_eq!(packed(1, 128, Kind::Float, 16), (1, 1));
        assert_eq!(packed(1, 1024, Kind::Float, 16), (1, 8));
        // Then columns.
        assert_eq!(packed(64, 512, Kind::Float, 2), (1, 2));
        assert_eq!(packed(64, 512, Kind::Float, 64), (2, 32));
        assert_eq!(packed(64, 256, Kind::Double, 16), (1, 16));
        // Too small to share.
        assert_eq!(packed(2, 8, Kind::Float, 16), (1, 1));
    }

    #[test]
    fn a_path_is_taken_where_it_can_be() {
        let sizes = Sizes { steps: 3, batch: 2, features: 4, hidden: 5 };
        let plan = |path, chip| Plan::new(path, sizes, Kind::Double, chip);
        let cpu = Chip::Cpu { threads: 4 };
        assert_eq!(plan(Path::PerStep, cpu), Plan::PerStep);
        assert_eq!(plan(Path::Packed, cpu), Plan::Packed { row_groups: 1, column_groups: 1 });
        assert_eq!(plan(Path::Persistent, cpu), Plan::Packed { row_groups: 1, column_groups: 1 });
        let all = [Path::Automatic, Path::PerStep, Path::Packed, Path::Persistent];
        for path in all {
            assert_eq!(plan(path, Chip::Cuda(Clusters::default())), Plan::PerStep);
        }
        let persistent = Plan::Persistent { cluster: 8 };
        assert_eq!(plan(Path::Persistent, H200), persistent);
        // Too few steps to pay for the weights.
        assert_eq!(plan(Path::Automatic, H200), Plan::PerStep);
    }

    const H200: Chip = Chip::Cuda(Clusters { of_8: 15, of_16: 7 });

    #[test]
    fn persistent_plans_suit_the_size() {
        let cluster = |path, batch, hidden, kind, chip| {
            let sizes = Sizes { steps: 512, batch, features: hidden, hidden };
            match Plan::new(path, sizes, kind, chip) {
                Plan::Persistent { cluster } => Some(cluster),
                _ => None,
            }
        };
        let automatic = |batch, hidden, kind| cluster(Path::Automatic, batch, hidden, kind, H200);
        assert_eq!(automatic(16, 128, Kind::BFloat16), Some(8));
        assert_eq!(automatic(16, 128, Kind::Double), Some(8));
        assert_eq!(automatic(16, 129, Kind::Float), None);
        assert_eq!(automatic(16, 512, Kind::Half), Some(16));
        assert_eq!(automatic(57, 512, Kind::Half), Some(8));
        assert_eq!(automatic(56, 768, Kind::Half), Some(16));
        // A second turn costs more than a step of its own.
        assert_eq!(automatic(57, 768, Kind::Half), None);
        let forced = |batch, hidden, chip| cluster(Path::Persistent, batch, hidden, Kind::Half, chip);
        assert_eq!(forced(57, 768, H200), Some(16));
        assert_eq!(forced(1, 769, H200), None);
        // A GPU, or a part of one, without clusters of 16.
        let part = Chip::Cuda(Clusters { of_8: 1, of_16: 0 });
        assert_eq!(forced(16, 512, part), Some(8));
        assert_eq!(forced(16, 513, part), None);
        // More than the kernel can count, and more than anybody can.
        assert_eq!(forced(i64::from(i32::MAX) / 512, 4, H200), None);
        assert_eq!(forced(i64::MAX, 4, H200), None);
    }

    /// What the kernels take for granted.
    #[test]
    fn every_team_has_a_thread_and_a_share_for_each() {
        for threads in [1, 2, 3, 7, 64, 1000] {
            for batch in [1, 7, 8, 9, 64, 1 << 40] {
                for hidden in [1, 15, 16, 17, 128, 512, 1 << 40] {
                    for kind in [Kind::Float, Kind::Double] {
                        let (rows, columns) = packed(batch, hidden, kind, threads);
                        assert!(rows >= 1 && columns >= 1 && rows * columns <= threads);
                        assert!(rows <= batch && columns <= hidden);
                    }
                }
            }
        }
    }
}
