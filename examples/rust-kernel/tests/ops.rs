//! The operators against tch: on the CPU, where they are tch's operations, the backward pass; on a
//! GPU also the kernels.

use rust_kernel::{matmul_add_relu, prepare, silu};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Graph, Stream, StreamGuard, memory_stats, synchronize};
use tch_extension::testing::{
    assert_close, conformance, cuda_or_skip, devices, gradcheck, gradgradcheck, tolerance,
};

const KINDS: [Kind; 4] = [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16];

/// Lets only one test run at a time. Captures and memory statistics would be disturbed by other
/// threads.
fn serially() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

type Operator<'a> = &'a (dyn Fn(&[Tensor]) -> Result<Vec<Tensor>> + Sync);

fn silu_of(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![silu(&inputs[0])?])
}

fn product_of(inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    Ok(vec![matmul_add_relu(&inputs[0], &inputs[1], &inputs[2])?])
}

fn random(size: &[i64], kind: Kind, device: Device) -> Tensor {
    (Tensor::randn(size, (Kind::Double, Device::Cpu)) * 0.5).to_device(device).to_kind(kind)
}

/// Gradcheck, second derivatives and the rules of `conformance`: other streams, threads and graphs
/// among them. What is captured is loaded before.
fn prove(name: &str, operator: Operator<'_>, sizes: &[&[i64]]) {
    tch::manual_seed(3);
    for device in devices() {
        if device.is_cuda() {
            prepare(Kind::Double, device).expect("images");
        }
        let leaves: Vec<Tensor> = sizes
            .iter()
            .map(|size| random(size, Kind::Double, device).set_requires_grad(true))
            .collect();
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let fail = |error| panic!("{name} {sizes:?} on {device:?}: {error}");
        gradcheck(operator, &inputs, &Default::default()).unwrap_or_else(fail);
        gradgradcheck(operator, &inputs, &Default::default()).unwrap_or_else(fail);
        conformance(operator, &inputs, &Default::default()).unwrap_or_else(fail);
    }
}

#[test]
fn silu_has_the_right_gradients() {
    let _serial = serially();
    for sizes in [&[7][..], &[2, 5], &[0], &[16]] {
        prove("silu", &silu_of, &[sizes]);
    }
}

#[test]
fn matmul_add_relu_has_the_right_gradients() {
    let _serial = serially();
    for [m, k, n] in [[3, 4, 5], [1, 1, 1], [16, 16, 16], [0, 3, 2], [2, 0, 3]] {
        prove("matmul_add_relu", &product_of, &[&[m, k], &[k, n], &[n]]);
    }
}

/// Values and gradients of an operator and of what it is equivalent to.
fn agree(operator: Operator<'_>, reference: Operator<'_>, inputs: &[Tensor], what: &str) {
    let kind = inputs[0].kind();
    let run = |operator: Operator<'_>, kind: Kind| {
        // Of the same kind, these are the inputs' own memory and strides.
        let leaves: Vec<Tensor> = inputs
            .iter()
            .map(|input| input.to_kind(kind).detach().set_requires_grad(true))
            .collect();
        let output = operator(&leaves).unwrap_or_else(|error| panic!("{what}: {error}"));
        let output = output.into_iter().next().expect("an output");
        output.sum(Kind::Double).backward();
        let gradients: Vec<Tensor> = leaves.iter().map(Tensor::grad).collect();
        (output.detach(), gradients)
    };
    let (found, found_gradients) = run(operator, kind);
    let (expected, gradients) = run(reference, Kind::Double);
    let (rtol, atol) = match kind {
        Kind::Double => (1e-10, 1e-10),
        Kind::Float => (1e-4, 1e-4),
        kind => {
            let (rtol, atol) = tolerance(kind);
            (rtol * 4.0, atol * 4.0)
        }
    };
    assert_close(&found.to_kind(Kind::Double), &expected, rtol, atol);
    // An element next to 0 may be cut off in one and not in the other: gradients are compared for
    // the exact kinds.
    if matches!(kind, Kind::Double) || inputs.len() == 1 {
        for (found, expected) in found_gradients.iter().zip(&gradients) {
            assert_close(&found.to_kind(Kind::Double), expected, rtol, atol);
        }
    }
}

