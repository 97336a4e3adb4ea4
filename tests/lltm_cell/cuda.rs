//! Tests that need a GPU.

use super::*;
use std::io::Write;
use support::gpu::caching_or_skip;
use tch_extension::cuda::Graph;
use tch_extension::testing::cuda_or_skip;

#[test]
fn cuda_under_autocast_only_the_product_loses_precision() {
    let Some(device) = cuda_or_skip("cuda_under_autocast") else { return };
    let sample = one([16, 32, 128], Kind::Float, device);
    let (rtol, atol) = tolerance(Kind::Half);
    let exact = call(f_lltm_cell, &sample.inputs).expect("without autocast");
    let half = tch::autocast(true, || call(f_lltm_cell, &sample.inputs)).expect("with autocast");
    for (half, exact) in half.iter().zip(&exact) {
        assert_eq!(half.kind(), Kind::Float);
        assert!(!half.equal(exact), "the product ran in half precision");
        assert_close(half, exact, 10.0 * rtol, 1e3 * atol);
    }
    let gradients =
        tch::autocast(true, || support::gradients(&fused, &leaves(&sample.inputs), &[0, 1]));
    assert!(gradients.iter().flatten().all(|gradient| gradient.kind() == Kind::Float));
}

/// The graph contains only kernels on the current stream. If a kernel ran on another stream, such
/// as the default stream, a replay would leave the outputs unchanged.
#[test]
fn cuda_the_work_is_one_kernel_or_the_product_and_two_on_the_current_stream() {
    let test = "cuda_the_work_is_one_kernel_or_the_product_and_two_on_the_current_stream";
    let Some(device) = caching_or_skip(test) else { return };
    for (size, is_small) in [
        ([16, 32, 128], true),
        ([64, 256, 512], true),
        ([3, 4, 5], true),
        ([1024, 256, 512], false),
    ] {
        let sample = one(size, Kind::Float, device);
        let [x, w, _, h, _] = &sample.inputs[..] else { unreachable!("with bias") };
        let hx = Tensor::cat(&[h, x], 1);
        let (product, _) = captured(device, || Ok(vec![hx.f_mm(&w.f_transpose(0, 1)?)?]));
        let leaves = leaves(&sample.inputs);
        let most = if is_small { (1, 0) } else { (product.kernels() + 2, product.other_nodes()) };
        for (name, inputs) in [("without a graph", &sample.inputs), ("with a graph", &leaves)] {
            let expected = call(f_lltm_cell, inputs).expect("outputs");
            let (graph, outputs) = captured(device, || call(f_lltm_cell, inputs));
            let found = (graph.kernels(), graph.other_nodes());
            assert!(
                found.0 <= most.0 && found.1 <= most.1,
                "{size:?} {name}: {found:?}, at most {most:?}"
            );
            for output in &outputs {
                let _ = output.detach().fill_(f64::NAN);
            }
            graph.replay().expect("a replay");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert_close(output, expected, 1e-5, 1e-5);
            }
        }
    }
}

#[test]
fn cuda_a_small_backward_is_one_kernel() {
    let test = "cuda_a_small_backward_is_one_kernel";
    let Some(device) = caching_or_skip(test) else { return };
    let sample = one([16, 32, 128], Kind::Float, device);
    let expected = support::gradients(&fused, &leaves(&sample.inputs), &[0, 1]);
    // A leaf's gradient belongs to the stream on which its first graph was made, so these leaves
    // get their first graph in the capture.
    let inputs = leaves(&sample.inputs);
    let vectors = [3, 4].map(|place| support::incoming(&sample.inputs[place]).contiguous());
    let (graph, gradients) = Graph::capture(device, || {
        let outputs = call(f_lltm_cell, &inputs)?;
        let options = GradOptions {
            grad_outputs: &[Some(&vectors[0]), Some(&vectors[1])],
            ..Default::default()
        };
        grad(&[&outputs[0], &outputs[1]], &inputs.iter().collect::<Vec<_>>(), &options)
    })
    .expect("a capture");
    assert_eq!((graph.kernels(), graph.other_nodes()), (2, 0), "forward and backward");
    graph.replay().expect("a replay");
    for (found, expected) in gradients.iter().zip(&expected) {
        assert_close(
            found.as_ref().expect("present"),
            expected.as_ref().expect("present"),
            1e-5,
            1e-5,
        );
    }
}

