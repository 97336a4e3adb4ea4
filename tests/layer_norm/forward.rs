//! Tests of the output.

use super::*;

#[test]
fn forward_agrees_with_the_reference() {
    for case in CASES.into_iter().chain(all_ways()) {
        case.suite(|suite| suite.forward_agrees_with_the_reference());
    }
}

#[test]
fn the_formula_by_hand() {
    // The reference could be wrong in the same way as the kernel, so these numbers come from the
    // formula.
    let (w, b) = ([0.5, -1.0, 2.0, 3.0], [0.1, 0.2, -0.3, 0.4]);
    for device in devices() {
        for row in [[1.0, 2.0, 4.0, -3.0], [0.25, 0.25, 0.5, 0.75]] {
            let mean = row.iter().sum::<f64>() / 4.0;
            let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 4.0;
            let tensor = |values: &[f64]| Tensor::from_slice(values).to_device(device);
            let (w, b) = (tensor(&w), tensor(&b));
            for op in [f_layer_norm, layer_norm_reference] {
                let y = op(&tensor(&row), &[4], Some(&w), Some(&b), 0.125).expect("output");
                for (index, x) in row.iter().enumerate() {
                    let expected = (x - mean) / (variance + 0.125).sqrt()
                        * w.double_value(&[index as i64])
                        + b.double_value(&[index as i64]);
                    let found = y.double_value(&[index as i64]);
                    assert!((found - expected).abs() < 1e-14, "{found} {expected} on {device:?}");
                }
            }
        }
    }
}

/// A kernel that omitted its tail would not write these elements.
#[test]
fn the_last_element_of_the_last_row_counts() {
    for case in std::iter::once(AFFINE).chain(all_ways()) {
        for device in devices() {
            for columns in [1, 3, 15, 17, 31, 33, 511, 513, 1023, 1025, 8191, 8193] {
                let sample = case.samples(&[[5, columns]], Kind::Float, device).remove(0);
                let last = |outputs: Vec<Tensor>| outputs[0].select(0, 4).select(0, columns - 1);
                let expected = last(case.reference(&sample.inputs).expect("reference"));
                let found = last(case.fused(&sample.inputs).expect("fused"));
                assert_close(&found, &expected, 1e-4, 1e-4);
            }
        }
    }
}

#[test]
fn without_rows_or_columns_as_libtorch_has_it() {
    for device in devices() {
        let options = (Kind::Double, device);
        let shapes: [(&[i64], &[i64]); 8] = [
            (&[0, 4], &[4]),
            (&[3, 0], &[0]),
            (&[0, 0], &[0]),
            (&[0], &[0]),
            (&[2, 0, 3], &[3]),
            (&[2, 0, 3], &[0, 3]),
            (&[2, 3, 0], &[3, 0]),
            (&[4], &[4]),
        ];
        for (size, normalized_shape) in shapes {
            let leaf = |size: &[i64]| Tensor::ones(size, options).set_requires_grad(true);
            let leaves = [leaf(size), leaf(normalized_shape), leaf(normalized_shape)];
            let [x, w, b] = &leaves;
            let ours = f_layer_norm(x, normalized_shape, Some(w), Some(b), EPS).expect("fused");
            let theirs = x
                .f_layer_norm(normalized_shape, Some(w), Some(b), EPS, false)
                .expect("libtorch's own");
            assert_close(&ours.detach(), &theirs.detach(), 1e-12, 1e-12);
            let gradients = |output: &Tensor| {
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                grad(&[&output.sum(Kind::Double)], &inputs, &GradOptions::default())
                    .expect("gradients")
            };
            for (ours, theirs) in gradients(&ours).iter().zip(gradients(&theirs).iter()) {
                let (ours, theirs) =
                    (ours.as_ref().expect("ours"), theirs.as_ref().expect("theirs"));
                assert_close(ours, theirs, 1e-12, 1e-12);
            }
        }
    }
}

/// A loop over these rows would take days.
#[test]
fn any_number_of_rows_without_columns() {
    for device in devices() {
        let rows = Tensor::zeros([1 << 48, 0], (Kind::Float, device));
        let output = f_layer_norm(&rows, &[0], None, None, EPS).expect("output");
        assert_eq!(output.size(), [1 << 48, 0]);
    }
}

#[test]
fn more_threads_give_the_same_bits() {
    let sample = AFFINE.samples(&[[1000, 40]], Kind::Float, Device::Cpu).remove(0);
    let run = || {
        let gradients =
            support::gradients(&|inputs| AFFINE.fused(inputs), &leaves(&sample.inputs), &[0]);
        let output = AFFINE.fused(&sample.inputs).expect("output");
        output.into_iter().chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
    };
    let threads = tch::get_num_threads();
    let before = run();
    tch::set_num_threads(if threads == 1 { 2 } else { 1 });
    let after = run();
    tch::set_num_threads(threads);
    for (before, after) in before.iter().zip(&after) {
        assert!(before.equal(after));
    }
}
