//! Derivatives of the gradients.

use super::*;

/// No way through the kernels of its own: with a graph, the gradients are made of tch operations.
#[test]
fn gradgradcheck_of_every_small_sample() {
    for case in CASES {
        case.suite(|suite| suite.gradgradcheck_of_every_small_sample());
    }
}

type Op = fn(&Tensor, &[i64], Option<&Tensor>, Option<&Tensor>, f64) -> Result<Tensor>;

/// Three steps that share their weight, the last fed with what depends on the first: total
/// derivatives with respect to the inputs would differ from the partial ones here, and
/// gradgradcheck on leaves would not notice.
fn three_steps(op: Op, leaves: &[Tensor]) -> Tensor {
    let [x, w, b] = leaves else { unreachable!("with weight and bias") };
    let mut state = x.shallow_clone();
    for step in 0..3 {
        let input =
            if step == 2 { x * state.sum(Kind::Double) + state.sin() } else { state.sin() + x };
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
    let programs: [(&str, Program); 2] =
        [("three steps", three_steps), ("w = Σ x²", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let sample = AFFINE.samples(&[[3, 4]], Kind::Double, device).remove(0);
            let (fused, reference): (Op, Op) = (f_layer_norm, layer_norm_reference);
            let programs: [support::Program<'_>; 2] =
                [&|leaves| program(fused, leaves), &|leaves| program(reference, leaves)];
            support::assert_derivatives_agree(name, programs, &sample.inputs, 1e-9);
        }
    }
}
