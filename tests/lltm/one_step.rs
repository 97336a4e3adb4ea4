//! Tests of sequences of one step, which the cell computes.

use super::*;
use crate::cuda::captured;
use support::gpu::caching_or_skip;
use tch_extension::amp::Autocast;
use tch_extension::cuda::Graph;
use tch_extension::ops::f_lltm_cell;

/// Cells in one kernel and, on the CPU, by a product; rows that are not whole vectors; no rows,
/// features or columns.
const SIZES: [[i64; 4]; 7] = [
    [1, 16, 32, 128],
    [1, 1, 40, 56],
    [1, 130, 9, 65],
    [1, 9, 0, 24],
    [1, 0, 3, 8],
    [1, 3, 2, 0],
    [1, 2, 3, 1],
];
/// Cells that are computed by a product on CUDA, and with tensor cores in half kinds.
const LARGE: [[i64; 4]; 2] = [[1, 200, 128, 256], [1, 2048, 64, 512]];

fn samples(kind: Kind, device: Device) -> Vec<Sample> {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&SIZES).with_layouts([1, 9, 6, 40]);
    let large = if device.is_cuda() { &LARGE[..] } else { &[] };
    let others = [
        with.samples(kind, device),
        SampleTable::empty(DIMS, with_bias).with_sizes(large).samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&SIZES[..1]).samples(kind, device),
        SampleTable::empty(DIMS, with_row).with_sizes(&SIZES[..1]).samples(kind, device),
    ];
    others.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

#[test]
fn one_step_agrees_with_the_reference() {
    let none = |_, _| Vec::new();
    let suite = Suite { small: &none, large: &samples, ..suite_of(&fused) };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn one_step_keeps_to_the_rules() {
    // In the last sample, the hidden size equals the number of features, so that calls are also
    // chained through the input.
    let table =
        SampleTable::empty(DIMS, with_bias).with_sizes(&[[1, 2, 4, 5], [1, 0, 4, 5], [1, 3, 5, 5]]);
    suite_of(&fused).conformance_of(|kind, device| table.samples(kind, device).expect("samples"));
}

/// As many combinations as for several steps.
#[test]
fn one_step_takes_the_kinds_of_several() {
    let of_several = |inputs: &[Tensor]| {
        let mut several: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        several[0] = several[0].f_repeat([3, 1, 1])?;
        fused(&several)?;
        reference(inputs)
    };
    let operators: [support::Operator<'_>; 2] = [&fused, &of_several];
    for device in devices() {
        let inputs = |kind| one([1, 3, 4, 5], kind, device).inputs;
        let agree = |kinds: &[Kind], rough| {
            support::kinds::agree_with_the_composite(operators, &inputs, kinds, rough)
        };
        // As many combinations as in kinds.rs.
        assert_eq!(agree(&KINDS, false), 16 * 4);
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            assert_eq!(
                agree(&[Kind::Float, Kind::Double, kind], true),
                3 * 16 + 3 * 5,
                "{device:?}"
            );
        }
    }
}

/// Calls the cell itself with the same tensors. Its h is also the output.
fn cell(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let (h, c) = f_lltm_cell(
        &inputs[0].f_select(0, 0)?,
        &inputs[1],
        Some(&inputs[2]),
        (&inputs[3], &inputs[4]),
    )?;
    Ok(vec![h.f_unsqueeze(0)?, h, c])
}

/// The outputs, and the gradients from each of them, alone and together.
fn everything(sequence: support::Operator<'_>, inputs: &[Tensor]) -> Vec<Tensor> {
    let mut all = sequence(inputs).expect("outputs");
    for from in [&[0][..], &[1], &[2], &[0, 1, 2]] {
        all.extend(support::gradients(sequence, &leaves(inputs), from).into_iter().flatten());
    }
    all.iter().map(Tensor::detach).collect()
}

#[test]
fn one_step_has_the_bits_of_the_cell() {
    for device in devices() {
        let kinds = if device.is_cuda() { &KINDS[..] } else { &[Kind::Float, Kind::Double] };
        for &kind in kinds {
            for sizes in SIZES[..3].iter().chain(&LARGE[..1]) {
                let inputs = one(*sizes, kind, device).inputs;
                let (found, expected) = (everything(&fused, &inputs), everything(&cell, &inputs));
                assert_eq!(found.len(), expected.len());
                for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                    assert!(
                        found.equal(expected),
                        "{index} of {sizes:?} in {kind:?} on {device:?}"
                    );
                }
            }
        }
    }
}

/// There is no kernel in addition to the cell's, neither in half kinds nor under autocast.
#[test]
fn cuda_one_step_is_the_kernels_of_the_cell() {
    let test = "cuda_one_step_is_the_kernels_of_the_cell";
    let Some(device) = caching_or_skip(test) else { return };
    let nodes = |graph: &Graph| (graph.kernels(), graph.other_nodes());
    let assert_is_the_cell = |inputs: &[Tensor], what: &str| {
        let expected = fused(inputs).expect("outputs");
        let (graph, outputs) = captured(device, || fused(inputs));
        let (of_the_cell, _) = captured(device, || cell(inputs));
        assert_eq!(nodes(&graph), nodes(&of_the_cell), "{what} {:?}", inputs[0]);
        for output in &outputs {
            let _ = output.detach().fill_(f64::NAN);
        }
        graph.replay().expect("a replay");
        for (output, expected) in outputs.iter().zip(&expected) {
            assert!(output.equal(expected), "{what} {:?}", inputs[0]);
        }
    };
    for sizes in [[1, 16, 32, 128], [1, 64, 256, 512], [1, 64, 1024, 1024], [1, 2048, 512, 512]] {
        for kind in KINDS {
            let inputs = one(sizes, kind, device).inputs;
            assert_is_the_cell(&inputs, "without a graph");
            assert_is_the_cell(&leaves(&inputs), "with a graph");
        }
        let inputs = one(sizes, Kind::Float, device).inputs;
        let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
        assert_is_the_cell(&inputs, "under autocast");
    }
}

/// Only the input of a single step has a dimension of the steps.
#[test]
fn one_step_refuses_a_dimension_of_steps_elsewhere() {
    for device in devices() {
        let good = one([1, 3, 4, 5], Kind::Float, device).inputs;
        for (index, name) in [(1, "weight"), (3, "h"), (4, "c")] {
            let mut inputs: Vec<Tensor> = good.iter().map(Tensor::shallow_clone).collect();
            // The samples may lack the bias.
            let place = if index > 1 { inputs.len() - 5 + index } else { index };
            inputs[place] = inputs[place].unsqueeze(0);
            let error = fused(&inputs).expect_err("a further dimension").to_string();
            assert!(error.starts_with(&format!("lltm: {name}: expected")), "{error}");
        }
    }
}
