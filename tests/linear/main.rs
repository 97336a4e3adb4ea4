//! Tests of `ops::linear` and `nn::Linear`: against libtorch's own and finite differences, and with
//! bad input.

mod arguments;
mod conformance;
mod cuda;
mod each;
mod forward;
mod gradients;
mod kinds;
mod layer;
mod lora;
mod parts;
mod random;
mod second_derivatives;
mod ways;

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_linear, linear_reference};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices};

const DIMS: [&str; 3] = ["M", "K", "N"];

/// The shapes of x, W and b.
fn with_bias([m, k, n]: [i64; 3]) -> Vec<Shape> {
    vec![Shape::new([m, k]), Shape::new([n, k]).scale(weight_scale(k)), Shape::new([n])]
}

/// The shapes of x and W.
fn without_bias(sizes: [i64; 3]) -> Vec<Shape> {
    with_bias(sizes)[..2].to_vec()
}

/// Replaces the input's leading dimension M by `leading`.
fn with_input(
    leading: &[i64],
    with: impl Fn([i64; 3]) -> Vec<Shape>,
) -> impl Fn([i64; 3]) -> Vec<Shape> {
    move |sizes| {
        let mut shapes = with(sizes);
        let mut input = leading.to_vec();
        input.push(sizes[1]);
        shapes[0] = Shape::new(input);
        shapes
    }
}

/// A scale with which the sums are roughly between -1 and 1.
fn weight_scale(features: i64) -> f64 {
    (9.0 / features.max(9) as f64).sqrt()
}

/// Samples that are small enough for a whole Jacobian.
fn small(kind: Kind, device: Device) -> Vec<Sample> {
    let mut samples = SampleTable::new(DIMS, with_bias).samples(kind, device).expect("samples");
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&[[3, 4, 5], [2, 3, 8]]);
    samples.extend(without.samples(kind, device).expect("samples"));
    for leading in [&[][..], &[1], &[2, 3], &[2, 1, 3], &[2, 0, 3], &[0]] {
        let table = SampleTable::empty(DIMS, with_input(leading, with_bias))
            .with_sizes(&[[0, 4, 5], [0, 0, 3], [0, 3, 0]])
            .with_layouts([0, 3, 8]);
        samples.extend(table.samples(kind, device).expect("samples"));
        let table =
            SampleTable::empty(DIMS, with_input(leading, without_bias)).with_sizes(&[[0, 4, 5]]);
        samples.extend(table.samples(kind, device).expect("samples"));
    }
    samples
}

/// Samples that are too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [
        [64, 32, 128], // two tiles of columns on the CPU, one whole tile on CUDA
        [300, 8, 65],  // one column after a tile
        [2500, 3, 64], // several slabs of rows, with whole vectors
        [2500, 3, 71], // several slabs, without whole vectors
        [9000, 2, 1],  // a single column
    ];
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&sizes).with_layouts([33, 20, 64]);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[..1]);
    let tables = [with.samples(kind, device), without.samples(kind, device)];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

fn one(sizes: [i64; 3], kind: Kind, device: Device) -> Sample {
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&[sizes]);
    table.samples(kind, device).expect("a sample").remove(0)
}

type Linear = fn(&Tensor, &Tensor, Option<&Tensor>) -> Result<Tensor>;

fn call(linear: Linear, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let output = match arguments {
        [x, w, b] => linear(x, w, Some(b)),
        [x, w] => linear(x, w, None),
        _ => unreachable!("two or three arguments"),
    }?;
    Ok(vec![output])
}

fn fused(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(f_linear, arguments)
}

fn reference(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(linear_reference, arguments)
}

fn suite() -> Suite<'static> {
    let terms = &|sample: &Sample| {
        let rows = sample.inputs[0].size().iter().rev().skip(1).product::<i64>();
        let weight = sample.inputs[1].size();
        rows.max(weight[0]).max(weight[1])
    };
    Suite { fused: &fused, reference: &reference, small: &small, large: &large, terms }
}
