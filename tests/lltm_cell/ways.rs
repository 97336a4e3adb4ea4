//! Tests of each way of computing the cell, at all sizes. By default, the cell takes one way at
//! some sizes and another at others.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::memory_stats;
use tch_extension::ops::{LltmCellWay, f_lltm_cell, force};
use tch_extension::testing::cuda_or_skip;

const WAYS: [LltmCellWay; 2] = [LltmCellWay::Product, LltmCellWay::Fused];

pub fn by(way: LltmCellWay, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let (x, w, b, h, c) = match arguments {
        [x, w, b, h, c] => (x, w, Some(b), h, c),
        [x, w, h, c] => (x, w, None, h, c),
        _ => unreachable!("four or five arguments"),
    };
    let (new_h, new_c) = force(way, || f_lltm_cell(x, w, b, (h, c)))?;
    Ok(vec![new_h, new_c])
}

/// Keeps only the samples on CUDA; other tests cover the CPU.
pub fn only_on_cuda(
    samples: fn(Kind, Device) -> Vec<Sample>,
) -> impl Fn(Kind, Device) -> Vec<Sample> {
    move |kind, device| if device.is_cuda() { samples(kind, device) } else { Vec::new() }
}

/// Samples with several tiles in each direction, none of them full.
fn ragged(kind: Kind, device: Device) -> Vec<Sample> {
    // More than one piece of rows and of hidden columns, and more than 256 columns of [h, x];
    // blocks of both tile sizes; one row; no features; sizes that allow vectors in some kinds and
    // not in others.
    let sizes =
        [[70, 9, 133], [130, 140, 260], [1, 5, 300], [33, 0, 31], [67, 12, 20], [40, 300, 4]];
    let tables = [
        SampleTable::empty(DIMS, with_row).with_sizes(&sizes).samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[..1]).samples(kind, device),
    ];
    large(kind, device)
        .into_iter()
        .chain(tables.into_iter().flat_map(|samples| samples.expect("samples")))
        .collect()
}

fn on_way(way: LltmCellWay, test: &str, body: impl Fn(&Suite<'_>)) {
    if cuda_or_skip(test).is_none() {
        return;
    }
    let fused = |arguments: &[Tensor]| by(way, arguments);
    let (small, large) = (only_on_cuda(small), only_on_cuda(ragged));
    body(&Suite { fused: &fused, small: &small, large: &large, ..suite() });
}

fn conformance(suite: &Suite<'_>) {
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&[[3, 4, 5], [2, 3, 8], [0, 4, 5]]);
    suite.conformance_of(|kind, device| match device.is_cuda() {
        true => table.samples(kind, device).expect("samples"),
        false => Vec::new(),
    });
}

#[test]
fn cuda_fused_outputs_agree_with_the_reference() {
    on_way(LltmCellWay::Fused, "cuda_fused_outputs_agree_with_the_reference", |suite| {
        suite.forward_agrees_with_the_reference();
    });
}

#[test]
fn cuda_fused_gradients_agree_with_the_reference() {
    on_way(LltmCellWay::Fused, "cuda_fused_gradients_agree_with_the_reference", |suite| {
        suite.gradients_agree_with_the_reference();
    });
}

#[test]
fn cuda_fused_bits_are_the_same_with_and_without_a_graph() {
    on_way(LltmCellWay::Fused, "cuda_fused_bits_are_the_same_with_and_without_a_graph", |suite| {
        suite.with_and_without_a_graph_the_bits_are_the_same();
    });
}

#[test]
fn cuda_fused_conformance() {
    on_way(LltmCellWay::Fused, "cuda_fused_conformance", conformance);
}

/// This is a single test, because initcheck skips it by its name: initcheck does not see what
/// libtorch's products in half kinds write.
#[test]
fn cuda_half_kinds_and_others_by_the_product() {
    on_way(LltmCellWay::Product, "cuda_half_kinds_and_others_by_the_product", |suite| {
        suite.forward_agrees_with_the_reference();
        suite.gradients_agree_with_the_reference();
        suite.with_and_without_a_graph_the_bits_are_the_same();
        conformance(suite);
    });
}

#[test]
fn cuda_gradcheck_of_each_way() {
    for way in WAYS {
        on_way(way, "cuda_gradcheck_of_each_way", |suite| suite.gradcheck_of_every_small_sample());
    }
}

