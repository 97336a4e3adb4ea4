//! A captured run is the run without graphs, bit by bit.

use super::*;
use support::gpu::caching_or_skip;

#[test]
fn cuda_a_captured_run_is_the_run_without_graphs() {
    let test = "cuda_a_captured_run_is_the_run_without_graphs";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    for warm_up in [1, 3, 11] {
        let with = StepOptions { warm_up, ..Default::default() };
        let captured = train(device, with, 0.0, 20, |_| 16);
        same_run(&captured, &train(device, options(false), 0.0, 20, |_| 16));
        let stats = captured.stats;
        assert_eq!((stats.eager_calls, stats.replays), (warm_up as u64, 20 - warm_up as u64));
        assert!(stats.captured && stats.graphs == 1 && stats.kernels > 10, "{stats:?}");
    }
}

#[test]
fn cuda_each_shape_has_a_graph() {
    let Some(device) = caching_or_skip("cuda_each_shape_has_a_graph") else { return };
    let _serial = serially();
    let rows = |call: i64| [16, 5, 32][call as usize % 3];
    let expected = train(device, options(false), 0.0, 24, rows);
    let run = train(device, StepOptions { warm_up: 2, ..Default::default() }, 0.0, 24, rows);
    same_run(&run, &expected);
    assert_eq!((run.stats.graphs, run.stats.eager_calls), (3, 6));
    // The third shape has none.
    let few = StepOptions { warm_up: 2, max_shapes: 2, ..Default::default() };
    let run = train(device, few, 0.0, 24, rows);
    same_run(&run, &expected);
    assert_eq!((run.stats.graphs, run.stats.eager_calls), (2, 4 + 8));
}

