//! Tests of the grid kernel for many rows, forced where it exists: in half kinds, and in `Float`
//! where tf32 is allowed.

use super::grid::{HALF_KINDS, assert_agrees_with_per_step, assert_no_number_is_as_in_per_step};
use super::persistent::{
    Tf32, assert_replays, assert_two_streams_finish_and_repeat, device_with, device_with_cache,
    everything,
};
use super::*;
use tch_extension::amp::Autocast;
use tch_extension::cuda::Graph;
use tch_extension::testing::Layout;

/// The size of each kernel, whole and partial; parts of a block's rows; several groups of blocks,
/// and more rows than the groups have.
const SIZES: [[i64; 4]; 8] = [
    [1, 1, 2, 8],
    [9, 70, 5, 136],
    [4, 130, 8, 512],
    [3, 600, 6, 520],
    [3, 90, 8, 768],
    [5, 65, 3, 1000],
    [4, 256, 8, 1024],
    [3, 300, 5, 1024],
];

fn device(test: &str) -> Option<Device> {
    device_with(RnnWay::WideGrid, test)
}

#[test]
fn cuda_half_kinds_agree_by_the_wide_grid() {
    let Some(device) = device("cuda_half_kinds_agree_by_the_wide_grid") else { return };
    for kind in HALF_KINDS {
        for sizes in SIZES {
            let inputs = one(sizes, kind, device).inputs;
            assert_agrees_with_per_step(&wide_grid, &inputs, 4.0 * tolerance(kind).0);
        }
    }
}

/// The bits differ from those of the other grid kernel and of the way with a kernel for each step,
/// whose sums are in other orders.
#[test]
fn cuda_half_kinds_are_computed_by_the_wide_grid() {
    let Some(device) = device("cuda_half_kinds_are_computed_by_the_wide_grid") else { return };
    let inputs = one([8, 100, 8, 520], Kind::Half, device).inputs;
    let found = everything(&wide_grid, &inputs);
    for other in [everything(&grid, &inputs), everything(&per_step, &inputs)] {
        // Index 0 is the output, index 3 the input's gradient.
        assert!(!found[0].equal(&other[0]) && !found[3].equal(&other[3]));
    }
}

/// Under autocast, the product's kind differs from the state's, so blocks exchange h in a buffer of
/// its own instead of in the output.
#[test]
fn cuda_half_kinds_of_the_product_alone_by_the_wide_grid() {
    let Some(device) = device("cuda_half_kinds_of_the_product_alone_by_the_wide_grid") else {
        return;
    };
    for kind in HALF_KINDS {
        for sizes in SIZES {
            let inputs = one(sizes, Kind::Float, device).inputs;
            let _autocast = Autocast::new(device, kind).expect("autocast");
            assert_agrees_with_per_step(&wide_grid, &inputs, 4.0 * tolerance(kind).0);
        }
    }
}

