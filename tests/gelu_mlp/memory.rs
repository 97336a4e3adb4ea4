//! Tests of what a call keeps for its backward pass, and of which gradients it computes.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{memory_stats, reset_peak_memory_stats};
use tch_extension::testing::cuda_or_skip;

/// Each subset of the gradients, in the forward pass and in the backward pass.
#[test]
fn each_subset_of_the_gradients() {
    for device in devices() {
        for save_activations in [true, false] {
            let options = GeluMlpOptions { save_activations, ..Default::default() };
            let case = Case { options, biases: [true, true] };
            let inputs = case.samples(&[[7, 3, 10, 4]], Kind::Double, device).remove(0).inputs;
            let gradients = |op: Op, leaves: &[usize], wanted: &[usize]| {
                let inputs: Vec<Tensor> = inputs
                    .iter()
                    .enumerate()
                    .map(|(place, input)| input.detach().set_requires_grad(leaves.contains(&place)))
                    .collect();
                let y = case.call(op, &inputs).expect("y");
                let vector = support::incoming(&y);
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let wanted: Vec<&Tensor> = wanted.iter().map(|&place| &inputs[place]).collect();
                grad(&[&y], &wanted, &options).expect("gradients").into_vec()
            };
            let subset = |bits: usize| (0..5).filter(move |place| bits >> place & 1 == 1);
            for leaves in 1..32 {
                let leaves: Vec<usize> = subset(leaves).collect();
                for wanted in 1..32 {
                    let wanted: Vec<usize> = subset(wanted).collect();
                    if !wanted.iter().all(|place| leaves.contains(place)) {
                        continue;
                    }
                    let found = gradients(f_gelu_mlp, &leaves, &wanted);
                    let expected = gradients(gelu_mlp_reference, &leaves, &wanted);
                    for (found, expected) in found.into_iter().zip(expected) {
                        let (found, expected) = (found.expect("one"), expected.expect("one"));
                        assert_close(&found, &expected, 1e-12, 1e-12);
                    }
                }
            }
        }
    }
}

/// A bias may change between the passes, as in libtorch; a saved tensor may not.
#[test]
fn tensors_that_change_between_the_passes() {
    for (place, is_error) in [(0, true), (1, true), (2, false), (3, true), (4, false)] {
        let case = cases()[0];
        let inputs = case.samples(&[[3, 4, 5, 2]], Kind::Double, Device::Cpu).remove(0).inputs;
        let leaves = leaves(&inputs);
        let y = case.call(f_gelu_mlp, &leaves).expect("y");
        let _ = tch::no_grad(|| leaves[place].shallow_clone().fill_(0.5));
        let leaves: Vec<&Tensor> = leaves.iter().collect();
        let result = grad(&[&y.sum(Kind::Double)], &leaves, &GradOptions::default());
        assert_eq!(result.is_err(), is_error, "{place}");
    }
}

/// What is kept, and the peaks of both passes, in units of `[M, H]`.
#[test]
fn cuda_memory_is_as_documented() {
    let Some(device) = caching_or_skip("cuda_memory_is_as_documented") else { return };
    let (m, d, h) = (4096_i64, 64, 2048);
    let unit = (m * h * 2) as f64;
    let of = |size: &[i64]| Tensor::randn(size, (Kind::BFloat16, device));
    let inputs = [of(&[m, d]), of(&[h, d]), of(&[h]), of(&[d, h]), of(&[d])];
    let leaves = leaves(&inputs);
    // How many units are kept, and how many are in use at most.
    for (save_activations, kept, peak) in [(true, 2.0, 3.0), (false, 1.0, 3.0)] {
        let options = GeluMlpOptions { save_activations, ..Default::default() };
        let case = Case { options, biases: [true, true] };
        let run = || {
            reset_peak_memory_stats(device).expect("statistics");
            let before = memory_stats(device).expect("statistics").allocated;
            let y = case.call(f_gelu_mlp, &leaves).expect("y");
            let after = memory_stats(device).expect("statistics").allocated;
            let all: Vec<&Tensor> = leaves.iter().collect();
            drop(grad(&[&y.sum(Kind::Float)], &all, &GradOptions::default()).expect("gradients"));
            let peak = memory_stats(device).expect("statistics").peak_allocated;
            [after - before, peak - before].map(|bytes| bytes as f64 / unit)
        };
        // The first call makes cuBLAS' workspace.
        run();
        let found = run();
        eprintln!("{save_activations}: {found:?}");
        assert!((kept..kept + 0.3).contains(&found[0]), "kept {found:?}");
        assert!(found[1] <= peak + 0.5, "peak {found:?}");
    }
    // Without a graph, the activations take the place of z.
    tch::no_grad(|| {
        let case = cases()[0];
        reset_peak_memory_stats(device).expect("statistics");
        let before = memory_stats(device).expect("statistics").allocated;
        drop(case.call(f_gelu_mlp, &leaves).expect("y"));
        let peak = memory_stats(device).expect("statistics").peak_allocated - before;
        assert!((peak as f64) < 1.3 * unit, "{peak} bytes without a graph");
    });
}

/// Some offsets exceed 32 bits. The last row must reach its output, and the last column its sum.
#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let Some(device) = cuda_or_skip("cuda_more_than_two_to_the_31_elements") else { return };
    let like = (Kind::Half, device);
    // Whole vectors, and none.
    for hidden in [1032_i64, 1025] {
        let rows = (1_i64 << 21) + 3;
        let x = Tensor::zeros([rows, 1], like);
        let _ = x.get(rows - 1).fill_(1.0);
        let w2 = Tensor::zeros([1, hidden], like);
        let _ = w2.get(0).get(hidden - 1).fill_(1.0);
        let inputs = [x, Tensor::ones([hidden, 1], like), Tensor::zeros([hidden], like), w2];
        for save_activations in [true, false] {
            let options = GeluMlpOptions { activation: Activation::ReluSquared, save_activations };
            let case = Case { options, biases: [true, false] };
            let leaves = leaves(&inputs);
            let y = case.call(f_gelu_mlp, &leaves).expect("y");
            let vector = y.ones_like();
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            let leaves: Vec<&Tensor> = leaves.iter().collect();
            let gradients = grad(&[&y], &leaves, &options).expect("gradients").into_vec();
            let last = |size: i64, value: f64| {
                let tensor = Tensor::zeros([size], like);
                let _ = tensor.get(size - 1).fill_(value);
                tensor
            };
            assert!(y.detach().view([-1]).equal(&last(rows, 1.0)));
            let found: Vec<Tensor> =
                gradients.into_iter().map(|one| one.expect("one").view([-1])).collect();
            assert!(found[0].equal(&last(rows, 2.0)));
            assert!(found[1].equal(&last(hidden, 2.0)) && found[2].equal(&last(hidden, 2.0)));
            assert!(found[3].equal(&Tensor::ones([hidden], like)));
        }
    }
}
