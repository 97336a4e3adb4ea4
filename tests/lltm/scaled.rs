//! Where libtorch allows tf32, the kernels that keep the weights on chip multiply halves with scales
//! (`csrc/lltm/scale_rows.h`): numbers of any range, and no less exact than in tf32.

use super::persistent::{Tf32, everything};
use super::*;

/// Each row of W times a power of ten of its own, from 1e-6 to 1e4, and inputs that are small enough for sums of either sign:
/// h stays small, because its gate is nearly shut.
fn rows_of_any_magnitude(sizes: [i64; 4], device: Device) -> Vec<Tensor> {
    const SMALL: f64 = 1e-4;
    let inputs = one(sizes, Kind::Float, device).inputs;
    let hidden = sizes[3];
    let exponents = Tensor::arange(3 * hidden, (Kind::Float, device)).remainder(11.0) - 6.0;
    // As of a gate that is nearly shut.
    let of_gates = Tensor::zeros([3, hidden], (Kind::Float, device));
    let _ = of_gates.get(1).fill_(-3.0);
    let rows = (exponents + of_gates.view([-1])) * std::f64::consts::LN_10;
    let weight = &inputs[1] * rows.exp().unsqueeze(1);
    let bias = inputs[2].copy();
    let _ = bias.narrow(0, hidden, hidden).fill_(SMALL.ln());
    vec![&inputs[0] * SMALL, weight, bias, &inputs[3] * SMALL, inputs[4].copy()]
}

/// A first h far beyond what steps make, and weights to match.
fn large_first_h(sizes: [i64; 4], device: Device) -> Vec<Tensor> {
    const LARGE: f64 = 1e4;
    let mut inputs = one(sizes, Kind::Float, device).inputs;
    let (weight, hidden) = (inputs[1].copy(), sizes[3]);
    let _ = weight.narrow(1, 0, hidden).divide_scalar_(LARGE);
    (inputs[1], inputs[3]) = (weight, &inputs[3] * LARGE);
    inputs
}

/// Beside all of it in `Double`.
pub fn assert_numbers_of_any_range(sequence: support::Operator<'_>, sizes: [i64; 4], device: Device) {
    let _switch = Tf32::set(true);
    for inputs in [rows_of_any_magnitude(sizes, device), large_first_h(sizes, device)] {
        let exact: Vec<_> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
        for (found, expected) in everything(sequence, &inputs).iter().zip(&everything(&per_step, &exact)) {
            let scale = expected.abs().max().double_value(&[]);
            assert_close(&found.to_kind(Kind::Double), expected, 4e-3, 4e-3 * scale);
        }
    }
}

/// From gradients for all outputs.
fn gradients_from(sequence: support::Operator<'_>, inputs: &[Tensor], vectors: &[Tensor]) -> Vec<Tensor> {
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

/// Gradients are what they are, times a power of two.
pub fn assert_gradients_of_any_range(sequence: support::Operator<'_>, sizes: [i64; 4], device: Device) {
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

/// What is no number in a row of the batch, also on the way back, changes no bit of another.
pub fn assert_no_number_stays_in_its_row(sequence: support::Operator<'_>, sizes: [i64; 4], device: Device) {
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
