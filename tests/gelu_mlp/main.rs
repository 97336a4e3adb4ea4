//! Tests of `ops::gelu_mlp`: against its reference, libtorch's own operations and finite differences;
//! what it keeps; and with bad input.

mod arguments;
mod kinds;
mod layer;
mod memory;
mod values;
mod ways;

use proptest::prelude::*;
use support::property::{Case as RandomCase, Property, size, style};
use support::{KINDS, Suite, leaves};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::ops::{Activation, GeluMlpOptions, f_gelu_mlp, gelu_mlp_reference};
use tch_extension::testing::{Sample, SampleTable, Shape, assert_close, devices};

const ACTIVATIONS: [Activation; 4] =
    [Activation::GeluTanh, Activation::Gelu, Activation::ReluSquared, Activation::Silu];

type Op = fn(
    &Tensor,
    &Tensor,
    Option<&Tensor>,
    &Tensor,
    Option<&Tensor>,
    &GeluMlpOptions,
) -> Result<Tensor>;

/// What varies besides sizes and kinds.
#[derive(Clone, Copy, Debug)]
struct Case {
    options: GeluMlpOptions,
    /// Whether there is a bias in each layer.
    biases: [bool; 2],
}

/// Each activation with both biases; then without one of them, and with what is kept the other way.
fn cases() -> Vec<Case> {
    let of = |activation, save_activations, biases| Case {
        options: GeluMlpOptions { activation, save_activations },
        biases,
    };
    let both = ACTIVATIONS.map(|activation| of(activation, true, [true, true]));
    let others = [
        of(Activation::GeluTanh, false, [true, false]),
        of(Activation::Gelu, false, [false, true]),
        of(Activation::ReluSquared, false, [true, true]),
        of(Activation::Silu, true, [false, false]),
    ];
    both.into_iter().chain(others).collect()
}

/// A scale with which the sums are roughly between -1 and 1.
fn weight_scale(features: i64) -> f64 {
    (9.0 / features.max(9) as f64).sqrt()
}

impl Case {
    fn call(self, op: Op, inputs: &[Tensor]) -> Result<Tensor> {
        let mut inputs = inputs.iter();
        let mut next = || inputs.next().expect("as many as `shapes` says");
        let (x, w1) = (next(), next());
        let b1 = self.biases[0].then(&mut next);
        let w2 = next();
        let b2 = self.biases[1].then(&mut next);
        op(x, w1, b1, w2, b2, &self.options)
    }

