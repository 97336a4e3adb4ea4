//! Tests of the grid kernel for `Float` and `Double` without tf32, one kernel for all steps whose
//! blocks fill the GPU. The tests force it where it exists; elsewhere the same calls take other
//! ways.

use super::grid::{assert_agrees_with_per_step, assert_no_number_agrees};
use super::persistent::{
    assert_more_steps_are_no_more_kernels, assert_two_streams_finish_and_repeat, device_with,
    device_with_cache, everything,
};
use super::*;

const PLAIN: [Kind; 2] = [Kind::Float, Kind::Double];

/// Parts of a warp's and of a block's share; rows for one group of blocks, for several groups, for
/// several iterations, and for a part of a group; weights whose rows are aligned, and weights whose
/// rows are not.
const SIZES: [[i64; 4]; 6] = [
    [1, 1, 2, 8],
    [2, 8, 8, 24],
    [33, 9, 5, 136],
    [9, 20, 6, 264],
    [3, 300, 8, 72],
    [4, 9, 3, 520],
];

/// Sizes that are small enough for a Jacobian.
const TINY: [[i64; 4]; 3] = [[1, 1, 2, 8], [3, 9, 1, 8], [2, 2, 1, 24]];

/// The size of each kernel in `Float`; in `Double`, H is half of it.
const LARGE: [[i64; 4]; 12] = [
    [9, 20, 6, 128],
    [9, 70, 6, 112],
    [7, 20, 3, 256],
    [5, 90, 8, 240],
    [6, 16, 3, 512],
    [4, 70, 8, 512],
    [6, 16, 6, 768],
    [4, 13, 5, 656],
    [5, 24, 3, 768],
    [4, 70, 3, 768],
    [3, 64, 8, 1024],
    [3, 21, 8, 1008],
];

fn device(test: &str) -> Option<Device> {
    device_with(RnnWay::Grid, test)
}

fn samples(sizes: &[[i64; 4]], kind: Kind, device: Device) -> Vec<Sample> {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(sizes);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[1..]);
    let samples = [with.samples(kind, device), without.samples(kind, device)];
    samples.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

fn plain(kind: Kind, device: Device) -> Vec<Sample> {
    if PLAIN.contains(&kind) { samples(&SIZES, kind, device) } else { Vec::new() }
}

fn large(kind: Kind, device: Device) -> Vec<Vec<Tensor>> {
    let part = if kind == Kind::Double { 2 } else { 1 };
    let of = |[steps, batch, features, hidden]: [i64; 4]| {
        one([steps, batch, features, hidden / part], kind, device).inputs
    };
    LARGE.map(of).into()
}

