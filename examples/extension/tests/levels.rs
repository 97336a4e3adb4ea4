//! Tests every level of every operator: values, gradients, second derivatives, and the conformance
//! suite.

use extension::{linear, lltm};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::testing::{assert_close, conformance, devices, gradcheck, gradgradcheck};

type Operator<'a> = &'a (dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Sync);

/// Makes leaves of kind f64. If `transposed`, each matrix is the transpose of a contiguous one.
fn leaves(sizes: &[&[i64]], transposed: bool, device: Device) -> Vec<Tensor> {
    tch::manual_seed(0);
    let leaf = |size: &&[i64]| {
        let mut size = size.to_vec();
        if transposed {
            size.reverse();
        }
        let values = Tensor::randn(size.as_slice(), (Kind::Double, device)) * 0.5;
        let values = if transposed && size.len() == 2 { values.transpose(0, 1) } else { values };
        values.detach().set_requires_grad(true)
    };
    sizes.iter().map(leaf).collect()
}

/// Checks all these sizes, which include zero, one, and sizes that are no multiple of a tile or
/// block.
fn prove(name: &str, operator: Operator<'_>, reference: Operator<'_>, sizes: &[Vec<Vec<i64>>]) {
    for device in devices() {
        for sizes in sizes {
            for transposed in [false, true] {
                let sizes: Vec<&[i64]> = sizes.iter().map(Vec::as_slice).collect();
                let leaves = leaves(&sizes, transposed, device);
                let inputs: Vec<&Tensor> = leaves.iter().collect();
                let what = format!("{name} {sizes:?} on {device:?}, transposed: {transposed}");
                let (found, expected) =
                    (operator(&leaves).expect(&what), reference(&leaves).expect(&what));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_close(found, expected, 1e-10, 1e-10);
                }
                let fail = |error| panic!("{what}: {error}");
                gradcheck(operator, &inputs, &Default::default()).unwrap_or_else(fail);
                gradgradcheck(operator, &inputs, &Default::default()).unwrap_or_else(fail);
                conformance(operator, &inputs, &Default::default()).unwrap_or_else(fail);
            }
        }
    }
}

#[test]
fn linear_at_every_level() {
    let of = |level: linear::Linear| {
        move |inputs: &[Tensor]| Ok(vec![level(&inputs[0], &inputs[1], &inputs[2])?])
    };
    let sizes = |m: i64, k: i64, n: i64| vec![vec![m, k], vec![n, k], vec![n]];
    let all = [sizes(3, 4, 5), sizes(17, 1, 2), sizes(1, 17, 1), sizes(0, 3, 2), sizes(2, 0, 3)];
    for (name, level) in linear::LEVELS {
        prove(name, &of(level), &of(linear::composed::linear), &all);
    }
}

#[test]
fn lltm_at_every_level() {
    let of = |level: lltm::Lltm| {
        move |inputs: &[Tensor]| {
            let [x, w, b, h, c] = inputs else { unreachable!("five inputs") };
            let (new_h, new_c) = level(x, w, b, (h, c))?;
            Ok(vec![new_h, new_c])
        }
    };
    let sizes = |b: i64, f: i64, h: i64| {
        vec![vec![b, f], vec![3 * h, h + f], vec![3 * h], vec![b, h], vec![b, h]]
    };
    for (name, level) in lltm::LEVELS {
        prove(
            name,
            &of(level),
            &of(lltm::composed::lltm),
            &[sizes(2, 3, 2), sizes(1, 1, 3), sizes(0, 2, 2)],
        );
    }
}

#[test]
fn the_kernels_name_what_does_not_fit() {
    let float = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let error = linear::kernels::linear(&float(&[2, 3]), &float(&[4, 5]), &float(&[4]))
        .expect_err("5 is not 3");
    assert!(error.to_string().starts_with("linear: w: expected"), "{error}");
    let state = (&float(&[2, 4]), &float(&[2, 5]));
    let error = lltm::kernels::lltm(&float(&[2, 3]), &float(&[12, 7]), &float(&[12]), state)
        .expect_err("5 is not 4");
    assert!(error.to_string().starts_with("lltm: c: expected"), "{error}");
}
