//! Tests of the derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_every_small_sample() {
    suite().gradgradcheck_of_every_small_sample();
}

/// Steps that share their factor, where the last one's input depends on the first one's output; and
/// factors that depend on one another. Total derivatives with respect to the inputs would differ
/// from the partial ones here.
fn program(operator: Operator, leaves: &[Tensor]) -> Tensor {
    let [x, w, b] = leaves else { unreachable!("three") };
    let mut state = x.shallow_clone();
    for step in 0..3 {
        let input = if step == 2 { &state * x.sum(Kind::Double) } else { state.shallow_clone() };
        state = operator(&input, w, b).expect("step").sin();
    }
    let dependent = operator(x, &(w * x.sum(Kind::Double)), &(b * b)).expect("dependent");
    (state.square() + dependent.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    for device in devices() {
        let sample =
            sample((&[3, 4], &[4, 4], &[4]), [Layout::Contiguous; 3], Kind::Double, device);
        let [found, expected] = OPERATORS.map(|operator| {
            let leaves = leaves(&sample.inputs);
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            let plain = grad(&[&program(operator, &leaves)], &inputs, &GradOptions::default())
                .expect("plain");
            let options = GradOptions { create_graph: true, ..Default::default() };
            let first = grad(&[&program(operator, &leaves)], &inputs, &options).expect("first");
            let norm = first.iter().flatten().map(|gradient| gradient.square().sum(Kind::Double));
            let norm = norm.reduce(|a, b| a + b).expect("gradients");
            let second = grad(&[&norm], &inputs, &GradOptions::default()).expect("second");
            [plain, first, second].map(|gradients| gradients.into_vec()).into_iter().flatten()
        });
        for (found, expected) in found.zip(expected) {
            let (found, expected) = (found.expect("present"), expected.expect("present"));
            assert!(expected.abs().max().double_value(&[]) > 0.0, "says something");
            assert_close(&found, &expected, 1e-10, 1e-10);
        }
    }
}
