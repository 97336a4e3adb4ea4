//! Derivatives of the gradients.

use super::*;

#[test]
fn gradgradcheck_of_the_smallest_samples() {
    let sizes = [[3, 4, 5], [2, 3, 8], [1, 1, 1], [0, 4, 5], [2, 0, 3], [2, 3, 0]];
    let table = SampleTable::empty(DIMS, with_bias).with_sizes(&sizes).with_layouts([2, 3, 4]);
    suite().gradgradcheck_of(|kind, device| table.samples(kind, device).expect("samples"));
}

/// Three steps that share their weight, the last fed with what depends on the first: total derivatives with
/// respect to the inputs would differ from the partial ones here, and gradgradcheck on leaves would not notice.
fn three_steps(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, c] = leaves else { unreachable!("with bias") };
    let (mut h, mut c) = (h.shallow_clone(), c.shallow_clone());
    for step in 0..3 {
        let input = if step == 2 { x * h.sum(Kind::Double) } else { x.shallow_clone() };
        (h, c) = cell(&input, w, Some(b), (&h, &c)).expect("step");
    }
    (h.square() + c.sin()).sum(Kind::Double)
}

/// One input is a function of another: c = h·h.
fn dependent_inputs(cell: Cell, leaves: &[Tensor]) -> Tensor {
    let [x, w, b, h, _] = leaves else { unreachable!("with bias") };
    let (new_h, new_c) = cell(x, w, Some(b), (h, &(h * h))).expect("step");
    (new_h.square() + new_c.sin()).sum(Kind::Double)
}

#[test]
fn second_derivatives_in_chains_and_with_dependent_inputs() {
    type Program = fn(Cell, &[Tensor]) -> Tensor;
    let programs: [(&str, Program); 2] = [("three steps", three_steps), ("c = h·h", dependent_inputs)];
    for device in devices() {
        for (name, program) in programs {
            let sample = one([3, 4, 5], Kind::Double, device);
            let (fused, fused_second) = first_and_second(program, f_lltm_cell, &sample);
            let (expected, expected_second) = first_and_second(program, lltm_cell_reference, &sample);
            let leaves = leaves(&sample.inputs);
            let plain = program(f_lltm_cell, &leaves);
            let options = GradOptions { allow_unused: true, ..Default::default() };
            let plain = grad(&[&plain], &leaves.iter().collect::<Vec<_>>(), &options).expect(name).into_vec();
            for index in 0..leaves.len() {
                let Some(expected) = &expected[index] else { continue };
                let fused = fused[index].as_ref().expect(name);
                assert_close(fused, expected, 1e-10, 1e-10);
                // The kernel's gradient and the one with a graph are the same function.
                assert_close(plain[index].as_ref().expect(name), fused, 1e-10, 1e-10);
                let second = fused_second[index].as_ref().expect(name);
                assert_close(second, expected_second[index].as_ref().expect(name), 1e-9, 1e-9);
            }
        }
    }
}

type Gradients = Vec<Option<Tensor>>;

fn first_and_second(
    program: fn(Cell, &[Tensor]) -> Tensor,
    cell: Cell,
    sample: &Sample,
) -> (Gradients, Gradients) {
    let leaves = leaves(&sample.inputs);
    let inputs: Vec<&Tensor> = leaves.iter().collect();
    let loss = program(cell, &leaves);
    let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
    let first = grad(&[&loss], &inputs, &options).expect("first").into_vec();
    let norm =
        first.iter().flatten().map(|gradient| gradient.square().sum(Kind::Double)).reduce(|a, b| a + b);
    let options = GradOptions { allow_unused: true, ..Default::default() };
    let second = grad(&[&norm.expect("gradients")], &inputs, &options).expect("second").into_vec();
    (first, second)
}
