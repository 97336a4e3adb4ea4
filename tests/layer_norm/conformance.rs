//! Tests of the rules that every operator keeps.

use super::*;

#[test]
fn conformance_in_every_kind() {
    for case in CASES.into_iter().chain(all_ways()) {
        let sizes = [[3, 5], [2, 8], [0, 4], [5, 64]];
        case.suite(|suite| suite.conformance_of(|kind, device| case.samples(&sizes, kind, device)));
    }
}
