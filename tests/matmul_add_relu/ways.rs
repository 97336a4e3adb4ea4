//! Tests of each way in which a product is computed on CUDA: by a cuBLASLt plan, by the kernel for
//! small products, by the kernel for Hopper (more in `hopper`), by the ways for any size (more in
//! `sizes`), and by libtorch with a kernel of ours after it.

use super::*;
use patterns::noise;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{Graph, Stream, StreamGuard};
use tch_extension::cuda::{matmul_allow_tf32, set_matmul_allow_tf32};
use tch_extension::ops::{ProductWay, f_matmul_add_relu, force, product_plans};
use tch_extension::testing::{cuda_or_skip, gradcheck};

const WAYS: [ProductWay; 7] = [
    ProductWay::Plan,
    ProductWay::Small,
    ProductWay::Hopper,
    ProductWay::Skinny,
    ProductWay::Padded,
    ProductWay::Pass,
    ProductWay::Composite,
];

fn by(way: ProductWay) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |arguments| {
        let [lhs, rhs, bias] = arguments else { unreachable!("three arguments") };
        Ok(vec![force(way, || f_matmul_add_relu(lhs, rhs, bias))?])
    }
}

pub fn one(way: ProductWay, arguments: &[Tensor]) -> Tensor {
    by(way)(arguments).expect("output").remove(0)
}

pub fn inputs([lhs, rhs, bias]: [&[i64]; 3], kind: Kind, device: Device) -> [Tensor; 3] {
    let inner = lhs[lhs.len() - 1] as f64;
    [noise(lhs, 0) / inner.sqrt(), noise(rhs, 1), noise(bias, 2)]
        .map(|tensor| tensor.to_kind(kind).to_device(device))
}

/// The number of kernels that a way takes, counted in a capture.
pub fn kernels(way: ProductWay, arguments: &[Tensor], device: Device) -> usize {
    // The first call makes cuBLAS' handle, which cannot be made during a capture.
    drop(one(way, arguments));
    let (graph, _) = Graph::capture(device, || by(way)(arguments)).expect("a graph");
    assert_eq!(graph.other_nodes(), 0);
    graph.kernels()
}

#[test]
fn cuda_half_kinds_and_others_agree_with_the_reference_by_each_way() {
    if cuda_or_skip("cuda_half_kinds_and_others_agree_with_the_reference_by_each_way").is_none() {
        return;
    }
    for way in WAYS {
        let fused = by(way);
        Suite { fused: &fused, ..suite() }.forward_agrees_with_the_reference();
    }
}

#[test]
fn cuda_gradcheck_by_each_way() {
    let Some(device) = cuda_or_skip("cuda_gradcheck_by_each_way") else { return };
    for way in WAYS {
        for sample in small(Kind::Double, device) {
            let leaves = sample.leaves().expect("leaves");
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            gradcheck(by(way), &inputs, &Default::default())
                .unwrap_or_else(|error| panic!("{} by {way:?}: {error}", sample.name));
        }
    }
}

