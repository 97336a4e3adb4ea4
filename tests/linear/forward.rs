//! Tests of the output.

use super::*;

#[test]
fn forward_agrees_with_the_reference() {
    suite().forward_agrees_with_the_reference();
}

#[test]
fn the_formula_by_hand() {
    for device in devices() {
        let tensor =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        let (x, w) =
            (tensor(&[1.0, 2.0, 3.0], &[3]), tensor(&[0.5, -1.0, 2.0, 4.0, 0.25, -3.0], &[2, 3]));
        let bias = tensor(&[10.0, 20.0], &[2]);
        for linear in [f_linear, linear_reference] as [Linear; 2] {
            let expected = tensor(&[4.5, -4.5], &[2]);
            assert_close(&linear(&x, &w, None).expect("without bias"), &expected, 0.0, 0.0);
            let found = linear(&x.view([1, 1, 3]), &w, Some(&bias)).expect("with bias");
            assert_close(&found, &(expected + &bias).view([1, 1, 2]), 0.0, 0.0);
        }
    }
}

#[test]
fn what_is_not_finite_comes_through() {
    for device in devices() {
        for kind in KINDS {
            let mut arguments = one([3, 4, 5], kind, device).inputs;
            let _ = arguments[2].get(1).fill_(f64::NAN);
            let _ = arguments[2].get(2).fill_(f64::INFINITY);
            let _ = arguments[0].get(2).get(3).fill_(f64::NEG_INFINITY);
            let found = fused(&arguments).expect("fused").remove(0);
            let expected = reference(&arguments).expect("reference").remove(0);
            assert_close(&found, &expected, 0.0, 0.0);
            arguments[2] = arguments[2].internal_neg_view();
            let found = fused(&arguments).expect("fused").remove(0);
            assert_close(&found, &reference(&arguments).expect("reference")[0], 0.0, 0.0);
        }
    }
}
