//! How many threads share a sequence on the CPU.

use super::Sizes;
use crate::ops::recurrent::kernels::cpu::Team;
use tch::Kind;

/// The team for a cell with this many gates.
pub(in crate::ops) fn team(
    [steps, batch, hidden]: [i64; 3],
    gates: i64,
    kind: Kind,
    threads: i64,
) -> Team {
    /// With less work, one thread is done before another is awake. Like the next number, this was
    /// measured with three gates.
    const WORTH_A_THREAD: f64 = (1 << 18) as f64;
    /// With less work, a step is done before the other threads of its rows notice that the preceding
    /// step is done.
    const WORTH_WAITING: f64 = (1 << 17) as f64;
    /// How many rows are multiplied with a weight each time it is read.
    const ROWS: i64 = 8;
    /// How many columns are computed together.
    const PANEL: i64 = 16;
    /// How many bytes of weights stay in a core's cache next to all other data.
    const NEAR: i64 = 1 << 20;

    let of_step = batch as f64 * hidden as f64 * hidden as f64 * gates as f64 / 3.0;
    let work = steps as f64 * of_step;
    let threads = threads.clamp(1, ((work / WORTH_A_THREAD) as i64).saturating_add(1));
    let (most_rows, most_columns) =
        ((batch / ROWS).max(1), (hidden / PANEL).min((of_step / WORTH_WAITING) as i64).max(1));
    let size = kind.elt_size_in_bytes() as i64;
    let near = hidden
        .checked_mul(hidden)
        .and_then(|n| n.checked_mul(gates * size))
        .is_some_and(|n| n <= NEAR);
    if near {
        // Threads with rows of their own never wait for one another.
        let row_groups = most_rows.min(threads);
        Team { row_groups, column_groups: most_columns.min(threads / row_groups) }
    } else {
        // Each weight is then in the cache of only one core.
        let column_groups = most_columns.min(threads);
        Team { row_groups: most_rows.min(threads / column_groups), column_groups }
    }
}

/// Whether the kernel that computes the steps also multiplies the input with W_ih, and the gradients
/// for the gates with it. What these products write or read is then in the cache.
pub(in crate::ops) fn multiplies_input(sizes: Sizes, gates: i64, kind: Kind, team: Team) -> bool {
    /// With fewer rows, most of the time is spent on reading the weights again in each step.
    const ROWS: i64 = 4;
    /// How many bytes both weights may have together to stay in a core's cache. With more, one
    /// product over all steps is as fast or faster.
    const NEAR: f64 = (1 << 20) as f64;

    let Sizes { batch, features, hidden, .. } = sizes;
    let of_gate = hidden as f64 * (hidden as f64 + features as f64);
    let bytes = of_gate * gates as f64 * kind.elt_size_in_bytes() as f64;
    // A product without terms is left to libtorch.
    features > 0 && batch / team.row_groups >= ROWS && bytes <= NEAR
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_multiply_the_input_where_both_weights_stay_in_a_cache() {
        let of = |batch, features, hidden, row_groups| {
            let sizes = Sizes { steps: 128, batch, features, hidden };
            let team = Team { row_groups, column_groups: 1 };
            multiplies_input(sizes, 4, Kind::Float, team)
        };
        assert!(of(16, 128, 128, 2) && of(8, 128, 128, 2) && of(4, 1, 1, 1));
        // Fewer than four rows for each group of threads; no features; weights of 2 MiB.
        assert!(!of(7, 128, 128, 2) && !of(16, 0, 128, 2) && !of(16, 256, 256, 2));
    }
}
