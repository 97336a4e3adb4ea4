//! Tests of the kernel for Hopper: tiles at the edges, everything that a batch can share, and cases
//! that take another way.

use super::ways::{inputs, kernels, one};
use super::*;
use std::io::Write;
use support::gpu::{caching_or_skip, has_caching_allocator};
use tch_extension::cuda::{Graph, Stream, StreamGuard};
use tch_extension::ops::{ProductWay, product_plans};
use tch_extension::testing::cuda_or_skip;

const HALVES: [Kind; 2] = [Kind::Half, Kind::BFloat16];

/// Whether this GPU and this build have the kernel; elsewhere the same calls take another way.
fn has_kernel() -> bool {
    let has = support::gpu::is_built_for_hopper() && support::gpu::is_hopper();
    if !has {
        let _ = std::io::stderr().write_all(
            b"SKIPPED: whether the kernel for Hopper is taken; it is not for this GPU\n",
        );
    }
    has
}

/// The result in f64, rounded once.
fn expected(arguments: &[Tensor]) -> Tensor {
    let exact: Vec<Tensor> =
        arguments.iter().map(|argument| argument.to_kind(Kind::Double)).collect();
    call(matmul_add_relu_reference, &exact).expect("reference").to_kind(arguments[0].kind())
}

/// A column-major copy, the layout of the weight in libtorch's linear.
fn by_columns(tensor: &Tensor) -> Tensor {
    tensor.transpose(-2, -1).contiguous().transpose(-2, -1)
}

fn assert_right(arguments: &[Tensor], found: &Tensor) {
    // Sums in f32 may round to the neighbouring value.
    let rtol = if found.kind() == Kind::Half { 2e-3 } else { 1e-2 };
    assert_close(found, &expected(arguments), rtol, 1e-3);
}

#[test]
fn cuda_half_kinds_agree_with_the_reference_by_hopper() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_agree_with_the_reference_by_hopper") else {
        return;
    };
    let has_kernel = has_kernel() && has_caching_allocator();
    let sizes: [[&[i64]; 3]; 10] = [
        [&[128, 64], &[64, 128], &[128, 128]],
        [&[8, 8], &[8, 8], &[8, 8]],
        [&[3, 200, 136], &[3, 136, 328], &[3, 200, 328]],
        [&[1, 200, 136], &[3, 136, 328], &[3, 200, 328]],
        [&[3, 200, 136], &[1, 136, 328], &[3, 200, 328]],
        [&[3, 200, 136], &[3, 136, 328], &[1, 200, 328]],
        [&[2, 2, 72, 64], &[2, 2, 64, 136], &[2, 2, 72, 136]],
        // A long K; more tiles than the GPU has multiprocessors, and three times as many.
        [&[2, 9, 4096], &[2, 4096, 136], &[2, 9, 136]],
        [&[25, 300, 72], &[25, 72, 264], &[25, 300, 264]],
        [&[200, 130, 200], &[200, 200, 40], &[200, 130, 40]],
    ];
    for kind in HALVES {
        for sizes in sizes {
            let [lhs, rhs, bias] = inputs(sizes, kind, device);
            for rhs in [rhs.shallow_clone(), by_columns(&rhs)] {
                let arguments = [lhs.shallow_clone(), rhs, bias.shallow_clone()];
                let found = one(ProductWay::Hopper, &arguments);
                assert_right(&arguments, &found);
                assert!(found.equal(&one(ProductWay::Hopper, &arguments)), "{sizes:?} {kind:?}");
                if has_kernel {
                    assert_eq!(
                        kernels(ProductWay::Hopper, &arguments, device),
                        1,
                        "{sizes:?} {kind:?}"
                    );
                }
            }
        }
        // These are parts of larger matrices.
        let [lhs, rhs, bias] =
            inputs([&[3, 210, 160], &[3, 150, 400], &[3, 220, 336]], kind, device);
        let arguments = [
            lhs.narrow(1, 3, 200).narrow(2, 8, 136),
            rhs.narrow(1, 5, 136).narrow(2, 16, 328),
            bias.narrow(1, 20, 200).narrow(2, 8, 328),
        ];
        assert_right(&arguments, &one(ProductWay::Hopper, &arguments));
        assert!(!has_kernel || kernels(ProductWay::Hopper, &arguments, device) == 1);
    }
}

#[test]
fn cuda_half_kinds_keep_nan_by_hopper() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_keep_nan_by_hopper") else { return };
    for kind in HALVES {
        let [lhs, rhs, bias] =
            inputs([&[2, 200, 136], &[2, 136, 328], &[2, 200, 328]], kind, device);
        let set = |tensor: &Tensor, at: [i64; 3], value: f64| {
            let _ = tensor.get(at[0]).get(at[1]).get(at[2]).fill_(value);
        };
        set(&lhs, [0, 5, 135], f64::NAN);
        set(&rhs, [1, 3, 9], f64::INFINITY);
        set(&rhs, [1, 4, 9], f64::NEG_INFINITY);
        set(&bias, [1, 199, 327], f64::NAN);
        set(&bias, [1, 150, 300], f64::INFINITY);
        set(&bias, [0, 150, 200], f64::NEG_INFINITY);
        let arguments = [lhs, rhs, bias];
        let found = one(ProductWay::Hopper, &arguments);
        let expected = expected(&arguments);
        assert!(found.isnan().equal(&expected.isnan()), "{kind:?}");
        assert!(found.isinf().equal(&expected.isinf()), "{kind:?}");
        assert!(
            found.isnan().any().int64_value(&[]) == 1 && found.isinf().any().int64_value(&[]) == 1
        );
    }
}

