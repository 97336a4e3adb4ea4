//! Tests of the outputs.

use super::*;
use tch::IndexOp;

#[test]
fn forward_agrees_with_the_reference() {
    suite().forward_agrees_with_the_reference();
}

#[test]
fn the_last_element_counts() {
    // A kernel that omitted its tail would not write these elements.
    for device in devices() {
        for hidden in [1, 3, 15, 17, 1023, 1025] {
            let arguments = one([2, 1, hidden], Kind::Float, device).inputs;
            let outputs = call(f_lltm_cell, &arguments).expect("outputs");
            let expected = call(lltm_cell_reference, &arguments).expect("reference");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert_close(&output.i((1, hidden - 1)), &expected.i((1, hidden - 1)), 1e-4, 1e-5);
            }
        }
    }
}

#[test]
fn the_formula_by_hand() {
    // The reference could be wrong in the same way as the kernel, so these numbers come from the
    // formula.
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let elu = |x: f64| if x > 0.0 { x } else { x.exp_m1() };
    for device in devices() {
        let tensor =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        // The columns are h and x; the rows are i, o and g.
        let weight = tensor(&[0.1, 0.2, 0.3, -0.4, 0.5, 0.6], &[3, 2]);
        let bias = tensor(&[0.7, -0.8, -0.9], &[3]);
        for (x, h, c) in [(2.0, 3.0, 0.25), (-2.0, 1.0, -0.5)] {
            let (i, o, g): (f64, f64, f64) =
                (0.1 * h + 0.2 * x + 0.7, 0.3 * h - 0.4 * x - 0.8, 0.5 * h + 0.6 * x - 0.9);
            let new_c = c + elu(g) * sigmoid(i);
            let new_h = new_c.tanh() * sigmoid(o);
            let [x, h, c] = [x, h, c].map(|value| tensor(&[value], &[1, 1]));
            for cell in [f_lltm_cell, lltm_cell_reference] as [Cell; 2] {
                let (found_h, found_c) = cell(&x, &weight, Some(&bias), (&h, &c)).expect("cell");
                assert!((found_h.double_value(&[0, 0]) - new_h).abs() < 1e-14, "h' on {device:?}");
                assert!((found_c.double_value(&[0, 0]) - new_c).abs() < 1e-14, "c' on {device:?}");
            }
        }
    }
}

#[test]
fn small_values_keep_their_digits() {
    // With c = 0, no large value hides a lost digit. This needs expm1 instead of exp - 1,
    // sigmoid(x) instead of 1 - sigmoid(-x), and the derivative of elu from exp(g) instead of
    // elu(g) + 1.
    for device in devices() {
        // The half kinds are left out, because their own rounding is as large as the errors that
        // this test looks for.
        for kind in [Kind::Float, Kind::Double] {
            let options = (kind, device);
            let gates = [-80.0, -30.0, -20.0, -10.0, -1.0, -1e-3, -1e-6, -1e-12, 1e-12, 1e-6, 1e-3];
            let hidden = gates.len() as i64;
            // Each gate in turn has these values, while the others are moderate.
            for place in 0..3 {
                let mut rows = vec![vec![0.5; gates.len()]; 3];
                rows[place] = gates.to_vec();
                let bias = Tensor::from_slice(&rows.concat()).to_kind(kind).to_device(device);
                let bias = bias.set_requires_grad(true);
                let weight = Tensor::zeros([3 * hidden, hidden + 1], options);
                let (x, state) =
                    (Tensor::zeros([1, 1], options), Tensor::zeros([1, hidden], options));
                let run = |cell: Cell| {
                    let (h, c) = cell(&x, &weight, Some(&bias), (&state, &state)).expect("cell");
                    let gradient = grad(&[&(&h + &c).sum(kind)], &[&bias], &GradOptions::default())
                        .expect("gradient");
                    [h, c, gradient.single().expect("one")]
                };
                let rtol = if kind == Kind::Double { 1e-13 } else { 2e-6 };
                for (fused, expected) in run(f_lltm_cell).iter().zip(&run(lltm_cell_reference)) {
                    assert_close(fused, expected, rtol, 0.0);
                }
            }
        }
    }
}

