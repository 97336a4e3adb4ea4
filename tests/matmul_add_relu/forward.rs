//! Tests of the output.

use super::*;
use patterns::noise;
use tch_extension::ops::{ProductWay, f_matmul_add_relu, force};

/// Our kernel after libtorch's product, on CUDA, too.
const COMPOSITE: Operator =
    |lhs, rhs, bias| force(ProductWay::Composite, || f_matmul_add_relu(lhs, rhs, bias));

#[test]
fn forward_agrees_with_the_reference() {
    suite().forward_agrees_with_the_reference();
}

/// Where libtorch computes the product, the product is the same, and what follows is rounded in the
/// same way, also near 0, where the sign of a sum can depend on the rounding.
#[test]
fn the_bits_are_the_composites() {
    for device in devices() {
        for kind in KINDS {
            for &(lhs, rhs, bias) in SMALL.iter().chain(LARGE) {
                let inputs = [(lhs, 0), (rhs, 1), (bias, 2)]
                    .map(|(size, seed)| noise(size, seed).to_kind(kind).to_device(device));
                let [found, expected] = [COMPOSITE, OPERATORS[1]]
                    .map(|operator| call(operator, &inputs).expect("output"));
                assert!(found.equal(&expected), "{lhs:?} @ {rhs:?} + {bias:?} {kind:?} {device:?}");
            }
        }
    }
}

#[test]
fn the_formula_by_hand() {
    for device in devices() {
        let tensor =
            |values: &[f64], size: &[i64]| Tensor::from_slice(values).view(size).to_device(device);
        let lhs = tensor(&[1.0, 2.0, 3.0, -1.0, 0.0, 2.0], &[2, 3]);
        let rhs = tensor(&[0.5, -1.0, 2.0, 4.0, 0.25, -3.0], &[3, 2]);
        for operator in OPERATORS {
            // The product is [[5.25, -2], [0, -5]].
            let row = operator(&lhs, &rhs, &tensor(&[1.0, 3.0], &[2])).expect("a row");
            assert_close(&row, &tensor(&[6.25, 1.0, 1.0, 0.0], &[2, 2]), 0.0, 0.0);
            let column = operator(&lhs, &rhs, &tensor(&[-5.0, 6.0], &[2, 1])).expect("a column");
            assert_close(&column, &tensor(&[0.25, 0.0, 6.0, 1.0], &[2, 2]), 0.0, 0.0);
            let larger =
                operator(&lhs, &rhs, &tensor(&[-5.0, 6.0], &[2, 1, 1])).expect("a larger one");
            let expected = tensor(&[0.25, 0.0, 0.0, 0.0, 11.25, 4.0, 6.0, 1.0], &[2, 2, 2]);
            assert_close(&larger, &expected, 0.0, 0.0);
        }
    }
}

#[test]
fn the_last_element_counts() {
    // A kernel that omitted its tail would leave the product there, or anything else.
    for device in devices() {
        for n in [1, 3, 7, 8, 9, 15, 17, 31, 33, 1023, 1024, 1025, 2049] {
            for bias in [vec![n], vec![2, 1], vec![2, n], vec![3, 2, n], vec![]] {
                let options = (Kind::Float, device);
                let (lhs, rhs) =
                    (Tensor::ones([2, 1], options), Tensor::full([1, n], 3.0, options));
                let found = f_matmul_add_relu(&lhs, &rhs, &Tensor::full(&bias, -1.0, options))
                    .expect("out");
                let last = found.reshape([-1]).get(-1).double_value(&[]);
                assert_eq!(last, 2.0, "n = {n}, bias {bias:?}");
                let found = f_matmul_add_relu(&lhs, &rhs, &Tensor::full(&bias, -4.0, options))
                    .expect("out");
                assert!(found.count_nonzero(None).int64_value(&[]) == 0, "n = {n}, bias {bias:?}");
            }
        }
    }
}

/// NaN passes through relu and through its derivative, and changes no other element.
#[test]
fn what_is_not_finite_is_treated_as_libtorch_treats_it() {
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, 1.0, -1.0, 1e-30];
    let count = special.len() as i64;
    for device in devices() {
        for kind in KINDS {
            let special = Tensor::from_slice(&special).to_kind(kind).to_device(device);
            // Each value occurs as a sum (with 0) and as an incoming gradient.
            let lhs = Tensor::zeros([count, 2], (kind, device));
            let (rhs, vector) =
                (Tensor::zeros([2, count], (kind, device)), special.view([count, 1]));
            let vector = |_: &Tensor| vector.expand([count, count], false).contiguous();
            let full = special.expand([count, count], false).contiguous();
            for bias in [special.shallow_clone(), full, special.view([count, 1])] {
                let inputs = leaves(&[lhs.shallow_clone(), rhs.shallow_clone(), bias]);
                let [found, expected] =
                    OPERATORS.map(|operator| results(operator, &inputs, vector));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, 0.0, 0.0);
                }
            }
            // The special values also come from the product.
            let rhs = Tensor::ones([1, 3], (kind, device));
            let inputs =
                leaves(&[special.view([count, 1]), rhs, Tensor::ones([3], (kind, device))]);
            let [found, expected] =
                OPERATORS.map(|operator| results(operator, &inputs, |y| y.ones_like()));
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 0.0, 0.0);
            }
        }
    }
}