/// tf32 is used only where it is allowed; otherwise the products are exact.
#[test]
fn cuda_float_in_tf32_by_the_wide_grid() {
    let Some(device) = device("cuda_float_in_tf32_by_the_wide_grid") else { return };
    for sizes in SIZES {
        let inputs = one(sizes, Kind::Float, device).inputs;
        let in_precision = |allow, sequence| {
            let _switch = Tf32::set(allow);
            everything(sequence, &inputs)
        };
        let (strict, exact) = (in_precision(false, &wide_grid), in_precision(false, &per_step));
        let others =
            [&grid as support::Operator<'_>, &per_step].map(|other| in_precision(true, other));
        let found = in_precision(true, &wide_grid);
        for ((found, strict), exact) in found.iter().zip(&strict).zip(&exact) {
            let scale = exact.abs().max().double_value(&[]);
            assert_close(strict, exact, 2e-5, 2e-5 * scale);
            assert_close(found, exact, 4e-3, 4e-3 * scale);
        }
        // Index 0 is the output, index 3 the input's gradient.
        for index in [0, 3] {
            assert!(!found[index].equal(&strict[index]), "{sizes:?}: tf32 was not taken");
            for other in others.iter().filter(|_| sizes[3] >= 512) {
                assert!(!found[index].equal(&other[index]), "{sizes:?}: another way was taken");
            }
        }
    }
}

/// In tf32, this kernel multiplies halves with scales.
#[test]
fn cuda_float_of_any_range_by_the_wide_grid() {
    let Some(device) = device("cuda_float_of_any_range_by_the_wide_grid") else { return };
    for sizes in SIZES.into_iter().filter(|sizes| sizes[3] >= 512) {
        scaled::assert_numbers_of_any_range(&wide_grid, sizes, device);
        scaled::assert_gradients_of_any_range(&wide_grid, sizes, device);
        scaled::assert_no_number_stays_in_its_row(&wide_grid, sizes, device);
    }
}

/// Two independent parts of h, of which one has far smaller gradients: neither may be rounded to
/// the precision of the other.
#[test]
fn cuda_float_of_small_gradients_beside_large_ones_by_the_wide_grid() {
    let test = "cuda_float_of_small_gradients_beside_large_ones_by_the_wide_grid";
    let Some(device) = device(test) else { return };
    let _switch = Tf32::set(true);
    for [steps, batch, features, hidden] in [[6, 256, 8, 512], [4, 70, 8, 1000]] {
        let inputs = one([steps, batch, features, hidden], Kind::Float, device).inputs;
        let weight = inputs[1].view([3, hidden, hidden + features]).copy();
        let first = hidden / 2;
        let _ = weight.narrow(1, 0, first).narrow(2, first, hidden - first).zero_();
        let _ = weight.narrow(1, first, hidden - first).narrow(2, 0, first).zero_();
        let vector = Tensor::randn([steps, batch, hidden], (Kind::Float, device));
        let _ = vector.narrow(2, first, hidden - first).multiply_scalar_(1e-8);
        let of_first_h = |sequence: support::Operator<'_>, kind| {
            let mut inputs: Vec<_> = inputs.iter().map(|input| input.to_kind(kind)).collect();
            inputs[1] = weight.view([3 * hidden, hidden + features]).to_kind(kind);
            let inputs = leaves(&inputs);
            let output = sequence(&inputs).expect("outputs").remove(0);
            let vector = vector.to_kind(kind);
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            let found = grad(&[&output], &[&inputs[3]], &options).expect("gradients").into_vec();
            found.into_iter().flatten().next().expect("h0's").to_kind(Kind::Double)
        };
        let (found, exact) =
            (of_first_h(&wide_grid, Kind::Float), of_first_h(&per_step, Kind::Double));
        for (from, count) in [(0, first), (first, hidden - first)] {
            let (found, exact) = (found.narrow(1, from, count), exact.narrow(1, from, count));
            let scale = exact.abs().max().double_value(&[]);
            assert_close(&found, &exact, 4e-3, 4e-3 * scale);
        }
    }
}

/// Between blocks, certain NaN bits mean that a message has not arrived yet. Inputs may contain
/// these bits, which must then be treated like any other NaN.
#[test]
fn cuda_half_kinds_and_float_of_what_is_no_number_by_the_wide_grid() {
    let test = "cuda_half_kinds_and_float_of_what_is_no_number_by_the_wide_grid";
    let Some(device) = device(test) else { return };
    for kind in [Kind::Half, Kind::BFloat16, Kind::Float] {
        for hidden in [24, 520, 1000] {
            assert_no_number_is_as_in_per_step(&wide_grid, kind, hidden, device);
        }
    }
}

/// Also checks calls without gradients, which keep nothing of each step. h0 and c0 may be parts of
/// other tensors.
#[test]
fn cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_wide_grid() {
    let test = "cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_wide_grid";
    let Some(device) = device(test) else { return };
    for kind in HALF_KINDS {
        let mut inputs = one([5, 70, 8, 40], kind, device).inputs;
        let expected = everything(&wide_grid, &inputs);
        for index in [3, 4] {
            inputs[index] = Layout::Offset.of(&inputs[index]).expect("a tensor");
        }
        for (found, expected) in wide_grid(&inputs).expect("outputs").iter().zip(&expected) {
            assert!(found.equal(expected));
        }
        for (found, expected) in everything(&wide_grid, &inputs).iter().zip(&expected) {
            assert!(found.equal(expected));
        }
    }
}

