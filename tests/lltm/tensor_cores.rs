//! Tests of the cell's kernel with tensor cores for each step of the forward pass, forced where it
//! exists. Elsewhere the same calls are a product and a kernel for each step.

use super::grid::{HALF_KINDS, assert_agrees_with_per_step, assert_no_number_is_as_in_per_step};
use super::persistent::{
    assert_replays, assert_two_streams_finish_and_repeat, device_with, device_with_cache,
    everything,
};
use super::*;
use tch_extension::amp::Autocast;
use tch_extension::testing::Layout;

/// One row, and a part of a tile of rows; no features, fewer than one iteration of the kernel
/// takes, exactly as many, and more.
const SIZES: [[i64; 4]; 6] = [
    [1, 1, 8, 64],
    [9, 130, 72, 128],
    [3, 300, 64, 192],
    [4, 128, 0, 64],
    [12, 40, 200, 256],
    [3, 8, 16, 1024],
];

fn device(test: &str) -> Option<Device> {
    device_with(RnnWay::TensorCores, test)
}

fn samples(kind: Kind, device: Device) -> Vec<Sample> {
    if !support::is_half(kind) {
        return Vec::new();
    }
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&SIZES).with_layouts([3, 5, 8, 64]);
    let others = [
        with.samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&SIZES[1..3]).samples(kind, device),
        SampleTable::empty(DIMS, with_row).with_sizes(&SIZES[1..2]).samples(kind, device),
    ];
    others.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

