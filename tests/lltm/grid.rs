//! Tests of the grid kernel, one kernel for all steps whose blocks fill the GPU. The tests force it
//! where it exists: in half kinds, and in `Float` where tf32 is allowed. Elsewhere the same calls
//! take other ways.

use super::persistent::{
    Tf32, assert_more_steps_are_no_more_kernels, assert_two_streams_finish_and_repeat, device_with,
    device_with_cache, everything,
};
use super::*;
use tch_extension::amp::Autocast;
use tch_extension::cuda::Graph;
use tch_extension::testing::Layout;

pub const HALF_KINDS: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// One vector of columns, and parts of a warp's and of a block's share; rows for one group of
/// blocks, for several groups, for several iterations, and for a part of a group; weights whose
/// rows are aligned, and weights whose rows are not.
const SMALL: [[i64; 4]; 6] = [
    [1, 1, 2, 8],
    [2, 8, 8, 24],
    [33, 9, 5, 136],
    [9, 20, 6, 264],
    [3, 300, 8, 72],
    [4, 9, 3, 520],
];

/// The size of each kernel, and of each kernel for tf32.
const LARGE: [[i64; 4]; 11] = [
    [9, 20, 6, 520],
    [5, 90, 8, 776],
    [6, 17, 3, 1000],
    [4, 70, 8, 1024],
    [3, 9, 8, 1288],
    [3, 11, 8, 2048],
    [3, 64, 8, 768],
    [3, 264, 8, 512],
    [3, 64, 8, 512],
    [3, 264, 8, 256],
    [3, 120, 8, 384],
];

fn device(test: &str) -> Option<Device> {
    device_with(RnnWay::Grid, test)
}

fn samples(kind: Kind, device: Device) -> Vec<Sample> {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&SMALL).with_layouts([3, 5, 4, 40]);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&SMALL[2..4]);
    let samples = [with.samples(kind, device), without.samples(kind, device)];
    samples.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Compares with the way that runs a kernel for each step, whose sums are in another order.
pub fn assert_agrees_with_per_step(sequence: support::Operator<'_>, inputs: &[Tensor], bound: f64) {
    let (found, expected) = (everything(sequence, inputs), everything(&per_step, inputs));
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
    let half =
        |kind, device| if support::is_half(kind) { samples(kind, device) } else { Vec::new() };
    let suite = Suite { fused: &grid, small: &half, large: &none, ..suite_of(&fused) };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

/// Under autocast, the product's kind differs from the state's, so blocks exchange h in a buffer of
/// its own instead of in the output.
#[test]
fn cuda_half_kinds_of_the_product_alone_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_of_the_product_alone_by_the_grid") else { return };
    for kind in HALF_KINDS {
        for sizes in LARGE {
            let inputs = one(sizes, Kind::Float, device).inputs;
            let _autocast = Autocast::new(device, kind).expect("autocast");
            assert_agrees_with_per_step(&grid, &inputs, 4.0 * tolerance(kind).0);
        }
    }
}

/// tf32 is used only where it is allowed; otherwise the products are exact.
#[test]
fn cuda_float_in_tf32_by_the_grid() {
    let Some(device) = device("cuda_float_in_tf32_by_the_grid") else { return };
    for sizes in LARGE {
        let inputs = one(sizes, Kind::Float, device).inputs;
        let in_precision = |allow, sequence| {
            let _switch = Tf32::set(allow);
            everything(sequence, &inputs)
        };
        let (forced, exact) = (in_precision(false, &grid), in_precision(false, &per_step));
        let found = in_precision(true, &grid);
        let _switch = Tf32::set(true);
        scaled::assert_is_not_per_step(&found, &inputs);
        for ((found, forced), exact) in found.iter().zip(&forced).zip(&exact) {
            let scale = exact.abs().max().double_value(&[]);
            assert_close(forced, exact, 2e-5, 2e-5 * scale);
            assert_close(found, exact, 4e-3, 4e-3 * scale);
        }
        assert!(!found[0].equal(&forced[0]), "tf32 is not taken");
    }
}

