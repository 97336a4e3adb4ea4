//! Tests of `ops::layer_norm`: against its reference, libtorch's own operator and finite
//! differences, and with bad input.

mod alike;
mod arguments;
mod conformance;
mod cuda;
mod exactness;
mod forward;
mod gradients;
mod kinds;
mod layer;
mod random;
mod second_derivatives;
use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{NormWay, f_layer_norm, force, layer_norm_reference};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, devices,
};

const EPS: f64 = 1e-5;

/// Which parameters are present, how many dimensions are normalised, and which kernels are used.
#[derive(Clone, Copy, Debug)]
struct Case {
    dims: usize,
    weight: bool,
    bias: bool,
    way: NormWay,
}

const AFFINE: Case = Case { dims: 1, weight: true, bias: true, way: NormWay::Automatic };
const PLAIN: Case = Case { weight: false, bias: false, ..AFFINE };

/// Weight and bias, each present and absent, and several normalised dimensions.
const CASES: [Case; 6] = [
    AFFINE,
    Case { bias: false, ..AFFINE },
    Case { weight: false, ..AFFINE },
    PLAIN,
    Case { dims: 2, ..AFFINE },
    Case { dims: 3, ..AFFINE },
];

/// A case for each of the kernels, with and without parameters.
fn all_ways() -> impl Iterator<Item = Case> {
    use NormWay::{Cluster, Few, FewPasses, InPlace, Passes, Registers, Ring};
    [Registers, Cluster, Ring, InPlace, Few, Passes, FewPasses]
        .into_iter()
        .flat_map(|way| [Case { way, ..AFFINE }, Case { way, ..PLAIN }])
}

impl Case {
    fn normalized_shape(self, input: &Tensor) -> Vec<i64> {
        let size = input.size();
        size[size.len() - self.dims..].to_vec()
    }

    /// Returns the input, the weight and the bias.
    fn split(self, arguments: &[Tensor]) -> (&Tensor, Option<&Tensor>, Option<&Tensor>) {
        let weight = self.weight.then(|| &arguments[1]);
        (&arguments[0], weight, self.bias.then(|| &arguments[1 + usize::from(self.weight)]))
    }

    fn fused(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let (input, weight, bias) = self.split(arguments);
        let shape = self.normalized_shape(input);
        Ok(vec![force(self.way, || f_layer_norm(input, &shape, weight, bias, EPS))?])
    }

    fn reference(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let (input, weight, bias) = self.split(arguments);
        Ok(vec![layer_norm_reference(input, &self.normalized_shape(input), weight, bias, EPS)?])
    }

    /// Calls libtorch's own operator.
    fn libtorch(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let (input, weight, bias) = self.split(arguments);
        Ok(vec![input.f_layer_norm(self.normalized_shape(input), weight, bias, EPS, false)?])
    }

    /// The shapes of the input, `[M, N]`, `[M, 2, N]` and so on, and of the parameters.
    fn shapes(self, [m, n]: [i64; 2]) -> Vec<Shape> {
        let mut parameter = vec![2; self.dims - 1];
        parameter.push(n);
        let parameters = usize::from(self.weight) + usize::from(self.bias);
        let input = [vec![m], parameter.clone()].concat();
        std::iter::once(input).chain(vec![parameter; parameters]).map(Shape::new).collect()
    }

    fn samples(self, sizes: &[[i64; 2]], kind: Kind, device: Device) -> Vec<Sample> {
        let table = SampleTable::empty(DIMS, |sizes| self.shapes(sizes)).with_sizes(sizes);
        table.samples(kind, device).expect("samples")
    }

    /// Samples that are small enough for a whole Jacobian.
    fn small(self, kind: Kind, device: Device) -> Vec<Sample> {
        SampleTable::new(DIMS, |sizes| self.shapes(sizes)).samples(kind, device).expect("samples")
    }

    /// Samples that are too large for a Jacobian.
    fn large(self, kind: Kind, device: Device) -> Vec<Sample> {
        let sizes = [
            [300, 40],    // several threads and parts on the CPU, several blocks and teams on CUDA
            [5000, 3],    // several rows for each warp
            [37, 256],    // the longest row for one warp in Double, and a block with idle teams
            [9, 1029],    // a block for each row, without vectors
            [6, 1032],    // a block for each row, with vectors
            [5, 2068],    // rows of half kinds at multiples of 8 bytes, but not of 16
            [3, 4098],    // more than fits in registers in Double
            [2, 8200],    // more than fits in registers in the other kinds
            [3, 70001],   // more than 64K columns
            [2, 35000],   // the same with vectors: a cluster for each row
            [2, 140_001], // more than fits in a cluster
        ];
        SampleTable::empty(DIMS, |sizes| self.shapes(sizes))
            .with_sizes(&sizes)
            .with_layouts([33, 64])
            .samples(kind, device)
            .expect("samples")
    }

    /// Runs one of the tests that all operators share.
    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        let fused = move |arguments: &[Tensor]| self.fused(arguments);
        let reference = move |arguments: &[Tensor]| self.reference(arguments);
        let terms = move |sample: &Sample| sample.inputs[0].size()[0].max(columns(self, sample));
        eprintln!("{self:?}");
        test(&Suite {
            fused: &fused,
            reference: &reference,
            small: &move |kind, device| self.small(kind, device),
            large: &move |kind, device| self.large(kind, device),
            terms: &terms,
        });
    }
}

const DIMS: [&str; 2] = ["M", "N"];

fn columns(case: Case, sample: &Sample) -> i64 {
    case.normalized_shape(&sample.inputs[0]).iter().product()
}
