//! Where libtorch allows tf32, the kernels that keep the weights on the chip multiply halves with
//! scales (`csrc/recurrent/scale_rows.h`). These tests check that they accept numbers of any range
//! and are no less accurate than tf32.

use super::persistent::{Tf32, everything};
use super::*;

/// Multiplies each row of W by a power of ten of its own, from 1e-6 to 1e4. The inputs are small
/// enough that sums have either sign; h stays small, because its gate is nearly shut.
fn rows_of_any_magnitude(sizes: [i64; 4], device: Device) -> Vec<Tensor> {
    const SMALL: f64 = 1e-4;
    let inputs = one(sizes, Kind::Float, device).inputs;
    let hidden = sizes[3];
    let exponents = Tensor::arange(3 * hidden, (Kind::Float, device)).remainder(11.0) - 6.0;
    // The factors for the rows of o are those of a gate that is nearly shut.
    let of_gates = Tensor::zeros([3, hidden], (Kind::Float, device));
    let _ = of_gates.get(1).fill_(-3.0);
    let rows = (exponents + of_gates.view([-1])) * std::f64::consts::LN_10;
    let weight = &inputs[1] * rows.exp().unsqueeze(1);
    let bias = inputs[2].copy();
    let _ = bias.narrow(0, hidden, hidden).fill_(SMALL.ln());
    vec![&inputs[0] * SMALL, weight, bias, &inputs[3] * SMALL, inputs[4].copy()]
}

/// Inputs with a first h that is far larger than what steps compute, and with weights to match.
fn large_first_h(sizes: [i64; 4], large: f64, device: Device) -> Vec<Tensor> {
    let mut inputs = one(sizes, Kind::Float, device).inputs;
    let (weight, hidden) = (inputs[1].copy(), sizes[3]);
    let _ = weight.narrow(1, 0, hidden).divide_scalar_(large);
    (inputs[1], inputs[3]) = (weight, &inputs[3] * large);
    inputs
}

/// Inputs whose weights for h are almost zero, with one row that is zero.
fn small_weights(sizes: [i64; 4], device: Device) -> Vec<Tensor> {
    let mut inputs = large_first_h(sizes, 1e9, device);
    let _ = inputs[1].get(1).fill_(0.0);
    inputs[3] = inputs[3].ones_like();
    inputs
}

/// Compares each column, or each row, with its own largest value, because the largest value of
/// another one says nothing about it.
fn assert_close_by_column(found: &Tensor, expected: &Tensor, by_row: bool) {
    const BOUND: f64 = 4e-3;
    let columns = |of: &Tensor| {
        let of = of.to_kind(Kind::Double);
        if by_row { of.transpose(0, 1) } else { of }
    };
    let (found, expected) = (columns(found), columns(expected));
    let last = *expected.size().last().expect("a dimension");
    let scale = match expected.dim() {
        1 => expected.abs().max(),
        _ => expected.abs().reshape([-1, last]).amax(0, false),
    };
    let excess = (&found - &expected).abs() - (expected.abs() + &scale) * BOUND;
    let worst = excess.max().double_value(&[]);
    assert!(
        worst <= 0.0,
        "{:?}: {worst} more than allowed of {}",
        expected.size(),
        scale.max().double_value(&[])
    );
}

/// Checks that the bits differ from those of the way with a kernel for each step, whose products
/// libtorch computes in tf32.
pub fn assert_is_not_per_step(found: &[Tensor], inputs: &[Tensor]) {
    let steps = everything(&per_step, inputs);
    for index in [0, 3] {
        assert!(!found[index].equal(&steps[index]), "{index} is that of each step");
    }
}

/// Compares the outputs and gradients with those in `Double`.
pub fn assert_numbers_of_any_range(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    device: Device,
) {
    let _switch = Tf32::set(true);
    // In the other inputs, the sums of products are almost zero except in the first step, whichever
    // way computes them.
    let all = [
        (rows_of_any_magnitude(sizes, device), true),
        (large_first_h(sizes, 1e4, device), false),
        (large_first_h(sizes, 1e28, device), false),
        (small_weights(sizes, device), false),
    ];
    for (inputs, shows_products) in all {
        let exact: Vec<_> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        let found = everything(sequence, &inputs);
        for (index, expected) in everything(&per_step, &exact).iter().enumerate() {
            assert_close_by_column(&found[index], expected, false);
        }
        if shows_products {
            assert!(
                !found[0].equal(&everything(&per_step, &inputs)[0]),
                "the output is that of each step"
            );
        }
    }
}