/// The whole operator is one kernel, whatever is broadcast. Otherwise this would be the composite
/// under another name.
#[test]
fn cuda_half_kinds_and_others_take_one_kernel() {
    let Some(device) = caching_or_skip("cuda_half_kinds_and_others_take_one_kernel") else {
        return;
    };
    let by_plan: [[&[i64]; 3]; 9] = [
        [&[256, 64], &[64, 512], &[512]],
        [&[256, 64], &[64, 512], &[1, 512]],
        [&[256, 64], &[64, 512], &[256, 512]],
        [&[8, 64, 64], &[8, 64, 128], &[8, 64, 128]],
        [&[8, 64, 64], &[8, 64, 128], &[8, 1, 128]],
        [&[8, 64, 64], &[8, 64, 128], &[64, 128]],
        [&[1, 64, 64], &[8, 64, 128], &[8, 64, 128]],
        [&[8, 64, 64], &[64, 128], &[128]],
        [&[4, 2, 64, 64], &[4, 2, 64, 128], &[128]],
    ];
    let small: [[&[i64]; 3]; 4] = [
        [&[1, 32, 32], &[32, 32, 32], &[32, 32, 32]],
        [&[16, 32], &[32, 128], &[16, 1]],
        [&[16, 32], &[32, 128], &[]],
        [&[16, 32], &[32, 128], &[128]],
    ];
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        for sizes in by_plan {
            let arguments = inputs(sizes, kind, device);
            assert_eq!(kernels(ProductWay::Plan, &arguments, device), 1, "{sizes:?} {kind:?}");
            assert_eq!(kernels(ProductWay::Automatic, &arguments, device), 1, "{sizes:?} {kind:?}");
        }
        for sizes in small {
            let arguments = inputs(sizes, kind, device);
            assert_eq!(kernels(ProductWay::Automatic, &arguments, device), 1, "{sizes:?} {kind:?}");
        }
        assert!(kernels(ProductWay::Composite, &inputs(by_plan[0], kind, device), device) >= 2);
    }
}

/// NaN from each input, and from infinities, must be kept. cuBLASLt proposes different families of
/// kernels for these sizes, and some of them lose NaN.
#[test]
fn cuda_half_kinds_and_others_keep_nan() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_keep_nan") else { return };
    let sizes = [
        (16, 128, 32),
        (128, 512, 512),
        (512, 512, 256),
        (256, 1024, 1024),
        (64, 512, 4096),
        (333, 777, 555),
        (1000, 1000, 1000),
        (4096, 1024, 64),
        (1, 1024, 1024),
        (7, 1000, 512),
        (333, 257, 101),
        (2, 75, 1023),
        (513, 3, 129),
    ];
    for tf32 in [false, true] {
        let before = matmul_allow_tf32().expect("a switch");
        set_matmul_allow_tf32(tf32).expect("a switch");
        for kind in KINDS {
            for (m, n, k) in sizes {
                for bias in [vec![n], vec![m, n]] {
                    let [lhs, rhs, bias] = inputs([&[m, k], &[k, n], &bias], kind, device);
                    let set = |tensor: &Tensor, at: i64, value: f64| {
                        let _ = tensor.view([-1]).narrow(0, at, 1).fill_(value);
                    };
                    set(&lhs, 1, f64::NAN);
                    set(&rhs, n / 2, f64::NAN);
                    set(&bias, n - 1, f64::NAN);
                    if m > 2 {
                        set(&lhs, 2 * k, f64::INFINITY);
                        set(&lhs, 2 * k + 1, f64::NEG_INFINITY);
                    }
                    for weight in
                        [rhs.shallow_clone(), rhs.transpose(0, 1).contiguous().transpose(0, 1)]
                    {
                        let arguments = [lhs.shallow_clone(), weight, bias.shallow_clone()];
                        let expected =
                            call(matmul_add_relu_reference, &arguments).expect("reference").isnan();
                        for way in [ProductWay::Automatic].into_iter().chain(WAYS) {
                            let found = one(way, &arguments).isnan();
                            assert!(
                                found.equal(&expected),
                                "{:?} {kind:?} {tf32} {way:?}",
                                (m, n, k)
                            );
                        }
                    }
                }
            }
        }
        set_matmul_allow_tf32(before).expect("a switch");
    }
}

