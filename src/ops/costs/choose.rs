//! The rules by which every plan chooses.

/// Of candidates with equal costs, or nearly so, the first one is taken: costs are measured to a few
/// percent.
const ALIKE: f64 = 1.02;

/// The cheapest candidate or, within 2 % of its cost, the first one. Plans put simpler ways first.
pub(in crate::ops) fn cheapest<W>(
    candidates: impl IntoIterator<Item = (W, f64), IntoIter: Clone>,
) -> Option<(W, f64)> {
    // It is cheaper to compute costs twice than to keep them in memory of their own.
    let mut all = candidates.into_iter();
    let least = all.clone().map(|(_, cost)| cost).fold(f64::INFINITY, f64::min);
    all.find(|(_, cost)| *cost <= least * ALIKE)
}

/// Costs are off by 15 to 20 %, as `tune` reports.
const CLEARLY: f64 = 1.2;

/// Whether a way of this crate is taken instead of the library's. Where costs are nearly alike, the cheaper
/// way is often the slower one: a margin of 1.2 in place of 1.02 left 1.4 instead of 4.7 % of products slower
/// than libtorch's, and cost half a percent of the mean speed; layers alike (docs/lab/methods.md).
pub(in crate::ops) fn is_clearly_cheaper(ours: f64, library: f64) -> bool {
    ours * CLEARLY < library
}

#[cfg(test)]
mod tests {
    use super::{cheapest, is_clearly_cheaper};

    #[test]
    fn the_library_is_left_for_a_clear_gain_only() {
        assert!(is_clearly_cheaper(1.0, 1.25));
        assert!(!is_clearly_cheaper(1.0, 1.15));
        // Unknown costs.
        assert!(!is_clearly_cheaper(f64::NAN, 1.0) && !is_clearly_cheaper(1.0, f64::NAN));
    }

    #[test]
    fn the_simpler_of_two_that_are_alike_is_taken() {
        assert_eq!(cheapest([("simple", 1.02), ("fast", 1.0)]), Some(("simple", 1.02)));
        assert_eq!(cheapest([("simple", 1.03), ("fast", 1.0)]), Some(("fast", 1.0)));
        assert_eq!(cheapest([("a", 2.0), ("b", f64::NAN), ("c", 1.0)]), Some(("c", 1.0)));
        assert_eq!(cheapest::<()>([]), None);
    }
}
