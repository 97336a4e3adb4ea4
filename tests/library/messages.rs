//! Tests of the messages for missing kernels and missing operators.

use super::*;

#[test]
fn a_missing_kernel_is_told_by_device() {
    let x = doubles(&[1.0]);
    let said = |name: &str| message(operator(name).call::<Tensor>(args![&x]));
    let schema = "; the schema is tch_test::";
    for (name, expected) in [
        // The dispatcher's fallbacks and kernels that only compute shapes do not count as kernels
        // for a device.
        ("cuda_only", "it has no kernel for CPU, only for CUDA; give it tensors on CUDA"),
        (
            "cuda_and_xla_only",
            "it has no kernel for CPU, only for CUDA or XLA; give it tensors on CUDA or XLA",
        ),
        (
            "without_kernels",
            "it has no kernel for CPU, nor for any other device; load the library that has them",
        ),
        (
            "calls_cuda_only",
            "it calls tch_test::cuda_only, which has no kernel for CPU, only for CUDA; give it tensors on CUDA",
        ),
    ] {
        let text = said(name);
        assert!(
            text.starts_with(&format!("tch_test::{name}: {expected}{schema}{name}(")),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}

#[test]
fn a_missing_kernel_of_libtorchs_own_is_told_by_device_too() {
    let sparse = doubles(&[1.0, 0.0]).to_sparse(None, None::<&[i64]>, None);
    let text = message(
        Operator::find("aten::cumsum").unwrap().no_grad().call::<Tensor>(args![&sparse, 0]),
    );
    assert!(
        text.contains("aten::cumsum: it") && text.contains(" no kernel for SparseCPU, only for "),
        "{text}"
    );
    assert!(!text.contains("BackendSelect") && !text.contains("FuncTorch"), "{text}");
}

#[test]
fn a_kernel_that_nobody_chooses_is_told_by_device() {
    let none: [&Tensor; 0] = [];
    let text = message(operator("first").call::<Tensor>(args![none]));
    let expected = "tch_test::first: it got no tensor argument, so no device to choose a kernel for; there are kernels for CPU; the";
    assert!(text.starts_with(expected), "{text}");
    let text = message(operator("first_without_kernels").call::<Tensor>(args![none]));
    assert!(
        text.contains(": it has no kernel for any device; load the library that has them; the"),
        "{text}"
    );
}

#[test]
fn a_name_that_is_not_found_suggests_near_ones() {
    compiled::library();
    for (name, expected) in [
        ("tch_test::cubed", "did you mean tch_test::cube?"),
        ("tch_test::cueb", "did you mean tch_test::cube?"),
        ("tch_test::sacled", "did you mean tch_test::scaled?"),
        ("tch_test::CUBE", "did you mean tch_test::cube?"),
        ("tch_test.cube", "did you mean tch_test::cube?"),
        ("tchtest::cube", "did you mean tch_test::cube?"),
        ("cube", "did you mean tch_test::cube?"),
        ("tch_test::twicee.int", "did you mean tch_test::twice?"),
        ("aten::softmaks", "did you mean aten::softmax?"),
        // Several names are equally similar.
        ("tch_test::scale", "did you mean tch_test::scale_ or tch_test::scaled?"),
    ] {
        let text = message(Operator::find(name));
        assert_eq!(text, format!("there is no operator {name}; {expected}"));
    }
    for name in ["tch_test::zzzzzzz", "xyzzy::plugh", "", "::", "a\0b"] {
        let text = message(Operator::find(name));
        assert!(
            text.contains("load the library that registers it") && !text.contains("did you mean"),
            "{text}"
        );
    }
}
