//! Tests of the derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_every_small_sample() {
    suite().gradgradcheck_of_every_small_sample();
}

/// Three steps that share their weight; the last one's input depends on the first one's output.
/// Total derivatives with respect to the inputs would differ from the partial ones here, and
/// gradgradcheck on leaves would not detect that.
fn three_steps(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, c] = leaves else { unreachable!("with bias") };
    let (mut h, mut c) = (h.shallow_clone(), c.shallow_clone());
    for step in 0..3 {
        let input = if step == 2 { x * h.sum(Kind::Double) } else { x.shallow_clone() };
        (h, c) = cell(&input, w, Some(b), (&h, &c)).expect("step");
    }
    (h.square() + c.sin()).sum(Kind::Double)
}

/// A step in which one input is a function of another: c = h·h.
fn dependent_inputs(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, _] = leaves else { unreachable!("with bias") };
    let (new_h, new_c) = cell(x, w, Some(b), (h, &(h * h))).expect("step");
    (new_h.square() + new_c.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    type Program = fn(Cell, &[Tensor]) -> Tensor;
    let programs: [(&str, Program); 2] =
        [("three steps", three_steps), ("c = h·h", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let sample = one([3, 4, 5], Kind::Double, device);
            let (fused, reference): (Cell, Cell) = (f_lltm_cell, lltm_cell_reference);
            let programs: [support::Program<'_>; 2] =
                [&|leaves| program(fused, leaves), &|leaves| program(reference, leaves)];
            support::assert_derivatives_agree(name, programs, &sample.inputs, 1e-10);
        }
    }
}
