//! Tests of each way: with a pass between the products, and with the activation in the epilogue of the
//! first product. Ways differ only on CUDA in half kinds.

use super::*;
use support::gpu::{caching_or_skip, is_hopper};

use tch_extension::cuda::Graph;
use tch_extension::ops::{MlpWay, force, product_plans};
use tch_extension::testing::{
    ConformanceOptions, assert_as_accurate, conformance, cuda_or_skip, tolerance,
};

const WAYS: [MlpWay; 2] = [MlpWay::Pass, MlpWay::Activation];

#[test]
fn cuda_half_kinds_agree_with_the_reference_by_each_way() {
    let test = "cuda_half_kinds_agree_with_the_reference_by_each_way";
    if cuda_or_skip(test).is_none() {
        return;
    }
    // Rows of whole vectors, for which there is an epilogue, and others.
    let small = [[3, 8, 16, 8], [1, 8, 8, 8], [5, 3, 8, 2], [4, 8, 7, 16], [0, 8, 8, 8]];
    let large = [[70, 24, 128, 40], [1100, 64, 256, 64], [515, 128, 136, 64], [33, 40, 64, 1]];
    for case in cases() {
        for way in WAYS {
            let fused = move |inputs: &[Tensor]| force(way, || case.fused(inputs));
            eprintln!("{way:?}");
            case.suite(|suite| {
                let small = move |kind, device| case.samples(&small, kind, device);
                let large = move |kind, device| case.samples(&large, kind, device);
                let suite = Suite {
                    fused: &fused,
                    small: &small,
                    large: &large,
                    reference: suite.reference,
                    terms: suite.terms,
                };
                suite.forward_agrees_with_the_reference();
                suite.gradients_agree_with_the_reference();
            });
        }
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let ways: Vec<MlpWay> = [MlpWay::Automatic].into_iter().chain(WAYS).collect();
    let sizes: [&[&[i64]]; 5] = [
        &[&[6, 8], &[16, 8], &[16], &[8, 16], &[8]],
        &[&[2, 3, 8], &[16, 8], &[16], &[24, 16], &[24]],
        &[&[4], &[5, 4], &[5], &[3, 5], &[3]],
        &[&[2, 0, 8], &[16, 8], &[16], &[8, 16], &[8]],
        &[&[64, 32], &[128, 32], &[128], &[32, 128], &[32]],
    ];
    for save_activations in [true, false] {
        let options = GeluMlpOptions { save_activations, ..Default::default() };
        let case = Case { options, biases: [true, true] };
        support::alike::assert_alike(&ways, &sizes, |way, arguments| {
            force(way, || case.fused(arguments))
        });
    }
}

/// How many kernels a training step has, and how many of its products have a GELU in their epilogue.
fn kernels_and_gelus(device: Device, way: MlpWay, rows: i64) -> (usize, i64) {
    let of = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, device));
    let inputs = [of(&[rows, 256]), of(&[1024, 256]), of(&[1024]), of(&[256, 1024]), of(&[256])];
    let case = Case { options: GeluMlpOptions::default(), biases: [true, true] };
    let run = || {
        let leaves = leaves(&inputs);
        let y = force(way, || case.call(f_gelu_mlp, &leaves))?;
        let leaves: Vec<&Tensor> = leaves.iter().collect();
        let vector = y.detach();
        let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
        grad(&[&y], &leaves, &options).map(|gradients| gradients.into_vec())
    };
    // The first call makes cuBLAS' workspace, which cannot be made during a capture.
    drop(run().expect("gradients"));
    let before = product_plans().gelus;
    let (graph, _) = Graph::capture(device, run).expect("a graph");
    (graph.kernels(), product_plans().gelus - before)
}