#[test]
fn cuda_dropout_draws_what_it_draws_without_graphs() {
    let test = "cuda_dropout_draws_what_it_draws_without_graphs";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let rows = |call: i64| 16 + 16 * (call % 2);
    let with = StepOptions { warm_up: 1, ..Default::default() };
    let captured = train(device, with, 0.5, 20, rows);
    same_run(&captured, &train(device, options(false), 0.5, 20, rows));
    // Without a change of weights and of the batch, only the numbers differ.
    let (model, mut optimizer) = Model::new(device, 0.5);
    optimizer.set_rate(0.0);
    let mut step =
        Step::new(with, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    let (x, y) = batch(0, 16);
    let mut draw = |seed: Option<i64>| {
        seed.into_iter().for_each(tch::manual_seed);
        step.step(&[&x, &y]).expect("a loss").double_value(&[])
    };
    let _ = (draw(None), draw(None));
    let drawn = [draw(None), draw(None), draw(Some(5)), draw(None), draw(Some(5)), draw(None)];
    assert!(drawn[0] != drawn[1] && drawn[2] != drawn[3] && drawn[1] != drawn[3], "{drawn:?}");
    assert_eq!(drawn[2..4], drawn[4..6]);
}

#[test]
fn cuda_accumulation_is_captured_in_two_graphs() {
    let test = "cuda_accumulation_is_captured_in_two_graphs";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    // Two shapes meet in one step.
    let rows = |call: i64| 8 + 8 * (call % 2);
    for (rows, graphs) in [(&(|_| 16_i64) as &dyn Fn(i64) -> i64, 2), (&rows, 4)] {
        for accumulate in [2, 3] {
            let with =
                |capture| StepOptions { accumulate, capture, warm_up: 2, ..Default::default() };
            let captured = train(device, with(true), 0.2, 30, rows);
            same_run(&captured, &train(device, with(false), 0.2, 30, rows));
            assert_eq!(captured.stats.steps, 30 / accumulate as u64);
            // With two batches per step, each shape always has the same part.
            let expected = if accumulate == 2 { 2 } else { graphs };
            assert_eq!(captured.stats.graphs, expected);
        }
    }
}

#[test]
fn cuda_a_rate_and_a_switch_take_effect() {
    let Some(device) = caching_or_skip("cuda_a_rate_and_a_switch_take_effect") else { return };
    let _serial = serially();
    let run = |capture: bool| {
        let (model, optimizer) = Model::new(device, 0.0);
        let mut step = Step::new(options(capture), optimizer, |batch: &[Tensor]| model.loss(batch))
            .expect("a step");
        let mut losses = Vec::new();
        for call in 0..20 {
            step.optimizer_mut().set_rate(0.03 / (1.0 + call as f64));
            if capture {
                step.set_capture(!(8..12).contains(&call));
            }
            let (x, y) = batch(call, 16);
            losses.push(step.step(&[&x, &y]).expect("a loss"));
        }
        let eager = step.stats().eager_calls;
        assert_eq!(eager, if capture { 3 + 4 } else { 20 });
        losses.extend(step.into_optimizer().weights);
        all_kept(&losses)
    };
    same_bits(&run(true), &run(false));
}

#[test]
fn cuda_batches_come_from_anywhere() {
    let Some(device) = caching_or_skip("cuda_batches_come_from_anywhere") else { return };
    let _serial = serially();
    let run = |capture: bool, place: fn(&Tensor, Device) -> Tensor| {
        let (model, optimizer) = Model::new(device, 0.0);
        let mut step = Step::new(options(capture), optimizer, |batch: &[Tensor]| model.loss(batch))
            .expect("a step");
        for call in 0..10 {
            let (x, y) = batch(call, 16);
            let (x, y) = (place(&x, device), place(&y, device));
            let _ = step.step(&[&x, &y]).expect("a loss");
        }
        all_kept(&step.into_optimizer().weights)
    };
    let expected = run(true, |tensor, _| tensor.shallow_clone());
    same_bits(&run(true, |tensor, device| tensor.to_device(device)), &expected);
    same_bits(&run(true, |tensor, device| tensor.pin_memory(device)), &expected);
    // A batch keeps its strides, with which libtorch may choose other kernels.
    let transposed: fn(&Tensor, Device) -> Tensor =
        |tensor, device| tensor.to_device(device).transpose(0, 1).contiguous().transpose(0, 1);
    same_bits(&run(true, transposed), &run(false, transposed));
}

#[test]
fn cuda_batches_keep_their_memory_format() {
    let Some(device) = caching_or_skip("cuda_batches_keep_their_memory_format") else { return };
    let _serial = serially();
    let strides = std::cell::RefCell::new(Vec::new());
    let (_, optimizer) = Model::new(device, 0.0);
    let weight = optimizer.weights[0].shallow_clone();
    let mut step = Step::new(options(true), optimizer, |batch: &[Tensor]| {
        strides.borrow_mut().push(batch[0].stride());
        Ok(weight.square().sum(Kind::Float) * batch[0].mean(Kind::Float))
    })
    .expect("a step");
    let image = Tensor::randn([2, 3, 4, 5], (Kind::Float, device));
    // channels_last has the order of dimensions 0, 2, 3, 1 in memory.
    let channels_last = image.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
    for _ in 0..5 {
        let _ = step.step(&[&channels_last]).expect("a loss");
    }
    assert_eq!(step.stats().graphs, 1);
    let _ = step.step(&[&image]).expect("a loss");
    drop(step);
    let strides = strides.into_inner();
    let (contiguous, earlier) = strides.split_last().expect("calls");
    assert!(earlier.iter().all(|stride| stride == &channels_last.stride()), "{earlier:?}");
    assert_eq!(contiguous, &image.stride());
}

#[test]
fn cuda_half_precision_with_autocast_and_losses_that_stay() {
    let test = "cuda_half_precision_with_autocast_and_losses_that_stay";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let run = |capture: bool| {
        let (model, optimizer) = Model::new(device, 0.1);
        let mut step = Step::new(options(capture), optimizer, |batch: &[Tensor]| {
            let _autocast = Autocast::new(batch[0].device(), Kind::BFloat16)?;
            let loss = model.loss(batch)?;
            assert_eq!(model.wide.forward(&batch[0]).kind(), Kind::BFloat16);
            Ok(loss)
        })
        .expect("a step");
        tch::manual_seed(3);
        let mut losses = Vec::new();
        for call in 0..20 {
            let (x, y) = batch(call, 16);
            losses.push(step.step(&[&x, &y]).expect("a loss"));
        }
        losses.extend(step.into_optimizer().weights);
        all_kept(&losses)
    };
    same_bits(&run(true), &run(false));
}

#[test]
fn cuda_gradients_stay_where_they_are() {
    let Some(device) = caching_or_skip("cuda_gradients_stay_where_they_are") else { return };
    let _serial = serially();
    for accumulate in [1, 2] {
        let (model, optimizer) = Model::new(device, 0.0);
        let weights = optimizer.parameters();
        let with = StepOptions { warm_up: 1, accumulate, ..Default::default() };
        let mut step =
            Step::new(with, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
        let mut addresses = |rows: i64| {
            for _ in 0..accumulate {
                let (x, y) = batch(1, rows);
                let _ = step.step(&[&x, &y]).expect("a loss");
            }
            weights.iter().map(|weight| weight.grad().data_ptr().addr()).collect::<Vec<_>>()
        };
        for _ in 0..2 {
            let _ = (addresses(8), addresses(16));
        }
        let (small, large) = (addresses(8), addresses(16));
        assert_eq!((addresses(8), addresses(16)), (small.clone(), large.clone()));
        assert_eq!(small == large, accumulate > 1, "each graph has its own, unless they add up");
    }
}

/// Autograd must see that a replay changes the parameters.
#[test]
fn cuda_a_replay_is_a_change_in_place() {
    let Some(device) = caching_or_skip("cuda_a_replay_is_a_change_in_place") else { return };
    let _serial = serially();
    let (model, optimizer) = Model::new(device, 0.0);
    let (narrow, x) =
        (model.narrow.ws.shallow_clone(), Tensor::ones([4, 32], (Kind::Float, device)));
    let x = x.set_requires_grad(true);
    let mut step =
        Step::new(options(true), optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    let (input, target) = batch(1, 8);
    for _ in 0..5 {
        let _ = step.step(&[&input, &target]).expect("a loss");
    }
    assert!(step.stats().captured);
    let product = x.matmul(&narrow.tr()).sum(Kind::Float);
    let _ = step.step(&[&input, &target]).expect("a loss");
    let error = tch_extension::autograd::backward(&[&product], &Default::default());
    assert!(error.expect_err("changed").to_string().contains("modified by an inplace operation"));
}

/// Other work of the optimizer, and flags of the closure, reach the graphs.
#[test]
fn cuda_changes_on_the_cpu_are_captured_anew() {
    let Some(device) = caching_or_skip("cuda_changes_on_the_cpu_are_captured_anew") else { return };
    let _serial = serially();
    let run = |capture: bool| {
        let (model, optimizer) = Model::new(device, 0.0);
        let factor = std::cell::Cell::new(1.0);
        let with = StepOptions { capture, warm_up: 1, ..Default::default() };
        let mut step =
            Step::new(with, optimizer, |batch: &[Tensor]| Ok(model.loss(batch)? * factor.get()))
                .expect("a step");
        for call in 0..16 {
            match call {
                5 => step.optimizer_mut().clip = Some(1e-3),
                9 => factor.set(2.0),
                _ => {}
            }
            if call == 9 {
                step.recapture();
            }
            let (x, y) = batch(call, 16);
            let _ = step.step(&[&x, &y]).expect("a loss");
        }
        let stats = step.stats();
        assert_eq!((stats.eager_calls, stats.graphs), if capture { (3, 1) } else { (16, 0) });
        all_kept(&step.into_optimizer().weights)
    };
    same_bits(&run(true), &run(false));
}

fn losses<O, F>(step: &mut Step<O, F>, x: &Tensor) -> Vec<f64>
where
    O: Optimizer,
    F: FnMut(&[Tensor]) -> Result<Tensor>,
{
    (0..4).map(|_| step.step(&[x]).expect("a loss").double_value(&[])).collect()
}

/// A tensor that is none of the optimizer's may get other memory, too.
#[test]
fn cuda_a_frozen_tensor_with_other_memory_is_captured_anew() {
    let test = "cuda_a_frozen_tensor_with_other_memory_is_captured_anew";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let ones = |len: i64| Tensor::ones([len], (Kind::Float, device));
    // With one graph for a step, or several: for each part, and for each shape.
    for (accumulate, shapes) in [(1, &[8][..]), (2, &[8]), (1, &[8, 1])] {
        let weight = ones(8).set_requires_grad(true);
        let (mut frozen, mut resized) = (ones(8), ones(8));
        let (read, also) = (frozen.shallow_clone(), resized.shallow_clone());
        let (optimizer, options) = (
            AdamW::new(vec![weight.shallow_clone()]),
            StepOptions { warm_up: 1, accumulate, ..Default::default() },
        );
        let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
            Ok((&weight * 0.0 + &read * &batch[0] + &also).sum(Kind::Float))
        })
        .expect("a step");
        let mut replays = 0;
        let mut check = |expected: f64, case: &str| {
            let case = format!("{case}, {accumulate} batches, shapes {shapes:?}");
            for x in shapes.iter().map(|&len| ones(len)) {
                assert_eq!(losses(&mut step, &x), [expected; 4], "{case}");
            }
            let before = std::mem::replace(&mut replays, step.stats().replays);
            assert!(replays > before, "{case}");
        };
        check(16.0, "as made");
        frozen.set_data(&Tensor::full([8], 3.0, (Kind::Float, device)));
        check(32.0, "other memory");
        let _ = resized.resize_([1 << 16]).resize_([8]).fill_(0.0);
        check(24.0, "resized");
    }
}
