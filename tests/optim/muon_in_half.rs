//! Muon's iteration on CUDA, which is in `Half`: large matrices, its kernel for symmetric products, and
//! what that kind cannot hold.

use super::muon::{Torch, distance, muon, randoms, step_with};
use super::reference::Reference;
use super::*;
use support::gpu::{caching_or_skip, is_built_for_hopper, is_hopper};
use tch_extension::cuda::Graph;
use tch_extension::optim::{Muon, symmetric_product};
use tch_extension::testing::cuda_or_skip;

/// With the kernel in both forms, for wide, tall and square matrices whose last tiles are not full; and
/// without it.
const SHAPES: [(usize, [i64; 2]); 7] = [
    (10, [1000, 1504]),
    (10, [1504, 1000]),
    (10, [1000, 1000]),
    (2, [2056, 2560]),
    (3, [130, 1030]),
    (3, [515, 131]),
    (2, [8, 520]),
];

/// A matrix that is normal, has rank 16 and a little noise, or singular values that fall from 1 to 10⁻⁴, or
/// whose first row or column is 10³ or 10⁴ times as large as the others.
fn direction(of: &str, [rows, columns]: [i64; 2], device: Device) -> Tensor {
    let drawn = |rows: i64, columns: i64| normal(&[rows, columns], Kind::Float, CPU);
    let smaller = rows.min(columns);
    let drawn = match of {
        "normal" => drawn(rows, columns),
        "row" | "column" => {
            let large = drawn(rows, columns);
            let shrink = if of == "row" { 1e-3 } else { 1e-4 };
            let (dim, len) = if of == "row" { (0, rows) } else { (1, columns) };
            let _ = large.narrow(dim, 1, len - 1).g_mul_scalar_(shrink);
            large
        }
        "rank 16" => drawn(rows, 16).mm(&drawn(16, columns)) + drawn(rows, columns) * 1e-3,
        _ => {
            let basis = |rows| Tensor::linalg_qr(&drawn(rows, smaller), "reduced").0;
            let values = Tensor::logspace(0.0, -4.0, smaller, 10.0, (Kind::Float, CPU));
            (basis(rows) * values).mm(&basis(columns).tr())
        }
    };
    drawn.to_device(device)
}

#[test]
fn cuda_large_steps_are_as_near_to_the_iteration_in_double_as_torchs() {
    let _alone = serially();
    let test = "cuda_large_steps_are_as_near_to_the_iteration_in_double_as_torchs";
    let Some(device) = cuda_or_skip(test) else { return };
    tch::manual_seed(91);
    let config = Muon { weight_decay: 0.0, ..Default::default() };
    for (count, shape) in SHAPES {
        for of in ["normal", "rank 16", "falling", "row", "column"] {
            let zeros = || Tensor::zeros(shape, (Kind::Float, device));
            let weights: Vec<Tensor> = (0..count).map(|_| zeros()).collect();
            let gradients: Vec<Tensor> =
                weights.iter().map(|_| direction(of, shape, device)).collect();
            let mut theirs = Torch::new(config, 0.1, Kind::BFloat16, &weights);
            let mut exact = Torch::new(config, 0.1, Kind::Double, &weights);
            let mut optimizer = muon(config, &weights, 0.1);
            theirs.step(&gradients);
            exact.step(&gradients);
            step_with(&mut optimizer, &gradients);
            let ours = distance(&weights, &exact.weights);
            let torchs = distance(&theirs.weights, &exact.weights);
            let all = Reference::norm(&exact.weights);
            assert!(torchs < 0.6 * all, "{torchs} of {all}: the reference is wrong");
            assert!(ours <= 1.5 * torchs, "{shape:?}, {of}: {ours}, torch {torchs}, of {all}");
            // Once more, from the same weights.
            let again: Vec<Tensor> = weights.iter().map(Tensor::zeros_like).collect();
            step_with(&mut muon(config, &again, 0.1), &gradients);
            assert!(bits(&again) == bits(&weights), "{shape:?}, {of}: other bits");
        }
    }
}

#[test]
fn cuda_replays_of_large_matrices_are_steps_of_muon() {
    let _alone = serially();
    let test = "cuda_replays_of_large_matrices_are_steps_of_muon";
    let Some(device) = caching_or_skip(test) else { return };
    let sizes: [&[i64]; 6] =
        [&[2056, 2560], &[2056, 2560], &[264, 136], &[2560, 2056], &[2560, 2056], &[7, 5]];
    for kind in [Kind::Float, Kind::BFloat16] {
        let run = |is_captured: bool| {
            tch::manual_seed(92);
            let leaves = leaves(&sizes, kind, device);
            accumulate(&leaves, 1.0);
            let mut optimizer = muon(Muon::default(), &leaves, 0.02);
            optimizer.step().expect("a step");
            let graph = is_captured
                .then(|| Graph::capture(device, || optimizer.step()).expect("a capture").0);
            for _ in 0..2 {
                for leaf in &leaves {
                    leaf.grad().copy_(&normal(&leaf.size(), kind, device));
                }
                match &graph {
                    Some(graph) => graph.replay().expect("a replay"),
                    None => optimizer.step().expect("a step"),
                }
            }
            bits(&leaves)
        };
        assert!(run(true) == run(false), "{kind:?}");
    }
}