#[test]
fn extreme_values_stay_as_exact_as_the_reference() {
    for device in devices() {
        for kind in KINDS {
            let gates = [
                -1e4,
                -100.0,
                -20.0,
                -1e-3,
                0.0,
                1e-30,
                1e-3,
                20.0,
                100.0,
                1e4,
                f64::INFINITY,
                f64::NAN,
            ];
            let hidden = gates.len() as i64;
            let gates = Tensor::from_slice(&gates).repeat([3]).to_kind(kind).to_device(device);
            let run = |cell: Cell, within: Kind| {
                let options = (within, device);
                let bias = gates.to_kind(within).set_requires_grad(true);
                let weight = Tensor::zeros([3 * hidden, hidden + 1], options);
                let (x, state) =
                    (Tensor::zeros([1, 1], options), Tensor::ones([1, hidden], options));
                let (h, c) = cell(&x, &weight, Some(&bias), (&state, &state)).expect("cell");
                let gradient = grad(&[&(&h + &c).sum(within)], &[&bias], &GradOptions::default())
                    .expect("gradient");
                [h, c, gradient.single().expect("one")].map(|tensor| tensor.detach().to_kind(kind))
            };
            // The half kinds are computed in Float and rounded once.
            let within = if kind == Kind::Double { Kind::Double } else { Kind::Float };
            let (fused, expected) = (run(f_lltm_cell, kind), run(lltm_cell_reference, within));
            let (rtol, atol) = tolerance(kind);
            assert_close(&fused[0], &expected[0], rtol, atol);
            assert_close(&fused[1], &expected[1], rtol, atol);
            // The activations are also rounded when they are saved.
            assert_close(&fused[2], &expected[2], 10.0 * rtol, atol);
        }
    }
}

/// Tests tensors whose values differ from their memory: libtorch negates lazily, and has zeros
/// without memory.
#[test]
fn lazily_negated_tensors_and_zeros_without_memory() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Double] {
            let arguments = one([2, 3, 4], kind, device).inputs;
            let zeros = Tensor::internal_efficientzerotensor([2, 4], (kind, device));
            let (rtol, atol) = tolerance(kind);
            for index in 0..arguments.len() {
                let mut lazy = arguments.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
                lazy[index] = lazy[index].internal_neg_view();
                for (fused, expected) in call(f_lltm_cell, &lazy)
                    .expect("fused")
                    .iter()
                    .zip(&call(lltm_cell_reference, &lazy).expect("reference"))
                {
                    assert_close(fused, expected, rtol, atol);
                }
            }
            let mut lazy = arguments.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
            lazy[4] = zeros.shallow_clone();
            let fused = call(f_lltm_cell, &lazy).expect("fused");
            assert_close(
                &fused[1],
                &call(lltm_cell_reference, &lazy).expect("reference")[1],
                rtol,
                atol,
            );

            let leaves: Vec<Tensor> =
                arguments.iter().map(|tensor| tensor.detach().set_requires_grad(true)).collect();
            for vector in [Tensor::ones([2, 4], (kind, device)).internal_neg_view(), zeros] {
                let of = |cell| {
                    let outputs = call(cell, &leaves).expect("outputs");
                    let options = GradOptions {
                        grad_outputs: &[Some(&vector), Some(&vector)],
                        ..Default::default()
                    };
                    let inputs: Vec<&Tensor> = leaves.iter().collect();
                    grad(&[&outputs[0], &outputs[1]], &inputs, &options)
                        .expect("gradients")
                        .into_vec()
                };
                for (fused, expected) in of(f_lltm_cell).iter().zip(&of(lltm_cell_reference)) {
                    let (fused, expected) =
                        (fused.as_ref().expect("present"), expected.as_ref().expect("present"));
                    assert_close(fused, expected, 10.0 * rtol, 10.0 * atol);
                }
            }
        }
    }
}