/// Tests tensors whose values differ from their memory: libtorch negates lazily, and has zeros
/// without memory.
#[test]
fn lazily_negated_tensors_and_zeros_without_memory() {
    for device in devices() {
        for pattern in [SMALL[0], SMALL[3], SMALL[8]] {
            let inputs = sample(pattern, [Layout::Contiguous; 3], Kind::Double, device).inputs;
            for index in 0..3 {
                let size = inputs[index].size();
                let zeros =
                    Tensor::internal_efficientzerotensor(size.as_slice(), (Kind::Double, device));
                for lazy in [inputs[index].internal_neg_view(), zeros] {
                    let mut inputs: Vec<Tensor> =
                        inputs.iter().map(Tensor::shallow_clone).collect();
                    inputs[index] = lazy;
                    let [found, expected] =
                        OPERATORS.map(|operator| call(operator, &inputs).expect("output"));
                    assert_close(&found, &expected, 0.0, 0.0);
                }
            }
            let inputs = leaves(&inputs);
            let vectors: [fn(&Tensor) -> Tensor; 4] = [
                |y| y.ones_like().internal_neg_view(),
                |y| {
                    Tensor::internal_efficientzerotensor(
                        y.size().as_slice(),
                        (y.kind(), y.device()),
                    )
                },
                |y| Tensor::ones([], (y.kind(), y.device())).expand(y.size().as_slice(), false),
                |y| support::incoming(y),
            ];
            for vector in vectors {
                let [found, expected] =
                    OPERATORS.map(|operator| results(operator, &inputs, vector));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, 1e-14, 1e-14);
                }
            }
        }
    }
}

/// There is nothing to compute, in any number of dimensions. Dimensions of tensors without elements
/// do not merge into fewer.
#[test]
fn empty_in_many_dimensions() {
    for device in devices() {
        let patterns: [[&[i64]; 3]; 2] = [
            [&[0, 0, 0, 0, 0, 0, 2], &[2, 0], &[1]],
            [&[0, 0, 2], &[2, 0], &[0, 1, 0, 1, 0, 1, 0, 0, 0]],
        ];
        for pattern in patterns {
            let inputs = leaves(&pattern.map(|size| Tensor::zeros(size, (Kind::Double, device))));
            let [found, expected] =
                OPERATORS.map(|operator| results(operator, &inputs, |y| y.ones_like()));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(
                    found.size() == expected.size() && found.equal(expected),
                    "{pattern:?} {device:?}"
                );
            }
        }
    }
}

/// libtorch refuses this, too. It must be an error, not a panic.
#[test]
fn more_rows_than_can_be_counted() {
    let inputs: [&[i64]; 3] = [&[1 << 32, 1 << 31, 0], &[0, 0], &[1]];
    let inputs = inputs.map(|size| Tensor::zeros(size, (Kind::Double, Device::Cpu)));
    for operator in OPERATORS {
        assert!(call(operator, &inputs).is_err());
    }
}

/// matmul itself takes another way for a batch with gaps if the other factor requires grad; our
/// bits must not depend on that.
#[test]
fn the_bits_are_the_same_whether_or_not_gradients_are_wanted() {
    for device in devices() {
        let lhs = noise(&[3, 2, 1000], 0).to_device(device).transpose(0, 1);
        let inputs =
            [lhs, noise(&[1000, 1], 1).to_device(device), noise(&[1], 2).to_device(device)];
        let leaves = inputs.each_ref().map(|input| input.detach().set_requires_grad(true));
        let expected = call(f_matmul_add_relu, &inputs).expect("without");
        let found = call(f_matmul_add_relu, &leaves).expect("with a graph");
        assert!(found.requires_grad() && found.equal(&expected));
        let found = tch::no_grad(|| call(f_matmul_add_relu, &leaves)).expect("without a graph");
        assert!(!found.requires_grad() && found.equal(&expected));
    }
}

/// The size is large enough for several threads, and its dimensions do not merge.
#[test]
fn a_broadcast_batch_is_cut_between_threads() {
    for device in devices() {
        let sizes: [(&[i64], i64); 3] = [(&[8, 64, 2], 0), (&[2, 300], 1), (&[8, 1, 300], 2)];
        let inputs = sizes.map(|(size, seed)| noise(size, seed).to_device(device));
        let [found, expected] =
            [COMPOSITE, OPERATORS[1]].map(|operator| call(operator, &inputs).expect("output"));
        assert!(found.equal(&expected), "{device:?}");
    }
}
