//! Tests of mixed kinds and autocast, compared with the composite.

use super::*;
use tch_extension::amp::Autocast;

fn agrees_with_the_composite(device: Device, kinds: &[Kind], rough: bool) -> usize {
    let operators: [support::Operator<'_>; 2] = [&fused, &reference];
    let inputs = |kind| one([3, 4, 5], kind, device).inputs;
    support::kinds::agree_with_the_composite(operators, &inputs, kinds, rough)
}

#[test]
fn mixed_kinds_match_the_composite() {
    for device in devices() {
        // h and x have the same kind or are promoted to the weight's kind, the bias has that kind,
        // and c may have any.
        assert_eq!(agrees_with_the_composite(device, &KINDS, false), 16 * 4);
    }
}

#[test]
fn under_autocast_kinds_match_the_composite() {
    for device in devices() {
        for kind in [Kind::BFloat16, Kind::Half] {
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let taken = agrees_with_the_composite(device, &[Kind::Float, Kind::Double, kind], true);
            // Either there is no Double in the product, or h or x is Double and then weight and
            // bias are, too.
            assert_eq!(taken, 3 * (16 + 5), "{device:?}");
        }
    }
}

/// The sum of product and bias is rounded only once. If the product were rounded before, a bias of
/// about the same magnitude would leave nothing of its last digits.
#[test]
fn a_bias_that_cancels_the_product_leaves_what_the_composite_s_leaves() {
    const LARGE: f64 = 2048.0;
    for device in devices() {
        for kind in KINDS {
            for [batch, features, hidden] in [[4, 8, 8], [300, 64, 520], [1, 1, 1]] {
                let zeros = |size: &[i64]| Tensor::zeros(size, (kind, device));
                let (x, h) = (zeros(&[batch, features]) + 1.0, zeros(&[batch, hidden]) + 1.0);
                // The product is 2048.75 in each row of g's part. The half kinds cannot represent
                // these digits.
                let weight = zeros(&[3 * hidden, hidden + features]);
                let _ = weight.narrow(0, 2 * hidden, hidden).select(1, 0).fill_(LARGE);
                let _ = weight.narrow(0, 2 * hidden, hidden).select(1, hidden).fill_(0.75);
                let bias = zeros(&[3 * hidden]);
                let _ = bias.narrow(0, 2 * hidden, hidden).fill_(-LARGE);
                let arguments = [x, weight, bias, h, zeros(&[batch, hidden])];
                let expected = call(lltm_cell_reference, &arguments).expect("the composite's");
                let found = call(f_lltm_cell, &arguments).expect("ours");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, 1e-2, 0.0);
                }
            }
        }
    }
}
