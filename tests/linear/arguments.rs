//! Tests of the arguments that linear refuses.

use super::*;
use tch_extension::ops::linear;

#[test]
fn bad_arguments_are_named() {
    let cpu = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| cpu(size, Kind::Float);
    let good = || [float(&[2, 4]), float(&[3, 4]), float(&[3])];
    let names = ["input", "weight", "bias"];
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[]), &["shape [..., in]", "view it as [1]"]),
        (
            0,
            cpu(&[2, 4], Kind::Int64),
            &["kind Float or Double or Half or BFloat16", "Int64", "to_kind"],
        ),
        (0, cpu(&[2, 4], Kind::Bool), &["kind Float", "Bool"]),
        (
            0,
            cpu(&[2, 4], Kind::ComplexFloat),
            &["kind Float or Double or Half or BFloat16", "ComplexFloat"],
        ),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[2, 4]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
        (0, float(&[2, 4]).to_mkldnn(), &["dense", "to_dense"]),
        // libtorch refuses it, too.
        (
            0,
            float(&[1 << 32, 1 << 31, 0]),
            &["leading sizes whose product fits 64 bits", "[4294967296, "],
        ),
        (1, float(&[3, 5]), &["[out, in] = [3, 4]", "[3, 5]"]),
        (1, float(&[4, 3]), &["[out, in] = [4, 4]", "[4, 3]"]),
        (1, float(&[4]), &["2 dimensions [out, in]", "[4]"]),
        (1, float(&[1, 3, 4]), &["2 dimensions [out, in]", "[1, 3, 4]"]),
        (1, cpu(&[3, 4], Kind::Half), &["kind Float, as input", "Half", "to_kind"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (1, float(&[3, 4]).to_sparse_csr(None), &["dense", "to_dense"]),
        (2, float(&[4]), &["[out] = [3]", "[4]"]),
        (2, float(&[1]), &["[out] = [3]", "[1]"]),
        (2, float(&[1, 3]), &["[out] = [3]", "[1, 3]"]),
        (2, cpu(&[3], Kind::Double), &["kind Float, as input", "Double", "to_kind"]),
        (2, Tensor::new(), &["a tensor", "undefined"]),
    ];
    for (index, bad, expected) in cases {
        let mut arguments = good();
        arguments[index] = bad;
        let error = fused(&arguments).expect_err("bad argument").to_string();
        assert!(error.starts_with(&format!("linear: {}: expected ", names[index])), "{error}");
        assert!(expected.iter().all(|text| error.contains(text)), "{error}: {expected:?}");
        assert!(!error.contains('\n'), "one line: {error}");
        let panic = std::panic::catch_unwind(|| {
            let [x, w, b] = &arguments;
            linear(x, w, Some(b))
        });
        let panic =
            *panic.expect_err("the form without f_ panics").downcast::<String>().expect("a text");
        assert_eq!(panic, error);
    }
    fused(&good()).expect("good arguments");
}

/// These tensors have no memory that a kernel could read.
#[test]
fn what_has_no_memory_is_named() {
    for device in devices() {
        let float = |size: &[i64]| Tensor::zeros(size, (Kind::Float, device));
        let odd: [fn(&Tensor) -> Tensor; 2] = [
            |x| x.quantize_per_tensor(0.1, 0, Kind::QInt8),
            |x| Tensor::stack(&[x, x], 0).internal_add_batch_dim(0, 1),
        ];
        for odd in odd {
            for (index, name) in ["input", "weight", "bias"].into_iter().enumerate() {
                let mut arguments = [float(&[2, 4]), float(&[3, 4]), float(&[3])];
                arguments[index] = odd(&arguments[index]);
                let error = fused(&arguments).expect_err(name).to_string();
                assert!(
                    error.starts_with(&format!("linear: {name}: expected ")),
                    "{device:?}: {error}"
                );
            }
        }
    }
}