    fn fused(self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![self.call(f_gelu_mlp, inputs)?])
    }

    fn reference(self, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        Ok(vec![self.call(gelu_mlp_reference, inputs)?])
    }

    /// The shapes of the inputs, where the leading dimensions of x are `lead`.
    fn shapes(self, lead: &[i64], [d, h, e]: [i64; 3]) -> Vec<Shape> {
        let mut shapes = vec![Shape::new([lead, &[d]].concat())];
        shapes.push(Shape::new([h, d]).scale(2.0 * weight_scale(d)));
        shapes.extend(self.biases[0].then(|| Shape::new([h])));
        shapes.push(Shape::new([e, h]).scale(weight_scale(h)));
        shapes.extend(self.biases[1].then(|| Shape::new([e])));
        shapes
    }

    fn samples(self, sizes: &[[i64; 4]], kind: Kind, device: Device) -> Vec<Sample> {
        self.samples_in(true, sizes, kind, device)
    }

    /// Samples of these sizes, and if wanted others in each layout.
    fn samples_in(
        self,
        layouts: bool,
        sizes: &[[i64; 4]],
        kind: Kind,
        device: Device,
    ) -> Vec<Sample> {
        let shapes = move |[m, d, h, e]: [i64; 4]| self.shapes(&[m], [d, h, e]);
        let table = SampleTable::empty(["M", "D", "H", "E"], shapes).with_sizes(sizes);
        let table = if layouts { table.with_layouts([4, 3, 8, 5]) } else { table };
        table.samples(kind, device).expect("samples")
    }

    /// With leading dimensions, and with none.
    fn of_leading_dimensions(self, kind: Kind, device: Device) -> Vec<Sample> {
        let leads: [&[i64]; 4] = [&[], &[2, 3], &[2, 0], &[1, 2, 1]];
        let samples = leads.into_iter().flat_map(|lead| {
            let shapes = move |[d, h, e]: [i64; 3]| self.shapes(lead, [d, h, e]);
            let table = SampleTable::empty(["D", "H", "E"], shapes).with_sizes(&[[3, 5, 2]]);
            table.samples(kind, device).expect("samples")
        });
        samples.collect()
    }

    /// Runs one of the tests that all operators share.
    fn suite(self, test: impl FnOnce(&Suite<'_>)) {
        self.suite_in(true, test);
    }

    fn suite_in(self, layouts: bool, test: impl FnOnce(&Suite<'_>)) {
        let small = [[3, 4, 5, 2], [1, 1, 1, 1], [2, 3, 16, 4], [3, 0, 4, 2], [2, 3, 0, 2]];
        let small = small.into_iter().chain([[0, 3, 4, 2], [3, 2, 4, 0], [5, 2, 33, 1]]);
        let small: Vec<[i64; 4]> = small.collect();
        // Whole vectors and none, one slab of rows and several on the CPU and on CUDA.
        let large = [[70, 24, 128, 40], [1100, 5, 64, 3], [1030, 3, 67, 2], [2600, 2, 9, 1]];
        eprintln!("{self:?}");
        test(&Suite {
            fused: &move |inputs| self.fused(inputs),
            reference: &move |inputs| self.reference(inputs),
            small: &move |kind, device| {
                let mut samples = self.samples_in(layouts, &small, kind, device);
                samples.extend(self.of_leading_dimensions(kind, device));
                samples
            },
            large: &move |kind, device| self.samples(&large, kind, device),
            terms: &|sample| {
                let rows: i64 = sample.inputs[0].size().iter().product();
                let hidden = sample.inputs[1].size()[0];
                rows.max(1) * hidden.max(1)
            },
        });
    }
}

fn for_each_case(mut test: impl FnMut(&Suite<'_>)) {
    cases().into_iter().for_each(|case| case.suite(&mut test));
}

/// The same, but only the first case has samples in each layout: the products and kernels of the others
/// read their arguments alike.
fn for_each_case_with_few_layouts(mut test: impl FnMut(&Suite<'_>)) {
    let cases = cases().into_iter().enumerate();
    cases.for_each(|(index, case)| case.suite_in(index == 0, &mut test));
}

#[test]
fn forward_agrees_with_the_reference() {
    for_each_case(|suite| suite.forward_agrees_with_the_reference());
}

#[test]
fn gradients_agree_with_the_reference() {
    for_each_case(|suite| suite.gradients_agree_with_the_reference());
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    for_each_case(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
}

#[test]
fn results_can_be_changed_in_place() {
    for_each_case_with_few_layouts(|suite| suite.results_can_be_changed_in_place());
}

#[test]
fn cuda_agrees_with_the_cpu() {
    for_each_case(|suite| suite.cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu"));
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    let test = "cuda_half_kinds_agree_with_the_cpu";
    for_each_case(|suite| suite.cuda_half_kinds_agree_with_the_cpu(test));
}

#[test]
fn gradcheck_of_every_small_sample() {
    for_each_case_with_few_layouts(|suite| suite.gradcheck_of_every_small_sample());
}

#[test]
fn second_derivatives_of_every_small_sample() {
    for_each_case_with_few_layouts(|suite| suite.gradgradcheck_of_every_small_sample());
}

/// Calls that share their tensors, where the input of the last one depends on the first one, and
/// weights that depend on the input: total derivatives would differ from partial ones here.
fn program(case: Case, op: Op, leaves: &[Tensor]) -> Tensor {
    let call = |inputs: &[Tensor]| case.call(op, inputs).expect("a step");
    let with_input = |x: Tensor| {
        let mut inputs: Vec<Tensor> = leaves.iter().map(Tensor::shallow_clone).collect();
        inputs[0] = x;
        inputs
    };
    let first = call(leaves);
    let second = call(&with_input(&first * leaves[0].sum(Kind::Double)));
    let dependent: Vec<Tensor> =
        leaves.iter().map(|leaf| leaf * leaves[0].sum(Kind::Double)).collect();
    (second.square() + call(&dependent).sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    for device in devices() {
        for case in cases() {
            let inputs = case.samples(&[[3, 4, 6, 4]], Kind::Double, device).remove(0).inputs;
            let of = |op: Op| move |leaves: &[Tensor]| program(case, op, leaves);
            let programs = [of(f_gelu_mlp), of(gelu_mlp_reference)];
            let name = format!("{case:?}");
            support::assert_derivatives_agree(&name, [&programs[0], &programs[1]], &inputs, 1e-10);
        }
    }
}

#[test]
fn conformance_in_every_kind() {
    for (index, case) in cases().into_iter().enumerate() {
        let sizes = [[3, 4, 5, 2], [2, 8, 16, 8], [0, 3, 4, 2]];
        case.suite(|suite| {
            suite.conformance_of(|kind, device| case.samples_in(index == 0, &sizes, kind, device));
            suite.conformance_of(|kind, device| case.of_leading_dimensions(kind, device));
        });
    }
}

/// A call with absent biases.
type Call = Box<dyn Fn(&[Option<Tensor>]) -> Result<Vec<Tensor>>>;

fn call_of(op: Op, options: GeluMlpOptions) -> Call {
    Box::new(move |inputs| {
        let [Some(x), Some(w1), b1, Some(w2), b2] = inputs else { unreachable!("five") };
        Ok(vec![op(x, w1, b1.as_ref(), w2, b2.as_ref(), &options)?])
    })
}

/// Whether the docs say that the operator accepts this case.
fn is_documented(RandomCase(arguments): &RandomCase) -> bool {
    let [Some(x), Some(w1), b1, Some(w2), b2] = &arguments[..] else { return false };
    let one_kind = arguments.iter().flatten().all(|argument| argument.kind == x.kind);
    let (Some(&d), &[h, features], &[e, hidden]) = (x.size.last(), &w1.size[..], &w2.size[..])
    else {
        return false;
    };
    let bias = |bias: &Option<support::property::Argument>, size: i64| {
        bias.as_ref().is_none_or(|bias| bias.size == [size])
    };
    one_kind
        && KINDS.contains(&x.kind)
        && features == d
        && hidden == h
        && bias(b1, h)
        && bias(b2, e)
}

#[test]
fn random_cases() {
    let lead = || proptest::collection::vec(size(), 0..3);
    let cases = (lead(), size(), size(), size(), any::<[bool; 2]>(), style(5));
    let cases = cases.prop_map(|(mut x, d, h, e, [b1, b2], style)| {
        x.push(d);
        let (b1, b2) = (b1.then(|| vec![h]), b2.then(|| vec![e]));
        style.case(vec![Some(x), Some(vec![h, d]), b1, Some(vec![e, h]), b2])
    });
    for device in devices() {
        for (activation, save_activations) in
            [(Activation::GeluTanh, true), (Activation::Gelu, false), (Activation::Silu, false)]
        {
            let options = GeluMlpOptions { activation, save_activations };
            let (fused, reference) =
                (call_of(f_gelu_mlp, options), call_of(gelu_mlp_reference, options));
            let property = Property {
                name: "gelu_mlp",
                fused: &*fused,
                reference: &*reference,
                excluded: &|case| !is_documented(case),
            };
            property.holds_for(&cases, if device.is_cuda() { 400 } else { 1000 }, device);
        }
    }
}