#[test]
fn cuda_plans_are_kept() {
    let Some(device) = cuda_or_skip("cuda_plans_are_kept") else { return };
    let arguments = inputs([&[64, 200], &[200, 48], &[48]], Kind::Float, device);
    let made = |arguments: &[Tensor]| {
        let before = product_plans();
        let output = one(ProductWay::Plan, arguments);
        assert_close(
            &output,
            &call(matmul_add_relu_reference, arguments).expect("reference"),
            2e-2,
            2e-2,
        );
        let after = product_plans();
        assert_eq!(after.hits + after.misses, before.hits + before.misses + 1);
        after.misses - before.misses
    };
    assert_eq!([made(&arguments), made(&arguments), made(&arguments)], [1, 0, 0]);
    // A plan is also used on another stream.
    let stream = Stream::new(device).expect("a stream");
    stream.wait_stream(&Stream::current(device).expect("a stream")).expect("to wait");
    {
        let _guard = StreamGuard::new(&stream).expect("a guard");
        assert_eq!(made(&arguments), 0);
    }
    Stream::current(device).expect("a stream").wait_stream(&stream).expect("to wait");
    // Another precision, alignment, layout or size needs another plan.
    let before = matmul_allow_tf32().expect("a switch");
    set_matmul_allow_tf32(true).expect("a switch");
    let with_tf32 = [made(&arguments), made(&arguments)];
    set_matmul_allow_tf32(before).expect("a switch");
    assert_eq!(with_tf32, [1, 0]);
    assert_eq!(made(&arguments), 0);
    let [lhs, rhs, bias] = &arguments;
    let beside =
        Tensor::zeros([64 * 200 + 1], (Kind::Float, device)).narrow(0, 1, 64 * 200).view([64, 200]);
    beside.shallow_clone().copy_(lhs);
    assert_eq!(made(&[beside, rhs.shallow_clone(), bias.shallow_clone()]), 1);
    let transposed = rhs.transpose(0, 1).contiguous().transpose(0, 1);
    assert_eq!(made(&[lhs.shallow_clone(), transposed, bias.shallow_clone()]), 1);
    assert_eq!(made(&[lhs.narrow(0, 0, 63), rhs.shallow_clone(), bias.shallow_clone()]), 1);
    // Each thread has plans of its own.
    let inputs = inputs([&[64, 200], &[200, 48], &[48]], Kind::Float, device);
    let other = std::thread::spawn(move || {
        let output = one(ProductWay::Plan, &inputs);
        (product_plans(), output)
    });
    let (plans, output) = other.join().expect("a thread");
    assert_eq!((plans.hits, plans.misses, plans.plans), (0, 1, 1));
    assert!(output.equal(&one(ProductWay::Plan, &arguments)));
}

/// Sizes that change all the time must not fill the memory with plans.
#[test]
fn cuda_plans_are_not_kept_forever() {
    let Some(device) = cuda_or_skip("cuda_plans_are_not_kept_forever") else { return };
    let [lhs, rhs, bias] = inputs([&[700, 160], &[160, 8], &[8]], Kind::Float, device);
    for rows in 1..=700 {
        let _ = one(
            ProductWay::Plan,
            &[lhs.narrow(0, 0, rows), rhs.shallow_clone(), bias.shallow_clone()],
        );
        assert!(product_plans().plans <= 512);
    }
    assert_eq!(product_plans().misses, 700);
    assert!(product_plans().plans > 0);
}

/// The first call of a shape is captured: choosing a kernel launches nothing, and the workspace
/// belongs to the graph.
#[test]
fn cuda_a_plan_is_made_while_a_graph_is_captured() {
    let Some(device) = caching_or_skip("cuda_a_plan_is_made_while_a_graph_is_captured") else {
        return;
    };
    let arguments = inputs([&[64, 4096], &[4096, 512], &[512]], Kind::Float, device);
    // The thread must already have a cuBLAS handle, as for libtorch's own products, because
    // cublasCreate fails in a capture.
    let _ = arguments[0].matmul(&arguments[1]);
    let (graph, output) =
        Graph::capture(device, || Ok(one(ProductWay::Plan, &arguments))).expect("a graph");
    assert_eq!((product_plans().hits, product_plans().misses), (0, 1));
    let _ = output.detach().fill_(f64::NAN);
    graph.replay().expect("a replay");
    assert!(output.equal(&one(ProductWay::Plan, &arguments)));
}

