//! Steps with the optimizers of `tch_extension::optim`.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::optim::{self, OptimizerConfig};

fn fused(device: Device, dropout: f64) -> (Model, optim::FusedOptimizer) {
    let (model, _) = Model::new(device, dropout);
    let optimizer = optim::AdamW::default().build(&model._vs, 1e-2).expect("an optimizer");
    (model, optimizer)
}

fn results(model: &Model, mut losses: Vec<Tensor>) -> Vec<Tensor> {
    losses.extend(model._vs.trainable_variables());
    all_kept(&losses)
}

/// Clipping and the rate change meanwhile, and each shape has a graph.
fn changing(device: Device, options: StepOptions) -> (Vec<Tensor>, StepStats) {
    let (model, mut optimizer) = fused(device, 0.2);
    optimizer.no_weight_decay(|name, _| name.ends_with("bias"));
    let mut step =
        Step::new(options, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    tch::manual_seed(3);
    let mut losses = Vec::new();
    for call in 0..24 {
        step.optimizer_mut().set_lr(0.01 / (1.0 + call as f64)).expect("a rate");
        match call {
            0 => step.optimizer_mut().set_clip_norm(Some(1.0)),
            8 => step.optimizer_mut().set_clip_norm(Some(0.01)),
            12 => step.optimizer_mut().set_clip_norm(None),
            _ => Ok(()),
        }
        .expect("a norm");
        let (x, y) = batch(call, 8 + 8 * (call % 2));
        losses.push(step.step(&[&x, &y]).expect("a loss"));
    }
    let stats = step.stats();
    drop(step);
    (results(&model, losses), stats)
}

#[test]
fn on_the_cpu_a_step_is_the_loop_of_the_optimizer() {
    let _serial = serially();
    let (model, optimizer) = fused(Device::Cpu, 0.0);
    let mut step =
        Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    let (other, mut optimizer) = fused(Device::Cpu, 0.0);
    optimizer.set_clip_norm(Some(0.1)).expect("set_clip_norm");
    step.optimizer_mut().set_clip_norm(Some(0.1)).expect("no error");
    for call in 0..5 {
        let (x, y) = batch(call, 8);
        let loss = step.step(&[&x, &y]).expect("a loss");
        let expected = other.loss(&[x, y]).expect("a loss");
        optimizer.backward_step(&expected).expect("backward_step");
        same_bits(&[loss], &[expected]);
    }
    drop(step);
    same_bits(&results(&model, vec![]), &results(&other, vec![]));
}

#[test]
fn cuda_rates_and_clipping_reach_the_graphs() {
    let Some(device) = caching_or_skip("cuda_rates_and_clipping_reach_the_graphs") else { return };
    let _serial = serially();
    for accumulate in [1, 2] {
        let with = StepOptions { warm_up: 2, accumulate, ..Default::default() };
        let (found, stats) = changing(device, with);
        let (expected, _) = changing(device, StepOptions { capture: false, ..with });
        same_bits(&found, &expected);
        assert!(stats.captured && stats.graphs == 2, "{stats:?}");
        // Both times, a warm-up of two calls for each shape; clipping ends at call 12.
        assert_eq!(stats.eager_calls, 8);
    }
}

/// The GPU itself skips steps that overflow, in a graph, too.
#[test]
fn cuda_a_scaler_is_captured() {
    let Some(device) = caching_or_skip("cuda_a_scaler_is_captured") else { return };
    let _serial = serially();
    let run = |capture: bool| {
        let (model, optimizer) = fused(device, 0.1);
        let scaler = GradScaler::new(GradScalerOptions {
            init_scale: 2.0_f64.powi(30),
            growth_interval: 4,
            ..Default::default()
        });
        let mut step = Step::new(options(capture), optimizer, |batch: &[Tensor]| {
            let _autocast = Autocast::new(batch[0].device(), Kind::Half)?;
            model.loss(batch)
        })
        .expect("a step")
        .with_scaler(scaler.expect("a scaler"));
        step.optimizer_mut().set_clip_norm(Some(1.0)).expect("no error");
        tch::manual_seed(3);
        let (mut losses, mut scales) = (Vec::new(), Vec::new());
        for call in 0..60 {
            let (x, y) = batch(call, 16);
            losses.push(step.step(&[&x, &y]).expect("a loss"));
            scales.push(step.scaler().expect("a scaler").scale_factor().expect("a scale"));
        }
        assert_eq!(step.stats().captured, capture);
        drop(step);
        (results(&model, losses), scales)
    };
    let ((found, scales), (expected, expected_scales)) = (run(true), run(false));
    assert_eq!(scales, expected_scales);
    assert!(scales[20] < scales[2], "steps are skipped in graphs, too: {scales:?}");
    assert!(scales.windows(2).any(|pair| pair[1] > pair[0]), "and the scale grows: {scales:?}");
    same_bits(&found, &expected);
}

/// tch's optimizer would repeat the bias correction of one step.
#[test]
fn cuda_an_optimizer_of_tch_is_refused() {
    let Some(device) = caching_or_skip("cuda_an_optimizer_of_tch_is_refused") else { return };
    let _serial = serially();
    let (model, _) = Model::new(device, 0.0);
    let optimizer = nn::OptimizerConfig::build(nn::AdamW::default(), &model._vs, 1e-2);
    let says = ["optimizer: expected one that is capturable", "use one of optim"];
    let step = Step::new(options(true), optimizer.expect("an optimizer"), |batch: &[Tensor]| {
        model.loss(batch)
    });
    refuses(step, &says);
}
