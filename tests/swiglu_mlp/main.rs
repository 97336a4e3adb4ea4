//! Tests of `ops::swiglu_mlp`: against its reference, libtorch's own operations and finite
//! differences; what it keeps; and with bad input.

#[path = "../support/mod.rs"]
mod support;

use proptest::prelude::*;
use support::property::{Case as RandomCase, Property, size, style};
use support::refusal::assert_refused;
use support::{KINDS, Suite, leaves};
use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::amp::Autocast;
use tch_extension::autograd::{GradOptions, grad, saved_tensors_hooks};
use tch_extension::cuda::{memory_stats, reset_peak_memory_stats};
use tch_extension::nn::{MlpOp, SwiGluConfig, swiglu};
use tch_extension::ops::{SwigluMlpOptions, f_swiglu_mlp, swiglu_mlp, swiglu_mlp_reference};
use tch_extension::testing::{
    ConformanceOptions, Layout, Sample, SampleTable, Shape, assert_as_accurate, assert_close,
    conformance, cuda_or_skip, devices, tolerance,
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

/// Whether the docs say that the operator accepts this case.
fn is_documented(RandomCase(arguments): &RandomCase) -> bool {
    let [Some(x), Some(gate), Some(up), Some(down)] = &arguments[..] else { return false };
    let one_kind = arguments.iter().flatten().all(|argument| argument.kind == x.kind);
    let (Some(&d), &[h, features], &[_, hidden]) = (x.size.last(), &gate.size[..], &down.size[..])
    else {
        return false;
    };
    one_kind && KINDS.contains(&x.kind) && features == d && hidden == h && up.size == gate.size
}

#[test]
fn random_cases() {
    fn take(inputs: &[Option<Tensor>]) -> [&Tensor; 4] {
        let [Some(x), Some(gate), Some(up), Some(down)] = inputs else { unreachable!("four") };
        [x, gate, up, down]
    }
    let lead = proptest::collection::vec(size(), 0..3);
    let cases = (lead, size(), size(), size(), style(4)).prop_map(|(mut x, d, h, e, style)| {
        x.push(d);
        style.case(vec![Some(x), Some(vec![h, d]), Some(vec![h, d]), Some(vec![e, h])])
    });
    for device in devices() {
        for options in BOTH {
            let property = Property {
                name: "swiglu_mlp",
                fused: &|inputs| {
                    let [x, gate, up, down] = take(inputs);
                    Ok(vec![f_swiglu_mlp(x, gate, up, down, &options)?])
                },
                reference: &|inputs| {
                    let [x, gate, up, down] = take(inputs);
                    Ok(vec![swiglu_mlp_reference(x, gate, up, down)?])
                },
                excluded: &|case| !is_documented(case),
            };
            property.holds_for(&cases, if device.is_cuda() { 600 } else { 1500 }, device);
        }
    }
}

/// The reference could be wrong in the same way, so these numbers come from the formula.
#[test]
fn the_formula_by_hand() {
    let (x, gate, up) = ([0.5, -1.0], [[1.0, 0.5], [-2.0, 3.0]], [[0.25, 1.0], [-1.0, 0.5]]);
    let down = [0.5, -3.0];
    let h = |k: usize| {
        let dot = |w: &[f64; 2]| w[0] * x[0] + w[1] * x[1];
        let g = dot(&gate[k]);
        g / (1.0 + (-g).exp()) * dot(&up[k])
    };
    let expected = down[0] * h(0) + down[1] * h(1);
    for device in devices() {
        let of =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        let inputs = [
            of(&x, &[2]),
            of(gate.as_flattened(), &[2, 2]),
            of(up.as_flattened(), &[2, 2]),
            of(&down, &[1, 2]),
        ];
        for op in [&fused(BOTH[0]) as Op<'_>, &swiglu_mlp_reference] {
            let found = call(op, &inputs).expect("y");
            assert_eq!(found.size(), [1]);
            let found = found.double_value(&[0]);
            assert!((found - expected).abs() < 1e-14, "{found} {expected} on {device:?}");
        }
    }
}

/// One feature, so that g = x and u = x · 2.
fn through(op: Op<'_>, x: &Tensor, vector: &Tensor) -> [Tensor; 2] {
    let of = |value: f64| Tensor::full([1, 1], value, (x.kind(), x.device()));
    let x = x.view([-1, 1]).detach().set_requires_grad(true);
    let y = op(&x, &of(1.0), &of(2.0), &of(1.0)).expect("y");
    let vector = vector.view([-1, 1]);
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let dx = grad(&[&y], &[&x], &options).expect("dx").into_vec().remove(0);
    [y.detach(), dx.expect("dx")]
}

#[test]
fn values_are_as_exact_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            for reach in [12.0, 3.0, 0.05] {
                let x = Tensor::linspace(-reach, reach, 20_011, (Kind::Double, device));
                let x = x.to_kind(kind);
                let ones = x.ones_like();
                let wide = [&x, &ones].map(|tensor| tensor.to_kind(Kind::Double));
                let exact = through(&swiglu_mlp_reference, &wide[0], &wide[1]);
                let rival = through(&swiglu_mlp_reference, &x, &ones);
                for options in BOTH {
                    let found = through(&fused(options), &x, &ones);
                    for ((found, rival), exact) in found.iter().zip(&rival).zip(&exact) {
                        eprintln!("{kind:?} {reach} {device:?}");
                        assert_as_accurate(found, rival, exact);
                    }
                }
            }
        }
    }
}