#[test]
fn silu_of_all_sizes_and_kinds() {
    let _serial = serially();
    tch::manual_seed(4);
    let reference = |inputs: &[Tensor]| Ok(vec![inputs[0].f_silu()?]);
    for device in devices() {
        for kind in KINDS {
            for n in [0, 1, 15, 16, 1023, 1024, 1025, 1032, 4096, 100_001] {
                let x = random(&[n + 1], kind, device) * 4.0;
                let what = format!("silu of {n} {kind:?} on {device:?}");
                agree(&silu_of, &reference, &[x.narrow(0, 0, n).copy()], &what);
                // An address that is aligned to its elements only.
                agree(&silu_of, &reference, &[x.narrow(0, 1, n)], &format!("{what}, misaligned"));
            }
            let x = random(&[33, 65], kind, device);
            agree(&silu_of, &reference, &[x.transpose(0, 1)], "silu of a transposed matrix");
            // Its memory has the other sign.
            agree(&silu_of, &reference, &[x.internal_neg_view()], "silu of a pending negation");
        }
    }
}

#[test]
fn matmul_add_relu_of_all_sizes_and_kinds() {
    let _serial = serially();
    tch::manual_seed(5);
    let reference =
        |inputs: &[Tensor]| Ok(vec![inputs[0].f_matmul(&inputs[1])?.f_add(&inputs[2])?.f_relu()?]);
    let sizes = [
        [1, 1, 1],
        [3, 5, 7],
        [16, 16, 16],
        [128, 64, 128],
        [256, 512, 384],
        [127, 65, 129],
        [144, 80, 272],
        [200, 1000, 33],
        // Rows of 16 bytes, and any number of them.
        [1, 8, 8],
        [65, 72, 1032],
        // More large tiles than a GPU has multiprocessors, and two bands of them.
        [1100, 72, 2056],
    ];
    for device in devices() {
        for kind in KINDS {
            for [m, k, n] in sizes {
                let inputs = [[m, k], [k, n]].map(|size| random(&size, kind, device));
                let [x, y] = inputs;
                let bias = random(&[n], kind, device);
                let what = format!("{m} {k} {n} {kind:?} on {device:?}");
                agree(&product_of, &reference, &[x.copy(), y.copy(), bias.copy()], &what);
                let negated = [x.internal_neg_view(), y.copy(), bias.internal_neg_view()];
                agree(&product_of, &reference, &negated, &format!("{what}, negated"));
                // A base address that is aligned to elements only, and a transposed operand.
                let shifted = Tensor::zeros([m * k + 1], (kind, device));
                let shifted = shifted.narrow(0, 1, m * k).view([m, k]);
                shifted.shallow_clone().copy_(&x);
                let y = y.transpose(0, 1).contiguous().transpose(0, 1);
                agree(&product_of, &reference, &[shifted, y, bias], &format!("{what}, shifted"));
            }
        }
    }
}