#[test]
fn cuda_float_and_double_agree_by_the_grid() {
    let Some(device) = device("cuda_float_and_double_agree_by_the_grid") else { return };
    assert!(device.is_cuda());
    let suite =
        Suite { fused: &grid, small: &plain, large: &|_, _| Vec::new(), ..suite_of(&fused) };
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn cuda_gradcheck_of_the_grid() {
    let Some(_) = device("cuda_gradcheck_of_the_grid") else { return };
    let tiny = |kind, device: Device| {
        if device.is_cuda() { samples(&TINY, kind, device) } else { Vec::new() }
    };
    Suite { small: &tiny, ..suite_of(&grid) }.gradcheck_of_every_small_sample();
    let tiniest = |kind, device| tiny(kind, device).into_iter().take(2).collect();
    Suite { small: &tiniest, ..suite_of(&grid) }.gradgradcheck_of_every_small_sample();
}

#[test]
fn cuda_float_and_double_of_each_kernel_by_the_grid() {
    let Some(device) = device("cuda_float_and_double_of_each_kernel_by_the_grid") else { return };
    for kind in PLAIN {
        let (rtol, _) = tolerance(kind);
        for inputs in large(kind, device) {
            assert_agrees_with_per_step(&grid, &inputs, 16.0 * rtol);
            // The grid kernel's sums are in another order than those of the way with a kernel for
            // each step, so different bits show that the grid kernel was used.
            let (found, of_steps) = (everything(&grid, &inputs), everything(&per_step, &inputs));
            assert!(!found.iter().zip(&of_steps).all(|(found, of)| found.equal(of)), "{kind:?}");
        }
    }
}

/// Sums are in double, so the results are no less accurate than those of the way with a kernel for
/// each step.
#[test]
fn cuda_float_by_the_grid_is_as_exact_as_step_by_step() {
    let Some(device) = device("cuda_float_by_the_grid_is_as_exact_as_step_by_step") else { return };
    for sizes in [[12, 16, 8, 256], [12, 16, 8, 768], [12, 16, 8, 1024]] {
        assert_as_exact_as_step_by_step(&grid, sizes, device);
    }
}

pub fn assert_as_exact_as_step_by_step(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    device: Device,
) {
    let inputs = one(sizes, Kind::Float, device).inputs;
    let exact: Vec<_> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
    let exact = per_step(&exact).expect("outputs");
    let worst = |sequence: support::Operator<'_>| {
        let outputs = sequence(&inputs).expect("outputs");
        let errors = outputs.iter().zip(&exact).map(|(found, exact)| {
            (found.to_kind(Kind::Double) - exact).abs().max().double_value(&[])
        });
        errors.fold(0.0, f64::max)
    };
    let (found, of_steps) = (worst(sequence), worst(&per_step));
    assert!(found <= 1.5 * of_steps, "{sizes:?}: {found:e}, and {of_steps:e} step by step");
}

/// Between blocks, certain NaN bits mean that a message has not arrived yet. Inputs may contain
/// these bits, which must then be treated like any other NaN.
#[test]
fn cuda_float_and_double_of_what_is_no_number_by_the_grid() {
    let Some(device) = device("cuda_float_and_double_of_what_is_no_number_by_the_grid") else {
        return;
    };
    for kind in PLAIN {
        let of_six_columns = if kind == Kind::Float { 728 } else { 328 };
        for hidden in [24, 136, 504, of_six_columns] {
            assert_no_number_agrees(&grid, kind, hidden, device);
        }
    }
}

/// All steps are one kernel in addition to the products, and a replay of a captured graph computes
/// the right values. This also holds for the default way.
#[test]
fn cuda_float_of_more_steps_is_no_more_kernels_of_the_grid() {
    let test = "cuda_float_of_more_steps_is_no_more_kernels_of_the_grid";
    let Some(device) = device_with_cache(RnnWay::Grid, test) else { return };
    for sequence in [grid as fn(&[Tensor]) -> _, fused] {
        assert_more_steps_are_no_more_kernels(&sequence, &grid, [16, 32, 512], Kind::Float, device);
    }
}

/// If other processes leave too few multiprocessors for all blocks at once, each step is a kernel.
#[test]
fn cuda_float_and_double_where_a_grid_does_not_fit_go_step_by_step() {
    let test = "cuda_float_and_double_where_a_grid_does_not_fit_go_step_by_step";
    let Some(device) = device(test) else { return };
    for kind in PLAIN {
        let inputs = one([6, 20, 8, 136], kind, device).inputs;
        let expected = everything(&per_step, &inputs);
        for (found, expected) in everything(&crowded_grid, &inputs).iter().zip(&expected) {
            assert!(found.equal(expected), "{kind:?}");
        }
    }
}

/// Runs grids that each need nearly all of the GPU from two streams at once. All of them must
/// finish, with the same bits.
#[test]
fn cuda_float_and_double_by_the_grid_on_two_streams_finish_and_repeat() {
    let test = "cuda_float_and_double_by_the_grid_on_two_streams_finish_and_repeat";
    let Some(device) = device(test) else { return };
    for (kind, sizes) in [
        (Kind::Float, [20, 64, 8, 1024]),
        (Kind::Float, [20, 16, 8, 512]),
        (Kind::Double, [20, 70, 8, 256]),
    ] {
        let inputs = one(sizes, kind, device).inputs;
        assert_two_streams_finish_and_repeat(&grid, &inputs, 5, device);
    }
}
