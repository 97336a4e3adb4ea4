//! Derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_every_small_sample() {
    // The reference is differentiated, whatever the way.
    suite_of(&fused).gradgradcheck_of_every_small_sample();
}

/// Three calls that share their weight, the last fed with what depends on the first: total
/// derivatives with respect to the inputs would differ from the partial ones here, and
/// gradgradcheck on leaves would not notice.
fn three_calls(sequence: Sequence, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, c] = leaves else { unreachable!("with bias") };
    let (mut h, mut c) = (h.shallow_clone(), c.shallow_clone());
    let mut sum = Tensor::zeros([], (Kind::Double, x.device()));
    for call in 0..3 {
        let input = if call == 2 { x * h.sum(Kind::Double) } else { x.shallow_clone() };
        let (output, last) = sequence(&input, w, Some(b), (&h, &c)).expect("call");
        sum += output.sin().sum(Kind::Double);
        (h, c) = last;
    }
    sum + (h.square() + c.sin()).sum(Kind::Double)
}

/// One input is a function of another: c = h·h.
fn dependent_inputs(sequence: Sequence, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, _] = leaves else { unreachable!("with bias") };
    let (output, (last_h, last_c)) = sequence(x, w, Some(b), (h, &(h * h))).expect("call");
    (last_h.square() + last_c.sin()).sum(Kind::Double) + output.square().sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    type Program = fn(Sequence, &[Tensor]) -> Tensor;
    let programs: [(&str, Program); 2] =
        [("three calls", three_calls), ("c = h·h", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let sample = one([3, 2, 4, 5], Kind::Double, device);
            let (fused, reference): (Sequence, Sequence) = (f_lltm, lltm_reference);
            let programs: [support::Program<'_>; 2] =
                [&|leaves| program(fused, leaves), &|leaves| program(reference, leaves)];
            support::assert_derivatives_agree(name, programs, &sample.inputs, 1e-10);
        }
    }
}
