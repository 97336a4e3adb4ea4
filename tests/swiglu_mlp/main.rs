//! Tests of `ops::swiglu_mlp`: against its reference, libtorch's own operations and finite
//! differences; what it keeps; and with bad input.

mod arguments;
mod kinds;
mod values;

use support::gpu::caching_or_skip;
use support::{KINDS, Suite, leaves};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{Graph, memory_stats, reset_peak_memory_stats};
use tch_extension::nn::{MlpOp, SwiGluConfig, swiglu};
use tch_extension::ops::{SwigluMlpOptions, f_swiglu_mlp, swiglu_mlp, swiglu_mlp_reference};
use tch_extension::testing::{
    ConformanceOptions, Sample, SampleTable, Shape, assert_as_accurate, assert_close, conformance,
    cuda_or_skip, devices, tolerance,
};

const BOTH: [SwigluMlpOptions; 2] =
    [SwigluMlpOptions { save_activations: true }, SwigluMlpOptions { save_activations: false }];

type Op<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, &Tensor) -> Result<Tensor>;

fn call(op: Op<'_>, inputs: &[Tensor]) -> Result<Tensor> {
    let [x, gate, up, down] = inputs else { panic!("four inputs") };
    op(x, gate, up, down)
}

fn fused(
    options: SwigluMlpOptions,
) -> impl Fn(&Tensor, &Tensor, &Tensor, &Tensor) -> Result<Tensor> {
    move |x, gate, up, down| f_swiglu_mlp(x, gate, up, down, &options)
}

/// A scale with which the sums are roughly between -1 and 1.
fn weight_scale(features: i64) -> f64 {
    (9.0 / features.max(9) as f64).sqrt()
}

/// The shapes of the inputs, where the leading dimensions of x are `lead`.
fn shapes(lead: &[i64], [d, h, e]: [i64; 3]) -> Vec<Shape> {
    let inner = || Shape::new([h, d]).scale(2.0 * weight_scale(d));
    let outer = Shape::new([e, h]).scale(weight_scale(h));
    vec![Shape::new([lead, &[d]].concat()), inner(), inner(), outer]
}

fn samples(sizes: &[[i64; 4]], kind: Kind, device: Device) -> Vec<Sample> {
    samples_in(true, sizes, kind, device)
}

/// Samples of these sizes, and if wanted others in each layout.
fn samples_in(layouts: bool, sizes: &[[i64; 4]], kind: Kind, device: Device) -> Vec<Sample> {
    let table = SampleTable::empty(["M", "D", "H", "E"], |[m, d, h, e]| shapes(&[m], [d, h, e]));
    let table = table.with_sizes(sizes);
    let table = if layouts { table.with_layouts([4, 3, 8, 5]) } else { table };
    table.samples(kind, device).expect("samples")
}

/// With leading dimensions, and with none.
fn of_leading_dimensions(kind: Kind, device: Device) -> Vec<Sample> {
    let leads: [&[i64]; 4] = [&[], &[2, 3], &[2, 0], &[1, 2, 1]];
    let samples = leads.into_iter().flat_map(|lead| {
        let table = SampleTable::empty(["D", "H", "E"], |sizes| shapes(lead, sizes));
        table.with_sizes(&[[3, 5, 2]]).samples(kind, device).expect("samples")
    });
    samples.collect()
}

fn small_in(layouts: bool, kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [[3, 4, 5, 2], [1, 1, 1, 1], [2, 3, 16, 4], [3, 0, 4, 2], [2, 3, 0, 2]];
    let others = [[0, 3, 4, 2], [3, 2, 4, 0], [5, 2, 33, 1]];
    let mut all = samples_in(layouts, &[&sizes[..], &others].concat(), kind, device);
    all.extend(of_leading_dimensions(kind, device));
    all
}

/// More than one block, with and without values after the last whole vector.
fn large(kind: Kind, device: Device) -> Vec<Sample> {
    let sizes = [[70, 24, 128, 40], [301, 5, 67, 3], [1031, 3, 33, 2], [1, 2, 5001, 1]];
    samples(&sizes, kind, device)
}