/// Requests each of the gradients alone, and leaves each one out: the backward's kernel computes
/// only those that are requested.
#[test]
fn cuda_gradients_are_the_same_whichever_are_asked_for() {
    let test = "cuda_gradients_are_the_same_whichever_are_asked_for";
    let Some(device) = cuda_or_skip(test) else { return };
    // Half kinds are left out for the product, because initcheck does not see what libtorch's
    // products in half kinds write.
    let cases = KINDS.map(|kind| (LltmCellWay::Fused, kind)).into_iter();
    for (way, kind) in cases.chain([(LltmCellWay::Product, Kind::Float)]) {
        let sample = one([70, 9, 133], kind, device);
        for used in [&[0, 1][..], &[0], &[1]] {
            let all = gradients_of(way, &sample, [true; 5], used);
            for subset in 1..31_u32 {
                let asked = std::array::from_fn(|place| subset >> place & 1 == 1);
                for (some, all) in gradients_of(way, &sample, asked, used).iter().zip(&all) {
                    let (Some(some), Some(all)) = (some, all) else { continue };
                    // libtorch's product may sum in another order for other sizes.
                    match way {
                        LltmCellWay::Fused => {
                            assert!(some.equal(all), "{kind:?} {asked:?} {used:?}")
                        }
                        _ => assert_close(some, all, 1e-5, 1e-5),
                    }
                }
            }
        }
    }
}

/// The requested gradients, from the outputs that are used.
fn gradients_of(
    way: LltmCellWay,
    sample: &Sample,
    asked: [bool; 5],
    used: &[usize],
) -> [Option<Tensor>; 5] {
    let leaf = |(input, asked): (&Tensor, bool)| input.detach().set_requires_grad(asked);
    let leaves: Vec<Tensor> = sample.inputs.iter().zip(asked).map(leaf).collect();
    let outputs = by(way, &leaves).expect("outputs");
    let outputs: Vec<&Tensor> = used.iter().map(|&index| &outputs[index]).collect();
    let vectors: Vec<Option<&Tensor>> =
        used.iter().map(|&index| Some(&sample.inputs[3 + index])).collect();
    let inputs: Vec<&Tensor> = leaves.iter().filter(|leaf| leaf.requires_grad()).collect();
    let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
    let mut found = grad(&outputs, &inputs, &options).expect("gradients").into_vec().into_iter();
    asked.map(|asked| asked.then(|| found.next().flatten().expect("a gradient")))
}

/// In addition to inputs and outputs, a graph keeps σ(i), σ(o) and g.
#[test]
fn cuda_a_graph_keeps_three_numbers_an_element() {
    let test = "cuda_a_graph_keeps_three_numbers_an_element";
    let Some(device) = caching_or_skip(test) else { return };
    let (batch, hidden) = (64, 256);
    let leaves = leaves(&one([batch, 32, hidden], Kind::Float, device).inputs);
    for way in WAYS {
        by(way, &leaves).expect("to warm up");
        let allocated = || memory_stats(device).expect("statistics").allocated;
        let before = allocated();
        let outputs = by(way, &leaves).expect("outputs");
        let kept = allocated() - before;
        // h', c' and these three tensors; the allocator rounds each size up to a multiple of 512
        // bytes.
        let state = (batch * hidden) as u64 * 4;
        assert!(
            (5 * state..5 * state + 6 * 512).contains(&kept),
            "{way:?}: {kept}, {state} a state"
        );
        drop(outputs);
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let ways = [
        LltmCellWay::Automatic,
        LltmCellWay::Product,
        LltmCellWay::Fused,
        LltmCellWay::TensorCores,
    ];
    let sizes = [
        [3, 4, 5],
        [9, 6, 33],
        [1, 3, 8],
        [3, 1, 1],
        [1, 1, 1],
        [3, 0, 4],
        [0, 3, 4],
        [2, 3, 0],
        [130, 8, 64],
    ];
    for [b, f, h] in sizes {
        let all: [&[i64]; 5] = [&[b, f], &[3 * h, h + f], &[3 * h], &[b, h], &[b, h]];
        let [x, w, _, h0, c0] = all;
        let samples: [&[&[i64]]; 3] = [&all, &[x, w, &[1, 3 * h], h0, c0], &[x, w, h0, c0]];
        support::alike::assert_alike(&ways, &samples, by);
    }
}