/// What is saved for the backward does not depend on the way.
#[test]
fn cuda_gradients_are_the_same_by_each_way() {
    let Some(device) = cuda_or_skip("cuda_gradients_are_the_same_by_each_way") else { return };
    for sizes in [
        [&[64, 96][..], &[96, 80], &[80]],
        [&[3, 64, 96], &[96, 80], &[3, 64, 80]],
        [&[65, 97], &[97, 83], &[83]],
        [&[3, 21, 35], &[3, 35, 2], &[2]],
    ] {
        let leaves = leaves(&inputs(sizes, Kind::Double, device));
        let gradients = |way: ProductWay| {
            let output = one(way, &leaves);
            let vector = support::incoming(&output);
            let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            grad(&[&output], &inputs, &options).expect("gradients").into_vec()
        };
        let expected = gradients(ProductWay::Composite);
        for way in [ProductWay::Automatic].into_iter().chain(WAYS) {
            for (found, expected) in gradients(way).iter().zip(&expected) {
                let [Some(found), Some(expected)] = [found, expected] else {
                    panic!("a gradient is missing")
                };
                assert_close(found, expected, 1e-12, 1e-12);
            }
        }
    }
}

/// This also holds where cuBLASLt splits the inner dimension: partial sums that were added in a
/// half kind would show here. The bits must not depend on whether a gradient is wanted.
#[test]
fn cuda_half_kinds_are_no_less_exact_than_the_composite() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_are_no_less_exact_than_the_composite") else {
        return;
    };
    let sizes = [
        (64, 512, 4096),
        (16, 128, 8192),
        (128, 1024, 4096),
        (1, 1024, 1024),
        (256, 1024, 1024),
        (512, 512, 2048),
        (32, 4096, 4096),
        (64, 200, 1000),
    ];
    for kind in [Kind::Half, Kind::BFloat16] {
        for (m, n, k) in sizes {
            for bias in [vec![n], vec![m, n]] {
                let arguments = inputs([&[m, k], &[k, n], &bias], kind, device);
                let exact = arguments.each_ref().map(|argument| argument.to_kind(Kind::Double));
                let exact = call(matmul_add_relu_reference, &exact).expect("reference");
                let fused = one(ProductWay::Automatic, &arguments);
                let error = |found: &Tensor| {
                    (found.to_kind(Kind::Double) - &exact).norm().double_value(&[])
                };
                let composite = one(ProductWay::Composite, &arguments);
                let (ours, theirs) = (error(&fused), error(&composite));
                assert!(
                    ours <= 1.02 * theirs,
                    "{:?} {bias:?} {kind:?}: {ours} > {theirs}",
                    (m, n, k)
                );
                let with_graph = one(ProductWay::Automatic, &leaves(&arguments)).detach();
                assert!(with_graph.equal(&fused), "{:?} {bias:?} {kind:?}", (m, n, k));
            }
        }
    }
}

/// A plan is kept with the bias address of its first call and used with others. Calls with an
/// address that cuBLASLt's epilogue cannot handle must take another way.
#[test]
fn cuda_half_kinds_and_others_read_the_bias_that_is_given() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_read_the_bias_that_is_given")
    else {
        return;
    };
    let sizes: [[&[i64]; 3]; 5] = [
        [&[256, 64], &[64, 512], &[512]],
        [&[256, 64], &[64, 512], &[256, 512]],
        [&[1, 64], &[64, 512], &[512]],
        [&[8, 64, 64], &[8, 64, 128], &[8, 1, 128]],
        [&[8, 64, 64], &[8, 64, 121], &[8, 1, 121]],
    ];
    for kind in KINDS {
        for [lhs, rhs, bias] in sizes {
            let [lhs, rhs, values] = inputs([lhs, rhs, bias], kind, device);
            let memory = Tensor::zeros([2 * values.numel() as i64 + 64], (kind, device));
            for offset in [0, 64, 1, 65, 3, 0] {
                let placed = memory.narrow(0, offset, values.numel() as i64).view(bias);
                placed.shallow_clone().copy_(&(&values + offset as f64));
                let arguments = [lhs.shallow_clone(), rhs.shallow_clone(), placed];
                let expected = call(matmul_add_relu_reference, &arguments).expect("reference");
                let (rtol, atol) = if support::is_half(kind) { (2e-2, 2e-2) } else { (1e-4, 1e-4) };
                for way in [ProductWay::Plan, ProductWay::Hopper, ProductWay::Automatic] {
                    assert_close(&one(way, &arguments), &expected, rtol, atol);
                }
            }
        }
    }
}

