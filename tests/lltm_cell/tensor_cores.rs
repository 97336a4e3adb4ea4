//! Tests of the forward pass in one kernel with the tensor cores of compute capability 9.0: tiles
//! at the edges, parts of larger matrices, and cases that take another way.

use super::ways::{by, only_on_cuda};
use super::*;
use std::io::Write;
use support::gpu::{caching_or_skip, has_caching_allocator};
use tch_extension::cuda::Graph;
use tch_extension::ops::LltmCellWay;
use tch_extension::testing::cuda_or_skip;

const HALVES: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// Whether this GPU and this build have the kernel; elsewhere the same calls take another way.
fn has_kernel() -> bool {
    let has = support::gpu::is_built_for_hopper() && support::gpu::is_hopper();
    if !has {
        let _ = std::io::stderr().write_all(
            b"SKIPPED: whether the kernel with tensor cores is taken; it is not for this GPU\n",
        );
    }
    has
}

fn cell(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    by(LltmCellWay::TensorCores, arguments)
}

/// The number of kernels of a call, counted in a capture, which runs none of them. Nothing can be
/// captured without libtorch's caching allocator.
fn kernels(arguments: &[Tensor], device: Device) -> usize {
    let (graph, _) = Graph::capture(device, || cell(arguments)).expect("a graph");
    graph.kernels()
}

/// One tile and several in each direction; parts of tiles; no features, and numbers of features
/// that do not fill an iteration over K.
const SIZES: [[i64; 3]; 6] =
    [[128, 64, 64], [1, 8, 64], [200, 72, 192], [300, 0, 128], [70, 136, 320], [129, 1000, 64]];

fn tiles(kind: Kind, device: Device) -> Vec<Sample> {
    if !HALVES.contains(&kind) {
        return Vec::new();
    }
    let tables = [
        SampleTable::empty(DIMS, with_bias)
            .with_sizes(&SIZES)
            .with_layouts([33, 24, 64])
            .samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&SIZES[..3]).samples(kind, device),
        SampleTable::empty(DIMS, with_row).with_sizes(&SIZES[..1]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

#[test]
fn cuda_half_kinds_by_tensor_cores() {
    if cuda_or_skip("cuda_half_kinds_by_tensor_cores").is_none() {
        return;
    }
    let (none, tiles) = (only_on_cuda(|_, _| Vec::new()), only_on_cuda(tiles));
    let suite = Suite { fused: &cell, small: &none, large: &tiles, ..suite() };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn cuda_half_kinds_by_tensor_cores_take_one_kernel() {
    let test = "cuda_half_kinds_by_tensor_cores_take_one_kernel";
    let Some(device) = caching_or_skip(test) else { return };
    let has_kernel = has_kernel();
    for kind in HALVES {
        for sizes in SIZES {
            let arguments = one(sizes, kind, device).inputs;
            let (first, second) =
                (cell(&arguments).expect("outputs"), cell(&arguments).expect("outputs"));
            for (first, second) in first.iter().zip(&second) {
                assert!(first.equal(second), "{sizes:?} {kind:?}");
            }
            assert!(!has_kernel || kernels(&arguments, device) == 1, "{sizes:?} {kind:?}");
        }
        // Cases that tiles or bulk copies cannot handle: a hidden size of other multiples, odd
        // rows, an unaligned address.
        for sizes in [[130, 64, 72], [130, 9, 64]] {
            let arguments = one(sizes, kind, device).inputs;
            cell(&arguments).expect("outputs");
            assert!(kernels(&arguments, device) > 1, "{sizes:?} {kind:?}");
        }
    }
}

/// Rows with gaps between them are read in their own layout, without a copy.
#[test]
fn cuda_half_kinds_by_tensor_cores_read_parts_of_matrices() {
    let test = "cuda_half_kinds_by_tensor_cores_read_parts_of_matrices";
    let Some(device) = cuda_or_skip(test) else { return };
    let can_count = has_caching_allocator() && has_kernel();
    for kind in HALVES {
        let whole = one([150, 80, 128], kind, device).inputs;
        let [input, weight, bias, h, c] = &whole[..] else { unreachable!("five arguments") };
        let parts = [
            input.narrow(0, 3, 140).narrow(1, 8, 64),
            weight.narrow(0, 0, 192).narrow(1, 16, 128),
            bias.narrow(0, 8, 192),
            h.narrow(0, 3, 140).narrow(1, 32, 64),
            c.narrow(0, 9, 140).narrow(1, 64, 64),
        ];
        let copies: Vec<Tensor> = parts.iter().map(Tensor::contiguous).collect();
        let (found, expected) = (cell(&parts).expect("outputs"), cell(&copies).expect("outputs"));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.equal(expected), "{kind:?}");
        }
        assert!(!can_count || kernels(&parts, device) == 1, "{kind:?}");
    }
}

/// More than twice as many tiles as the GPU has multiprocessors: both warpgroups have several tiles
/// each, and the ring buffer continues from one tile to the next. 320 tiles nearly fill the last
/// wave, where the kernel is chosen by default.
#[test]
fn cuda_half_kinds_by_tensor_cores_have_many_tiles() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_by_tensor_cores_have_many_tiles") else {
        return;
    };
    let has_kernel = has_kernel();
    for kind in HALVES {
        for sizes in [[2500, 72, 1024], [5100, 8, 512], [41000, 0, 64]] {
            let arguments = one(sizes, kind, device).inputs;
            let found = cell(&arguments).expect("outputs");
            let again = by(LltmCellWay::Automatic, &arguments).expect("outputs");
            let with_graph = cell(&leaves(&arguments)).expect("outputs");
            let expected = by(LltmCellWay::Product, &arguments).expect("outputs");
            let rtol = if kind == Kind::Half { 4e-3 } else { 3e-2 };
            for (index, found) in found.iter().enumerate() {
                assert_close(found, &expected[index], rtol, rtol);
                assert!(found.equal(&with_graph[index].detach()), "{sizes:?} {kind:?}");
                assert!(!has_kernel || found.equal(&again[index]), "{sizes:?} {kind:?}");
            }
        }
    }
}
