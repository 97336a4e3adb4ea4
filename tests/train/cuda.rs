//! Errors of captures, memory, streams and threads.

use super::*;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{
    Graph, Stream, StreamGuard, device_count, empty_cache, memory_stats, synchronize,
};

/// What cannot be captured, and the name that the error must have.
type Forbidden = (fn(&Tensor) -> Result<()>, &'static str);

fn positive(value: f64) -> Result<()> {
    assert!(value >= -1.0);
    Ok(())
}

fn forbidden() -> Vec<Forbidden> {
    vec![
        (|x| Ok(x.f_double_value(&[0, 0]).map(|_| ())?), "aten::"),
        // This one panics.
        (|x| positive(x.double_value(&[0, 0])), "aten::"),
        (|x| Ok(x.f_nonzero().map(|_| ())?), "aten::nonzero"),
        (|x| Ok(x.f_to_device(Device::Cpu).map(|_| ())?), "aten::to"),
        (|x| Stream::current(x.device())?.synchronize(), "Stream::synchronize"),
        // The error is hidden, but the capture is lost.
        (|x| positive(f64::from(u8::from(x.f_nonzero().is_ok()))), "aten::nonzero"),
    ]
}

#[test]
fn cuda_what_cannot_be_captured_is_named_and_changes_nothing() {
    let test = "cuda_what_cannot_be_captured_is_named_and_changes_nothing";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    for (forbidden, name) in forbidden() {
        for accumulate in [1, 2] {
            let (model, optimizer) = Model::new(device, 0.5);
            let weights = optimizer.parameters();
            let with = StepOptions { warm_up: 2, accumulate, ..Default::default() };
            let mut step = Step::new(with, optimizer, |batch: &[Tensor]| {
                forbidden(&batch[0])?;
                model.loss(batch)
            })
            .expect("a step");
            tch::manual_seed(3);
            let (x, y) = batch(1, 8);
            for _ in 0..2 * accumulate {
                let _ = step.step(&[&x, &y]).expect("a loss");
            }
            let steps = step.stats().steps;
            let state = |step: &Step<AdamW, _>| {
                let AdamW { means, variances, updates, .. } = step.optimizer();
                let state = weights.iter().chain(means).chain(variances).chain([updates]);
                state.map(kept).collect::<Vec<_>>()
            };
            let before = state(&step);
            // With two batches per step, the part that only adds up is captured first.
            refuses(step.step(&[&x, &y]), &[name, "captur"]);
            same_bits(&state(&step), &before);
            refuses(step.step(&[&x, &y]), &[name, "captur"]);
            same_bits(&state(&step), &before);
            assert_eq!(step.stats().steps, steps);

            step.set_capture(false);
            for _ in 0..accumulate {
                let _ = step.step(&[&x, &y]).expect("a loss");
            }
            assert_eq!(step.stats().steps, steps + 1);
            assert!(weights.iter().all(|weight| weight.grad().defined()));
            synchronize(device).expect("synchronize");
        }
    }
}

#[test]
fn cuda_an_operation_of_a_backward_pass_is_named() {
    let test = "cuda_an_operation_of_a_backward_pass_is_named";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let (model, optimizer) = Model::new(device, 0.0);
    let mut step = Step::new(options(true), optimizer, |batch: &[Tensor]| {
        let loss = model.loss(batch)?;
        // The hook runs in a thread of libtorch's engine, and is gone with the graph.
        let hook = tch_extension::autograd::register_hook(&loss, |gradient| {
            let _ = gradient.f_nonzero()?;
            Ok(None)
        })?;
        hook.forget();
        Ok(loss)
    })
    .expect("a step");
    let (x, y) = batch(1, 8);
    for _ in 0..3 {
        let _ = step.step(&[&x, &y]).expect("a loss");
    }
    refuses(step.step(&[&x, &y]), &["aten::nonzero", "cannot be captured"]);
    step.set_capture(false);
    let _ = step.step(&[&x, &y]).expect("a loss");
}

/// `Graph::capture` names operations, too, and says nothing of them in other errors.
#[test]
fn cuda_a_plain_capture_names_the_operation() {
    let Some(device) = caching_or_skip("cuda_a_plain_capture_names_the_operation") else { return };
    let _serial = serially();
    let x = Tensor::ones([4], (Kind::Float, device));
    let _ = x.exp();
    let error = Graph::capture(device, || Ok(x.f_exp()?.double_value(&[0])));
    refuses(error, &["Graph::capture: aten::", " cannot be captured: CUDA error"]);
    let error = Graph::capture(device, || Ok(x.f_reshape([3_i64])?));
    let text = error.expect_err("a shape").to_string();
    assert!(text.contains("shape '[3]' is invalid") && !text.contains("aten::"), "{text}");
    assert!(
        catch_unwind(AssertUnwindSafe(|| {
            Graph::capture(device, || -> Result<()> { panic!("on purpose") })
        }))
        .is_err()
    );
    let (graph, y) = Graph::capture(device, || Ok(x.f_exp()?)).expect("a graph");
    graph.replay().expect("a replay");
    assert!(y.double_value(&[0]) > 2.7);
}

#[test]
fn cuda_an_optimizer_that_is_not_capturable_is_refused() {
    let test = "cuda_an_optimizer_that_is_not_capturable_is_refused";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let (model, mut optimizer) = Model::new(device, 0.0);
    optimizer.capturable = false;
    let says =
        ["train::Step::new: optimizer: expected one that is capturable", "StepOptions::capture"];
    refuses(Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)), &says);
    let (model, mut optimizer) = Model::new(device, 0.0);
    optimizer.capturable = false;
    assert!(Step::new(options(false), optimizer, |batch: &[Tensor]| model.loss(batch)).is_ok());
    if device_count() > 1 {
        let (model, mut optimizer) = Model::new(device, 0.0);
        let other = Tensor::ones([1], (Kind::Float, Device::Cuda(1)));
        optimizer.weights.push(other.set_requires_grad(true));
        let says = ["parameters on Cuda(0) and Cuda(1)"];
        refuses(Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)), &says);
    }
}

