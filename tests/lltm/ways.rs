//! What all ways have in common, whichever of them the plan chooses.

use super::*;

const WAYS: [RnnWay; 12] = [
    RnnWay::Automatic,
    RnnWay::Cells,
    RnnWay::Step,
    RnnWay::Fused,
    RnnWay::TensorCores,
    RnnWay::Packed,
    RnnWay::Resident,
    RnnWay::Cluster,
    RnnWay::Grid,
    RnnWay::PlainGrid,
    RnnWay::WideGrid,
    RnnWay::CrowdedGrid,
];

/// None of the results is a view: each may be detached in place.
#[test]
fn without_a_graph_the_results_are_no_views() {
    for device in devices() {
        for (way, kind) in WAYS.into_iter().flat_map(|way| [(way, Kind::Float), (way, Kind::Half)])
        {
            let sample = one([9, 16, 32, 264], kind, device);
            for mut output in force(way, || fused(&sample.inputs)).expect("outputs") {
                let _ = output.f_detach_().expect("no view");
            }
        }
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let sizes = [
        [1, 3, 4, 5],
        [2, 3, 4, 5],
        [3, 3, 4, 5],
        [3, 1, 1, 1],
        [1, 1, 1, 1],
        [2, 3, 0, 4],
        [3, 3, 0, 4],
        [0, 3, 4, 5],
        [1, 0, 4, 5],
        [2, 0, 4, 5],
        [3, 0, 4, 5],
        [2, 3, 4, 0],
        [3, 3, 4, 0],
        [9, 2, 8, 264], // enough steps and columns for one kernel of them all
    ];
    for [t, b, f, h] in sizes {
        let (weight, bias, row, state) = ([3 * h, h + f], [3 * h], [1, 3 * h], [b, h]);
        let samples: [&[&[i64]]; 3] = [
            &[&[t, b, f], &weight, &bias, &state, &state],
            &[&[t, b, f], &weight, &row, &state, &state],
            &[&[t, b, f], &weight, &state, &state],
        ];
        // The large size is slow, and its biases are those of the small ones.
        let samples = if h > 100 { &samples[..1] } else { &samples };
        support::alike::assert_alike(&WAYS, samples, |way, arguments| {
            force(way, || fused(arguments))
        });
    }
}
