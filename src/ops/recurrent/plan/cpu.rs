//! Which way computes a sequence on the CPU, and how many threads share it.

use super::Sizes;
use crate::ops::kinds::Kind;
use crate::ops::recurrent::kernels::cpu::Team;

/// The team for a cell with this many gates.
pub(in crate::ops) fn team(
    [steps, batch, hidden]: [i64; 3],
    gates: i64,
    kind: Kind,
    threads: i64,
) -> Team {
    // Work is counted in multiplications of one of three gates.
    /// With less work, one thread is done before another is awake. This was measured with three
    /// gates.
    const WORTH_A_THREAD: f64 = (1 << 18) as f64;
    /// With less work, a step is done before the other threads of its rows notice that the preceding
    /// step is done.
    const WORTH_WAITING: f64 = 24_000.0;
    /// How many rows are multiplied with a weight each time it is read.
    const ROWS: i64 = 4;
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
    const ROWS: i64 = 8;
    /// How many bytes both weights may have together to stay in a core's cache. With more, one
    /// product over all steps is as fast or faster.
    const NEAR: f64 = (1 << 20) as f64;

    let Sizes { batch, features, hidden, .. } = sizes;
    let of_gate = hidden as f64 * (hidden as f64 + features as f64);
    let bytes = of_gate * gates as f64 * kind.elt_size_in_bytes() as f64;
    // A product without terms is left to libtorch.
    features > 0 && batch / team.row_groups >= ROWS && bytes <= NEAR
}

/// Whether packing the weights takes longer than it saves: libtorch's products read them where they
/// are.
pub(in crate::ops) fn are_too_few_to_pack(Sizes { steps, batch, .. }: Sizes) -> bool {
    /// A packed row takes about as long as several that are read in place.
    const ROWS: i64 = 4;
    steps == 1 || steps.saturating_mul(batch) <= ROWS
}

/// Whether oneDNN's LSTM is faster than ours in `Float`, forward, or both ways if `keep` is set.
/// Both multiply at the same rate. oneDNN's products are faster where they are large, and columns
/// are whole tiles of it; what it keeps for the backward pass takes more memory, which is slow
/// beyond what an allocator keeps.
pub(in crate::ops) fn is_onednn_faster(sizes: Sizes, keep: bool) -> bool {
    const TILE: i64 = 64;
    const ROWS: i64 = 8;
    /// One step is computed without packing.
    const ROWS_OF_ONE_STEP: i64 = 64;
    const COLUMNS: std::ops::RangeInclusive<i64> = 192..=1024;
    const COLUMNS_KEPT: i64 = 640;
    /// T·B·H at which it keeps 32 MiB.
    const KEPT: i64 = 1 << 19;
    let Sizes { steps, batch, hidden, .. } = sizes;
    let are_tiles = COLUMNS.contains(&hidden) && hidden % TILE == 0;
    let all = steps.saturating_mul(batch).saturating_mul(hidden);
    let is_large = match keep {
        true => steps > 1 && batch >= ROWS && hidden <= COLUMNS_KEPT && all <= KEPT,
        false => batch >= if steps > 1 { ROWS } else { ROWS_OF_ONE_STEP },
    };
    are_tiles && is_large
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
        assert!(of(16, 128, 128, 2) && of(8, 1, 1, 1));
        // Fewer than eight rows for each group of threads; no features; weights of 2 MiB.
        assert!(!of(15, 128, 128, 2) && !of(16, 0, 128, 2) && !of(16, 256, 256, 2));
    }

    /// What the kernels rely on.
    #[test]
    fn every_team_has_a_thread_and_a_share_for_each() {
        for threads in [1, 2, 3, 7, 64, 1000] {
            for batch in [1, 7, 8, 9, 64, 1 << 40] {
                for hidden in [1, 15, 16, 17, 128, 512, 1 << 40] {
                    for (kind, gates) in [(Kind::Float, 3), (Kind::Double, 4)] {
                        let Team { row_groups, column_groups } =
                            team([128, batch, hidden], gates, kind, threads);
                        assert!(row_groups >= 1 && column_groups >= 1);
                        assert!(row_groups * column_groups <= threads);
                        assert!(row_groups <= batch && column_groups <= hidden);
                    }
                }
            }
        }
    }

    #[test]
    fn threads_share_rows_first_and_then_columns() {
        let of = |batch, hidden, kind, threads| {
            let Team { row_groups, column_groups } = team([128, batch, hidden], 3, kind, threads);
            (row_groups, column_groups)
        };
        // While each has enough rows, and the weights fit into a core's cache.
        assert_eq!(of(16, 128, Kind::Float, 2), (2, 1));
        assert_eq!(of(16, 128, Kind::Float, 1), (1, 1));
        assert_eq!(of(7, 128, Kind::Float, 2), (1, 2));
        assert_eq!(of(64, 512, Kind::Float, 2), (1, 2));
        assert_eq!(of(64, 256, Kind::Double, 16), (1, 16));
        // There is too little work to share.
        assert_eq!(of(2, 8, Kind::Float, 16), (1, 1));
    }

    #[test]
    fn weights_are_packed_where_it_pays() {
        let of =
            |steps, batch| are_too_few_to_pack(Sizes { steps, batch, features: 64, hidden: 64 });
        assert!(of(1, 1) && of(1, 1024) && of(4, 1) && of(2, 2));
        assert!(!of(2, 3) && !of(5, 1) && !of(512, 16));
    }

    #[test]
    fn onednn_is_faster_where_its_products_are_large() {
        let of = |steps, batch, hidden, keep| {
            is_onednn_faster(Sizes { steps, batch, features: hidden, hidden }, keep)
        };
        assert!(of(32, 64, 256, true) && of(32, 64, 256, false) && of(1024, 64, 256, false));
        // Too much to keep; narrow; wide; few rows; columns that are no whole tiles; one step.
        assert!(!of(1024, 64, 256, true) && !of(128, 16, 128, true) && !of(4, 64, 1536, false));
        assert!(!of(32, 4, 256, true) && !of(32, 64, 200, false) && !of(1, 64, 256, true));
    }
}
