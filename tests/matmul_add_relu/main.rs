//! Tests of `ops::matmul_add_relu`: against its reference and finite differences, and with bad
//! input.

mod arguments;
mod conformance;
mod cuda;
mod forward;
mod gradients;
mod hopper;
mod kinds;
mod patterns;
mod random;
mod second_derivatives;
mod sizes;
mod training;
mod ways;

use patterns::{LARGE, Pattern, SMALL, sample, samples};
use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{f_matmul_add_relu, matmul_add_relu_reference};
use tch_extension::testing::{Layout, Sample, assert_close, devices};

/// Samples that are small enough for a whole Jacobian.
fn small(kind: Kind, device: Device) -> Vec<Sample> {
    let mut all = samples(SMALL, kind, device);
    // Sizes with whole vectors and without, and each shape that a bias can have.
    let bases: [Pattern; 4] = [
        (&[3, 4], &[4, 5], &[5]),
        (&[3, 4], &[4, 8], &[8]),
        (&[2, 3, 4], &[2, 4, 8], &[3, 1]),
        (&[2, 3, 4], &[4, 8], &[2, 3, 8]),
    ];
    for base in bases {
        for layout in Layout::ALL.into_iter().filter(|&layout| layout != Layout::Contiguous) {
            all.push(sample(base, [layout; 3], kind, device));
            for input in 0..3 {
                let mut layouts = [Layout::Contiguous; 3];
                layouts[input] = layout;
                all.push(sample(base, layouts, kind, device));
            }
        }
    }
    all
}

/// Samples that are too large for a Jacobian.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    samples(LARGE, kind, device)
}

type Operator = fn(&Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn call(operator: Operator, arguments: &[Tensor]) -> Result<Tensor> {
    let [lhs, rhs, bias] = arguments else { unreachable!("three arguments") };
    operator(lhs, rhs, bias)
}

fn fused(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![call(f_matmul_add_relu, arguments)?])
}

fn reference(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![call(matmul_add_relu_reference, arguments)?])
}

const OPERATORS: [Operator; 2] = [f_matmul_add_relu, matmul_add_relu_reference];

/// The output, and the gradients of the inputs that require one.
fn results(
    operator: Operator,
    inputs: &[Tensor],
    vector: impl Fn(&Tensor) -> Tensor,
) -> Vec<Tensor> {
    let output = call(operator, inputs).expect("output");
    let vector = vector(&output);
    let needed: Vec<&Tensor> = inputs.iter().filter(|input| input.requires_grad()).collect();
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let gradients = grad(&[&output], &needed, &options).expect("gradients").into_vec();
    std::iter::once(Some(output.detach())).chain(gradients).flatten().collect()
}

fn suite() -> Suite<'static> {
    let terms = &|sample: &Sample| {
        let inner = sample.inputs[0].size().last().copied().unwrap_or(1);
        let output = call(matmul_add_relu_reference, &sample.inputs).expect("reference");
        inner.max(output.numel() as i64)
    };
    Suite { fused: &fused, reference: &reference, small: &small, large: &large, terms }
}