/// A way that does not exist falls back without an error, so kernels and epilogues are counted.
#[test]
fn cuda_each_way_is_used_where_it_is_forced() {
    let test = "cuda_each_way_is_used_where_it_is_forced";
    let Some(device) = caching_or_skip(test) else { return };
    if !is_hopper() {
        eprintln!("skipped: the epilogue was seen on compute capability 9.0 only");
        return;
    }
    let (pass, none) = kernels_and_gelus(device, MlpWay::Pass, 512);
    let (activation, one) = kernels_and_gelus(device, MlpWay::Activation, 512);
    assert_eq!((none, one), (0, 1));
    assert!(activation < pass, "{activation} kernels, and {pass} without");
    assert_eq!(kernels_and_gelus(device, MlpWay::Automatic, 512), (activation, 1));
    assert_eq!(kernels_and_gelus(device, MlpWay::Automatic, 10_240).1, 1);
    assert_eq!(kernels_and_gelus(device, MlpWay::Pass, 10_240).1, 0);
}

/// y and the gradients of x, b₁ and the other tensors, of a layer that passes on the first of eight
/// hidden features.
fn through(way: MlpWay, kind: Kind, x: &Tensor, b1: f64) -> [Tensor; 3] {
    let like = (kind, x.device());
    let first = Tensor::zeros([8, 8], like);
    let _ = first.get(0).get(0).fill_(1.0);
    let bias = Tensor::zeros([8], like);
    let _ = bias.get(0).fill_(b1);
    let x = x.to_kind(kind).detach().set_requires_grad(true);
    let bias = bias.set_requires_grad(true);
    // All rows of the second weight are ones, so that a NaN is seen.
    let w2 = Tensor::ones([8, 8], like);
    let options = GeluMlpOptions::default();
    let y = match kind {
        Kind::Double => gelu_mlp_reference(&x, &first, Some(&bias), &w2, None, &options),
        _ => force(way, || f_gelu_mlp(&x, &first, Some(&bias), &w2, None, &options)),
    };
    let y = y.expect("y");
    let vector = y.zeros_like();
    let _ = vector.select(1, 0).fill_(1.0);
    let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
    let gradients = grad(&[&y], &[&x, &bias], &options).expect("gradients").into_vec();
    let [dx, db1] = <[_; 2]>::try_from(gradients).expect("two").map(|one| one.expect("one"));
    [y.detach().select(1, 0), dx.select(1, 0), db1]
}

/// cuBLASLt computes GELU by an approximation of its own.
#[test]
fn cuda_half_kinds_activations_are_as_exact_by_each_way() {
    let test = "cuda_half_kinds_activations_are_as_exact_by_each_way";
    let Some(device) = cuda_or_skip(test) else { return };
    for kind in [Kind::Half, Kind::BFloat16] {
        for reach in [12.0, 3.0, 0.05] {
            let x = Tensor::zeros([4096, 8], (Kind::Double, device));
            let values = Tensor::linspace(-reach, reach, 4096, (Kind::Double, device));
            x.select(1, 0).copy_(&values.to_kind(kind));
            let exact = through(MlpWay::Pass, Kind::Double, &x, 0.0);
            let rival = through(MlpWay::Pass, kind, &x, 0.0);
            for way in WAYS {
                let found = through(way, kind, &x, 0.0);
                for ((found, rival), exact) in found.iter().zip(&rival).zip(&exact) {
                    eprintln!("{way:?} {kind:?} {reach}");
                    assert_as_accurate(found, rival, exact);
                }
            }
        }
    }
}

