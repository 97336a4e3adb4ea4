//! Tests of each way in which a product is computed on CUDA: by a cuBLASLt plan, by our kernels for
//! small and for narrow products, with padded copies, and by libtorch.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::Graph;
use tch_extension::ops::{ProductWay, f_linear, force, product_plans};
use tch_extension::testing::{cuda_or_skip, gradcheck};

const WAYS: [ProductWay; 5] = [
    ProductWay::Plan,
    ProductWay::Small,
    ProductWay::Skinny,
    ProductWay::Padded,
    ProductWay::Composite,
];

fn by(way: ProductWay) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |arguments| {
        let output = match arguments {
            [x, w, b] => force(way, || f_linear(x, w, Some(b))),
            [x, w] => force(way, || f_linear(x, w, None)),
            _ => unreachable!("two or three arguments"),
        }?;
        Ok(vec![output])
    }
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

/// Negative sums must stay negative. The plan of the same product with a ReLU would make them zero.
#[test]
fn cuda_one_kernel_with_a_plan_that_is_kept() {
    let Some(device) = caching_or_skip("cuda_one_kernel_with_a_plan_that_is_kept") else { return };
    let options = (Kind::Float, device);
    let (x, w, b) = (
        Tensor::ones([3, 64, 128], options),
        Tensor::full([512, 128], -1.0, options),
        Tensor::full([512], 0.5, options),
    );
    // libtorch cannot create a thread's cuBLAS handle during a capture.
    drop(w.matmul(&w.tr()));
    let before = product_plans();
    for _ in 0..2 {
        let (graph, output) =
            Graph::capture(device, || force(ProductWay::Plan, || f_linear(&x, &w, Some(&b))))
                .expect("a graph");
        assert_eq!((graph.kernels(), graph.other_nodes()), (1, 0));
        graph.replay().expect("a replay");
        assert!(output.equal(&Tensor::full([3, 64, 512], -127.5, options)));
    }
    let after = product_plans();
    assert_eq!((after.misses - before.misses, after.hits - before.hits), (1, 1));
}

/// The products of the forward and the backward pass have different layouts. All must be as
/// accurate as libtorch's.
#[test]
fn cuda_half_kinds_and_others_are_right_at_sizes_nobody_chose() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_and_others_are_right_at_sizes_nobody_chose")
    else {
        return;
    };
    for (m, k, n) in [
        (1, 431, 93),
        (6, 973, 1),
        (2, 77, 130),
        (65, 33, 131),
        (1001, 419, 233),
        (64, 53, 48),
        (8, 104, 48),
        (8, 2056, 4300),
        (5, 264, 17),
        (7, 4104, 33),
    ] {
        for kind in KINDS {
            let normal =
                |size: &[i64], scale: f64| Tensor::randn(size, (Kind::Float, device)) * scale;
            let inner = 1.0 / (k as f64).sqrt();
            let values = [
                normal(&[m, k], 1.0),
                normal(&[n, k], inner),
                normal(&[n], 1.0),
                normal(&[m, n], 1.0),
            ]
            .map(|tensor| tensor.to_kind(kind));
            let all = |way: ProductWay, kind: Kind| {
                let leaves = values
                    .each_ref()
                    .map(|tensor| tensor.to_kind(kind).detach().set_requires_grad(true));
                let [x, w, b, vector] = &leaves;
                let output = force(way, || f_linear(x, w, Some(b))).expect("output");
                let vector = vector.detach();
                let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
                let gradients =
                    grad(&[&output], &[x, w, b], &options).expect("gradients").into_vec();
                let mut all = vec![output.detach()];
                all.extend(gradients.into_iter().flatten());
                all.into_iter().map(|tensor| tensor.to_kind(Kind::Double)).collect::<Vec<_>>()
            };
            let exact = all(ProductWay::Composite, Kind::Double);
            let apart = |way: ProductWay| -> Vec<f64> {
                let of =
                    |(found, exact): (&Tensor, &Tensor)| (found - exact).norm().double_value(&[]);
                all(way, kind).iter().zip(&exact).map(of).collect()
            };
            let theirs = apart(ProductWay::Composite);
            for way in [ProductWay::Automatic, ProductWay::Skinny, ProductWay::Padded] {
                for ((ours, theirs), exact) in apart(way).into_iter().zip(&theirs).zip(&exact) {
                    let rounding = if kind == Kind::Double { 1e-14 } else { 1e-6 };
                    let allowed = 1.3 * theirs + rounding * exact.norm().double_value(&[]);
                    assert!(
                        ours <= allowed,
                        "{:?} {kind:?} {way:?}: {ours} > {allowed}",
                        (m, k, n)
                    );
                }
            }
        }
    }
}

#[test]
fn each_way_gives_the_same_sizes_kinds_strides_and_memory() {
    let ways = [ProductWay::Automatic].into_iter().chain(WAYS).collect::<Vec<_>>();
    let sizes: [&[&[i64]]; 12] = [
        &[&[6, 4], &[5, 4], &[5]],
        &[&[6, 4], &[5, 4]],
        &[&[4], &[5, 4], &[5]],
        &[&[2, 3, 4], &[5, 4], &[5]],
        &[&[2, 3, 4], &[5, 4]],
        &[&[2, 1, 1], &[5, 1], &[5]],
        &[&[1, 4], &[1, 4], &[1]],
        &[&[3, 2, 4], &[1, 4], &[1]],
        &[&[2, 0, 4], &[5, 4], &[5]],
        &[&[6, 0], &[5, 0], &[5]],
        &[&[6, 4], &[0, 4], &[0]],
        &[&[3, 40, 33], &[65, 33], &[65]],
    ];
    support::alike::assert_alike(&ways, &sizes, |way, arguments| by(way)(arguments));
}
