//! The operator against tch: on the CPU, where the shim runs the kernel's text, and on a GPU, where
//! there is one.

use cube::silu;
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Graph, Stream, StreamGuard, synchronize};
use tch_extension::testing::{
    assert_close, conformance, cuda_or_skip, devices, gradcheck, gradgradcheck,
};

const KINDS: [Kind; 2] = [Kind::Float, Kind::Double];

fn bounds(kind: Kind) -> (f64, f64) {
    if kind == Kind::Double { (1e-12, 1e-12) } else { (1e-5, 1e-6) }
}

/// The operator's value and gradient for a gradient `g`.
fn both(of: impl Fn(&Tensor) -> Tensor, x: &Tensor, g: &Tensor) -> [Tensor; 2] {
    let leaf = x.detach().set_requires_grad(true);
    let y = of(&leaf);
    let dx = Tensor::run_backward(&[(&y * g).sum(y.kind())], &[&leaf], false, false);
    [y.detach(), dx.into_iter().next().expect("a gradient")]
}

/// Value and gradient are those of libtorch.
fn agree(x: &Tensor, what: &str) {
    let g = x.randn_like();
    let ours = |x: &Tensor| silu(x).unwrap_or_else(|error| panic!("{what}: {error}"));
    let (rtol, atol) = bounds(x.kind());
    for (found, expected) in both(ours, x, &g).iter().zip(&both(Tensor::silu, x, &g)) {
        assert_eq!(found.size(), expected.size(), "{what}");
        assert_close(found, expected, rtol, atol);
    }
}

#[test]
fn all_sizes_agree() {
    tch::manual_seed(1);
    for device in devices() {
        for kind in KINDS {
            // Around a block of 256 threads, and some blocks with a rest.
            for n in [0, 1, 2, 255, 256, 257, 511, 512, 513, 10_000] {
                let x = Tensor::randn([n + 1], (kind, device)) * 4.0;
                let what = format!("{n} {kind:?} {device:?}");
                agree(&x.narrow(0, 0, n), &what);
                // An address that is aligned to its elements only.
                agree(&x.narrow(0, 1, n), &format!("{what}, misaligned"));
            }
        }
    }
}

#[test]
fn all_shapes_and_strides_agree() {
    tch::manual_seed(2);
    for device in devices() {
        for kind in KINDS {
            let x = Tensor::randn([6, 5, 40], (kind, device));
            agree(&x, "three dimensions");
            agree(&x.transpose(0, 2), "transposed");
            agree(&x.slice(2, 1, 40, 3), "every third column");
            agree(&x.select(1, 2), "a selection");
            agree(&x.flip([0]), "flipped");
            agree(&x.get(0).get(0).get(0), "a scalar");
            agree(&Tensor::randn([1, 1, 40], (kind, device)).expand([3, 2, 40], true), "expanded");
            agree(&x.narrow(1, 2, 0), "no element, three dimensions");
            // Its memory has the other sign.
            agree(&x.internal_neg_view(), "a pending negation");
        }
    }
}

#[test]
fn nan_and_infinities_are_kept() {
    for device in devices() {
        for kind in KINDS {
            let values = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0, 1e30, -1e30];
            let x = Tensor::from_slice(&values).to_kind(kind).to_device(device);
            let g = x.ones_like();
            let found = both(|x| silu(x).expect("silu"), &x, &g);
            let expected = both(Tensor::silu, &x, &g);
            let numbers = |tensor: &Tensor| {
                let tensor = tensor.to_kind(Kind::Double).to_device(Device::Cpu);
                Vec::<f64>::try_from(tensor).expect("numbers")
            };
            // NaN has no defined sign, so it is not compared bit by bit.
            let text = |tensor: &Tensor| format!("{:?}", numbers(tensor));
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(text(found), text(expected), "{kind:?} {device:?}");
            }
            let y = numbers(&found[0]);
            assert!(y[0].is_nan() && y[1] == f64::INFINITY && y[2].is_nan(), "{y:?}");
        }
    }
}

fn of(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![silu(&inputs[0])?])
}

/// Gradcheck, second derivatives, and the rules of `conformance`: other streams, threads and graphs
/// among them. The first of them compiles.
#[test]
fn gradients_are_right() {
    tch::manual_seed(3);
    for device in devices() {
        let double = |size: &[i64]| Tensor::randn(size, (Kind::Double, device));
        for x in [double(&[0]), double(&[7]), double(&[2, 5]), double(&[3, 4]).transpose(0, 1)] {
            let x = x.detach().set_requires_grad(true);
            let fail = |error| panic!("{:?} {device:?}: {error}", x.size());
            gradcheck(of, &[&x], &Default::default()).unwrap_or_else(fail);
            gradgradcheck(of, &[&x], &Default::default()).unwrap_or_else(fail);
            conformance(of, &[&x], &Default::default()).unwrap_or_else(fail);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let says = |expected: &str, x: &Tensor| {
        let text = silu(x).expect_err("it was accepted").to_string();
        assert!(text.starts_with("cube_silu: x: expected ") && text.contains(expected), "{text}");
        assert!(!text.contains('\n'), "{text}");
    };
    for kind in [Kind::Half, Kind::BFloat16, Kind::Int64, Kind::Bool, Kind::ComplexFloat] {
        let x = Tensor::ones([3], (kind, Device::Cpu));
        says(&format!("f64 or f32, got {kind:?}"), &x);
    }
    assert!(silu(&Tensor::new()).is_err(), "an undefined tensor");
    let sparse = Tensor::ones([3], (Kind::Float, Device::Cpu)).to_sparse(None, None::<i64>, None);
    assert!(silu(&sparse).is_err(), "a sparse tensor");
}

/// A kernel on another stream than the current one would read what is there before the long work
/// ends.
#[test]
fn cuda_kernels_wait_for_the_current_stream() {
    let Some(device) = cuda_or_skip("cuda_kernels_wait_for_the_current_stream") else { return };
    let big = Tensor::ones([4096, 4096], (Kind::Float, device)) / 4096.0;
    let x = Tensor::zeros([4096, 4096], (Kind::Float, device));
    let expected = silu(&big).expect("silu");
    let _ = big.matmul(&big);
    synchronize(device).expect("warm");
    let side = Stream::new(device).expect("a stream");
    let guard = StreamGuard::new(&side).expect("a guard");
    let mut product = big.shallow_clone();
    for _ in 0..50 {
        product = product.matmul(&big);
    }
    x.shallow_clone().copy_(&product);
    let y = silu(&x).expect("silu");
    drop(guard);
    side.synchronize().expect("done");
    assert_close(&y, &expected, 1e-3, 1e-6);
}

#[test]
fn cuda_a_step_is_captured() {
    let Some(device) = cuda_or_skip("cuda_a_step_is_captured") else { return };
    let x = Tensor::randn([1000], (Kind::Float, device)).set_requires_grad(true);
    let step = || -> Result<Tensor> {
        let y = silu(&x)?;
        let gradients = Tensor::run_backward(&[y.sum(Kind::Float)], &[&x], false, false);
        Ok(gradients.into_iter().next().expect("a gradient"))
    };
    let _compiled = step().expect("a step");
    let (graph, gradient) = Graph::capture(device, step).expect("captured");
    for value in [0.5, -2.0] {
        let _ = tch::no_grad(|| x.shallow_clone().fill_(value));
        graph.replay().expect("replayed");
        assert_close(&gradient.copy(), &step().expect("a step"), 0.0, 0.0);
    }
}