/// Divides h into two halves that do not depend on each other. The gradients of one are a billionth
/// of the other's.
pub fn assert_halves_of_any_range(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    device: Device,
) {
    const SMALL: f64 = 1e-9;
    let _switch = Tf32::set(true);
    let [_, _, _, hidden] = sizes;
    let half = hidden / 64 * 32;
    let (inputs, vectors) = (one(sizes, Kind::Float, device).inputs, vectors_of(sizes, device));
    for gate in 0..3 {
        let rows = inputs[1].narrow(0, gate * hidden, hidden);
        let _ = rows.narrow(0, 0, half).narrow(1, half, hidden - half).fill_(0.0);
        let _ = rows.narrow(0, half, hidden - half).narrow(1, 0, half).fill_(0.0);
    }
    for vector in &vectors {
        let _ = vector.narrow(-1, half, hidden - half).multiply_scalar_(SMALL);
    }
    let exact = |of: &[Tensor]| of.iter().map(|of| of.to_kind(Kind::Double)).collect::<Vec<_>>();
    let found = gradients_from(sequence, &inputs, &vectors);
    let expected = gradients_from(&per_step, &exact(&inputs), &exact(&vectors));
    for (index, expected) in expected.iter().enumerate() {
        assert_close_by_column(&found[index], expected, index == 1);
    }
}

/// The gradients of all inputs, from incoming gradients for all outputs.
fn gradients_from(
    sequence: support::Operator<'_>,
    inputs: &[Tensor],
    vectors: &[Tensor],
) -> Vec<Tensor> {
    let inputs = leaves(inputs);
    let outputs = sequence(&inputs).expect("outputs");
    let (outputs, inputs): (Vec<_>, Vec<_>) = (outputs.iter().collect(), inputs.iter().collect());
    let vectors: Vec<_> = vectors.iter().map(Some).collect();
    let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
    let gradients = grad(&outputs, &inputs, &options).expect("gradients").into_vec();
    gradients.into_iter().flatten().collect()
}

fn vectors_of(sizes: [i64; 4], device: Device) -> Vec<Tensor> {
    let [steps, batch, _, hidden] = sizes;
    let of = |size: &[i64]| Tensor::randn(size, (Kind::Float, device));
    vec![of(&[steps, batch, hidden]), of(&[batch, hidden]), of(&[batch, hidden])]
}

/// If the incoming gradients are multiplied by a power of two, all gradients are multiplied by
/// exactly that number.
pub fn assert_gradients_of_any_range(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    device: Device,
) {
    let _switch = Tf32::set(true);
    let (inputs, vectors) = (one(sizes, Kind::Float, device).inputs, vectors_of(sizes, device));
    let expected = gradients_from(sequence, &inputs, &vectors);
    for factor in [2f64.powi(-40), 2f64.powi(40)] {
        let vectors: Vec<_> = vectors.iter().map(|vector| vector * factor).collect();
        let found = gradients_from(sequence, &inputs, &vectors);
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.equal(&(expected * factor)), "{index} of {sizes:?} times {factor:e}");
        }
    }
}

/// Rows of the batch have gradients of very different magnitudes, and each must be equally
/// accurate.
pub fn assert_rows_of_any_range(sequence: support::Operator<'_>, sizes: [i64; 4], device: Device) {
    let _switch = Tf32::set(true);
    let inputs = one(sizes, Kind::Float, device).inputs;
    // Factors from 1e-12 to 1e12.
    let exponents = Tensor::arange(sizes[1], (Kind::Float, device)).remainder(5.0) * 6.0 - 12.0;
    let of_rows = (exponents * std::f64::consts::LN_10).exp().unsqueeze(1);
    let vectors: Vec<_> =
        vectors_of(sizes, device).iter().map(|vector| vector * &of_rows).collect();
    let wide =
        |tensors: &[Tensor]| tensors.iter().map(|of| of.to_kind(Kind::Double)).collect::<Vec<_>>();
    let found = gradients_from(sequence, &inputs, &vectors);
    let expected = gradients_from(&per_step, &wide(&inputs), &wide(&vectors));
    for index in [3, 4] {
        let off = (found[index].to_kind(Kind::Double) - &expected[index]).abs().amax([1], false);
        let of_row = off / expected[index].abs().amax([1], false);
        assert!(of_row.max().double_value(&[]) <= 4e-3, "{index} of {sizes:?}: {of_row:?}");
    }
}

/// A NaN or infinity in one row of the batch, also in the backward pass, changes no bit of another
/// row.
pub fn assert_no_number_stays_in_its_row(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    device: Device,
) {
    let _switch = Tf32::set(true);
    let (inputs, vectors) = (one(sizes, Kind::Float, device).inputs, vectors_of(sizes, device));
    let expected = gradients_from(sequence, &inputs, &vectors);
    let last = sizes[1] - 1;
    for value in [f64::INFINITY, f64::NAN] {
        let vectors: Vec<_> = vectors.iter().map(Tensor::copy).collect();
        let _ = vectors[0].get(sizes[0] / 2).get(last).get(3).fill_(value);
        let found = gradients_from(sequence, &inputs, &vectors);
        for (index, dim) in [(0, 1), (3, 0), (4, 0)] {
            let others = |of: &Tensor| of.narrow(dim, 0, last);
            assert!(others(&found[index]).equal(&others(&expected[index])), "{index} of {sizes:?}");
            let row = found[index].select(dim, last);
            assert!(row.isfinite().all().int64_value(&[]) == 0, "{index} of {sizes:?}");
        }
    }
}
