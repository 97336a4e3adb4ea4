//! Tests of inputs for which accurate results are difficult.

use super::*;

type Operator = fn(Case, &[Tensor]) -> Result<Vec<Tensor>>;

/// The output, and the gradients of all inputs that the case has.
fn results(case: Case, operator: Operator, inputs: &[Tensor]) -> Vec<Tensor> {
    let operator = move |inputs: &[Tensor]| operator(case, inputs);
    let leaves = leaves(inputs);
    let output = operator(&leaves).expect("output").remove(0).detach();
    let gradients = support::gradients(&operator, &leaves, &[0]);
    std::iter::once(output).chain(gradients.into_iter().flatten()).collect()
}

fn exact(case: Case, inputs: &[Tensor]) -> Vec<Tensor> {
    let inputs: Vec<Tensor> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
    results(case, Case::reference, &inputs)
}

/// Rows of noise with this mean and approximately this standard deviation.
fn around(mean: f64, deviation: f64, size: [i64; 2], kind: Kind, device: Device) -> Vec<Tensor> {
    let mut inputs = AFFINE.samples(&[size], Kind::Double, device).remove(0).inputs;
    inputs[0] = &inputs[0] * deviation + mean;
    inputs.iter().map(|input| input.to_kind(kind)).collect()
}

/// For these rows, `E[x²] - E[x]²` would lose all digits, and a rounded mean would lose most of
/// them.
#[test]
fn a_large_mean_and_a_small_variance() {
    for case in std::iter::once(AFFINE).chain(all_ways()) {
        for device in devices() {
            for columns in [3, 100, 1000, 4097, 20_000] {
                for (mean, deviation) in
                    [(100.0, 1.0), (1e4, 1.0), (-1e4, 0.1), (1e5, 1.0), (1.0, 1e-3)]
                {
                    let inputs = around(mean, deviation, [4, columns], Kind::Float, device);
                    let (exact, found) =
                        (exact(case, &inputs), results(case, Case::fused, &inputs));
                    let error = |found: &Tensor, exact: &Tensor| {
                        let difference = (found.to_kind(Kind::Double) - exact).abs().max();
                        difference.double_value(&[]) / exact.abs().max().double_value(&[])
                    };
                    let context =
                        format!("{mean} ± {deviation}, {columns} columns, {case:?} {device:?}");
                    let off = error(&found[0], &exact[0]);
                    assert!(off <= 2e-6, "{context}: {off:e}");
                    // The backward uses a mean that was rounded to Float.
                    let ulps = (mean.abs() / deviation).max(1.0);
                    let off = error(&found[1], &exact[1]);
                    assert!(off <= 1e-6 * ulps, "{context}: {off:e} in the gradient");
                }
            }
        }
    }
}

/// Apart from rounding, our results are no further from the exact ones than those of libtorch's own
/// operator. This is the bound that the docs state.
#[test]
fn no_less_exact_than_libtorch() {
    for case in CASES.into_iter().chain(all_ways()).filter(|case| case.dims == 1) {
        for device in devices() {
            // For Double there is no more accurate kind to compare with.
            for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
                for (mean, deviation) in [(0.0, 1.0), (3.0, 1.0), (0.0, 1e3), (50.0, 1.0)] {
                    for size in [[40, 100], [4, 5000]] {
                        let inputs = around(mean, deviation, size, kind, device);
                        let ours = results(case, Case::fused, &inputs);
                        let theirs = results(case, Case::libtorch, &inputs);
                        let exact = exact(case, &inputs);
                        for (index, ours) in ours.iter().enumerate() {
                            eprintln!(
                                "{index} of {mean} ± {deviation}, {size:?}, {kind:?}, {case:?}, {device:?}"
                            );
                            assert_as_accurate(ours, &theirs[index], &exact[index]);
                        }
                    }
                }
            }
        }
    }
}

/// A constant row gives exactly the bias, whatever its value is and however it is rounded.
#[test]
fn constant_rows() {
    for case in std::iter::once(AFFINE).chain(all_ways()).filter(|case| case.bias) {
        for device in devices() {
            for kind in KINDS {
                let largest = if kind == Kind::Half { 65504.0 } else { 3e38 };
                for value in [0.0, 5.0, 0.1, -1234.5678, 65504.0, 0.7 * largest, largest] {
                    for columns in [1, 2, 3, 7, 100, 1000, 5001, 9001] {
                        let mut inputs = around(0.0, 1.0, [2, columns], kind, device);
                        let _ = inputs[0].fill_(value);
                        let output = case.fused(&inputs).expect("output").remove(0);
                        let bias = inputs[2].expand_as(&output);
                        assert_close(&output, &bias.contiguous(), 0.0, 0.0);
                    }
                }
            }
        }
    }
}

