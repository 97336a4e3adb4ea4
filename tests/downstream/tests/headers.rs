//! Tests of the public headers: scalar functions compared with libtorch's, accessors with any
//! strides, and vectors with the elements left over.

use downstream::maths::{FUNCTIONS, element, fits_in_32_bits, maths};
use tch::{Device, Kind, Tensor};
use tch_extension::testing::devices;

/// libtorch's own function for a name in the headers.
fn libtorch(function: &str, x: &Tensor) -> Tensor {
    match function {
        "relu" => x.relu(),
        "silu" => x.silu(),
        "softplus" => x.softplus(),
        "gelu" => x.gelu("none"),
        "gelu_tanh" => x.gelu("tanh"),
        "sigmoid" => x.sigmoid(),
        "elu" => x.elu(),
        "tanh" => x.tanh(),
        _ => match function.strip_suffix("_grad") {
            Some(function) => {
                let x = x.detach().set_requires_grad(true);
                libtorch(function, &x).sum(x.kind()).backward();
                x.grad()
            }
            None => panic!("libtorch has no {function}"),
        },
    }
}

/// Small and large numbers of both signs, including zero, in a transposed part of a wider matrix.
fn inputs(kind: Kind, device: Device) -> Tensor {
    let grid = (Tensor::arange(61 * 9, (Kind::Double, device)) - 274.0) * 0.11;
    let grid = grid.reshape([61, 9]);
    let x = grid.slice(1, 0, 9, 2).transpose(0, 1).to_kind(kind);
    let x = Tensor::cat(&[&x, &(&x * 0.01)], 1);
    assert!(x.eq(0.0).any().int64_value(&[]) == 1);
    x.transpose(0, 1).contiguous().transpose(0, 1)
}

#[test]
fn scalar_functions_are_libtorchs() {
    for device in devices() {
        let mut kinds = vec![(Kind::Float, 1e-6), (Kind::Double, 1e-14)];
        if device != Device::Cpu {
            kinds.extend([(Kind::Half, 2e-3), (Kind::BFloat16, 2e-2)]);
        }
        for (kind, tolerance) in kinds {
            let x = inputs(kind, device);
            for function in FUNCTIONS {
                // The output is every other column of a wider matrix; the columns between must not
                // change.
                let wide = Tensor::full([x.size()[0], 2 * x.size()[1]], 7.0, (kind, device));
                maths(function, &x, &mut wide.slice(1, 0, None, 2)).expect("a kernel");
                assert!(
                    wide.slice(1, 1, None, 2).eq(7.0).all().int64_value(&[]) == 1,
                    "{function}"
                );
                let (ours, theirs) = (wide.slice(1, 0, None, 2), libtorch(function, &x));
                let error =
                    ((&ours - &theirs).abs() / (theirs.abs() + 1.0)).max().double_value(&[]);
                assert!(error <= tolerance, "{function} of {kind:?} on {device:?}: {error:e}");
            }
        }
    }
}

/// Tests numbers for which exponentials overflow, digits are lost or values are denormal. The
/// results must not become infinite or NaN unless libtorch's do.
#[test]
fn extremes_are_libtorchs() {
    const BOTH: [f64; 10] = [0.0, 1e-45, 1e-38, 1e-8, 5.0, 19.9, 20.1, 88.8, 104.0, 1e4];
    let values: Vec<f64> = BOTH.iter().flat_map(|&value| [value, -value]).collect();
    for device in devices() {
        for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::Double, 1e-14)] {
            let x = Tensor::from_slice(&values).to_device(device).to_kind(kind).reshape([1, -1]);
            for function in FUNCTIONS {
                let mut ours = x.zeros_like();
                maths(function, &x, &mut ours).expect("a kernel");
                let theirs = libtorch(function, &x);
                assert!(
                    ours.allclose(&theirs, tolerance, tolerance, false),
                    "{function} of {kind:?} on {device:?} at {values:?}: {:?} instead of {:?}",
                    Vec::<f64>::try_from(ours.view(-1)),
                    Vec::<f64>::try_from(theirs.view(-1)),
                );
            }
        }
    }
}

#[test]
fn not_a_number_stays_one() {
    for device in devices() {
        let x = Tensor::full([1, 1], f64::NAN, (Kind::Double, device));
        for function in FUNCTIONS.into_iter().filter(|name| !name.ends_with("_grad")) {
            let mut y = x.zeros_like();
            maths(function, &x, &mut y).expect("a kernel");
            assert!(y.double_value(&[0, 0]).is_nan(), "{function}");
        }
    }
}

#[test]
fn accessors_know_tensors() {
    let x = Tensor::arange(12, (Kind::Float, Device::Cpu)).reshape([3, 4]).transpose(0, 1);
    for at_once in [true, false] {
        assert_eq!(element(&x, 3, 1, at_once).expect("an element"), 7.0);
    }
    for (tensor, part) in [
        (Tensor::new(), "expected a tensor"),
        (x.to_kind(Kind::Double), "expected Float, got Double"),
        (x.unsqueeze(0), "expected 2 dimensions, got shape [1, 4, 3]"),
        (x.to_sparse(None, None::<i64>, None), "expected a dense tensor"),
    ] {
        let error = element(&tensor, 0, 0, true).expect_err(part).to_string();
        assert!(error.starts_with("x: ") && error.contains(part), "{part:?} is not in {error}");
    }
}

#[test]
#[cfg(debug_assertions)]
fn an_index_out_of_range_is_an_error_in_debug_builds() {
    let x = Tensor::zeros([3, 4], (Kind::Float, Device::Cpu));
    for at_once in [true, false] {
        for (row, column, part) in
            [(3, 0, "index 3 of dimension"), (-1, 0, "index -1"), (0, 4, "for size 4")]
        {
            let error = element(&x, row, column, at_once).expect_err(part).to_string();
            assert!(error.contains(part) && error.contains("out of range"), "{error}");
        }
    }
}

#[test]
fn thirty_two_bits_are_enough_only_where_they_are() {
    let most = i64::from(i32::MAX);
    assert!(fits_in_32_bits([2, most], [most - most / 2, 0]));
    assert!(!fits_in_32_bits([1, most + 1], [1, 1]));
    assert!(fits_in_32_bits([2, 2], [most, 0]) && !fits_in_32_bits([2, 2], [most, 1]));
    assert!(!fits_in_32_bits([1, 1], [most + 1, 1]), "the stride itself is stored");
    assert!(fits_in_32_bits([0, 4], [1 << 40, 1]), "there is nothing to index");
}

#[test]
#[cfg(tch_extension_cuda)]
fn cuda_vectors_have_tails() {
    use tch_extension::testing::cuda_or_skip;
    let Some(device) = cuda_or_skip("cuda_vectors_have_tails") else { return };
    for len in [1, 2, 3, 4, 5, 1023, 1024, 1025] {
        for offset in 0..4 {
            let x = Tensor::rand([len + 4], (Kind::Float, device)).narrow(0, offset, len);
            let wide = Tensor::full([len + 8], 7.0, (Kind::Float, device));
            downstream::maths::twice(&x, &mut wide.narrow(0, offset, len)).expect("a launch");
            assert_eq!(wide.narrow(0, offset, len), &x * 2.0, "{len} from {offset}");
            let around = Tensor::cat(
                &[wide.narrow(0, 0, offset), wide.narrow(0, offset + len, 8 - offset)],
                0,
            );
            assert!(around.eq(7.0).all().int64_value(&[]) == 1, "{len} from {offset}");
        }
    }
}
