//! Tests of `ops::lltm_cell`: against its reference and finite differences, and with bad input.

mod arguments;
mod conformance;
mod cpu;
mod cuda;
mod forward;
mod gradients;
mod kinds;
mod odd;
mod random;
mod second_derivatives;
mod tensor_cores;
mod training;
mod ways;

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices, tolerance};

const DIMS: [&str; 3] = ["B", "F", "H"];

/// The shapes of x, W, b, h and c.
fn with_bias([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let weight = Shape::new([3 * h, h + f]).scale(weight_scale(f, h));
    vec![Shape::new([b, f]), weight, Shape::new([3 * h]), Shape::new([b, h]), Shape::new([b, h])]
}

/// The shapes of x, W, h and c.
fn without_bias([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let mut shapes = with_bias([b, f, h]);
    shapes.remove(2);
    shapes
}

/// The shapes of x, W, b, h and c, where b is a row, as in PyTorch's extension-cpp.
fn with_row([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let mut shapes = with_bias([b, f, h]);
    shapes[2] = Shape::new([1, 3 * h]);
    shapes
}

/// A scale with which the sums are roughly between -1 and 1.
fn weight_scale(features: i64, hidden: i64) -> f64 {
    (9.0 / (features + hidden).max(9) as f64).sqrt()
}

/// Samples that are small enough for a whole Jacobian.
fn small(kind: Kind, device: Device) -> Vec<Sample> {
    let tables = [
        SampleTable::new(DIMS, with_bias).samples(kind, device),
        SampleTable::empty(DIMS, without_bias)
            .with_sizes(&[[3, 4, 5], [2, 3, 8]])
            .samples(kind, device),
        SampleTable::empty(DIMS, with_row)
            .with_sizes(&[[1, 1, 1], [2, 3, 6]])
            .samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Samples that are too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [
        [16, 32, 128], // the tutorial's size
        [64, 7, 17],   // one column after two vectors
        [300, 8, 40],  // several threads on the CPU
        [5, 3, 1029],  // a second, shorter piece of a row on the CPU
    ];
    let tables = [
        SampleTable::empty(DIMS, with_bias)
            .with_sizes(&sizes)
            .with_layouts([33, 20, 64])
            .samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&sizes[..1]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

fn one(sizes: [i64; 3], kind: Kind, device: Device) -> Sample {
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&[sizes]);
    table.samples(kind, device).expect("a sample").remove(0)
}

type Cell = fn(&Tensor, &Tensor, Option<&Tensor>, (&Tensor, &Tensor)) -> Result<(Tensor, Tensor)>;

fn call(cell: Cell, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let (new_h, new_c) = match arguments {
        [x, w, b, h, c] => cell(x, w, Some(b), (h, c)),
        [x, w, h, c] => cell(x, w, None, (h, c)),
        _ => unreachable!("four or five arguments"),
    }?;
    Ok(vec![new_h, new_c])
}

fn fused(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(f_lltm_cell, arguments)
}

fn reference(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    call(lltm_cell_reference, arguments)
}

fn suite() -> Suite<'static> {
    let terms = &|sample: &Sample| sample.inputs[1].size()[1].max(sample.inputs[0].size()[0]);
    Suite { fused: &fused, reference: &reference, small: &small, large: &large, terms }
}
