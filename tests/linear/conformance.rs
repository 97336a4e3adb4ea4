//! Tests of the rules that every operator keeps.

use super::*;

#[test]
fn conformance_in_every_kind() {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&[[3, 5, 5], [2, 3, 8], [0, 4, 5]]);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&[[3, 5, 5]]);
    let vector = SampleTable::empty(DIMS, with_input(&[], with_bias)).with_sizes(&[[0, 5, 5]]);
    let batched = SampleTable::empty(DIMS, with_input(&[2, 3], with_bias)).with_sizes(&[[0, 5, 5]]);
    suite().conformance_of(|kind, device| with.samples(kind, device).expect("samples"));
    suite().conformance_of(|kind, device| without.samples(kind, device).expect("samples"));
    suite().conformance_of(|kind, device| vector.samples(kind, device).expect("samples"));
    suite().conformance_of(|kind, device| batched.samples(kind, device).expect("samples"));
}
