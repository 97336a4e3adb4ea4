//! Tests of the arguments that lltm refuses.

use super::*;
use tch_extension::ops::lltm;

#[test]
fn bad_arguments_are_named() {
    let cpu = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| cpu(size, Kind::Float);
    let good = || [float(&[6, 2, 4]), float(&[9, 7]), float(&[9]), float(&[2, 3]), float(&[2, 3])];
    let names = ["input", "weight", "bias", "h", "c"];
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[2, 4]), &["3 dimensions [T, B, F]", "[2, 4]"]),
        (0, float(&[]), &["3 dimensions"]),
        (
            0,
            cpu(&[6, 2, 4], Kind::Int64),
            &["kind Float or Double or Half or BFloat16", "Int64", "to_kind"],
        ),
        (0, cpu(&[6, 2, 4], Kind::Bool), &["kind Float", "Bool"]),
        (0, cpu(&[6, 2, 4], Kind::ComplexFloat), &["kind Float or Double", "ComplexFloat"]),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[6, 2, 4]).to_sparse_sparse_dim(3), &["dense", "to_dense"]),
        (1, float(&[9, 6]), &["[3H, H + F] = [9, 7]", "[9, 6]"]),
        (1, float(&[12, 7]), &["[3H, H + F] = [9, 7]", "[12, 7]"]),
        (1, float(&[63]), &["[3H, H + F]", "[63]"]),
        (1, cpu(&[9, 7], Kind::Half), &["kind Float, as input", "Half", "to_kind"]),
        (1, cpu(&[9, 7], Kind::Double), &["kind Float, as input", "Double", "to_kind"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (2, float(&[8]), &["[3H]", "[8]"]),
        (2, float(&[2, 9]), &["[3H]", "[2, 9]"]),
        (2, float(&[9, 1]), &["[3H]", "[9, 1]"]),
        (2, Tensor::new(), &["a tensor", "undefined"]),
        (3, float(&[3]), &["2 dimensions [B, H]", "[3]"]),
        (3, float(&[1, 3]), &["[B, H] = [2, 3]", "[1, 3]"]),
        (3, Tensor::new(), &["a tensor", "undefined"]),
        (4, float(&[2, 4]), &["[B, H] = [2, 3]", "[2, 4]"]),
        (4, cpu(&[2, 3], Kind::Int64), &["kind Float or Double", "Int64"]),
        (3, cpu(&[2, 3], Kind::Bool), &["kind Float or Double", "Bool"]),
        (1, float(&[9, 7]).to_sparse_csr(None), &["dense", "to_dense"]),
    ];
    for (index, bad, expected) in cases {
        let mut arguments = good();
        arguments[index] = bad;
        let place = format!("lltm: {}", names[index]);
        support::refusal::assert_refused(&place, expected, call(f_lltm, &arguments), || {
            let [x, w, b, h, c] = &arguments;
            lltm(x, w, Some(b), (h, c))
        });
    }
    call(f_lltm, &good()).expect("good arguments");

    // Sizes whose sums overflow 64 bits.
    let mut arguments = good();
    let huge = float(&[1, 1]).expand([1, i64::MAX / 2], false);
    (arguments[0], arguments[3], arguments[4]) = (float(&[6, 1, 4]), huge.shallow_clone(), huge);
    let error = call(f_lltm, &arguments).expect_err("too large").to_string();
    assert!(error.starts_with("lltm: h: expected sizes whose sums fit 64 bits"), "{error}");
}
