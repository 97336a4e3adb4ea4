//! Tests that need a GPU.

use super::*;
use crate::persistent::Tf32;
use support::gpu::caching_or_skip;
use tch_extension::cuda::Graph;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_agrees_with_the_cpu() {
    suite_of(&fused).cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu");
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    suite_of(&fused).cuda_half_kinds_agree_with_the_cpu("cuda_half_kinds_agree_with_the_cpu");
}

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    for (index, name) in ["weight", "bias", "h", "c"].iter().enumerate() {
        let mut arguments = one([3, 2, 4, 3], Kind::Float, device).inputs;
        arguments[index + 1] = arguments[index + 1].to_device(Device::Cpu);
        let error = call(f_lltm, &arguments).expect_err("mixed devices").to_string();
        assert!(
            error.starts_with(&format!("lltm: {name}: expected device Cuda(0), as input, got Cpu")),
            "{error}"
        );
    }
}

/// Compares the outputs and gradients of one way with exact ones. There are few steps and few rows,
/// so that a sanitizer needs only seconds. The sizes have whole vectors and parts, one row, and
/// rows and columns beyond a tile of each kernel.
fn assert_agrees_with_the_exact(
    sequence: support::Operator<'_>,
    sizes: [i64; 4],
    kind: Kind,
    device: Device,
) {
    let bound = if support::is_half(kind) { 3e-2 } else { 1e-5 };
    assert_agrees_within(bound, sequence, &one(sizes, kind, device).inputs);
}

fn assert_agrees_within(bound: f64, sequence: support::Operator<'_>, inputs: &[Tensor]) {
    let exact: Vec<Tensor> = inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
    let results = |sequence: support::Operator<'_>, inputs: &[Tensor]| -> Vec<Tensor> {
        let leaves = leaves(inputs);
        let outputs = sequence(&leaves).expect("outputs");
        let loss = (outputs[0].sum(Kind::Double) + outputs[2].sum(Kind::Double))
            / inputs[0].size()[0] as f64;
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let gradients = grad(&[&loss], &inputs, &GradOptions::default()).expect("gradients");
        outputs
            .iter()
            .map(Tensor::detach)
            .chain(gradients.into_vec().into_iter().flatten())
            .collect()
    };
    for (found, expected) in results(sequence, inputs).iter().zip(&results(&reference, &exact)) {
        assert_eq!(found.size(), expected.size());
        if expected.numel() == 0 {
            continue;
        }
        let scale = expected.abs().max().double_value(&[]).max(1.0);
        assert_close(&found.to_kind(Kind::Double), expected, bound, bound * scale);
    }
}

const FEW_STEPS: [[i64; 4]; 2] = [[2, 5, 4, 40], [4, 1, 8, 136]];
/// Enough steps that the input is multiplied for all steps at once, although a kernel could do
/// without that.
const ENOUGH_STEPS: [i64; 4] = [8, 3, 5, 9];

/// This test also runs under initcheck, which does not see what cuBLAS' products in half kinds
/// write. So it contains no such product whose result one of our kernels reads.
#[test]
fn cuda_every_path_agrees_with_the_reference() {
    let Some(device) = cuda_or_skip("cuda_every_path_agrees_with_the_reference") else { return };
    for kind in KINDS {
        for sizes in FEW_STEPS {
            assert_agrees_with_the_exact(&fused, sizes, kind, device);
            assert_agrees_with_the_exact(&whole, sizes, kind, device);
        }
    }
    for kind in [Kind::Float, Kind::Double] {
        assert_agrees_with_the_exact(&whole, ENOUGH_STEPS, kind, device);
        for sizes in FEW_STEPS {
            assert_agrees_with_the_exact(&per_step, sizes, kind, device);
            assert_agrees_with_the_exact(&persistent, sizes, kind, device);
        }
    }
}

#[test]
fn cuda_half_kinds_by_products_agree_with_the_reference() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_by_products_agree_with_the_reference") else {
        return;
    };
    for kind in [Kind::Half, Kind::BFloat16] {
        assert_agrees_with_the_exact(&whole, ENOUGH_STEPS, kind, device);
        for sizes in FEW_STEPS {
            assert_agrees_with_the_exact(&per_step, sizes, kind, device);
            assert_agrees_with_the_exact(&persistent, sizes, kind, device);
        }
    }
}

/// There are so many rows that h and x are not concatenated for the weight's gradient. With two
/// steps, h0 provides half of the rows.
#[test]
fn cuda_half_kinds_of_many_rows_agree_with_the_reference() {
    let Some(device) = cuda_or_skip("cuda_half_kinds_of_many_rows_agree_with_the_reference") else {
        return;
    };
    for kind in [Kind::Half, Kind::BFloat16] {
        assert_agrees_with_the_exact(&fused, [2, 8192, 768, 768], kind, device);
    }
}

