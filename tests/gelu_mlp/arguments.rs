//! Tests of the arguments that gelu_mlp refuses.

use super::*;
use support::refusal::assert_refused;
use tch_extension::ops::gelu_mlp;

const NAMES: [&str; 5] = ["input", "w1", "b1", "w2", "b2"];

fn call(arguments: &[Tensor; 5], op: Op) -> Result<Tensor> {
    let [x, w1, b1, w2, b2] = arguments;
    op(x, w1, Some(b1), w2, Some(b2), &GeluMlpOptions::default())
}

fn good(device: Device) -> [Tensor; 5] {
    let of = |size: &[i64]| Tensor::zeros(size, (Kind::Float, device));
    [of(&[2, 4]), of(&[6, 4]), of(&[6]), of(&[3, 6]), of(&[3])]
}

#[test]
fn bad_arguments_are_named() {
    let of = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let float = |size: &[i64]| of(size, Kind::Float);
    let cases: Vec<(usize, Tensor, &[&str])> = vec![
        (0, float(&[]), &["shape [..., D]", "view it as [1]"]),
        (0, of(&[2, 4], Kind::Int64), &["kind Float or Double or Half or BFloat16", "Int64"]),
        (0, of(&[2, 4], Kind::ComplexFloat), &["kind Float", "ComplexFloat"]),
        (0, Tensor::new(), &["a tensor", "undefined"]),
        (0, float(&[2, 4]).to_sparse_sparse_dim(2), &["dense", "to_dense"]),
        (0, float(&[1 << 32, 1 << 31, 0]), &["leading sizes whose product fits 64 bits"]),
        (1, float(&[6, 5]), &["[H, D] = [6, 4]", "[6, 5]"]),
        (1, float(&[6]), &["2 dimensions [H, D]", "[6]"]),
        (1, of(&[6, 4], Kind::Half), &["kind Float, as input", "Half"]),
        (1, Tensor::new(), &["a tensor", "undefined"]),
        (2, float(&[5]), &["[H] = [6]", "[5]"]),
        (2, float(&[1, 6]), &["[H] = [6]", "[1, 6]"]),
        (2, of(&[6], Kind::Double), &["kind Float, as input", "Double"]),
        (3, float(&[3, 5]), &["[D2, H] = [3, 6]", "[3, 5]"]),
        (3, float(&[3, 6, 1]), &["2 dimensions [D2, H]", "[3, 6, 1]"]),
        (3, of(&[3, 6], Kind::BFloat16), &["kind Float, as input", "BFloat16"]),
        (4, float(&[6]), &["[D2] = [3]", "[6]"]),
        (4, of(&[3], Kind::Int), &["kind Float, as input", "Int"]),
        (4, Tensor::new(), &["a tensor", "undefined"]),
    ];
    for (index, bad, texts) in cases {
        let mut arguments = good(Device::Cpu);
        arguments[index] = bad;
        let place = format!("gelu_mlp: {}", NAMES[index]);
        let result = call(&arguments, f_gelu_mlp);
        assert_refused(
            &place,
            texts,
            result,
            std::panic::AssertUnwindSafe(|| {
                let [x, w1, b1, w2, b2] = &arguments;
                gelu_mlp(x, w1, Some(b1), w2, Some(b2), &GeluMlpOptions::default())
            }),
        );
    }
    assert_eq!(call(&good(Device::Cpu), f_gelu_mlp).expect("good arguments").size(), [2, 3]);
}

#[test]
fn cuda_mixed_devices_are_named() {
    let test = "cuda_mixed_devices_are_named";
    let Some(device) = tch_extension::testing::cuda_or_skip(test) else { return };
    for (index, name) in NAMES.iter().enumerate().skip(1) {
        let mut arguments = good(device);
        arguments[index] = arguments[index].to_device(Device::Cpu);
        let error = call(&arguments, f_gelu_mlp).expect_err("mixed devices").to_string();
        let expected = format!("gelu_mlp: {name}: expected device Cuda(0), as input, got Cpu");
        assert!(error.starts_with(&expected), "{error}");
    }
}