/// Runs one of the tests that all operators share.
fn for_each_option(test: impl FnMut(&Suite<'_>)) {
    for_each_option_in(BOTH.map(|options| (options, true)), test);
}

/// The same, but only the first options have samples in each layout: what is kept does not depend on it.
fn for_each_option_with_few_layouts(test: impl FnMut(&Suite<'_>)) {
    for_each_option_in([(BOTH[0], true), (BOTH[1], false)], test);
}

fn for_each_option_in(options: [(SwigluMlpOptions, bool); 2], mut test: impl FnMut(&Suite<'_>)) {
    for (options, layouts) in options {
        eprintln!("{options:?}");
        test(&Suite {
            fused: &|inputs| Ok(vec![call(&fused(options), inputs)?]),
            reference: &|inputs| Ok(vec![call(&swiglu_mlp_reference, inputs)?]),
            small: &|kind, device| small_in(layouts, kind, device),
            large: &large,
            terms: &|sample| {
                let rows: i64 = sample.inputs[0].size().iter().product();
                let hidden = sample.inputs[1].size()[0];
                rows.max(1) * hidden.max(1)
            },
        });
    }
}

#[test]
fn forward_agrees_with_the_reference() {
    for_each_option(|suite| suite.forward_agrees_with_the_reference());
}

#[test]
fn gradients_agree_with_the_reference() {
    for_each_option(|suite| suite.gradients_agree_with_the_reference());
}

#[test]
fn with_and_without_a_graph_the_bits_are_the_same() {
    for_each_option(|suite| suite.with_and_without_a_graph_the_bits_are_the_same());
}

#[test]
fn results_can_be_changed_in_place() {
    for_each_option_with_few_layouts(|suite| suite.results_can_be_changed_in_place());
}

#[test]
fn cuda_agrees_with_the_cpu() {
    for_each_option(|suite| suite.cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu"));
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    let test = "cuda_half_kinds_agree_with_the_cpu";
    for_each_option(|suite| suite.cuda_half_kinds_agree_with_the_cpu(test));
}

#[test]
fn gradcheck_of_every_small_sample() {
    for_each_option_with_few_layouts(|suite| suite.gradcheck_of_every_small_sample());
}

#[test]
fn second_derivatives_of_every_small_sample() {
    for_each_option_with_few_layouts(|suite| suite.gradgradcheck_of_every_small_sample());
}

/// Calls that share their tensors, where the input of the last one depends on the first one, and
/// weights that depend on the input: total derivatives would differ from partial ones here.
fn program(op: Op<'_>, leaves: &[Tensor]) -> Tensor {
    let [x, gate, up, down] = leaves else { panic!("four inputs") };
    let sum = x.sum(Kind::Double);
    let first = op(x, gate, up, down).expect("first");
    let second = op(&(&first * &sum), gate, up, down).expect("second");
    let third = op(&(x * &sum), &(gate * &sum), &(up * &sum), &(down * &sum)).expect("third");
    (second.square() + third.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    for device in devices() {
        for options in BOTH {
            let inputs = samples(&[[3, 4, 6, 4]], Kind::Double, device).remove(0).inputs;
            let programs: [support::Program<'_>; 2] =
                [&|leaves| program(&fused(options), leaves), &|leaves| {
                    program(&swiglu_mlp_reference, leaves)
                }];
            support::assert_derivatives_agree("swiglu_mlp", programs, &inputs, 1e-10);
        }
    }
}

/// The largest number in dg Wg, for an incoming gradient of ones.
fn largest_first_product(sample: &Sample) -> f64 {
    let inputs = sample.inputs.iter().map(|input| input.to_kind(Kind::Double));
    let [x, gate, up, down] = &inputs.collect::<Vec<_>>()[..] else { panic!("four inputs") };
    let x = x.detach().set_requires_grad(true);
    let u = x.detach().linear(up, None::<&Tensor>);
    let h = x.linear(gate, None::<&Tensor>).silu() * u;
    let sum = h.linear(down, None::<&Tensor>).sum(Kind::Double);
    let dx = grad(&[&sum], &[&x], &GradOptions::default()).expect("dx").into_vec().remove(0);
    let dx = dx.expect("dx");
    if dx.numel() == 0 { 0.0 } else { dx.abs().max().double_value(&[]) }
}

/// dx is dg Wg, rounded, plus du Wu, and rounded again. Another layout may be multiplied by another
/// kernel, which adds in another order, so that dg Wg may be rounded to the next number: its relative
/// tolerance is allowed besides that of the sum, which may be much smaller. So in half kinds; in the
/// others the default's absolute tolerance is larger than that.
#[test]
fn conformance_in_every_kind() {
    let sizes = [[3, 4, 5, 2], [2, 8, 16, 8], [0, 3, 4, 2]];
    for (options, layouts) in [(BOTH[0], true), (BOTH[1], false)] {
        let run = |inputs: &[Tensor]| Ok(vec![call(&fused(options), inputs)?]);
        for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
            let mut all = samples_in(layouts, &sizes, kind, device);
            all.extend(of_leading_dimensions(kind, device));
            for sample in all {
                let (rtol, atol) = tolerance(kind);
                let twice = (rtol, atol + rtol * largest_first_product(&sample));
                let tolerance = support::is_half(kind).then_some(twice);
                let options = ConformanceOptions { tolerance, ..Default::default() };
                let leaves = sample.leaves().expect("leaves");
                conformance(run, &leaves.iter().collect::<Vec<_>>(), &options)
                    .unwrap_or_else(|error| panic!("{} {kind:?}:\n{error}", sample.name));
            }
        }
    }
}

/// Each subset of the gradients, in the forward pass and in the backward pass.
#[test]
fn each_subset_of_the_gradients() {
    for device in devices() {
        let inputs = samples(&[[7, 3, 10, 4]], Kind::Double, device).remove(0).inputs;
        for options in BOTH {
            let gradients = |op: Op<'_>, leaves: usize, wanted: usize| {
                let is_in = |set: usize, place: usize| set >> place & 1 == 1;
                let inputs: Vec<Tensor> = inputs
                    .iter()
                    .enumerate()
                    .map(|(place, input)| input.detach().set_requires_grad(is_in(leaves, place)))
                    .collect();
                let y = call(op, &inputs).expect("y");
                let vector = support::incoming(&y);
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let wanted = (0..4).filter(|&place| is_in(wanted, place));
                let wanted: Vec<&Tensor> = wanted.map(|place| &inputs[place]).collect();
                grad(&[&y], &wanted, &options).expect("gradients").into_vec()
            };
            for leaves in 1..16 {
                for wanted in (1..16).filter(|wanted| wanted & !leaves == 0) {
                    let found = gradients(&fused(options), leaves, wanted);
                    let expected = gradients(&swiglu_mlp_reference, leaves, wanted);
                    for (found, expected) in found.into_iter().zip(expected) {
                        let (found, expected) = (found.expect("one"), expected.expect("one"));
                        assert_close(&found, &expected, 1e-12, 1e-12);
                    }
                }
            }
        }
    }
}

/// What is kept, and the peaks of both passes, in units of `[M, H]`.
#[test]
fn cuda_memory_is_as_documented() {
    let Some(device) = caching_or_skip("cuda_memory_is_as_documented") else { return };
    let (m, d, h) = (4096_i64, 64, 2048);
    let unit = (m * h * 2) as f64;
    let of = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, device));
    let leaves = leaves(&[of(&[m, d]), of(&[h, d]), of(&[h, d]), of(&[d, h])]);
    // How many units are kept, and how many are in use at most.
    for (options, kept, peak) in [(BOTH[0], 3.0, 5.0), (BOTH[1], 2.0, 5.0)] {
        let run = || {
            reset_peak_memory_stats(device).expect("statistics");
            let before = memory_stats(device).expect("statistics").allocated;
            let y = call(&fused(options), &leaves).expect("y");
            let after = memory_stats(device).expect("statistics").allocated;
            let all: Vec<&Tensor> = leaves.iter().collect();
            drop(grad(&[&y.sum(Kind::Float)], &all, &GradOptions::default()).expect("gradients"));
            let peak = memory_stats(device).expect("statistics").peak_allocated;
            [after - before, peak - before].map(|bytes| bytes as f64 / unit)
        };
        // The first call makes cuBLAS' workspace.
        run();
        let found = run();
        eprintln!("{options:?}: {found:?}");
        assert!((kept..kept + 0.3).contains(&found[0]), "kept {found:?}");
        assert!(found[1] <= peak + 0.5, "peak {found:?}");
    }
}

#[test]
fn the_layer_has_the_parameters_of_three() {
    for device in devices() {
        let linear = nn::LinearConfig { bias: false, ..Default::default() };
        tch::manual_seed(3);
        let theirs = VarStore::new(device);
        let path = theirs.root() / "mlp";
        let gate = nn::linear(&path / "gate_proj", 6, 20, linear);
        let up = nn::linear(&path / "up_proj", 6, 20, linear);
        let down = nn::linear(&path / "down_proj", 20, 6, linear);
        let x = Tensor::randn([2, 5, 6], (Kind::Float, device));
        let expected = down.forward(&(gate.forward(&x).silu() * up.forward(&x)));
        for op in [MlpOp::Fused, MlpOp::Composite] {
            tch::manual_seed(3);
            let ours = VarStore::new(device);
            let config = SwiGluConfig { op, ..Default::default() };
            let layer = swiglu(ours.root() / "mlp", 6, 20, config);
            assert_eq!(ours.len(), 3);
            for (name, value) in theirs.variables() {
                assert!(ours.variables()[&name].equal(&value), "{name}");
            }
            assert_close(&layer.forward(&x), &expected, 1e-5, 1e-5);
            let bad = layer.f_forward(&x.narrow(2, 0, 5)).expect_err("5 features").to_string();
            if op == MlpOp::Fused {
                let expected = "swiglu_mlp: w_gate: expected shape [H, D] = [20, 5], got [20, 6]";
                assert_eq!(bad, expected);
            }
        }
    }
}

/// Some offsets exceed 32 bits. The last row must reach its output and its gradient.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let Some(device) = cuda_or_skip("cuda_more_than_two_to_the_31_elements") else { return };
    let like = (Kind::Half, device);
    let (rows, hidden) = ((1_i64 << 21) + 3, 1028_i64);
    let x = Tensor::zeros([rows, 1], like);
    let _ = x.get(rows - 1).fill_(2.0);
    let down = Tensor::zeros([1, hidden], like);
    let _ = down.get(0).get(hidden - 1).fill_(1.0);
    let leaves =
        leaves(&[x, Tensor::ones([hidden, 1], like), Tensor::ones([hidden, 1], like), down]);
    for options in BOTH {
        let y = call(&fused(options), &leaves).expect("y");
        let vector = y.ones_like();
        let grad_options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
        let all: Vec<&Tensor> = leaves.iter().collect();
        let gradients = grad(&[&y], &all, &grad_options).expect("gradients").into_vec();
        let y = y.detach().view([-1]);
        let dx = gradients[0].as_ref().expect("dx").view([-1]);
        let s = 1.0 / (1.0 + (-2.0_f64).exp());
        let (value, slope) = (2.0 * s * 2.0, 2.0 * s + 2.0 * (s + 2.0 * s * (1.0 - s)));
        for (found, expected) in [(&y, value), (&dx, slope)] {
            assert!((found.double_value(&[rows - 1]) - expected).abs() < 0.01, "{expected}");
            assert_eq!(found.narrow(0, 0, rows - 1).abs().max().double_value(&[]), 0.0);
        }
    }
}
