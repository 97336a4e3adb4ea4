//! The ways in which a product is computed on CUDA: by a plan of cuBLASLt's, by the kernel for small products, and by
//! libtorch.

use super::*;
use tch_extension::cuda::Graph;
use tch_extension::ops::{ProductPath, f_linear_by, product_plans};
use tch_extension::testing::{cuda_or_skip, gradcheck};

const WAYS: [ProductPath; 3] = [ProductPath::Plan, ProductPath::Small, ProductPath::Composite];

fn by(way: ProductPath) -> impl Fn(&[Tensor]) -> Result<Vec<Tensor>> {
    move |arguments| {
        let output = match arguments {
            [x, w, b] => f_linear_by(way, x, w, Some(b)),
            [x, w] => f_linear_by(way, x, w, None),
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

/// Negative sums stay, which they would not in the plan of the same product with a ReLU.
#[test]
fn cuda_one_kernel_with_a_plan_that_is_kept() {
    let Some(device) = cuda_or_skip("cuda_one_kernel_with_a_plan_that_is_kept") else { return };
    let options = (Kind::Float, device);
    let (x, w, b) = (
        Tensor::ones([3, 64, 128], options),
        Tensor::full([512, 128], -1.0, options),
        Tensor::full([512], 0.5, options),
    );
    let before = product_plans();
    for _ in 0..2 {
        let (graph, output) =
            Graph::capture(device, || f_linear_by(ProductPath::Plan, &x, &w, Some(&b))).expect("a graph");
        assert_eq!((graph.kernels(), graph.other_nodes()), (1, 0));
        graph.replay().expect("a replay");
        assert!(output.equal(&Tensor::full([3, 64, 512], -127.5, options)));
    }
    let after = product_plans();
    assert_eq!((after.misses - before.misses, after.hits - before.hits), (1, 1));
}
