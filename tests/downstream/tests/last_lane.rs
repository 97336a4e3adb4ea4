//! Tests that gradcheck detects a kernel that omits its last lane.

use downstream::cube::cube;
use tch::{Kind, Tensor};
use tch_extension::testing::{conformance, devices, gradcheck};

/// Whole vectors on every machine, one element more than that, and fewer than a vector.
const SIZES: [i64; 5] = [1, 2, 5, 16, 17];

fn leaf(size: i64, device: tch::Device) -> Tensor {
    (Tensor::rand([size], (Kind::Double, device)) + 0.5).set_requires_grad(true)
}

#[test]
fn the_whole_kernel_passes() {
    for device in devices() {
        for size in SIZES {
            let x = leaf(size, device);
            gradcheck(|inputs| cube(&inputs[0], false), &[&x], &Default::default())
                .expect("a right kernel");
        }
        conformance(
            |inputs| cube(&inputs[0].contiguous(), false),
            &[&leaf(17, device)],
            &Default::default(),
        )
        .expect("an operator that keeps to the rules");
    }
}

#[test]
fn a_forgotten_last_lane_is_named() {
    for device in devices() {
        for size in SIZES {
            let x = leaf(size, device);
            let result = gradcheck(|inputs| cube(&inputs[0], true), &[&x], &Default::default());
            let error = result.expect_err("the last gradient is missing").to_string();
            let last = size - 1;
            let place = format!(
                "at row {last} (output element [{last}]), column {last} (input element [{last}])"
            );
            assert!(error.contains("the gradient is wrong") && error.contains(&place), "{error}");
            assert!(error.contains("; 1 of "), "only there: {error}");
        }
    }
}
