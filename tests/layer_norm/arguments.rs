//! Tests of the arguments that layer_norm refuses.

use super::*;
use tch_extension::ops::layer_norm;

#[test]
fn bad_arguments_are_named() {
    let cpu = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| cpu(size, Kind::Float);
    let names = ["input", "weight", "bias"];
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[2, 3]), &["[*, 3, 4], as normalized_shape has it", "[2, 3]"]),
        (0, float(&[4]), &["[*, 3, 4]", "[4]"]),
        (0, float(&[]), &["[*, 3, 4]", "[]"]),
        (0, float(&[2, 4, 3]), &["[*, 3, 4]", "[2, 4, 3]"]),
        (
            0,
            cpu(&[2, 3, 4], Kind::Int64),
            &["kind Float or Double or Half or BFloat16", "Int64", "to_kind"],
        ),
        (0, cpu(&[2, 3, 4], Kind::ComplexFloat), &["kind Float", "ComplexFloat"]),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[2, 3, 4]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
        (0, float(&[2, 3, 4]).to_mkldnn(), &["dense", "to_dense"]),
        (1, float(&[4]), &["[normalized_shape] = [3, 4]", "[4]"]),
        (1, float(&[12]), &["[normalized_shape] = [3, 4]", "[12]"]),
        (1, float(&[1, 3, 4]), &["[normalized_shape] = [3, 4]", "[1, 3, 4]"]),
        (
            1,
            cpu(&[3, 4], Kind::Double),
            &["kind Float, as input", "Double", "to_kind(Kind::Float)"],
        ),
        (1, cpu(&[3, 4], Kind::Half), &["kind Float, as input", "Half"]),
        (1, cpu(&[3, 4], Kind::Bool), &["kind Float or", "Bool"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (1, float(&[3, 4]).to_sparse_sparse_dim(1), &["dense", "to_dense"]),
        (2, float(&[4, 3]), &["[normalized_shape] = [3, 4]", "[4, 3]"]),
        (2, float(&[]), &["[normalized_shape] = [3, 4]", "[]"]),
        (2, cpu(&[3, 4], Kind::BFloat16), &["kind Float, as input", "BFloat16"]),
        (2, Tensor::new(), &["a tensor", "undefined"]),
    ];
    for (index, bad, expected) in cases {
        let mut arguments = [float(&[2, 3, 4]), float(&[3, 4]), float(&[3, 4])];
        arguments[index] = bad;
        let [x, w, b] = &arguments;
        let error =
            f_layer_norm(x, &[3, 4], Some(w), Some(b), EPS).expect_err("bad argument").to_string();
        assert!(error.starts_with(&format!("layer_norm: {}: expected ", names[index])), "{error}");
        assert!(expected.iter().all(|text| error.contains(text)), "{error}: {expected:?}");
        assert!(!error.contains('\n'), "one line: {error}");
        let panic = std::panic::catch_unwind(|| layer_norm(x, &[3, 4], Some(w), Some(b), EPS));
        let panic =
            *panic.expect_err("the form without f_ panics").downcast::<String>().expect("a text");
        assert_eq!(panic, error);
    }
}

#[test]
fn bad_shapes_and_mixtures_are_named() {
    let float = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let refused = |x: &Tensor, shape: &[i64], w: Option<&Tensor>, b: Option<&Tensor>| {
        f_layer_norm(x, shape, w, b, EPS).expect_err("bad arguments").to_string()
    };
    let x = float(&[3, 4]);
    let error = refused(&x, &[], None, None);
    assert_eq!(
        error,
        "layer_norm: normalized_shape: expected at least one dimension, got []; pass the trailing sizes of the input, \
         such as &[features]"
    );
    assert!(
        refused(&x, &[5], None, None)
            .contains("input: expected shape [*, 5], as normalized_shape has it, got [3, 4]")
    );
    assert!(refused(&x, &[-1], None, None).contains("[*, -1]"));
    assert!(refused(&x, &[2, 3, 4], None, None).contains("[*, 2, 3, 4]"));
    // On the CPU, a half input also accepts Float parameters, but weight and bias must have the
    // same kind.
    let (half, float_w, half_b) =
        (x.to_kind(Kind::Half), float(&[4]), float(&[4]).to_kind(Kind::Half));
    assert!(
        refused(&half, &[4], Some(&float_w), Some(&half_b))
            .contains("bias: expected kind Float, as weight, got Half")
    );
    assert!(
        refused(&half, &[4], Some(&half_b), Some(&float_w))
            .contains("bias: expected kind Half, as weight, got Float")
    );
    // The sizes of an empty tensor may have a product that overflows.
    let huge = float(&[0, 1, 1]).expand([0, 1 << 40, 1 << 40], false);
    let error = refused(&huge, &[1 << 40, 1 << 40], None, None);
    assert!(error.contains("input: expected sizes whose products fit 64 bits"), "{error}");
}

#[test]
fn errors_leave_the_tensors_as_they_were() {
    let x = Tensor::ones([3, 4], (Kind::Float, Device::Cpu));
    let w = Tensor::ones([3], (Kind::Float, Device::Cpu));
    f_layer_norm(&x, &[4], Some(&w), None, EPS).expect_err("a weight of the wrong size");
    assert!(x.equal(&x.ones_like()) && w.equal(&w.ones_like()));
}
