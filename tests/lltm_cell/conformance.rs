//! The rules that every operator keeps to.

use super::*;
use tch_extension::testing::{ConformanceOptions, conformance};

#[test]
fn conformance_in_every_kind() {
    for device in devices() {
        for kind in KINDS {
            for sample in
                [one([3, 4, 5], kind, device), one([2, 3, 8], kind, device), one([0, 4, 5], kind, device)]
            {
                check(&sample, kind);
            }
        }
        let table = SampleTable::empty(DIMS, without_bias).with_sizes(&[[3, 5, 5]]);
        for sample in table.samples(Kind::Double, device).expect("samples") {
            check(&sample, Kind::Double);
        }
    }
}

fn check(sample: &Sample, kind: Kind) {
    let leaves = leaves(sample);
    let options = ConformanceOptions::default();
    conformance(|inputs| call(f_lltm_cell, inputs), &leaves.iter().collect::<Vec<_>>(), &options)
        .unwrap_or_else(|error| panic!("{} {kind:?}:\n{error}", sample.name));
}