/// A factor that a batch shares costs one additional sum and no copies. libtorch's product makes
/// two copies of the whole batch when such a factor requires grad.
#[test]
fn cuda_half_kinds_and_others_copy_nothing_for_a_shared_factor() {
    let name = "cuda_half_kinds_and_others_copy_nothing_for_a_shared_factor";
    let Some(device) = caching_or_skip(name) else { return };
    for kind in [Kind::Float, Kind::Half, Kind::BFloat16] {
        for shared in [&[1, 64, 48][..], &[64, 48]] {
            let kernels = |lhs: &[i64]| {
                let leaves = leaves(&inputs([lhs, &[8, 48, 96], &[8, 64, 96]], kind, device));
                let forward_and_backward = || {
                    let output = one(ProductWay::Automatic, &leaves);
                    let vector = output.detach();
                    let options =
                        GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                    grad(&[&output], &leaves.iter().collect::<Vec<_>>(), &options)
                };
                // A thread's first cuBLAS handle cannot be created in a capture.
                forward_and_backward().expect("gradients");
                let (graph, _) = Graph::capture(device, forward_and_backward).expect("a graph");
                graph.kernels()
            };
            let (one_each, shared) = (kernels(&[8, 64, 48]), kernels(shared));
            assert!(
                shared <= one_each + 1,
                "{kind:?}: {shared} kernels, {one_each} with one for each"
            );
        }
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let ways = [ProductWay::Automatic].into_iter().chain(WAYS).collect::<Vec<_>>();
    let sizes: [&[&[i64]]; 26] = [
        &[&[6, 4], &[4, 5], &[5]],
        &[&[6, 4], &[4, 5], &[6, 5]],
        &[&[6, 4], &[4, 5], &[6, 1]],
        &[&[6, 4], &[4, 5], &[]],
        &[&[6, 4], &[4, 5], &[2, 1, 5]],
        &[&[4], &[4, 5], &[5]],
        &[&[6, 4], &[4], &[6]],
        &[&[4], &[4], &[1]],
        &[&[4], &[2, 4, 5], &[5]],
        &[&[2, 6, 4], &[4], &[6]],
        // A batch in both factors, in one of them, and of different parts in each.
        &[&[3, 6, 4], &[3, 4, 5], &[5]],
        &[&[3, 6, 4], &[4, 5], &[3, 6, 5]],
        &[&[6, 4], &[3, 4, 5], &[3, 1, 5]],
        &[&[3, 1, 6, 4], &[2, 4, 5], &[2, 6, 5]],
        &[&[1, 6, 4], &[3, 4, 5], &[5]],
        // Sizes of 1, for whose strides libtorch has several conventions.
        &[&[1, 4], &[4, 1], &[1]],
        &[&[1, 4], &[3, 4, 5], &[5]],
        &[&[6, 4], &[3, 4, 1], &[1]],
        &[&[3, 6, 1], &[1, 5], &[5]],
        &[&[3, 1, 4], &[3, 4, 1], &[1]],
        // Nothing to multiply, or nothing to sum.
        &[&[0, 4], &[4, 5], &[5]],
        &[&[6, 0], &[0, 5], &[5]],
        &[&[3, 6, 4], &[3, 4, 0], &[0]],
        // Sizes for which the CPU has a product of this crate.
        &[&[33, 40], &[40, 72], &[72]],
        &[&[3, 33, 40], &[3, 40, 72], &[72]],
        &[&[33, 40], &[3, 40, 16], &[3, 1, 16]],
    ];
    support::alike::assert_alike(&ways, &sizes, |way, arguments| by(way)(arguments));
}
