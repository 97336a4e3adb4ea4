//! Tests of the derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_every_small_sample() {
    suite().gradgradcheck_of_every_small_sample();
}

/// Steps that share their weight, where the last one's input depends on the first one's; and a
/// weight that depends on the input. Total derivatives with respect to the inputs would differ from
/// the partial ones here.
fn program(linear: Linear, leaves: &[Tensor]) -> Tensor {
    let [x, w, b] = leaves else { unreachable!("with bias") };
    let mut state = x.shallow_clone();
    for step in 0..3 {
        let input = if step == 2 { &state * x.sum(Kind::Double) } else { state.shallow_clone() };
        state = linear(&input, w, Some(b)).expect("step").tanh();
    }
    let dependent = linear(x, &(w * x.sum(Kind::Double)), Some(&(b * b))).expect("dependent");
    (state.square() + dependent.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    for device in devices() {
        let sample = one([3, 4, 4], Kind::Double, device);
        let [found, expected] = [f_linear, linear_reference].map(|linear: Linear| {
            let leaves = leaves(&sample.inputs);
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            let plain = grad(&[&program(linear, &leaves)], &inputs, &GradOptions::default())
                .expect("plain");
            let options = GradOptions { create_graph: true, ..Default::default() };
            let first = grad(&[&program(linear, &leaves)], &inputs, &options).expect("first");
            let norm = first.iter().flatten().map(|gradient| gradient.square().sum(Kind::Double));
            let norm = norm.reduce(|a, b| a + b).expect("gradients");
            let second = grad(&[&norm], &inputs, &GradOptions::default()).expect("second");
            [plain, first, second].map(|gradients| gradients.into_vec()).into_iter().flatten()
        });
        for (found, expected) in found.zip(expected) {
            assert_close(&found.expect("present"), &expected.expect("present"), 1e-10, 1e-10);
        }
    }
}
