//! Derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_the_smallest_samples() {
    for case in CASES {
        let sizes: &[[i64; 2]] =
            if case.dims == 3 { &[[2, 2]] } else { &[[3, 4], [2, 5], [1, 2], [0, 4], [3, 0]] };
        case.suite(|suite| suite.gradgradcheck_of(|kind, device| case.samples(sizes, kind, device)));
    }
}

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

/// Three steps that share their weight, the last fed with what depends on the first: total derivatives with
/// respect to the inputs would differ from the partial ones here, and gradgradcheck on leaves would not notice.
fn three_steps(op: Op, leaves: &[Tensor]) -> Tensor {
    let [x, w, b] = leaves else { unreachable!("with weight and bias") };
    let mut state = x.shallow_clone();
    for step in 0..3 {
        let input = if step == 2 { x * state.sum(Kind::Double) + state.sin() } else { state.sin() + x };
        state = op(&input, &[4], Some(w), Some(b), EPS).expect("step");
    }
    (state.square() + state.sin()).sum(Kind::Double)
}

/// One input is a function of another: w = Σ x².
fn dependent_inputs(op: Op, leaves: &[Tensor]) -> Tensor {
    let [x, _, b] = leaves else { unreachable!("with weight and bias") };
    let weight = x.square().sum_dim_intlist([0_i64].as_slice(), false, Kind::Double);
    let output = op(x, &[4], Some(&weight), Some(&(b * &weight)), EPS).expect("step");
    (output.square() + output.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    type Program = fn(Op, &[Tensor]) -> Tensor;
    let programs: [(&str, Program); 2] = [("three steps", three_steps), ("w = Σ x²", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let sample = AFFINE.samples(&[[3, 4]], Kind::Double, device).remove(0);
            let (fused, fused_second) = first_and_second(program, f_layer_norm, &sample);
            let (expected, expected_second) = first_and_second(program, layer_norm_reference, &sample);
            let leaves = leaves(&sample.inputs);
            let plain = program(f_layer_norm, &leaves);
            let options = GradOptions { allow_unused: true, ..Default::default() };
            let plain = grad(&[&plain], &leaves.iter().collect::<Vec<_>>(), &options).expect(name).into_vec();
            for index in 0..leaves.len() {
                let Some(expected) = &expected[index] else { continue };
                let fused = fused[index].as_ref().expect(name);
                assert_close(fused, expected, 1e-9, 1e-9);
                // The kernel's gradient and the one with a graph are the same function.
                assert_close(plain[index].as_ref().expect(name), fused, 1e-9, 1e-9);
                let second = fused_second[index].as_ref().expect(name);
                assert_close(second, expected_second[index].as_ref().expect(name), 1e-8, 1e-8);
            }
        }
    }
}

type Gradients = Vec<Option<Tensor>>;

fn first_and_second(program: fn(Op, &[Tensor]) -> Tensor, op: Op, sample: &Sample) -> (Gradients, Gradients) {
    let leaves = leaves(&sample.inputs);
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let loss = program(op, &leaves);
    let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
    let first = grad(&[&loss], &inputs, &options).expect("first").into_vec();
    let norm =
        first.iter().flatten().map(|gradient| gradient.square().sum(Kind::Double)).reduce(|a, b| a + b);
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let second = grad(&[&norm.expect("gradients")], &inputs, &options).expect("second").into_vec();
    (first, second)
}
