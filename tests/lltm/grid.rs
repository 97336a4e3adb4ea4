//! One kernel for all steps whose blocks fill the GPU, forced where it can be: in half kinds, and in `Float` where tf32 is
//! allowed; elsewhere the same calls take other paths.

use super::persistent::{Tf32, device_with, everything};
use super::*;
use tch_extension::amp::Autocast;
use tch_extension::cuda::{Graph, Stream, StreamGuard, synchronize};

const HALF_KINDS: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// One vector of columns, parts of a warp's share and of a block's; rows of one group of blocks, of several, of several
/// turns, and of a part of one; weights whose rows begin anywhere, and not.
const SMALL: [[i64; 4]; 6] =
    [[1, 1, 2, 8], [2, 8, 8, 24], [33, 9, 5, 136], [9, 20, 6, 264], [3, 300, 8, 72], [4, 9, 3, 520]];

/// Each kernel's size.
const LARGE: [[i64; 4]; 6] =
    [[9, 20, 6, 520], [5, 90, 8, 776], [6, 17, 3, 1000], [4, 70, 8, 1024], [3, 9, 8, 1288], [3, 11, 8, 2048]];

fn device(test: &str) -> Option<Device> {
    device_with(LltmPath::Grid, test)
}

fn samples(kind: Kind, device: Device) -> Vec<Sample> {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&SMALL).with_layouts([3, 5, 4, 40]);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&SMALL[2..4]);
    let samples = [with.samples(kind, device), without.samples(kind, device)];
    samples.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Beside the path of each step, whose sums are made in another order.
fn assert_agrees_with_per_step(inputs: &[Tensor], bound: f64) {
    let (found, expected) = (everything(&grid, inputs), everything(&per_step, inputs));
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.kind(), expected.kind());
        let scale = expected.abs().max().double_value(&[]);
        assert_close(found, expected, bound, bound * scale);
    }
}

#[test]
fn cuda_half_kinds_agree_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_agree_by_the_grid") else { return };
    assert!(device.is_cuda());
    let none = |_, _| Vec::new();
    let half = |kind, device| if support::is_half(kind) { samples(kind, device) } else { Vec::new() };
    let suite = Suite { fused: &grid, small: &half, large: &none, ..suite_of(&fused) };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

/// Under autocast the product's kind is not the state's, and h travels beside the output.
#[test]
fn cuda_half_kinds_of_the_product_alone_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_of_the_product_alone_by_the_grid") else { return };
    for kind in HALF_KINDS {
        for sizes in LARGE {
            let inputs = one(sizes, Kind::Float, device).inputs;
            let _autocast = Autocast::new(device, kind).expect("autocast");
            assert_agrees_with_per_step(&inputs, 4.0 * tolerance(kind).0);
        }
    }
}

/// Only where that is allowed: otherwise the products are exact.
#[test]
fn cuda_float_in_tf32_by_the_grid() {
    let Some(device) = device("cuda_float_in_tf32_by_the_grid") else { return };
    let mut differs = false;
    for sizes in LARGE.into_iter().filter(|sizes| sizes[3] <= 1024) {
        let inputs = one(sizes, Kind::Float, device).inputs;
        let in_precision = |allow, sequence| {
            let _switch = Tf32::set(allow);
            everything(sequence, &inputs)
        };
        let (forced, exact) = (in_precision(false, &grid), in_precision(false, &per_step));
        let found = in_precision(true, &grid);
        for ((found, forced), exact) in found.iter().zip(&forced).zip(&exact) {
            let scale = exact.abs().max().double_value(&[]);
            assert_close(forced, exact, 2e-5, 2e-5 * scale);
            assert_close(found, exact, 4e-3, 4e-3 * scale);
            differs |= !found.equal(forced);
        }
    }
    assert!(differs, "tf32 is never taken");
}

