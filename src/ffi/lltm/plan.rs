//! Which way a sequence takes.

use tch::{Device, Kind};

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
    Cuda,
}

impl Chip {
    pub fn of(device: Device) -> Chip {
        match device {
            Device::Cpu => Chip::Cpu { threads: i64::from(tch::get_num_threads()) },
            _ => Chip::Cuda,
        }
    }
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
}

impl Plan {
    /// The way for a sequence of these sizes, whose state is of this kind. A path that a chip does not have is one that
    /// it has.
    pub fn new(path: Path, sizes: Sizes, kind: Kind, chip: Chip) -> Plan {
        match (path, chip) {
            (Path::PerStep, _) | (_, Chip::Cuda) => Plan::PerStep,
            (Path::Automatic | Path::Packed, Chip::Cpu { threads }) => Plan::packed(sizes, kind, threads),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn packed(batch: i64, hidden: i64, kind: Kind, threads: i64) -> (i64, i64) {
        let sizes = Sizes { steps: 128, batch, features: hidden, hidden };
        match Plan::new(Path::Automatic, sizes, kind, Chip::Cpu { threads }) {
            Plan::Packed { row_groups, column_groups } => (row_groups, column_groups),
            Plan::PerStep => panic!("per step"),
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
        for path in [Path::Automatic, Path::PerStep, Path::Packed] {
            assert_eq!(plan(path, Chip::Cuda), Plan::PerStep);
        }
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
