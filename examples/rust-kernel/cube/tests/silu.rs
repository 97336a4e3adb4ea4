//! The operator against tch, on the CPU by the shim and, where there is one, on a GPU.

use cube::silu;
use tch::{Kind, Tensor};
use tch_extension::testing::{assert_close, conformance, devices, gradcheck, gradgradcheck};

#[test]
fn silu_is_tchs_and_has_the_right_gradients() {
    tch::manual_seed(1);
    for device in devices() {
        for kind in [Kind::Float, Kind::Double] {
            for n in [0, 1, 255, 256, 257, 10_000] {
                let x = Tensor::randn([n], (kind, device));
                let y = silu(&x).unwrap_or_else(|error| panic!("{n} {kind:?}: {error}"));
                assert_close(&y, &x.silu(), 1e-5, 1e-6);
            }
        }
        let x = Tensor::randn([2, 5], (Kind::Double, device)).set_requires_grad(true);
        let of = |inputs: &[Tensor]| Ok(vec![silu(&inputs[0])?]);
        let fail = |error| panic!("{device:?}: {error}");
        gradcheck(of, &[&x], &Default::default()).unwrap_or_else(fail);
        gradgradcheck(of, &[&x], &Default::default()).unwrap_or_else(fail);
        conformance(of, &[&x], &Default::default()).unwrap_or_else(fail);
    }
}

#[test]
fn another_kind_is_refused() {
    let x = Tensor::ones([3], (Kind::Half, tch::Device::Cpu));
    let text = silu(&x).expect_err("no kernel for f16").to_string();
    assert_eq!(text, "cube_silu: no kernel for Half");
}
