//! Tests of the rules that every operator keeps.

use super::*;

#[test]
fn conformance_in_every_kind() {
    // In the last sample, the hidden size equals the number of features, so that calls are also
    // chained through the input.
    let sizes = [[3, 2, 4, 5], [0, 2, 4, 5], [2, 0, 4, 5], [2, 3, 5, 5]];
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&sizes);
    suite_of(&fused).conformance_of(|kind, device| table.samples(kind, device).expect("samples"));
}
