//! Tests of `ops::lltm` in each of its ways: against its reference and finite differences, and with
//! bad input.

mod arguments;
mod conformance;
mod cuda;
mod forward;
mod gradients;
mod grid;
mod kinds;
mod layer;
mod numerics;
mod one_step;
mod persistent;
mod plain_grid;
mod random;
mod scaled;
mod second_derivatives;
mod tensor_cores;
mod threads;
mod training;
mod ways;
mod wide_grid;

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{RnnWay, f_lltm, force, lltm_reference};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices, tolerance};

const DIMS: [&str; 4] = ["T", "B", "F", "H"];

/// The shapes of x, W, b, h and c.
fn with_bias([t, b, f, h]: [i64; 4]) -> Vec<Shape> {
    let weight = Shape::new([3 * h, h + f]).scale(weight_scale(f, h));
    vec![Shape::new([t, b, f]), weight, Shape::new([3 * h]), Shape::new([b, h]), Shape::new([b, h])]
}

/// The shapes of x, W, h and c.
fn without_bias(sizes: [i64; 4]) -> Vec<Shape> {
    let mut shapes = with_bias(sizes);
    shapes.remove(2);
    shapes
}

/// The shapes of x, W, b, h and c, where b is a row, as in PyTorch's extension-cpp.
fn with_row(sizes: [i64; 4]) -> Vec<Shape> {
    let mut shapes = with_bias(sizes);
    shapes[2] = Shape::new([1, 3 * sizes[3]]);
    shapes
}

/// A scale with which a step forgets enough that rounding errors stay as small over many steps as
/// over few.
fn weight_scale(features: i64, hidden: i64) -> f64 {
    (1.0 / (features + hidden).max(3) as f64).sqrt()
}

/// Samples that are small enough for a whole Jacobian: no steps, rows, features or columns; one of
/// each; blocks of rows with each possible remainder; whole vectors and panels, and parts of them.
fn small(kind: Kind, device: Device) -> Vec<Sample> {
    type Shapes = fn([i64; 4]) -> Vec<Shape>;
    let table =
        |shapes: Shapes, sizes: &[[i64; 4]]| SampleTable::empty(DIMS, shapes).with_sizes(sizes);
    let with = [
        [3, 2, 3, 4],
        [1, 1, 1, 1],
        [0, 2, 3, 4],
        [2, 0, 3, 4],
        [2, 2, 0, 3],
        [2, 2, 3, 0],
        [5, 1, 1, 2],
    ];
    let tables = [
        table(with_bias, &with).with_layouts([2, 3, 2, 5]).samples(kind, device),
        table(without_bias, &[[2, 3, 2, 8], [1, 2, 1, 17]]).samples(kind, device),
        table(with_row, &[[2, 15, 1, 2], [4, 2, 1, 3]]).samples(kind, device),
        // With these sizes, the input is multiplied for all steps at once.
        table(with_bias, &[[9, 1, 1, 3], [8, 2, 0, 1]]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Samples that are too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [
        [12, 16, 32, 128], // threads share the rows
        [9, 7, 5, 129],    // threads share the columns, with one column after the whole panels
        [3, 3, 8, 320],    // weights that are larger than a core's cache
    ];
    let tables = [
        SampleTable::empty(DIMS, with_bias)
            .with_sizes(&sizes)
            .with_layouts([4, 9, 6, 40])
            .samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[..1]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Samples for ways that treat all layouts alike.
fn large_of_a_way(kind: Kind, device: Device) -> Vec<Sample> {
    // On the CPU there is also a size whose product over all steps is large enough for oneDNN to be
    // worthwhile.
    let sizes = [[12, 16, 32, 128], [9, 7, 5, 129], [3, 3, 8, 320], [48, 20, 60, 160]];
    let count = if device == Device::Cpu { 4 } else { 3 };
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&sizes[..count]);
    table.samples(kind, device).expect("samples")
}

fn one(sizes: [i64; 4], kind: Kind, device: Device) -> Sample {
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&[sizes]);
    table.samples(kind, device).expect("a sample").remove(0)
}

type Sequence =
    fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, (Tensor, Tensor))>;

fn call(sequence: Sequence, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let (output, (h, c)) = match arguments {
        [x, w, b, h, c] => sequence(x, w, Some(b), (h, c)),
        [x, w, h, c] => sequence(x, w, None, (h, c)),
        _ => unreachable!("four or five arguments"),
    }?;
    Ok(vec![output, h, c])
}

fn fused(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(f_lltm, arguments)
}

fn per_step(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::Step, || f_lltm(x, w, b, state)), arguments)
}

/// Forces one kernel for all steps, on a GPU that supports it; elsewhere, the default way is taken.
fn persistent(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::Resident, || f_lltm(x, w, b, state)), arguments)
}

/// Forces the grid kernel in the same manner.
fn grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::Grid, || f_lltm(x, w, b, state)), arguments)
}

/// Forces the grid kernel for many rows.
fn wide_grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::WideGrid, || f_lltm(x, w, b, state)), arguments)
}

/// Forces the grid kernel as if its blocks did not fit on the GPU.
fn crowded_grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::CrowdedGrid, || f_lltm(x, w, b, state)), arguments)
}

/// Forces the cell's kernel with tensor cores for each step of the forward pass.
fn tensor_cores(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::TensorCores, || f_lltm(x, w, b, state)), arguments)
}

/// Forces one kernel for each step on CUDA, and packed weights on the CPU, for any number of steps.
fn whole(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(RnnWay::Fused, || f_lltm(x, w, b, state)), arguments)
}

fn reference(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(lltm_reference, arguments)
}

fn suite_of(fused: support::Operator<'static>) -> Suite<'static> {
    // The sums within a step, and the sums over all steps and rows.
    let terms = &|sample: &Sample| {
        let size = sample.inputs[0].size();
        sample.inputs[1].size()[1].max(size[0] * size[1]) * 4
    };
    Suite { fused, reference: &reference, small: &small, large: &large, terms }
}

/// The ways that some device takes by default. With few steps, the first is a loop over the cell.
fn suites() -> [Suite<'static>; 3] {
    let of_way = |way| Suite { large: &large_of_a_way, ..suite_of(way) };
    [suite_of(&fused), of_way(&per_step), of_way(&whole)]
}
