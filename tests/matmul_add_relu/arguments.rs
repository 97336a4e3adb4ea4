//! Tests of the arguments that matmul_add_relu refuses.

use super::*;
use tch_extension::ops::matmul_add_relu;

#[test]
fn bad_arguments_are_named() {
    let cpu = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| cpu(size, Kind::Float);
    let good = || [float(&[2, 3, 4]), float(&[2, 4, 5]), float(&[5])];
    let names = ["lhs", "rhs", "bias"];
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[]), &["at least 1 dimension", "[]"]),
        (
            0,
            cpu(&[2, 3, 4], Kind::Int64),
            &["kind Float or Double or Half or BFloat16", "Int64", "to_kind"],
        ),
        (0, cpu(&[2, 3, 4], Kind::ComplexFloat), &["kind Float", "ComplexFloat"]),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[3, 4]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
        (0, float(&[3, 4]).to_mkldnn(), &["dense", "to_dense"]),
        (1, float(&[]), &["at least 1 dimension", "[]"]),
        (1, float(&[2, 5, 4]), &["[..., K, N] with K = 4, as lhs [2, 3, 4]", "[2, 5, 4]"]),
        (1, float(&[5]), &["shape [K] with K = 4", "[5]"]),
        (1, float(&[3, 4, 5]), &["leading dimensions that broadcast with lhs' [2]", "[3]"]),
        (1, cpu(&[2, 4, 5], Kind::Half), &["kind Float, as lhs", "Half", "to_kind"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (2, float(&[4]), &["broadcasts with the product's [2, 3, 5]", "[4]"]),
        (2, float(&[0]), &["broadcasts with the product's [2, 3, 5]", "[0]"]),
        (2, float(&[3, 2, 3, 4]), &["broadcasts with the product's [2, 3, 5]", "[3, 2, 3, 4]"]),
        (2, float(&[2, 1, 2]), &["broadcasts with the product's [2, 3, 5]", "[2, 1, 2]"]),
        (2, cpu(&[5], Kind::ComplexFloat), &["kind Float", "ComplexFloat"]),
        (2, Tensor::new(), &["a tensor", "undefined"]),
        (2, float(&[3, 5]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
    ];
    for (index, bad, expected) in cases {
        let mut arguments = good();
        arguments[index] = bad;
        let place = format!("matmul_add_relu: {}", names[index]);
        support::refusal::assert_refused(
            &place,
            expected,
            call(f_matmul_add_relu, &arguments),
            || {
                let [lhs, rhs, bias] = &arguments;
                matmul_add_relu(lhs, rhs, bias)
            },
        );
    }
    fused(&good()).expect("good arguments");
}

/// Shapes are refused exactly where the composite refuses them.
#[test]
fn shapes_are_taken_and_refused_as_libtorch_does() {
    let sizes: [&[i64]; 13] = [
        &[],
        &[1],
        &[2],
        &[3],
        &[0],
        &[2, 3],
        &[3, 2],
        &[1, 3],
        &[3, 1],
        &[2, 2, 3],
        &[1, 3, 2],
        &[3, 3, 2],
        &[2, 1, 2, 3],
    ];
    let (mut taken, mut refused) = (0, 0);
    for lhs in sizes {
        for rhs in sizes {
            for bias in sizes {
                let inputs =
                    [lhs, rhs, bias].map(|size| Tensor::ones(size, (Kind::Double, Device::Cpu)));
                let [found, expected] = OPERATORS.map(|operator| call(operator, &inputs));
                match (found, expected) {
                    (Ok(found), Ok(expected)) => {
                        taken += 1;
                        assert!(found.equal(&expected), "{lhs:?} {rhs:?} {bias:?}");
                    }
                    (Err(error), Err(_)) => {
                        refused += 1;
                        assert!(error.to_string().starts_with("matmul_add_relu: "), "{error}");
                    }
                    (found, expected) => {
                        panic!("{lhs:?} {rhs:?} {bias:?}: {found:?}, not {expected:?}")
                    }
                }
            }
        }
    }
    assert!(taken > 300 && refused > 300, "{taken} and {refused}");
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
            for (index, name) in ["lhs", "rhs", "bias"].into_iter().enumerate() {
                let mut arguments = [float(&[2, 3, 4]), float(&[2, 4, 5]), float(&[5])];
                arguments[index] = odd(&arguments[index]);
                let error = call(f_matmul_add_relu, &arguments).expect_err(name).to_string();
                assert!(
                    error.starts_with(&format!("matmul_add_relu: {name}: expected ")),
                    "{device:?}: {error}"
                );
            }
        }
    }
}