/// A replay of a captured graph computes the right values, also with the default way.
#[test]
fn cuda_half_kinds_and_float_of_a_replayed_graph_by_the_wide_grid() {
    let test = "cuda_half_kinds_and_float_of_a_replayed_graph_by_the_wide_grid";
    let Some(device) = device_with_cache(RnnWay::WideGrid, test) else { return };
    let _switch = Tf32::set(true);
    for kind in [Kind::Half, Kind::Float] {
        let inputs = one([40, 256, 8, 1024], kind, device).inputs;
        let expected = wide_grid(&inputs).expect("outputs");
        for sequence in [wide_grid as fn(&[Tensor]) -> _, fused] {
            assert_replays(&sequence, &inputs, &expected);
        }
    }
}

/// Runs grids that each need nearly all of the GPU from two streams at once, again and again. All
/// of them must finish, with the same bits.
#[test]
fn cuda_half_kinds_and_float_by_the_wide_grid_on_two_streams_finish_and_repeat() {
    let test = "cuda_half_kinds_and_float_by_the_wide_grid_on_two_streams_finish_and_repeat";
    let Some(device) = device(test) else { return };
    let _switch = Tf32::set(true);
    let half =
        [[40, 256, 8, 1024], [40, 150, 8, 768], [20, 700, 8, 512]].map(|sizes| (sizes, Kind::Half));
    let float = [[40, 256, 8, 1024], [20, 150, 8, 520]].map(|sizes| (sizes, Kind::Float));
    for (sizes, kind) in half.into_iter().chain(float) {
        let inputs = one(sizes, kind, device).inputs;
        assert_two_streams_finish_and_repeat(&wide_grid, &inputs, 10, device);
    }
}

/// Each direction is one kernel, in this grid and in the other one: also without a bias, and when
/// only the last h has a gradient and h0 needs none.
#[test]
fn cuda_half_kinds_go_back_in_one_kernel_by_each_grid() {
    let test = "cuda_half_kinds_go_back_in_one_kernel_by_each_grid";
    let Some(device) = device_with_cache(RnnWay::WideGrid, test) else { return };
    for sizes in [[100, 70, 8, 512], [100, 30, 8, 136], [6, 70, 8, 512], [6, 30, 8, 136]] {
        let table = SampleTable::empty(DIMS, without_bias).with_sizes(&[sizes]);
        let inputs = table.samples(Kind::BFloat16, device).expect("samples").remove(0).inputs;
        let mut inputs = leaves(&inputs);
        inputs[2] = inputs[2].detach();
        let of_last_h = |sequence: support::Operator<'_>| {
            let outputs = sequence(&inputs)?;
            let vector = outputs[1].ones_like();
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            let wanted = [&inputs[0], &inputs[1], &inputs[3]];
            let found = grad(&[&outputs[1]], &wanted, &options)?.into_vec();
            Ok::<Vec<Tensor>, tch_extension::Error>(found.into_iter().flatten().collect())
        };
        let expected = of_last_h(&per_step).expect("gradients");
        for sequence in [grid, wide_grid] {
            let (graph, found) =
                Graph::capture(device, || of_last_h(&sequence)).expect("a capture");
            graph.replay().expect("a replay");
            assert!(graph.kernels() < 60, "{sizes:?}: {} kernels of 100 steps", graph.kernels());
            assert_eq!(found.len(), 3);
            // Over many steps, rounding errors grow, so only the short sequences are compared.
            for (found, expected) in found.iter().zip(&expected).filter(|_| sizes[0] == 6) {
                let scale = expected.abs().max().double_value(&[]);
                assert_close(found, expected, 0.05, 0.05 * scale);
            }
        }
    }
}