/// Bytes of tensors when the device is idle.
fn allocated(device: Device) -> u64 {
    synchronize(device).expect("synchronize");
    memory_stats(device).expect("statistics").allocated
}

#[test]
fn cuda_memory_does_not_grow_and_comes_back() {
    let Some(device) = caching_or_skip("cuda_memory_does_not_grow_and_comes_back") else { return };
    let _serial = serially();
    let everything = || {
        let (model, optimizer) = Model::new(device, 0.1);
        let with = StepOptions { warm_up: 1, accumulate: 2, ..Default::default() };
        let mut step =
            Step::new(with, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
        let mut run = |calls: i64| {
            for call in 0..calls {
                let (x, y) = batch(call, 8 + 8 * (call / 2 % 2));
                let _ = step.step(&[&x, &y]).expect("a loss");
            }
            allocated(device)
        };
        let before = run(20);
        assert_eq!(run(400), before, "bytes after 400 calls more");
        assert_eq!(step.stats().graphs, 4);
    };
    // Libraries keep workspaces from their first use on.
    everything();
    let before = allocated(device);
    everything();
    assert_eq!(allocated(device), before, "bytes after the step is gone");
}

#[test]
fn cuda_losses_of_many_calls_are_kept() {
    let Some(device) = caching_or_skip("cuda_losses_of_many_calls_are_kept") else { return };
    let _serial = serially();
    let found = train(device, options(true), 0.0, 300, |_| 8);
    let expected = train(device, options(false), 0.0, 300, |_| 8);
    same_bits(&found.losses, &expected.losses);
}

#[test]
fn cuda_two_steps_next_to_one_another() {
    let Some(device) = caching_or_skip("cuda_two_steps_next_to_one_another") else { return };
    let _serial = serially();
    let expected = train(device, options(false), 0.0, 12, |_| 8);
    let make = || Model::new(device, 0.0);
    let ((first_model, first), (second_model, second)) = (make(), make());
    let mut first = Step::new(options(true), first, |batch: &[Tensor]| first_model.loss(batch))
        .expect("a step");
    let mut second = Step::new(options(true), second, |batch: &[Tensor]| second_model.loss(batch))
        .expect("a step");
    for call in 0..12 {
        let (x, y) = batch(call, 8);
        let _ = first.step(&[&x, &y]).expect("a loss");
        if call % 2 == 1 {
            for earlier in [call - 1, call] {
                let (x, y) = batch(earlier, 8);
                let _ = second.step(&[&x, &y]).expect("a loss");
            }
        }
    }
    same_bits(&first.into_optimizer().weights, &expected.weights);
    // The second goes on without the first.
    let (x, y) = batch(12, 8);
    same_bits(&second.optimizer().parameters(), &expected.weights);
    let _ = second.step(&[&x, &y]).expect("a loss");
}

#[test]
fn cuda_a_step_moves_between_threads_and_streams() {
    let test = "cuda_a_step_moves_between_threads_and_streams";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let expected = train(device, options(false), 0.5, 16, |_| 8);
    let (model, optimizer) = Model::new(device, 0.5);
    let mut step = Step::new(options(true), optimizer, move |batch: &[Tensor]| model.loss(batch))
        .expect("a step");
    tch::manual_seed(3);
    let mut losses = Vec::new();
    for call in 0..16 {
        // Each call is on another stream, and each second one in another thread.
        let run = move || {
            let side = Stream::new(device).expect("a stream");
            let _guard = StreamGuard::new(&side).expect("a guard");
            let (x, y) = batch(call, 8);
            let loss = step.step(&[&x, &y]).expect("a loss");
            side.synchronize().expect("synchronize");
            (step, loss)
        };
        let (moved, loss) =
            if call % 2 == 0 { run() } else { std::thread::spawn(run).join().expect("a thread") };
        step = moved;
        losses.push(loss);
    }
    same_bits(&losses, &expected.losses);
    same_bits(&step.into_optimizer().weights, &expected.weights);
}

#[test]
fn cuda_a_step_inside_a_capture_is_refused() {
    let Some(device) = caching_or_skip("cuda_a_step_inside_a_capture_is_refused") else { return };
    let _serial = serially();
    let (model, optimizer) = Model::new(device, 0.0);
    let mut step =
        Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    let (x, y) = batch(1, 8);
    let inside = Graph::capture(device, || step.step(&[&x, &y]));
    refuses(inside, &["train::Step::step: the current stream is being captured already"]);
    let _ = step.step(&[&x, &y]).expect("a loss");
}

/// A scaler waits for the GPU with an optimizer that cannot skip a step by itself. The error must say
/// so, and training goes on.
#[test]
fn cuda_a_scaler_that_waits_is_named() {
    let Some(device) = caching_or_skip("cuda_a_scaler_that_waits_is_named") else { return };
    let _serial = serially();
    let (model, optimizer) = Model::new(device, 0.0);
    let mut step = Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch))
        .expect("a step")
        .with_scaler(GradScaler::new(GradScalerOptions::default()).expect("a scaler"));
    let (x, y) = batch(1, 8);
    for _ in 0..3 {
        let _ = step.step(&[&x, &y]).expect("a loss");
    }
    refuses(step.step(&[&x, &y]), &["aten::", "cannot be captured"]);
    step.set_capture(false);
    let _ = step.step(&[&x, &y]).expect("a loss");
    assert_eq!(step.stats().steps, 4);
}