#[test]
fn cuda_steps_that_half_cannot_hold_are_as_torchs() {
    let _alone = serially();
    let Some(device) = cuda_or_skip("cuda_steps_that_half_cannot_hold_are_as_torchs") else {
        return;
    };
    tch::manual_seed(93);
    // X grows to 3¹⁶ of what it was, and what `Half` holds ends at 65504.
    let config = Muon {
        ns_coefficients: (3.0, 0.0, 0.0),
        ns_steps: 16,
        weight_decay: 0.0,
        ..Default::default()
    };
    let weights = randoms(&[&[40, 96], &[96, 40]], Kind::Float, device);
    let gradients: Vec<Tensor> = weights.iter().map(Tensor::randn_like).collect();
    let mut theirs = Torch::new(config, 1e-6, Kind::BFloat16, &weights);
    let mut exact = Torch::new(config, 1e-6, Kind::Double, &weights);
    theirs.step(&gradients);
    exact.step(&gradients);
    step_with(&mut muon(config, &weights, 1e-6), &gradients);
    let torchs = distance(&theirs.weights, &exact.weights);
    assert!(distance(&weights, &exact.weights) <= 1.5 * torchs);
}

#[test]
fn cuda_symmetric_products_agree_with_those_in_double() {
    let _alone = serially();
    let Some(device) = cuda_or_skip("cuda_symmetric_products_agree_with_those_in_double") else {
        return;
    };
    tch::manual_seed(94);
    let has_kernel = is_hopper() && is_built_for_hopper();
    for n in [8, 64, 120, 136, 256, 264, 520, 1000] {
        // The last one has tiles of several stages for each cluster.
        for (batch, k) in [(1, 8), (3, 72), (24, 64), (2, 520), (12, 520)] {
            for is_across in [false, true] {
                let size = if is_across { [batch, k, n] } else { [batch, n, k] };
                let x = normal(&size, Kind::Half, device) / (k as f64).sqrt();
                let half = normal(&[batch, n, n], Kind::Half, device);
                let addend = &half + half.transpose(1, 2);
                let product = |diagonal, addend| {
                    symmetric_product(&x, &x, is_across, 0.5, addend, diagonal).expect("a product")
                };
                let Some(ours) = product(3.0, Some((-2.0, &addend))) else {
                    assert!(!has_kernel, "there is no kernel for {size:?}");
                    continue;
                };
                let wide = x.to_kind(Kind::Double);
                let turned = wide.transpose(1, 2);
                let gram = if is_across { turned.bmm(&wide) } else { wide.bmm(&turned) } * 0.5;
                let identity = Tensor::eye(n, (Kind::Double, device));
                let expected = &gram - addend.to_kind(Kind::Double) * 2.0 + identity * 3.0;
                let close = |ours: &Tensor, expected: &Tensor| {
                    assert!(
                        ours.to_kind(Kind::Double).allclose(expected, 1e-3, 1e-4, false),
                        "{size:?}, {is_across}"
                    );
                };
                close(&ours, &expected);
                let again = product(3.0, Some((-2.0, &addend))).expect("a kernel");
                assert!(bits(&[again]) == bits(&[ours]), "{size:?}, {is_across}: other bits");
                close(&product(0.0, None).expect("a kernel"), &gram);
            }
        }
    }
    // Two factors that commute. Rows of no whole 16 bytes have no kernel.
    let x = normal(&[2, 520, 64], Kind::Half, device) / 8.0;
    let gram = x.bmm(&x.transpose(1, 2));
    let square = gram.bmm(&gram) / 16.0;
    let ours = symmetric_product(&gram, &square, false, 1.0, None, 0.0).expect("a product");
    if let Some(ours) = ours {
        let double = |x: &Tensor| x.to_kind(Kind::Double);
        let expected = double(&gram).bmm(&double(&square));
        let error = (double(&ours) - &expected).norm() / expected.norm();
        assert!(error.double_value(&[]) < 2e-3, "{error:?}");
    }
    let odd = normal(&[2, 12, 12], Kind::Half, device);
    assert!(symmetric_product(&odd, &odd, false, 1.0, None, 0.0).expect("none").is_none());
}