/// Negative g whose SiLU is small, which a norm over all values would not see: y = silu(g) 2 g. The bounds
/// are of each number: exponents of at most 8, the roundings of products, and in the derivative a sum of
/// two numbers. In half kinds g, u, dg, du and dx are rounded, and dg Wg before du Wu is added to it.
#[test]
fn small_values_have_their_digits() {
    for (device, kind) in devices().into_iter().flat_map(|d| KINDS.map(|kind| (d, kind))) {
        let (unit, rounded, least) = match kind {
            Kind::Half => (2_f64.powi(-24), 2_f64.powi(-11), 2_f64.powi(-25)),
            Kind::BFloat16 => (2_f64.powi(-24), 2_f64.powi(-8), 0.0),
            Kind::Float => (2_f64.powi(-24), 2_f64.powi(-24), 0.0),
            _ => (2_f64.powi(-53), 2_f64.powi(-53), 0.0),
        };
        let x = Tensor::linspace(-8.0, -2.5, 4001, (Kind::Double, device)).to_kind(kind);
        let wide = x.to_kind(Kind::Double);
        let s = wide.sigmoid();
        let y = &wide * &wide * &s * 2.0;
        // dg Wg and du Wu have opposite signs, so that the bound is of their sizes.
        let of_gate = &wide * (&s + &wide * &s * (1.0 - &s)) * 2.0;
        let of_up = &wide * &s * 2.0;
        let (dx, sizes) = (&of_gate + &of_up, of_gate.abs() + of_up.abs());
        for options in BOTH {
            let [found_y, found_dx] = through(&fused(options), &x, &x.ones_like());
            for (found, exact, sizes, times) in
                [(&found_y, &y, &y.abs(), 1.0), (&found_dx, &dx, &sizes, 3.0)]
            {
                let allowed = sizes * (64.0 * unit + 1.01 * times * rounded) + 4.0 * least;
                let error = (found.to_kind(Kind::Double).view([-1]) - exact).abs();
                let worst = (error / allowed).max().double_value(&[]);
                eprintln!("{kind:?} {device:?}: the worst is {worst:.3} of its bound");
                assert!(worst <= 1.0, "{kind:?} {options:?} {device:?}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_comes_through() {
    let (infinity, nan) = (f64::INFINITY, f64::NAN);
    for device in devices() {
        for kind in KINDS {
            let of = |values: &[f64]| Tensor::from_slice(values).to_kind(kind).to_device(device);
            let odd = of(&[infinity, -infinity, nan, 0.0, -0.0, 100.0, -100.0]);
            let plain = of(&[-2.0, -0.5, 0.0, 0.5, 2.0]);
            let bad = [infinity, -infinity, nan].map(|bad| plain.full_like(bad));
            let calls = std::iter::once((odd.copy(), odd.ones_like()))
                .chain(bad.into_iter().map(|bad| (plain.copy(), bad)));
            for (x, vector) in calls {
                let expected = through(&swiglu_mlp_reference, &x, &vector);
                for options in BOTH {
                    let found = through(&fused(options), &x, &vector);
                    for (found, expected) in found.iter().zip(&expected) {
                        eprintln!("{kind:?} {device:?} {vector}");
                        let bound = if support::is_half(kind) { 1e-2 } else { 1e-6 };
                        assert_close(found, expected, bound, 1e-30);
                    }
                }
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

/// The gradient of the input is a sum of two products. Its error is about that of libtorch's, or less.
#[test]
fn the_inputs_gradient_is_as_exact_as_libtorchs() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
            let inputs: Vec<Tensor> =
                [([256, 64], 1.4), ([128, 64], 0.2), ([128, 64], 0.2), ([64, 128], 0.2)]
                    .into_iter()
                    .zip([1.0, 1.3, 1.7, 2.1])
                    .map(|((size, scale), step): (([i64; 2], f64), f64)| {
                        let numbers = Tensor::arange(size[0] * size[1], (Kind::Double, device));
                        ((numbers * step).sin() * scale).view(size).to_kind(kind)
                    })
                    .collect();
            let gradient = |op: Op<'_>, inputs: &[Tensor]| {
                let leaves = leaves(inputs);
                let y = call(op, &leaves).expect("y");
                let sum = (&y * &y).sum(y.kind());
                let found = grad(&[&sum], &[&leaves[0]], &GradOptions::default());
                let found = found.expect("dx").into_vec().remove(0).expect("dx");
                found.to_kind(Kind::Double)
            };
            let wide: Vec<Tensor> =
                inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
            let exact = gradient(&swiglu_mlp_reference, &wide);
            let error = |op: Op<'_>| (gradient(op, &inputs) - &exact).norm().double_value(&[]);
            let rival = error(&swiglu_mlp_reference);
            for options in BOTH {
                let ours = error(&fused(options));
                eprintln!("{kind:?} on {device:?}: {ours:e}, libtorch's {rival:e}");
                assert!(ours <= 1.1 * rival, "{kind:?} {options:?} on {device:?}: {ours} {rival}");
            }
        }
    }
}

/// Calls both with every combination of these kinds, and returns how many are taken.
fn count_taken(kinds: &[Kind], device: Device) -> usize {
    let sizes: [&[i64]; 4] = [&[2, 3], &[4, 3], &[4, 3], &[5, 4]];
    let mut taken = 0;
    for combination in 0..kinds.len().pow(4) {
        let of = |place: usize| kinds[combination / kinds.len().pow(place as u32) % kinds.len()];
        let arguments: Vec<Tensor> =
            (0..4).map(|place| Tensor::ones(sizes[place], (of(place), device))).collect();
        let kind = |op: Op<'_>| call(op, &arguments).ok().map(|output| output.kind());
        let names: Vec<Kind> = (0..4).map(of).collect();
        let found = kind(&fused(BOTH[0]));
        // libtorch multiplies silu(g) and u of different kinds.
        let is_mixed = names[2] != names[0];
        let expected = kind(&swiglu_mlp_reference).filter(|_| !is_mixed || found.is_some());
        assert_eq!(found, expected, "{names:?} on {device:?}");
        taken += usize::from(found.is_some());
    }
    taken
}

#[test]
fn kinds_with_and_without_autocast_are_as_libtorch_has_them() {
    for device in devices() {
        assert_eq!(count_taken(&KINDS, device), 4);
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            // Any combination of the three kinds that are cast, and all in Double.
            assert_eq!(count_taken(&KINDS, device), 3_usize.pow(4) + 1);
        }
    }
}

/// Under autocast in both passes, in the forward pass only, and in the backward pass only.
#[test]
fn under_autocast_values_and_gradients_are_libtorchs() {
    for device in devices() {
        let inputs = samples(&[[33, 20, 40, 24]], Kind::Float, device).remove(0).inputs;
        for (forward, backward, create_graph) in [
            (true, true, false),
            (true, false, false),
            (false, true, false),
            (true, true, true),
            (false, true, true),
        ] {
            let run = |op: Op<'_>, forward: bool, backward: bool| {
                let region = |within: bool| {
                    within.then(|| Autocast::new(device, Kind::BFloat16).expect("autocast"))
                };
                let leaves = leaves(&inputs);
                let autocast = region(forward);
                let y = call(op, &leaves).expect("y");
                drop(autocast);
                let _autocast = region(backward);
                let vector = support::incoming(&y);
                let vectors = [Some(&vector)];
                let options =
                    GradOptions { grad_outputs: &vectors, create_graph, ..Default::default() };
                let leaves: Vec<&Tensor> = leaves.iter().collect();
                let gradients = grad(&[&y], &leaves, &options).expect("gradients").into_vec();
                let gradients = gradients.into_iter().flatten().map(|gradient| gradient.detach());
                std::iter::once(y.detach()).chain(gradients).collect::<Vec<_>>()
            };
            let found = run(&fused(BOTH[0]), forward, backward);
            // Ours does not lose digits if only the backward pass runs in a region.
            let expected = run(&swiglu_mlp_reference, forward, forward && backward);
            assert_eq!(found.len(), 5);
            for (found, expected) in found.iter().zip(&expected) {
                let largest = expected.abs().max().double_value(&[]).max(1.0);
                let bound = if forward { 1.6e-2 } else { 1e-5 };
                assert_close(found, expected, bound, bound * largest);
            }
        }
    }
}

/// Hooks of libtorch's may give a saved tensor back in another memory.
#[test]
fn saved_tensors_may_come_back_in_other_memory() {
    for device in devices() {
        let inputs = samples(&[[5, 3, 8, 4]], Kind::Double, device).remove(0).inputs;
        let leaves = leaves(&inputs);
        for options in BOTH {
            let run = || {
                let y = call(&fused(options), &leaves).expect("y");
                let all: Vec<&Tensor> = leaves.iter().collect();
                let gradients = grad(&[&y.sum(Kind::Double)], &all, &GradOptions::default());
                gradients.expect("gradients").into_vec().into_iter().flatten().collect::<Vec<_>>()
            };
            let expected = run();
            let hooks = saved_tensors_hooks(
                |tensor| Ok(tensor.copy()),
                |tensor: &Tensor| Layout::Transposed.of(tensor),
            );
            let found = run();
            drop(hooks);
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 1e-12, 1e-12);
            }
        }
    }
}

