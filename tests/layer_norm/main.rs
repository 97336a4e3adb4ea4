//! `ops::layer_norm` against its reference, against libtorch's own, against finite differences, and
//! against bad input.

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
#[path = "../support/mod.rs"]
mod support;

use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{LayerNormWay, f_layer_norm, force, layer_norm_reference};
use tch_extension::testing::{
    Sample, SampleTable, Shape, assert_as_accurate, assert_close, devices,
};

const EPS: f64 = 1e-5;

/// Which tensors there are, over how many dimensions is normalised, and which kernels do it.
#[derive(Clone, Copy, Debug)]
struct Case {
    dims: usize,
    weight: bool,
    bias: bool,
    way: LayerNormWay,
}

const AFFINE: Case = Case { dims: 1, weight: true, bias: true, way: LayerNormWay::Automatic };
const PLAIN: Case = Case { weight: false, bias: false, ..AFFINE };

/// Weight and bias, each present and absent; and several dimensions.
const CASES: [Case; 6] = [
    AFFINE,
    Case { bias: false, ..AFFINE },
    Case { weight: false, ..AFFINE },
    PLAIN,
    Case { dims: 2, ..AFFINE },
    Case { dims: 3, ..AFFINE },
];

/// Every way through the kernels.
fn all_ways() -> impl Iterator<Item = Case> {
    use LayerNormWay::{Block, Cluster, Direct, Loop, Warp};
    [Warp, Block, Cluster, Direct, Loop]
        .into_iter()
        .flat_map(|way| [Case { way, ..AFFINE }, Case { way, ..PLAIN }])
}

impl Case {
    fn normalized_shape(self, input: &Tensor) -> Vec<i64> {
        let size = input.size();
        size[size.len() - self.dims..].to_vec()
    }

    /// The input, the weight and the bias.
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

    /// libtorch's own operator.
    fn libtorch(self, arguments: &[Tensor]) -> Result<Vec<Tensor>> {
        let (input, weight, bias) = self.split(arguments);
        Ok(vec![input.f_layer_norm(self.normalized_shape(input), weight, bias, EPS, false)?])
    }

    /// The input `[M, N]`, or `[M, 2, N]` and so on, and the parameters.
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

    /// Small enough for a whole Jacobian.
    fn small(self, kind: Kind, device: Device) -> Vec<Sample> {
        SampleTable::new(DIMS, |sizes| self.shapes(sizes)).samples(kind, device).expect("samples")
    }

    /// Too large for a Jacobian.
    fn large(self, kind: Kind, device: Device) -> Vec<Sample> {
        let sizes = [
            [300, 40],    // several threads and parts on the CPU, several blocks and teams on CUDA
            [5000, 3],    // several rows in a warp
            [37, 256],    // the last row that a warp holds in Double, and a block with idle teams
            [9, 1029],    // a block, without vectors
            [6, 1032],    // a block, with
            [3, 4098],    // beyond the registers in Double
            [2, 8200],    // and in the others
            [3, 70001],   // beyond 64K
            [2, 35000],   // the same with vectors: a cluster
            [2, 140_001], // beyond a cluster
        ];
        SampleTable::empty(DIMS, |sizes| self.shapes(sizes))
            .with_sizes(&sizes)
            .with_layouts([33, 64])
            .samples(kind, device)
            .expect("samples")
    }

    /// Runs a test that every operator is put through.
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