/// In tf32, the grid kernel multiplies halves with scales. The sizes have one tile without its
/// neighbour, all pairs of tiles, some of the pairs, and several iterations.
#[test]
fn cuda_float_of_any_range_by_the_grid() {
    let Some(device) = device("cuda_float_of_any_range_by_the_grid") else { return };
    for sizes in [
        [3, 9, 3, 8],
        [9, 20, 6, 520],
        [5, 90, 8, 776],
        [6, 17, 3, 1000],
        [4, 70, 8, 1024],
        [3, 11, 8, 2048],
    ] {
        scaled::assert_numbers_of_any_range(&grid, sizes, device);
        scaled::assert_halves_of_any_range(&grid, sizes, device);
        scaled::assert_gradients_of_any_range(&grid, sizes, device);
        scaled::assert_no_number_stays_in_its_row(&grid, sizes, device);
    }
}

/// All steps are one kernel in addition to the products, and a replay of a captured graph computes
/// the right values. This also holds for the default way.
#[test]
fn cuda_half_kinds_and_float_of_more_steps_are_no_more_kernels_of_the_grid() {
    let test = "cuda_half_kinds_and_float_of_more_steps_are_no_more_kernels_of_the_grid";
    let Some(device) = device_with_cache(RnnWay::Grid, test) else { return };
    for kind in [Kind::Half, Kind::Float] {
        let _switch = Tf32::set(kind == Kind::Float);
        for sequence in [grid as fn(&[Tensor]) -> _, fused] {
            assert_more_steps_are_no_more_kernels(&sequence, &grid, [16, 32, 1024], kind, device);
        }
    }
}

/// Values in which all bits are set. Between blocks, these bits mean that a message has not arrived
/// yet.
fn all_bits(size: [i64; 2], kind: Kind, device: Device) -> Tensor {
    let integer = match kind {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        _ => Kind::Int16,
    };
    let values = Tensor::full(size, -1, (integer, device)).view_dtype(kind);
    assert!(values.isnan().all().int64_value(&[]) != 0);
    values
}

/// Compares the effect of NaN with the way that runs a kernel for each step; `Float` uses tf32.
pub fn assert_no_number_is_as_in_per_step(
    sequence: support::Operator<'_>,
    kind: Kind,
    hidden: i64,
    device: Device,
) {
    let _switch = Tf32::set(kind == Kind::Float);
    assert_no_number_agrees(sequence, kind, hidden, device);
}

/// The same check, with libtorch's tf32 switch as it is.
pub fn assert_no_number_agrees(
    sequence: support::Operator<'_>,
    kind: Kind,
    hidden: i64,
    device: Device,
) {
    let inputs = one([6, 20, 8, hidden], kind, device).inputs;
    let no_numbers = all_bits([20, hidden], kind, device);
    // One row of h0, another row of c0, and a third row of the input at one step have such values.
    // A fourth row of the input is infinite at one step.
    inputs[3].get(3).copy_(&no_numbers.get(0));
    inputs[4].get(11).copy_(&no_numbers.get(0));
    inputs[0].get(2).get(9).copy_(&no_numbers.get(0).narrow(0, 0, 8));
    let _ = inputs[0].get(4).get(17).fill_(f64::INFINITY);
    let everything = |sequence: support::Operator<'_>| {
        let inputs = leaves(&inputs);
        let outputs = sequence(&inputs).expect("outputs");
        // Incoming gradients have such values, too: at some step, and for the last h and c.
        let vectors: Vec<_> = outputs.iter().map(Tensor::ones_like).collect();
        vectors[0].get(4).get(5).copy_(&no_numbers.get(0));
        vectors[1].get(13).copy_(&no_numbers.get(0));
        vectors[2].get(15).copy_(&no_numbers.get(0));
        let (outputs, inputs): (Vec<_>, Vec<_>) =
            (outputs.iter().collect(), inputs.iter().collect());
        let vectors: Vec<_> = vectors.iter().map(Some).collect();
        let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
        let gradients = grad(&outputs, &inputs, &options).expect("gradients").into_vec();
        let outputs = outputs.into_iter().map(Tensor::shallow_clone);
        outputs.chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
    };
    let (found, expected) = (everything(sequence), everything(&per_step));
    assert_eq!(found.len(), 8);
    for (found, expected) in found.iter().zip(&expected) {
        assert!(found.isnan().equal(&expected.isnan()), "{kind:?} {hidden}");
        assert!(found.isinf().equal(&expected.isinf()), "{kind:?} {hidden}");
    }
    let clean = |result: &Tensor| result.narrow(-2, 0, 3).isnan().any().int64_value(&[]) == 0;
    let (output, grad_input) = (&found[0], &found[3]);
    assert!(clean(output) && clean(grad_input), "{kind:?} {hidden}");
    for row in [3, 11] {
        assert!(output.get(5).get(row).isnan().all().int64_value(&[]) == 1);
    }
    for row in [5, 13, 15] {
        assert!(grad_input.get(0).get(row).isnan().all().int64_value(&[]) == 1);
    }
}