/// What is kept, and the peaks of both passes, in units of `[M, H]`.
#[test]
fn cuda_memory_is_as_documented() {
    let Some(device) = cuda_or_skip("cuda_memory_is_as_documented") else { return };
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
fn bad_arguments_are_named() {
    let names = ["input", "w_gate", "w_up", "w_down"];
    for device in devices() {
        let of = |size: &[i64], kind| Tensor::zeros(size, (kind, device));
        let float = |size: &[i64]| of(size, Kind::Float);
        let good = || [float(&[2, 4]), float(&[6, 4]), float(&[6, 4]), float(&[3, 6])];
        let cases: Vec<(usize, Tensor, &[&str])> = vec![
            (0, float(&[]), &["shape [..., D]", "view it as [1]"]),
            (0, of(&[2, 4], Kind::Int64), &["kind Float or Double or Half or BFloat16", "Int64"]),
            (0, Tensor::new(), &["a tensor", "undefined"]),
            (1, float(&[6, 5]), &["[H, D] = [6, 4]", "[6, 5]"]),
            (1, float(&[6]), &["2 dimensions [H, D]", "[6]"]),
            (1, of(&[6, 4], Kind::Half), &["kind Float, as input", "Half"]),
            (2, float(&[5, 4]), &["[H, D] = [6, 4]", "[5, 4]"]),
            (2, of(&[6, 4], Kind::Double), &["kind Float, as input", "Double"]),
            (2, Tensor::new(), &["a tensor", "undefined"]),
            (3, float(&[3, 5]), &["[D2, H] = [3, 6]", "[3, 5]"]),
            (3, float(&[6]), &["2 dimensions [D2, H]", "[6]"]),
            (3, of(&[3, 6], Kind::BFloat16), &["kind Float, as input", "BFloat16"]),
        ];
        for (index, bad, texts) in cases {
            let mut arguments = good();
            arguments[index] = bad;
            let place = format!("swiglu_mlp: {}", names[index]);
            let result = call(&fused(BOTH[0]), &arguments);
            let panicking = std::panic::AssertUnwindSafe(|| {
                let [x, gate, up, down] = &arguments;
                swiglu_mlp(x, gate, up, down, &BOTH[0])
            });
            assert_refused(&place, texts, result, panicking);
        }
        assert_eq!(call(&fused(BOTH[0]), &good()).expect("good arguments").size(), [2, 3]);
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
