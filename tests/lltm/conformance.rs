//! The rules that every operator keeps to.

use super::*;

#[test]
fn conformance_in_every_kind() {
    // The last with a state of the features' size, so that calls are chained through the input,
    // too.
    let sizes = [[3, 2, 4, 5], [0, 2, 4, 5], [2, 0, 4, 5], [2, 3, 5, 5]];
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&sizes);
    suite_of(&fused).conformance_of(|kind, device| table.samples(kind, device).expect("samples"));
}
