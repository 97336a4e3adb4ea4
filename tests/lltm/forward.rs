//! Tests of the outputs.

use super::*;

#[test]
fn forward_agrees_with_the_reference() {
    suites().iter().for_each(Suite::forward_agrees_with_the_reference);
}

#[test]
fn the_formula_by_hand() {
    // The reference could be wrong in the same way as the kernels, so these numbers come from the
    // formula.
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let elu = |x: f64| if x > 0.0 { x } else { x.exp_m1() };
    for device in devices() {
        let tensor =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        // The columns are h and x; the rows are i, o and g.
        let weight = tensor(&[0.1, 0.2, 0.3, -0.4, 0.5, 0.6], &[3, 2]);
        let bias = tensor(&[0.7, -0.8, -0.9], &[3]);
        let inputs = [2.0, -2.0, 0.5];
        let (mut h, mut c) = (3.0_f64, 0.25_f64);
        let steps = inputs.map(|x| {
            let (i, o, g) =
                (0.1 * h + 0.2 * x + 0.7, 0.3 * h - 0.4 * x - 0.8, 0.5 * h + 0.6 * x - 0.9);
            c += elu(g) * sigmoid(i);
            h = c.tanh() * sigmoid(o);
            h
        });
        let arguments = [
            tensor(&inputs, &[3, 1, 1]),
            weight,
            bias,
            tensor(&[3.0], &[1, 1]),
            tensor(&[0.25], &[1, 1]),
        ];
        for sequence in [fused, per_step, whole, reference] {
            let outputs = sequence(&arguments).expect("outputs");
            for (step, expected) in steps.iter().enumerate() {
                assert!((outputs[0].double_value(&[step as i64, 0, 0]) - expected).abs() < 1e-14);
            }
            assert!((outputs[1].double_value(&[0, 0]) - h).abs() < 1e-14, "h on {device:?}");
            assert!((outputs[2].double_value(&[0, 0]) - c).abs() < 1e-14, "c on {device:?}");
        }
    }
}

/// No output shares memory with another output or with an input.
#[test]
fn outputs_are_memory_of_their_own() {
    for device in devices() {
        for sequence in [&fused as support::Operator<'_>, &whole] {
            for steps in [0, 1, 3, 8] {
                let arguments = one([steps, 2, 3, 4], Kind::Float, device).inputs;
                let before = sequence(&arguments).expect("outputs");
                let changed = sequence(&arguments).expect("outputs");
                let _ = changed[1].shallow_clone().fill_(7.0);
                let _ = changed[2].shallow_clone().fill_(8.0);
                assert!(changed[0].equal(&before[0]));
                assert!(sequence(&arguments).expect("outputs")[2].equal(&before[2]));
            }
        }
    }
}

#[test]
fn extreme_values_stay_as_exact_as_the_reference() {
    for device in devices() {
        for kind in [Kind::Float, Kind::Double] {
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
            let options = (kind, device);
            let weight = Tensor::zeros([3 * hidden, hidden + 1], options);
            let (x, state) =
                (Tensor::zeros([1, 1, 1], options), Tensor::ones([1, hidden], options));
            let run = |sequence: support::Operator<'_>| {
                let bias = gates.detach().set_requires_grad(true);
                let arguments = [&x, &weight, &bias, &state, &state].map(Tensor::shallow_clone);
                let outputs = sequence(&arguments).expect("outputs");
                let loss = (&outputs[0] + &outputs[2]).sum(kind);
                let gradient = grad(&[&loss], &[&bias], &GradOptions::default()).expect("gradient");
                [outputs[1].detach(), outputs[2].detach(), gradient.single().expect("one")]
            };
            let (rtol, atol) = tolerance(kind);
            for sequence in [&fused as support::Operator<'_>, &per_step, &whole] {
                for (fused, expected) in run(sequence).iter().zip(&run(&reference)) {
                    assert_close(fused, expected, rtol, atol);
                }
            }
        }
    }
}

/// Tests tensors whose values differ from their memory: libtorch negates lazily, and has zeros
/// without memory.
#[test]
fn lazily_negated_tensors_and_zeros_without_memory() {
    for device in devices() {
        let arguments = one([3, 2, 3, 4], Kind::Double, device).inputs;
        for index in 0..2 * arguments.len() {
            let mut lazy = arguments.iter().map(Tensor::shallow_clone).collect::<Vec<_>>();
            let place = index / 2;
            lazy[place] = match index % 2 {
                0 => lazy[place].internal_neg_view(),
                _ => {
                    Tensor::internal_efficientzerotensor(lazy[place].size(), (Kind::Double, device))
                }
            };
            let plain: Vec<Tensor> = lazy.iter().map(|tensor| tensor * 1.0).collect();
            for (fused, expected) in
                whole(&lazy).expect("whole").iter().zip(&reference(&plain).expect("reference"))
            {
                assert_close(fused, expected, 1e-12, 1e-12);
            }
        }
    }
}