/// In tf32, the weight's gradient is computed from h and x column by column. The sizes have whole
/// tiles and parts of them from each of the three sources (h0, the output and x), columns that are
/// not a multiple of 16 bytes, and no columns of x.
#[test]
fn cuda_float_in_tf32_agrees_with_the_reference() {
    let Some(device) = cuda_or_skip("cuda_float_in_tf32_agrees_with_the_reference") else { return };
    let _switch = Tf32::set(true);
    for sizes in [
        [3, 5, 4, 40],
        [1, 3, 2, 5],
        [4, 33, 70, 65],
        [3, 7, 0, 9],
        [5, 64, 32, 32],
        [2, 130, 100, 31],
    ] {
        let inputs = one(sizes, Kind::Float, device).inputs;
        for sequence in [fused, per_step] {
            assert_agrees_within(4e-3, &sequence, &inputs);
        }
        // A first h in another memory layout.
        let mut turned: Vec<Tensor> = inputs.iter().map(Tensor::shallow_clone).collect();
        turned[3] = turned[3].transpose(0, 1).contiguous().transpose(0, 1);
        assert_agrees_within(4e-3, &fused, &turned);
    }
}

#[test]
fn cuda_a_small_step_is_one_kernel_of_the_graph() {
    let test = "cuda_a_small_step_is_one_kernel_of_the_graph";
    let Some(device) = caching_or_skip(test) else { return };
    for kind in KINDS {
        let kernels = |steps| {
            let inputs = leaves(&one([steps, 16, 32, 128], kind, device).inputs);
            let expected = whole(&inputs).expect("outputs");
            let (graph, outputs) = captured(device, || whole(&inputs));
            graph.replay().expect("a replay");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert!(output.equal(expected), "{kind:?}");
            }
            graph.kernels()
        };
        // The product with the input is made for all steps at once and may be split into more parts
        // when it is larger.
        let (more, once) = (kernels(24) - kernels(9), 2);
        assert!((24 - 9..=24 - 9 + once).contains(&more), "{kind:?}: {more}");
    }
}

/// A step consists of its product and one kernel. All work is on the current stream and therefore
/// in the graph.
#[test]
fn cuda_a_step_is_the_product_and_one_kernel_of_the_graph() {
    let test = "cuda_a_step_is_the_product_and_one_kernel_of_the_graph";
    let Some(device) = caching_or_skip(test) else { return };
    let (few, many) = (8, 24);
    for (kind, [batch, features, hidden]) in
        [(Kind::Float, [16, 32, 128]), (Kind::BFloat16, [64, 128, 512]), (Kind::Float, [3, 4, 5])]
    {
        let [h, w] =
            [[batch, hidden], [3 * hidden, hidden]].map(|size| Tensor::ones(size, (kind, device)));
        let w = w.transpose(0, 1);
        let sums = if support::is_half(kind) { Kind::Float } else { kind };
        let no_bias = Tensor::zeros([3 * hidden], (kind, device));
        let product = || {
            Ok(if kind == sums {
                vec![no_bias.f_addmm(&h, &w)?]
            } else {
                vec![h.f_mm_dtype(&w, sums)?]
            })
        };
        let (product, _) = captured(device, product);
        let nodes = |steps| {
            let inputs = leaves(&one([steps, batch, features, hidden], kind, device).inputs);
            let expected = per_step(&inputs).expect("outputs");
            let (graph, outputs) = captured(device, || per_step(&inputs));
            for output in &outputs {
                let _ = output.detach().fill_(f64::NAN);
            }
            graph.replay().expect("a replay");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert!(output.equal(expected), "{kind:?}");
            }
            (graph.kernels(), graph.other_nodes())
        };
        let ((kernels, others), (more_kernels, more_others)) = (nodes(few), nodes(many));
        let steps = (many - few) as usize;
        // The product with the input is made for all steps at once and may be split into more parts
        // when it is larger.
        let once = 2;
        assert!(
            more_kernels - kernels <= steps * (product.kernels() + 1) + once,
            "{kind:?}: {kernels} kernels of {few} steps and {more_kernels} of {many}; a product is {}",
            product.kernels()
        );
        assert!(
            more_others - others <= steps * product.other_nodes() + once,
            "{kind:?}: {others} other nodes of {few} steps and {more_others} of {many}; a product has {}",
            product.other_nodes()
        );
    }
}

pub fn captured(device: Device, work: impl Fn() -> Result<Vec<Tensor>>) -> (Graph, Vec<Tensor>) {
    // After some runs, cuBLAS has chosen its kernels.
    for _ in 0..3 {
        work().expect("to warm up");
    }
    Graph::capture(device, work).expect("a capture")
}
