//! The one rule by which every plan chooses.

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

#[cfg(test)]
mod tests {
    use super::cheapest;

    #[test]
    fn the_simpler_of_two_that_are_alike_is_taken() {
        assert_eq!(cheapest([("simple", 1.02), ("fast", 1.0)]), Some(("simple", 1.02)));
        assert_eq!(cheapest([("simple", 1.03), ("fast", 1.0)]), Some(("fast", 1.0)));
        assert_eq!(cheapest([("a", 2.0), ("b", f64::NAN), ("c", 1.0)]), Some(("c", 1.0)));
        assert_eq!(cheapest::<()>([]), None);
    }
}
