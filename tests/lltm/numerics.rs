//! Tests how far results drift over long sequences.

use super::*;
use support::gpu::caching_or_skip;

/// The largest difference from the exact outputs and gradients, where each tensor's differences are
/// divided by its largest exact value.
fn drift(sequence: support::Operator<'_>, inputs: &[Tensor], exact: &[Tensor]) -> f64 {
    let found = everything(sequence, inputs);
    let of = |(found, exact): (&Tensor, &Tensor)| {
        let off = (found.to_kind(Kind::Double) - exact).abs().max().double_value(&[]);
        off / exact.abs().max().double_value(&[])
    };
    found.iter().zip(exact).map(of).fold(0.0, f64::max)
}

fn everything(sequence: support::Operator<'_>, inputs: &[Tensor]) -> Vec<Tensor> {
    let leaves = leaves(inputs);
    let outputs = sequence(&leaves).expect("outputs");
    // The loss is a mean over the steps, so that gradients have the same magnitude for any T.
    let vectors: Vec<Tensor> =
        outputs.iter().map(|output| support::incoming(output) / output.size()[0] as f64).collect();
    let vectors: Vec<Option<&Tensor>> = vectors.iter().map(Some).collect();
    let options = GradOptions { grad_outputs: &vectors, ..Default::default() };
    let gradients =
        grad(&outputs.iter().collect::<Vec<_>>(), &leaves.iter().collect::<Vec<_>>(), &options);
    let gradients = gradients.expect("gradients").into_vec().into_iter().flatten();
    outputs.iter().map(Tensor::detach).chain(gradients).collect()
}

/// An LLTM has no forget gate: c is a sum over all steps, and so are the gradients that reach far
/// back. Errors grow with the number of steps; our bound allows them to grow as √T roundings do.
#[test]
fn results_stay_close_over_thousands_of_steps() {
    for device in devices() {
        for steps in [1, 4, 16, 64, 256, 1024, 4096] {
            let exact = one([steps, 3, 4, 24], Kind::Double, device).inputs;
            let rounded =
                |kind: Kind| exact.iter().map(|input| input.to_kind(kind)).collect::<Vec<_>>();
            let rooted = (steps as f64).sqrt();
            for kind in [Kind::Double, Kind::Float, Kind::Half, Kind::BFloat16] {
                let inputs = rounded(kind);
                let wide: Vec<Tensor> =
                    inputs.iter().map(|input| input.to_kind(Kind::Double)).collect();
                let exact = everything(&reference, &wide);
                let epsilon = match kind {
                    Kind::Double => f64::EPSILON,
                    Kind::Float => f64::from(f32::EPSILON),
                    Kind::Half => 0.5_f64.powi(10),
                    _ => 0.5_f64.powi(7),
                };
                for sequence in
                    [&fused as support::Operator<'_>, &per_step, &whole, &grid, &wide_grid]
                {
                    let drift = drift(sequence, &inputs, &exact);
                    eprintln!("{device:?} {kind:?} T = {steps}: {:.2} ε", drift / epsilon);
                    assert!(
                        drift <= 8.0 * rooted.max(2.0) * epsilon,
                        "{kind:?}, T = {steps}: {} ε on {device:?}",
                        drift / epsilon
                    );
                }
            }
        }
    }
}

/// The memory that is kept between forward and backward is linear in T.
#[test]
fn cuda_memory_is_linear_in_the_steps() {
    let Some(device) = caching_or_skip("cuda_memory_is_linear_in_the_steps") else { return };
    let (batch, features, hidden) = (16, 32, 64);
    let kept = |steps: i64| {
        let leaves = leaves(&one([steps, batch, features, hidden], Kind::Float, device).inputs);
        let allocated =
            || tch_extension::cuda::memory_stats(device).expect("statistics").allocated as i64;
        let before = allocated();
        let outputs = fused(&leaves).expect("outputs");
        let kept = allocated() - before;
        drop(outputs);
        kept
    };
    kept(8);
    let rest = 2 * 4 * batch * hidden * 4;
    for steps in [64, 512] {
        // The documented amount: the output, c and three activations.
        let stated = 5 * steps * batch * hidden * 4;
        let found = kept(steps);
        assert!((stated..=stated + rest + 8192).contains(&found), "{found} bytes, stated {stated}");
    }
}