/// The default way is this kernel where it was measured to be the fastest: on any stream, and in a
/// graph that is replayed with other numbers.
#[test]
fn cuda_half_kinds_are_fastest_by_hopper() {
    let Some(device) = caching_or_skip("cuda_half_kinds_are_fastest_by_hopper") else { return };
    let asked_plans = || product_plans().hits + product_plans().misses;
    for kind in HALVES {
        let arguments = inputs([&[8, 1024, 512], &[8, 512, 1024], &[8, 1024, 1024]], kind, device);
        let before = asked_plans();
        let stream = Stream::new(device).expect("a stream");
        stream.wait_stream(&Stream::current(device).expect("a stream")).expect("to wait");
        let found = {
            let _guard = StreamGuard::new(&stream).expect("a guard");
            one(ProductWay::Automatic, &arguments)
        };
        Stream::current(device).expect("a stream").wait_stream(&stream).expect("to wait");
        assert_right(&arguments, &found);
        assert!(!has_kernel() || asked_plans() == before, "{kind:?}: by a plan");
        let (graph, output) =
            Graph::capture(device, || Ok(one(ProductWay::Automatic, &arguments))).expect("a graph");
        assert_eq!((graph.kernels(), graph.other_nodes()), (1, 0));
        let _ = arguments[2].shallow_clone().neg_();
        graph.replay().expect("a replay");
        assert!(!output.equal(&found));
        assert_right(&arguments, &output);
        // The kernel is slower for rows that do not begin at a cache line, so another way is taken.
        let arguments = inputs([&[8, 1000, 512], &[8, 512, 1000], &[8, 1000, 1000]], kind, device);
        let before = asked_plans();
        let _ = one(ProductWay::Automatic, &arguments);
        assert_eq!(asked_plans(), before + 1);
    }
}

/// The driver function that describes the matrices needs a context, which nothing has set in a new
/// thread.
#[test]
fn cuda_half_kinds_in_a_new_thread_by_hopper() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_in_a_new_thread_by_hopper") else { return };
    let arguments =
        inputs([&[8, 1024, 512], &[8, 512, 1024], &[8, 1024, 1024]], Kind::Half, device);
    let found = one(ProductWay::Automatic, &arguments);
    // This leaves free memory in the cache, so that the thread's output needs no allocation from
    // CUDA.
    drop(one(ProductWay::Automatic, &arguments));
    let first_work_of_a_thread = std::thread::spawn(move || {
        let found = one(ProductWay::Automatic, &arguments);
        (found, product_plans().misses)
    });
    let (again, plans) = first_work_of_a_thread.join().expect("the thread");
    assert!(again.equal(&found));
    assert!(!has_kernel() || plans == 0, "by a plan");
}

#[test]
fn cuda_half_kinds_and_others_go_elsewhere_than_hopper() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_go_elsewhere_than_hopper") else {
        return;
    };
    let elsewhere = |arguments: &[Tensor], what: &str| {
        assert_close(&one(ProductWay::Hopper, arguments), &expected(arguments), 2e-2, 2e-2);
        if has_caching_allocator() {
            assert!(kernels(ProductWay::Hopper, arguments, device) > 1, "{what}");
        }
    };
    for (sizes, what) in [
        ([&[64, 72][..], &[72, 136], &[136]], "a row"),
        ([&[64, 72], &[72, 136], &[64, 1]], "a column"),
        ([&[64, 72], &[72, 132], &[64, 132]], "rows of 264 bytes"),
        ([&[64, 68], &[68, 136], &[64, 136]], "rows of 136 bytes"),
        ([&[1, 72], &[72, 136], &[1, 136]], "one row"),
    ] {
        elsewhere(&inputs(sizes, Kind::Half, device), what);
    }
    let sizes: [&[i64]; 3] = [&[64, 72], &[72, 136], &[64, 136]];
    elsewhere(&inputs(sizes, Kind::Float, device), "another kind");
    let [lhs, rhs, bias] = inputs(sizes, Kind::Half, device);
    elsewhere(&[by_columns(&lhs), rhs.shallow_clone(), bias.shallow_clone()], "lhs by columns");
    let beside =
        Tensor::zeros([64 * 72 + 1], (Kind::Half, device)).narrow(0, 1, 64 * 72).view([64, 72]);
    beside.shallow_clone().copy_(&lhs);
    elsewhere(&[beside, rhs, bias], "an address that is no multiple of 16 bytes");
}