/// All steps are one kernel beside the products, and a replay of it computes: also where users ask for nothing.
#[test]
fn cuda_half_kinds_of_more_steps_are_no_more_kernels_of_the_grid() {
    let test = "cuda_half_kinds_of_more_steps_are_no_more_kernels_of_the_grid";
    let Some(device) = device(test) else { return };
    if std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some() {
        let line = format!("SKIPPED {test}: no caching allocator\n");
        let _ = std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes());
        return;
    }
    for sequence in [grid, fused] {
        let nodes = |steps| {
            let inputs = leaves(&one([steps, 16, 32, 1024], Kind::Half, device).inputs);
            let expected = grid(&inputs).expect("outputs");
            let (graph, outputs) = Graph::capture(device, || sequence(&inputs)).expect("a capture");
            for _ in 0..3 {
                for output in &outputs {
                    let _ = output.detach().fill_(f64::NAN);
                }
                graph.replay().expect("a replay");
                for (output, expected) in outputs.iter().zip(&expected) {
                    assert!(output.equal(expected));
                }
            }
            graph.kernels()
        };
        let (few, many) = (nodes(10), nodes(200));
        assert!(many <= few + 2, "{few} kernels of 10 steps, {many} of 200");
    }
}

/// Bits that mean "not there yet" between blocks are a number like any other where they come from outside.
#[test]
fn cuda_half_kinds_of_what_is_no_number_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_of_what_is_no_number_by_the_grid") else { return };
    for kind in HALF_KINDS {
        for hidden in [24, 136, 1000] {
            let inputs = one([6, 20, 8, hidden], kind, device).inputs;
            let all_bits = Tensor::full([20, hidden], -1, (Kind::Int16, device)).view_dtype(kind);
            assert!(all_bits.isnan().all().int64_value(&[]) != 0);
            // h0 of one row, the input of another at some step, and an infinite one.
            inputs[3].get(3).copy_(&all_bits.get(0));
            inputs[0].get(2).get(9).copy_(&all_bits.get(0).narrow(0, 0, 8));
            let _ = inputs[0].get(4).get(17).fill_(f64::INFINITY);
            let (found, expected) = (grid(&inputs).expect("outputs"), per_step(&inputs).expect("outputs"));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.isnan().equal(&expected.isnan()), "{kind:?} {hidden}");
                assert!(found.isinf().equal(&expected.isinf()), "{kind:?} {hidden}");
            }
            let clean = found[0].narrow(1, 0, 3).isnan().any().int64_value(&[]);
            assert!(clean == 0 && found[0].get(5).get(3).isnan().all().int64_value(&[]) == 1);
        }
    }
}

/// h0 may be a part of another tensor.
#[test]
fn cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_grid") else { return };
    let mut inputs = one([5, 9, 8, 40], Kind::BFloat16, device).inputs;
    let expected = everything(&grid, &inputs);
    let storage = Tensor::zeros([9 * 40 + 1], (Kind::BFloat16, device));
    let moved = storage.narrow(0, 1, 9 * 40).view([9, 40]);
    moved.shallow_clone().copy_(&inputs[3]);
    inputs[3] = moved;
    for (found, expected) in everything(&grid, &inputs).iter().zip(&expected) {
        assert!(found.equal(expected));
    }
}

/// Grids that each need nearly all of the GPU, from two streams at once, again and again: all of it ends, with the same bits.
#[test]
fn cuda_half_kinds_by_the_grid_on_two_streams_finish_and_repeat() {
    let Some(device) = device("cuda_half_kinds_by_the_grid_on_two_streams_finish_and_repeat") else { return };
    for sizes in [[40, 64, 8, 1024], [40, 16, 8, 768], [20, 300, 8, 512], [20, 30, 8, 2048]] {
        let inputs = one(sizes, Kind::Half, device).inputs;
        let expected = everything(&grid, &inputs);
        synchronize(device).expect("an end");
        let streams = [(); 2].map(|()| Stream::new(device).expect("a stream"));
        let mut results = Vec::new();
        for _ in 0..10 {
            for stream in &streams {
                let _guard = StreamGuard::new(stream).expect("a guard");
                results.push(everything(&grid, &inputs));
            }
        }
        for stream in &streams {
            stream.synchronize().expect("an end");
        }
        for (found, expected) in results.iter().flatten().zip(expected.iter().cycle()) {
            assert!(found.equal(expected), "{sizes:?}");
        }
    }
}
