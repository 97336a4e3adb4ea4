//! Tests of the rules that every operator keeps.

use super::*;

#[test]
fn conformance_in_every_kind() {
    let patterns: [Pattern; 6] = [
        (&[3, 4], &[4, 4], &[4]),
        (&[3, 4], &[4, 8], &[3, 8]),
        (&[3, 4], &[4, 5], &[2, 3, 1]),
        (&[2, 3, 4], &[4, 4], &[3, 1]),
        (&[4], &[4, 4], &[4]),
        (&[0, 4], &[4, 5], &[5]),
    ];
    suite().conformance_of(|kind, device| samples(&patterns, kind, device));
}