/// The sum of a row exceeds the kind's largest value long before the row's values do.
#[test]
fn values_near_the_kinds_largest() {
    for case in std::iter::once(PLAIN).chain(all_ways().filter(|case| !case.bias)) {
        for device in devices() {
            for columns in [2, 8, 100, 1001, 9000] {
                let signs =
                    Tensor::arange(columns, (Kind::Double, device)).remainder(2.0) * 2.0 - 1.0;
                for kind in [Kind::Half, Kind::Float, Kind::BFloat16] {
                    // In the other kinds, the values must be small enough that a sum of squares
                    // does not overflow, because it does so in libtorch, too.
                    let largest = if kind == Kind::Half { 65504.0 } else { 1e17 };
                    for row in [
                        &signs * largest,
                        signs.abs() * largest - (&signs + 1.0) * (largest / 1000.0),
                    ] {
                        let inputs = [row.view([1, columns]).to_kind(kind)];
                        let output = case.fused(&inputs).expect("output").remove(0);
                        let exact = exact(case, &inputs);
                        let (rtol, atol) =
                            if kind == Kind::Float { (2e-6, 2e-6) } else { (1e-2, 1e-2) };
                        assert_close(&output, &exact[0].to_kind(kind), rtol, atol);
                    }
                }
                // For these rows the variance does overflow. The standard deviation is then
                // infinite and the output zero, not NaN. The mean of the second row is rounded, by
                // an amount whose square is infinite.
                let waves = Tensor::arange(columns, (Kind::Double, device)).sin();
                for row in [(&signs + 2.0) * 1e38, (waves + 2.0) * 1e38] {
                    let output =
                        case.fused(&[row.view([1, columns]).to_kind(Kind::Float)]).expect("output");
                    assert!(
                        output[0].equal(&output[0].zeros_like()),
                        "{columns} {case:?} {device:?}"
                    );
                }
            }
        }
    }
}

/// A row that contains an infinity or NaN becomes NaN in the whole output and the whole input
/// gradient; all other rows do not.
#[test]
fn infinity_and_nan_as_in_libtorch() {
    for case in std::iter::once(AFFINE).chain(all_ways()) {
        for device in devices() {
            for kind in KINDS {
                for columns in [1, 4, 77, 1030, 9001] {
                    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                        for place in [0, columns - 1] {
                            let inputs = around(0.0, 1.0, [5, columns], kind, device);
                            let _ = inputs[0].select(0, 2).select(0, place).fill_(value);
                            let ours = results(case, Case::fused, &inputs);
                            let theirs = results(case, Case::libtorch, &inputs);
                            // Only the output and the input's gradient are compared.
                            for (ours, theirs) in ours.iter().zip(&theirs).take(2) {
                                assert!(
                                    ours.isnan().equal(&theirs.isnan()),
                                    "{value} at {place} of {columns}, {kind:?} {case:?} {device:?}"
                                );
                                assert_eq!(ours.isnan().sum(Kind::Int64).int64_value(&[]), columns);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// eps gets no special treatment: without it, a constant row is 0/0.
#[test]
fn any_eps_as_in_libtorch() {
    for device in devices() {
        let x = Tensor::from_slice(&[1.0, 1.0, 1.0, 3.0]).view([2, 2]).to_device(device);
        for eps in [0.0, -1.0, -2.0, f64::NAN, f64::INFINITY, 1e300] {
            let ours = f_layer_norm(&x, &[2], None, None, eps).expect("ours");
            let theirs = x.f_layer_norm([2], None::<&Tensor>, None, eps, false).expect("theirs");
            assert_close(&ours, &theirs, 1e-14, 0.0);
        }
    }
}

/// Tests tensors whose values differ from their memory: libtorch negates lazily, and has zeros
/// without memory.
#[test]
fn lazily_negated_tensors_and_zeros_without_memory() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Double] {
            let arguments = around(0.5, 1.0, [3, 10], kind, device);
            let zeros = |size: &[i64]| Tensor::internal_efficientzerotensor(size, (kind, device));
            for index in 0..arguments.len() {
                for lazy in [arguments[index].internal_neg_view(), zeros(&arguments[index].size())]
                {
                    let mut inputs: Vec<Tensor> =
                        arguments.iter().map(Tensor::shallow_clone).collect();
                    inputs[index] = lazy;
                    let (ours, theirs) = (AFFINE.fused(&inputs), AFFINE.reference(&inputs));
                    assert_close(&ours.expect("ours")[0], &theirs.expect("theirs")[0], 1e-5, 1e-5);
                }
            }
            let leaves = leaves(&arguments);
            for vector in
                [Tensor::ones([3, 10], (kind, device)).internal_neg_view(), zeros(&[3, 10])]
            {
                let of = |output: Tensor| {
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                    let inputs: Vec<&Tensor> = leaves.iter().collect();
                    grad(&[&output], &inputs, &options).expect("gradients").into_vec()
                };
                let ours = of(AFFINE.fused(&leaves).expect("ours").remove(0));
                let theirs = of(AFFINE.reference(&leaves).expect("theirs").remove(0));
                for (ours, theirs) in ours.iter().flatten().zip(theirs.iter().flatten()) {
                    assert_close(ours, theirs, 1e-4, 1e-4);
                }
            }
        }
    }
}

/// A finite row has finite gradients. For a constant row they are as exact as for small values: x̂
/// is zero, so only the gradient's mean is subtracted.
#[test]
fn gradients_of_huge_constant_rows() {
    for case in std::iter::once(AFFINE).chain(all_ways()) {
        for device in devices() {
            for kind in [Kind::Float, Kind::BFloat16] {
                for columns in [1, 3, 8, 13, 1001, 9001] {
                    let mut inputs = around(0.0, 1.0, [2, columns], kind, device);
                    let _ = inputs[0].fill_(1e37);
                    let found = results(case, Case::fused, &inputs);
                    let mut small = inputs;
                    let _ = small[0].fill_(1.0);
                    let expected = results(case, Case::fused, &small);
                    for (found, expected) in found.iter().zip(&expected) {
                        assert_close(found, expected, 0.0, 0.0);
                    }
                }
            }
        }
    }
}
