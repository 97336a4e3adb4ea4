//! `ops::lltm` against its reference, against finite differences, and against bad input, on each of
//! its ways.

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
#[path = "../support/mod.rs"]
mod support;
mod tensor_cores;
mod threads;
mod training;
mod wide_grid;

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{LltmWay, f_lltm, force, lltm_reference};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices, tolerance};

const DIMS: [&str; 4] = ["T", "B", "F", "H"];

/// x, W, b, h, c.
fn with_bias([t, b, f, h]: [i64; 4]) -> Vec<Shape> {
    let weight = Shape::new([3 * h, h + f]).scale(weight_scale(f, h));
    vec![Shape::new([t, b, f]), weight, Shape::new([3 * h]), Shape::new([b, h]), Shape::new([b, h])]
}

/// x, W, h, c.
fn without_bias(sizes: [i64; 4]) -> Vec<Shape> {
    let mut shapes = with_bias(sizes);
    shapes.remove(2);
    shapes
}

/// x, W, b, h, c, where b is a row, as in PyTorch's extension-cpp.
fn with_row(sizes: [i64; 4]) -> Vec<Shape> {
    let mut shapes = with_bias(sizes);
    shapes[2] = Shape::new([1, 3 * sizes[3]]);
    shapes
}

/// So that a step forgets: over many steps, rounding errors then stay as small as over few.
fn weight_scale(features: i64, hidden: i64) -> f64 {
    (1.0 / (features + hidden).max(3) as f64).sqrt()
}

/// Small enough for a whole Jacobian. No steps, rows, features or columns; one of each; blocks of
/// rows with each rest; whole vectors and panels, and not.
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
        // The input multiplied for all steps at once.
        table(with_bias, &[[9, 1, 1, 3], [8, 2, 0, 1]]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [
        [12, 16, 32, 128], // rows shared among threads
        [9, 7, 5, 129],    // columns shared among threads, one behind whole panels
        [3, 3, 8, 320],    // weights beyond a core's cache
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

/// For ways, to which all layouts are one.
fn large_of_a_path(kind: Kind, device: Device) -> Vec<Sample> {
    // On the CPU also products over all steps that are worth oneDNN's while.
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
    call(|x, w, b, state| force(LltmWay::PerStep, || f_lltm(x, w, b, state)), arguments)
}

/// One kernel for all steps, on a GPU that can; elsewhere as users get it.
fn persistent(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::Persistent, || f_lltm(x, w, b, state)), arguments)
}

/// One kernel of a grid, likewise.
fn grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::Grid, || f_lltm(x, w, b, state)), arguments)
}

/// One kernel of a grid for many rows.
fn wide_grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::WideGrid, || f_lltm(x, w, b, state)), arguments)
}

/// As if it did not fit.
fn crowded_grid(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::CrowdedGrid, || f_lltm(x, w, b, state)), arguments)
}

/// The cell's kernel with tensor cores for each step of the forward.
fn tensor_cores(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::TensorCores, || f_lltm(x, w, b, state)), arguments)
}

/// One kernel a step on CUDA, and packed weights on the CPU, however few the steps are.
fn whole(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(|x, w, b, state| force(LltmWay::Fused, || f_lltm(x, w, b, state)), arguments)
}

fn reference(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(lltm_reference, arguments)
}

fn suite_of(fused: support::Operator<'static>) -> Suite<'static> {
    // A step's sums, and the sums over all steps and rows.
    let terms = &|sample: &Sample| {
        let size = sample.inputs[0].size();
        sample.inputs[1].size()[1].max(size[0] * size[1]) * 4
    };
    Suite { fused, reference: &reference, small: &small, large: &large, terms }
}

/// Each way that some device takes by itself: the first of few steps is a loop of the cell.
fn suites() -> [Suite<'static>; 3] {
    let of_path = |way| Suite { large: &large_of_a_path, ..suite_of(way) };
    [suite_of(&fused), of_path(&per_step), of_path(&whole)]
}