/// Between blocks, certain NaN bits mean that a message has not arrived yet. Inputs may contain
/// these bits, which must then be treated like any other NaN.
#[test]
fn cuda_half_kinds_and_float_of_what_is_no_number_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_and_float_of_what_is_no_number_by_the_grid") else {
        return;
    };
    for kind in [Kind::Half, Kind::BFloat16, Kind::Float] {
        for hidden in [24, 136, 1000] {
            assert_no_number_is_as_in_per_step(&grid, kind, hidden, device);
        }
    }
}

/// When h0 needs no gradient, the last product of the backward pass is omitted.
#[test]
fn cuda_half_kinds_whose_first_h_needs_no_gradient_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_whose_first_h_needs_no_gradient_by_the_grid") else {
        return;
    };
    for sizes in [[6, 20, 8, 136], [1, 9, 8, 24], [4, 70, 8, 1024]] {
        let inputs = one(sizes, Kind::BFloat16, device).inputs;
        let gradients = |needs_h0: bool| {
            let mut inputs = leaves(&inputs);
            if !needs_h0 {
                inputs[3] = inputs[3].detach();
            }
            let outputs = grid(&inputs).expect("outputs");
            let sum = outputs.iter().map(|output| output.sum(Kind::Float)).sum::<Tensor>();
            sum.backward();
            inputs.into_iter().map(|input| input.grad()).collect::<Vec<_>>()
        };
        let (all, others) = (gradients(true), gradients(false));
        assert!(all[3].defined() && !others[3].defined());
        for index in [0, 1, 2, 4] {
            assert!(others[index].equal(&all[index]), "{index} of {sizes:?}");
        }
    }
}

/// If other processes leave too few multiprocessors for all blocks at once, each step is a kernel,
/// also when a graph is captured.
#[test]
fn cuda_half_kinds_where_a_grid_does_not_fit_go_step_by_step() {
    let test = "cuda_half_kinds_where_a_grid_does_not_fit_go_step_by_step";
    let Some(device) = device_with_cache(RnnWay::Grid, test) else { return };
    for (kind, sizes) in [(Kind::Half, [6, 20, 8, 136]), (Kind::BFloat16, [9, 70, 8, 1024])] {
        let inputs = one(sizes, kind, device).inputs;
        // The grid kernel's sums are in another order, so the bits show which way was taken.
        let expected = everything(&per_step, &inputs);
        assert!(
            !everything(&grid, &inputs).iter().zip(&expected).all(|(found, of)| found.equal(of))
        );
        for (found, expected) in everything(&crowded_grid, &inputs).iter().zip(&expected) {
            assert!(found.equal(expected), "{sizes:?}");
        }
        let (graph, outputs) = Graph::capture(device, || crowded_grid(&inputs)).expect("a capture");
        graph.replay().expect("a replay");
        for (found, expected) in outputs.iter().zip(&expected) {
            assert!(found.equal(expected), "{sizes:?}");
        }
    }
}

/// h0 may be a part of another tensor and begin at any address.
#[test]
fn cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_grid() {
    let Some(device) = device("cuda_half_kinds_of_a_state_that_begins_anywhere_by_the_grid") else {
        return;
    };
    let mut inputs = one([5, 9, 8, 40], Kind::BFloat16, device).inputs;
    let expected = everything(&grid, &inputs);
    inputs[3] = Layout::Offset.of(&inputs[3]).expect("a tensor");
    for (found, expected) in everything(&grid, &inputs).iter().zip(&expected) {
        assert!(found.equal(expected));
    }
}

/// Runs grids that each need nearly all of the GPU from two streams at once, again and again. All
/// of them must finish, with the same bits.
#[test]
fn cuda_half_kinds_by_the_grid_on_two_streams_finish_and_repeat() {
    let Some(device) = device("cuda_half_kinds_by_the_grid_on_two_streams_finish_and_repeat")
    else {
        return;
    };
    for sizes in [[40, 64, 8, 1024], [40, 16, 8, 768], [20, 300, 8, 512], [20, 30, 8, 2048]] {
        let inputs = one(sizes, Kind::Half, device).inputs;
        assert_two_streams_finish_and_repeat(&grid, &inputs, 10, device);
    }
}
