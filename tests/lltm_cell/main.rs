//! `ops::lltm_cell` against its reference, against finite differences, and against bad input.

mod arguments;
mod conformance;
mod cuda;
mod forward;
mod gradients;
mod second_derivatives;

use std::collections::BTreeMap;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_lltm_cell, lltm_cell_reference};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, devices, tolerance,
};

const KINDS: [Kind; 4] = [Kind::Float, Kind::Double, Kind::Half, Kind::BFloat16];

const DIMS: [&str; 3] = ["B", "F", "H"];

/// x, W, b, h, c.
fn with_bias([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let weight = Shape::new([3 * h, h + f]).scale(weight_scale(f, h));
    vec![Shape::new([b, f]), weight, Shape::new([3 * h]), Shape::new([b, h]), Shape::new([b, h])]
}

/// x, W, h, c.
fn without_bias([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let mut shapes = with_bias([b, f, h]);
    shapes.remove(2);
    shapes
}

/// x, W, b, h, c, where b is a row, as in PyTorch's extension-cpp.
fn with_row([b, f, h]: [i64; 3]) -> Vec<Shape> {
    let mut shapes = with_bias([b, f, h]);
    shapes[2] = Shape::new([1, 3 * h]);
    shapes
}

/// So that the sums are between -1 and 1, or thereabouts.
fn weight_scale(features: i64, hidden: i64) -> f64 {
    (9.0 / (features + hidden).max(9) as f64).sqrt()
}

/// Small enough for a whole Jacobian.
fn small(kind: Kind, device: Device) -> Vec<Sample> {
    let tables = [
        SampleTable::new(DIMS, with_bias).samples(kind, device),
        SampleTable::empty(DIMS, without_bias).with_sizes(&[[3, 4, 5], [2, 3, 8]]).samples(kind, device),
        SampleTable::empty(DIMS, with_row).with_sizes(&[[1, 1, 1], [2, 3, 6]]).samples(kind, device),
    ];
    tables.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [
        [16, 32, 128], // the tutorial's
        [64, 7, 17],   // one column behind two vectors
        [300, 8, 40],  // several threads on CPU
        [5, 3, 1029],  // a second, short piece of a row on CPU
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

fn for_each(mut test: impl FnMut(&Sample, Kind, Device)) {
    for device in devices() {
        for kind in KINDS {
            for sample in small(kind, device).iter().chain(&large(kind, device)) {
                test(sample, kind, device);
            }
        }
    }
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

fn leaves(sample: &Sample) -> Vec<Tensor> {
    sample.leaves().expect("leaves")
}

/// A fixed, non-uniform, non-contiguous incoming gradient.
fn incoming(output: &Tensor) -> Tensor {
    let (rows, columns) = output.size2().expect("[B, H]");
    let values = Tensor::arange(rows * columns, (Kind::Double, Device::Cpu)).sin() + 0.3;
    values.view([columns, rows]).transpose(0, 1).to_kind(output.kind()).to_device(output.device())
}

fn gradients(cell: Cell, leaves: &[Tensor], used: &[usize]) -> Vec<Option<Tensor>> {
    let outputs = call(cell, leaves).expect("outputs");
    let outputs: Vec<&Tensor> = used.iter().map(|&index| &outputs[index]).collect();
    let vectors: Vec<Tensor> = outputs.iter().map(|output| incoming(output)).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let options = GradOptions { grad_outputs: &vectors, allow_unused: true, ..Default::default() };
    grad(&outputs, &inputs, &options).expect("gradients").into_vec()
}

/// Compares fused results with the reference's: of the large kinds one by one, the same but for the order of sums.
/// Of the half kinds, they are no further from the exact ones than the reference's; small results are pooled for
/// that, because of a few elements luck decides.
#[derive(Default)]
struct Results {
    pools: BTreeMap<String, [Vec<Tensor>; 3]>,
}

const ENOUGH: usize = 1000;

impl Results {
    fn compare(
        &mut self,
        sample: &Sample,
        what: &str,
        kind: Kind,
        fused: &Tensor,
        of: impl Fn(&[Tensor]) -> Tensor,
    ) {
        let expected = of(&sample.inputs);
        if matches!(kind, Kind::Float | Kind::Double) {
            let (rtol, atol) = bounds(sample, kind);
            return assert_close_in(sample, what, fused, &expected, rtol, atol);
        }
        let exact: Vec<Tensor> = sample.inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        let exact = of(&exact);
        assert_eq!(fused.size(), exact.size(), "{what} of {}", sample.name);
        if fused.numel() >= ENOUGH {
            return in_context(sample, what, || assert_as_accurate(fused, &expected, &exact));
        }
        let pool = self.pools.entry(format!("{what} {kind:?} {:?}", fused.device())).or_default();
        for (part, tensor) in pool.iter_mut().zip([fused, &expected, &exact]) {
            part.push(tensor.reshape([-1]));
        }
    }

    fn finish(self) {
        for (what, pool) in self.pools {
            let [fused, expected, exact] = pool.map(|part| Tensor::cat(&part, 0));
            eprintln!("pooled {what}: {} elements", fused.numel());
            assert_as_accurate(&fused, &expected, &exact);
        }
    }
}

fn assert_close_in(sample: &Sample, what: &str, actual: &Tensor, expected: &Tensor, rtol: f64, atol: f64) {
    in_context(sample, what, || assert_close(actual, expected, rtol, atol));
}

/// Runs an assertion, and says on failure which sample it was.
fn in_context(sample: &Sample, what: &str, check: impl FnOnce()) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) {
        eprintln!("in {what} of {}", sample.name);
        std::panic::resume_unwind(panic);
    }
}

/// How far sums of this many products may drift apart when they are added in another order.
fn bounds(sample: &Sample, kind: Kind) -> (f64, f64) {
    let terms = sample.inputs[1].size()[1].max(sample.inputs[0].size()[0]).max(1) as f64;
    let (rtol, atol) = match kind {
        Kind::Double => (1e-13, 1e-13),
        _ => tolerance(kind),
    };
    (rtol * terms.sqrt(), atol * terms.sqrt())
}