/// cuBLASLt may compute the tanh by the GPU's instruction, whose relative error is up to 2⁻¹¹, so that a is
/// off by up to 2⁻¹² z. The derivative is computed from z by our kernel, whatever the way.
#[test]
fn cuda_half_kinds_small_activations_by_each_way() {
    let test = "cuda_half_kinds_small_activations_by_each_way";
    let Some(device) = cuda_or_skip(test) else { return };
    for kind in [Kind::Half, Kind::BFloat16] {
        let z = Tensor::linspace(-8.0, -1.0, 4096, (Kind::Double, device)).to_kind(kind);
        let x = Tensor::zeros([4096, 8], (kind, device));
        x.select(1, 0).copy_(&z);
        let exact = values::exact(Activation::GeluTanh, &z);
        let (rounded, least) = values::rounding(kind);
        for (way, by_z) in [(MlpWay::Pass, 0.0), (MlpWay::Activation, 2_f64.powi(-12))] {
            let [a, dz, _] = through(way, kind, &x, 0.0);
            eprintln!("{way:?} {kind:?}");
            let relative = 1.01 * rounded + 2_f64.powi(-16);
            values::assert_each_within(&a, &exact[0], &z, (relative, by_z, least));
            values::assert_each_within(&dz, &exact[1], &z, (relative, 0.0, least));
        }
    }
}

/// A z that is not finite comes from the bias, because infinity times a weight of 0 is NaN.
#[test]
fn cuda_half_kinds_what_is_not_finite_comes_through_by_each_way() {
    let test = "cuda_half_kinds_what_is_not_finite_comes_through_by_each_way";
    let Some(device) = cuda_or_skip(test) else { return };
    for kind in [Kind::Half, Kind::BFloat16] {
        let x = Tensor::zeros([16, 8], (kind, device));
        for b1 in [f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 6e4, -6e4, 100.0, -100.0] {
            let expected = through(MlpWay::Pass, kind, &x, b1);
            for way in WAYS {
                let found = through(way, kind, &x, b1);
                for (found, expected) in found.iter().zip(&expected) {
                    eprintln!("{way:?} {kind:?} {b1}");
                    assert_close(found, expected, 1e-2, 1e-6);
                }
            }
        }
    }
}

const HALVES: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// By how much y and dx may differ in units of the relative tolerance r, if z may be the next number:
/// Σ |a| |W₂|, and Σ |da| (1 + 1.2 |z|) |W₁|, because act' changes by at most 1.2 times as much as z.
fn largest_change(sample: &Sample) -> f64 {
    let double: Vec<Tensor> =
        sample.inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
    let [x, w1, b1, w2, _] = &double[..] else { panic!("five inputs") };
    let z = x.linear(w1, Some(b1));
    let of_y = z.gelu("tanh").abs().linear(&w2.abs(), None::<&Tensor>);
    // The incoming gradients are normal numbers: three of them are nearly never exceeded.
    let of_dz = (w2.abs() * 3.0).sum_dim_intlist([0_i64].as_slice(), false, Kind::Double);
    let of_dx = (of_dz * (z.abs() * 1.2 + 1.0)).matmul(&w1.abs());
    of_y.max().maximum(&of_dx.max()).double_value(&[])
}

/// In another layout the epilogue cannot be used, so that z and a may be rounded to the next number,
/// and the epilogue's hyperbolic tangent is the hardware's.
#[test]
fn cuda_half_kinds_conformance_by_each_way() {
    if cuda_or_skip("cuda_half_kinds_conformance_by_each_way").is_none() {
        return;
    }
    let case = cases()[0];
    for (device, kind) in devices().into_iter().flat_map(|d| HALVES.map(|kind| (d, kind))) {
        for sample in case.samples(&[[6, 8, 16, 8]], kind, device) {
            let (rtol, atol) = tolerance(kind);
            let tolerance = Some((rtol, atol + 2.0 * rtol * largest_change(&sample)));
            let options = ConformanceOptions { tolerance, ..Default::default() };
            let leaves = sample.leaves().expect("leaves");
            let leaves: Vec<&Tensor> = leaves.iter().collect();
            for way in WAYS {
                let fused = |inputs: &[Tensor]| force(way, || case.fused(inputs));
                conformance(fused, &leaves, &options)
                    .unwrap_or_else(|error| panic!("{way:?} {} {kind:?}:\n{error}", sample.name));
            }
        }
    }
}