#[test]
fn nan_stays_nan() {
    let _serial = serially();
    for device in devices() {
        for kind in KINDS {
            for n in [5, 32] {
                let x = Tensor::ones([n, n], (kind, device));
                let _ = x.get(1).get(2).fill_(f64::NAN);
                let y = silu(&x).expect("silu");
                assert_eq!(i64::try_from(y.isnan().sum(Kind::Int64)).expect("a number"), 1);
                let bias = Tensor::ones([n], (kind, device)) * -1e4;
                let z = matmul_add_relu(&x, &x, &bias).expect("a product");
                let nans = z.isnan();
                // Row 1 and column 2 of the product.
                let count = i64::try_from(nans.sum(Kind::Int64)).expect("a number");
                assert_eq!(count, 2 * n - 1, "{kind:?} {n}");
                let zeros = i64::try_from(z.eq(0.0).sum(Kind::Int64)).expect("a number");
                assert_eq!(zeros, n * n - count, "{kind:?} {n}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let float = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let says = |start: &str, result: Result<Tensor>| {
        let text = result.expect_err("it was accepted").to_string();
        assert!(text.starts_with(start) && !text.contains('\n'), "{text}");
    };
    says("silu: x: expected f64", silu(&Tensor::zeros([2], (Kind::Int64, Device::Cpu))));
    let (x, y, bias) = (float(&[2, 3]), float(&[3, 4]), float(&[4]));
    says("matmul_add_relu: x: expected [M, K]", matmul_add_relu(&bias, &y, &bias));
    says("matmul_add_relu: y: expected [3, N]", matmul_add_relu(&x, &x, &bias));
    says("matmul_add_relu: bias: expected [4]", matmul_add_relu(&x, &y, &float(&[3])));
    says("matmul_add_relu: y: ", matmul_add_relu(&x, &y.to_kind(Kind::Double), &bias));
}

/// A kernel on another stream than the current one would read what is there before the long work
/// ends.
#[test]
fn cuda_kernels_wait_for_the_current_stream() {
    let Some(device) = cuda_or_skip("cuda_kernels_wait_for_the_current_stream") else { return };
    let _serial = serially();
    prepare(Kind::Float, device).expect("images");
    let big = Tensor::ones([4096, 4096], (Kind::Float, device)) / 4096.0;
    let x = Tensor::zeros([4096, 4096], (Kind::Float, device));
    let expected = (&big * 1.0).silu();
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
    assert!(!side.is_idle().expect("is_idle"), "the work was not long");
    drop(guard);
    side.synchronize().expect("done");
    assert_close(&y, &expected, 1e-3, 1e-6);
}

#[test]
fn cuda_a_training_step_is_captured() {
    let Some(device) = cuda_or_skip("cuda_a_training_step_is_captured") else { return };
    let _serial = serially();
    prepare(Kind::Float, device).expect("images");
    tch::manual_seed(6);
    let x = random(&[48, 32], Kind::Float, device);
    let y = random(&[32, 64], Kind::Float, device).set_requires_grad(true);
    let bias = random(&[64], Kind::Float, device).set_requires_grad(true);
    let step = || -> Result<Vec<Tensor>> {
        let z = silu(&matmul_add_relu(&x, &y, &bias)?)?;
        let mut results = Tensor::run_backward(&[z.sum(Kind::Float)], &[&y, &bias], false, false);
        results.push(z.detach());
        Ok(results)
    };
    let _warm = step().expect("a step");
    let (graph, results) = Graph::capture(device, step).expect("captured");
    for seed in [7, 8] {
        tch::manual_seed(seed);
        x.shallow_clone().copy_(&random(&[48, 32], Kind::Float, device));
        graph.replay().expect("replayed");
        let results: Vec<Tensor> = results.iter().map(Tensor::copy).collect();
        for (found, expected) in results.iter().zip(&step().expect("a step")) {
            assert_close(found, expected, 0.0, 0.0);
        }
    }
}

#[test]
fn cuda_a_thousand_calls_need_no_memory() {
    let Some(device) = cuda_or_skip("cuda_a_thousand_calls_need_no_memory") else { return };
    let _serial = serially();
    let x = random(&[256, 256], Kind::Half, device).set_requires_grad(true);
    let bias = random(&[256], Kind::Half, device);
    let run = |times: usize| {
        for _ in 0..times {
            let y = silu(&matmul_add_relu(&x, &x, &bias).expect("a product")).expect("silu");
            y.sum(Kind::Float).backward();
        }
        synchronize(device).expect("done");
        memory_stats(device).expect("statistics").allocated
    };
    let first = run(10);
    assert_eq!(run(1000), first);
}