#[test]
fn cuda_half_kinds_agree_by_tensor_cores() {
    let Some(device) = device("cuda_half_kinds_agree_by_tensor_cores") else { return };
    assert!(device.is_cuda());
    let none = |_, _| Vec::new();
    let suite = Suite { fused: &tensor_cores, small: &samples, large: &none, ..suite_of(&fused) };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

/// A step is one kernel, and a replay of a captured graph computes the right values. Once the rows
/// fill the GPU, this is also the default way.
#[test]
fn cuda_half_kinds_of_a_step_are_one_kernel_by_tensor_cores() {
    let test = "cuda_half_kinds_of_a_step_are_one_kernel_by_tensor_cores";
    let Some(device) = device_with_cache(RnnWay::TensorCores, test) else { return };
    const STEPS: i64 = 20;
    for kind in HALF_KINDS {
        let inputs = one([STEPS, 4096, 128, 512], kind, device).inputs;
        let (expected, of_steps) = (tensor_cores(&inputs), per_step(&inputs).expect("outputs"));
        let expected = expected.expect("outputs");
        // The sums are in another order, which shows that this is another kernel.
        assert!(!expected[0].equal(&of_steps[0]), "{kind:?}");
        for sequence in [tensor_cores as fn(&[Tensor]) -> _, fused] {
            let kernels = assert_replays(&sequence, &inputs, &expected);
            assert!(kernels < STEPS as usize + 5, "{kind:?}: {kernels} kernels of {STEPS} steps");
        }
    }
}

/// Cases that the kernel cannot compute: rows that are not multiples of 16 bytes, columns that are
/// not whole tiles, `Float`, and a state whose kind differs from the products'. The sizes are so
/// large that no other way computes a step in one kernel.
#[test]
fn cuda_half_kinds_and_float_without_a_kernel_go_step_by_step() {
    let test = "cuda_half_kinds_and_float_without_a_kernel_go_step_by_step";
    let Some(device) = device(test) else { return };
    let assert_is_per_step = |inputs: &[Tensor]| {
        let (found, expected) =
            (tensor_cores(inputs).expect("outputs"), per_step(inputs).expect("outputs"));
        for (found, expected) in found.iter().zip(&expected) {
            assert!(found.equal(expected), "{:?} {:?}", inputs[0].kind(), inputs[0].size());
        }
    };
    for kind in HALF_KINDS {
        for sizes in [[3, 300, 9, 256], [3, 300, 8, 264]] {
            let inputs = one(sizes, kind, device).inputs;
            assert_is_per_step(&inputs);
            assert_is_per_step(&leaves(&inputs));
        }
    }
    let inputs = one([3, 1500, 8, 256], Kind::Float, device).inputs;
    assert_is_per_step(&inputs);
    let _autocast = Autocast::new(device, Kind::Half).expect("autocast");
    assert_is_per_step(&inputs);
}

/// Bulk copies begin at multiples of 16 bytes. A tensor that begins elsewhere is copied first and
/// gives the same bits.
#[test]
fn cuda_half_kinds_that_begin_anywhere_by_tensor_cores() {
    let Some(device) = device("cuda_half_kinds_that_begin_anywhere_by_tensor_cores") else {
        return;
    };
    let kind = Kind::Half;
    for shapes in [with_bias, without_bias] {
        let table = SampleTable::empty(DIMS, shapes).with_sizes(&[[5, 70, 8, 64]]);
        let aligned = table.samples(kind, device).expect("samples").remove(0).inputs;
        let expected = everything(&tensor_cores, &aligned);
        assert!(!expected[0].equal(&per_step(&aligned).expect("outputs")[0]));
        for moved in 0..aligned.len() {
            let mut inputs: Vec<_> = aligned.iter().map(Tensor::shallow_clone).collect();
            inputs[moved] = Layout::Offset.of(&inputs[moved]).expect("a tensor");
            let outputs = tensor_cores(&leaves(&inputs)).expect("outputs");
            let found = everything(&tensor_cores, &inputs);
            // With a graph, and without one, when the kernel keeps nothing of each step.
            for (found, expected) in
                outputs.iter().chain(&found[..3]).zip(expected[..3].iter().cycle())
            {
                assert!(found.equal(expected), "argument {moved}");
            }
            // Other kernels compute the gradients and may sum in another order.
            for (found, expected) in found.iter().zip(&expected) {
                let (bound, scale) =
                    (4.0 * tolerance(kind).0, expected.abs().max().double_value(&[]));
                assert_close(found, expected, bound, bound * scale);
            }
        }
    }
}

#[test]
fn cuda_half_kinds_of_many_rows_by_tensor_cores() {
    let Some(device) = device("cuda_half_kinds_of_many_rows_by_tensor_cores") else { return };
    for kind in HALF_KINDS {
        // The last size has more tiles than the multiprocessors take at a time, two each.
        for sizes in [[9, 4096, 64, 512], [4, 2000, 520, 768], [3, 5100, 8, 512]] {
            let inputs = one(sizes, kind, device).inputs;
            assert_agrees_with_per_step(&tensor_cores, &inputs, 4.0 * tolerance(kind).0);
            // If nothing of each step is kept, a step writes its c over the previous step's c.
            let (all, last) = (tensor_cores(&leaves(&inputs)), tensor_cores(&inputs));
            for (all, last) in all.expect("outputs").iter().zip(&last.expect("outputs")) {
                assert!(all.equal(last), "{kind:?} {sizes:?}");
            }
        }
    }
}

#[test]
fn cuda_half_kinds_of_what_is_no_number_by_tensor_cores() {
    let Some(device) = device("cuda_half_kinds_of_what_is_no_number_by_tensor_cores") else {
        return;
    };
    for kind in HALF_KINDS {
        for hidden in [64, 192] {
            assert_no_number_is_as_in_per_step(&tensor_cores, kind, hidden, device);
        }
    }
}

#[test]
fn cuda_half_kinds_by_tensor_cores_on_two_streams_finish_and_repeat() {
    let test = "cuda_half_kinds_by_tensor_cores_on_two_streams_finish_and_repeat";
    let Some(device) = device(test) else { return };
    let inputs = one([12, 1500, 64, 512], Kind::BFloat16, device).inputs;
    assert_two_streams_finish_and_repeat(&tensor_cores, &inputs, 10, device);
}
