//! The rules that every operator keeps to.

use super::*;

#[test]
fn conformance_in_every_kind() {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&[[3, 4, 5], [2, 3, 8], [0, 4, 5]]);
    // A state of the features' size, so that steps are chained through the input, too.
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&[[3, 5, 5]]);
    suite().conformance_of(|kind, device| with.samples(kind, device).expect("samples"));
    suite().conformance_of(|kind, device| without.samples(kind, device).expect("samples"));
}