fn captured(device: Device, work: impl Fn() -> Result<Vec<Tensor>>) -> (Graph, Vec<Tensor>) {
    // After some runs, cuBLAS has chosen its kernels.
    for _ in 0..3 {
        work().expect("to warm up");
    }
    Graph::capture(device, work).expect("a capture")
}

#[test]
fn cuda_mixed_devices_are_named() {
    let Some(device) = cuda_or_skip("cuda_mixed_devices_are_named") else { return };
    let names = ["weight", "bias", "h", "c"];
    for (index, name) in names.iter().enumerate() {
        let mut arguments = one([2, 4, 3], Kind::Float, device).inputs;
        arguments[index + 1] = arguments[index + 1].to_device(Device::Cpu);
        let error = call(f_lltm_cell, &arguments).expect_err("mixed devices").to_string();
        assert!(
            error.starts_with(&format!(
                "lltm_cell: {name}: expected device Cuda(0), as input, got Cpu"
            )),
            "{error}"
        );
    }
}

#[test]
fn cuda_agrees_with_the_cpu() {
    suite().cuda_agrees_with_the_cpu("cuda_agrees_with_the_cpu");
}

#[test]
fn cuda_half_kinds_agree_with_the_cpu() {
    suite().cuda_half_kinds_agree_with_the_cpu("cuda_half_kinds_agree_with_the_cpu");
}

#[test]
fn cuda_more_than_two_to_the_31_elements() {
    let test = "cuda_more_than_two_to_the_31_elements";
    let Some(device) = cuda_or_skip(test) else { return };
    let (features, hidden, rows) = (8, 2048, 8);
    let batch = (1 << 31) / (3 * hidden) + rows;
    let options = (Kind::BFloat16, device);
    let row =
        |columns: i64| Tensor::arange(columns, (Kind::Float, device)).sin().to_kind(Kind::BFloat16);
    let matrix = |columns: i64| -> Result<Tensor> {
        let matrix = Tensor::f_zeros([batch, columns], options)?;
        // Only the last rows are not zero.
        let scale =
            Tensor::arange(rows, (Kind::Float, device)).to_kind(Kind::BFloat16).view([rows, 1])
                * 0.1;
        matrix.narrow(0, batch - rows, rows).f_copy_(&(row(columns) * scale))?;
        Ok(matrix)
    };
    let run = |x: &Tensor, h: &Tensor, c: &Tensor| -> Result<Vec<Tensor>> {
        let weight = row(3 * hidden).view([3 * hidden, 1]) * row(hidden + features) * 0.03;
        let state = [h, c].map(|tensor| tensor.detach().set_requires_grad(true));
        let (new_h, new_c) = f_lltm_cell(x, &weight, None, (&state[0], &state[1]))?;
        let gradients = grad(
            &[&new_h, &new_c],
            &[&state[0], &state[1]],
            &GradOptions { grad_outputs: &[Some(h), Some(c)], ..Default::default() },
        )?;
        Ok([new_h, new_c].into_iter().chain(gradients.into_vec().into_iter().flatten()).collect())
    };
    let whole = || -> Result<(Vec<Tensor>, [Tensor; 3])> {
        let [x, h, c] = [matrix(features)?, matrix(hidden)?, matrix(hidden)?];
        Ok((run(&x, &h, &c)?, [x, h, c]))
    };
    let (whole, [x, h, c]) = match whole() {
        Ok(whole) => whole,
        Err(error) if error.to_string().contains("out of memory") => {
            let _ = std::io::stderr()
                .write_all(format!("SKIPPED {test}: not enough memory\n").as_bytes());
            return;
        }
        Err(error) => panic!("{error}"),
    };
    let last = |tensor: &Tensor| tensor.narrow(0, batch - rows, rows);
    for (whole, alone) in
        whole.iter().zip(&run(&last(&x), &last(&h), &last(&c)).expect("the last rows"))
    {
        assert!(alone.abs().max().double_value(&[]) > 0.01);
        assert_close(&last(whole).to_kind(Kind::Float), &alone.to_kind(Kind::Float), 2e-2, 1e-2);
        assert_eq!(whole.get(5).abs().max().double_value(&[]), 0.0, "a row of zeros");
    }
}