#[test]
fn cuda_the_cache_may_be_emptied_between_steps() {
    let Some(device) = caching_or_skip("cuda_the_cache_may_be_emptied_between_steps") else {
        return;
    };
    let _serial = serially();
    let expected = train(device, options(false), 0.0, 10, |_| 8);
    let (model, optimizer) = Model::new(device, 0.0);
    let mut step =
        Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    for call in 0..10 {
        let (x, y) = batch(call, 8);
        let _ = step.step(&[&x, &y]).expect("a loss");
        // Memory of the graphs must not go, and what takes its place must not be written to.
        synchronize(device).expect("synchronize");
        empty_cache().expect("empty_cache");
        drop(Tensor::full([1 << 22], f64::NAN, (Kind::Float, device)));
    }
    same_bits(&step.into_optimizer().weights, &expected.weights);
}

#[test]
fn cuda_a_shape_that_fails_takes_no_place() {
    let Some(device) = caching_or_skip("cuda_a_shape_that_fails_takes_no_place") else { return };
    let _serial = serially();
    let (model, optimizer) = Model::new(device, 0.0);
    let with = StepOptions { warm_up: 1, max_shapes: 1, ..Default::default() };
    let mut step = Step::new(with, optimizer, |batch: &[Tensor]| match batch {
        [_, _] => model.loss(batch),
        _ => Err(Error::msg("a target is missing")),
    })
    .expect("a step");
    let (x, y) = batch(1, 8);
    refuses(step.step(&[&x]), &["a target is missing"]);
    for _ in 0..3 {
        let _ = step.step(&[&x, &y]).expect("a loss");
    }
    assert_eq!((step.stats().graphs, step.stats().replays), (1, 2));
    refuses(step.step(&[&x]), &["a target is missing"]);
    let _ = step.step(&[&x, &y]).expect("a loss");
    assert_eq!((step.stats().graphs, step.stats().replays), (1, 3));
}
