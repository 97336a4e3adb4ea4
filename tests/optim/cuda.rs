//! Steps in CUDA graphs.

use super::reference::Reference;
use super::updates::{assert_agree, build, rules};
use super::*;
use support::gpu::caching_or_skip;
use tch_extension::amp::{GradScaler, GradScalerOptions};
use tch_extension::cuda::Graph;
use tch_extension::testing::cuda_or_skip;
use tch_extension::train::{Step, StepOptions};

/// Leaves with gradients that stay where they are.
fn with_gradients(device: Device) -> Vec<Tensor> {
    let leaves = leaves(&SIZES, Kind::Float, device);
    accumulate(&leaves, 1.0);
    leaves
}

/// New values for the gradients.
fn refill(leaves: &[Tensor]) {
    for leaf in leaves {
        leaf.grad().copy_(&normal(&leaf.size(), Kind::Float, CPU));
    }
}

#[test]
fn cuda_replays_are_steps() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_replays_are_steps") else { return };
    for rule in rules() {
        for max_norm in [None, Some(2.0)] {
            let run = |is_captured: bool| {
                tch::manual_seed(41);
                let leaves = with_gradients(device);
                let mut reference = Reference::new(rule, 0.01, &leaves);
                let mut optimizer = build(rule, &leaves, 0.01);
                optimizer.set_clip_norm(max_norm).expect("set_clip_norm");
                optimizer.step().expect("step");
                reference.step(&gradients(&leaves), max_norm);
                let graph = is_captured.then(|| {
                    let (graph, ()) =
                        Graph::capture(device, || optimizer.step()).expect("a capture");
                    assert_eq!(graph.kernels(), 2);
                    graph
                });
                for step in 0..12 {
                    refill(&leaves);
                    let lr = 0.02 / f64::from(step + 1);
                    optimizer.set_lr(lr).expect("set_lr");
                    reference.lr = lr;
                    let max_norm = max_norm.map(|max| max / f64::from(step + 1));
                    if max_norm.is_some() {
                        optimizer.set_clip_norm(max_norm).expect("set_clip_norm");
                    }
                    match &graph {
                        Some(graph) => graph.replay().expect("a replay"),
                        None => optimizer.step().expect("step"),
                    }
                    reference.step(&gradients(&leaves), max_norm);
                }
                assert_agree(&leaves, &reference, Kind::Float);
                (
                    bits(&leaves),
                    optimizer.grad_norm().expect("grad_norm").map(|norm| norm.double_value(&[])),
                )
            };
            assert!(run(true) == run(false), "{max_norm:?}");
        }
    }
}

/// Why `tch::nn::AdamW` cannot be captured: the bias correction of one step is in the graph.
#[test]
fn cuda_graphs_of_tchs_optimizer_repeat_one_step_and_ours_go_on() {
    let _alone = serially();
    let test = "cuda_graphs_of_tchs_optimizer_repeat_one_step_and_ours_go_on";
    let Some(device) = caching_or_skip(test) else { return };
    const REPLAYS: usize = 20;
    // With equal gradients, Adam moves by the learning rate in each step, if it is right.
    let moved = |step: &mut dyn FnMut(), w: &Tensor| {
        w.grad().copy_(&Tensor::ones([4], (Kind::Float, CPU)));
        step();
        let before = w.double_value(&[0]);
        let (graph, ()) = Graph::capture(device, || {
            step();
            Ok(())
        })
        .expect("a capture");
        for _ in 0..REPLAYS {
            graph.replay().expect("a replay");
        }
        (before - w.double_value(&[0])) / (0.01 * REPLAYS as f64)
    };
    let leaf = |vs: &VarStore| {
        let w = vs.root().ones("w", &[4]);
        accumulate(&[w.shallow_clone()], 1.0);
        w
    };
    let vs = VarStore::new(device);
    let w = leaf(&vs);
    let mut ours = AdamW::default().wd(0.0).build(&vs, 0.01).expect("an optimizer");
    let of_ours = moved(&mut || ours.step().expect("a step"), &w);
    assert!((of_ours - 1.0).abs() < 1e-3, "{of_ours}");

    let vs = VarStore::new(device);
    let w = leaf(&vs);
    let theirs = tch::nn::AdamW::default().wd(0.0);
    let mut theirs = tch::nn::OptimizerConfig::build(theirs, &vs, 0.01).expect("an optimizer");
    let of_theirs = moved(&mut || theirs.step(), &w);
    assert!((of_theirs - 1.0).abs() > 0.1, "{of_theirs}: tch's would do, too");
}

#[test]
fn cuda_a_whole_training_step_is_captured() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_a_whole_training_step_is_captured") else { return };
    let run = |is_captured: bool| {
        tch::manual_seed(42);
        let leaves = leaves(&[&[20, 30], &[30]], Kind::Float, device);
        let mut x = normal(&[8, 20], Kind::Float, device);
        let mut optimizer = build(rules()[0], &leaves, 0.01);
        optimizer.set_clip_norm(Some(0.1)).expect("set_clip_norm");
        let mut step = || {
            optimizer.zero_grad()?;
            let y = (x.f_matmul(&leaves[0])? + &leaves[1]).tanh();
            y.square().mean(Kind::Float).f_backward()?;
            optimizer.step()
        };
        let stream = tch_extension::cuda::Stream::new(device).expect("a stream");
        let current = tch_extension::cuda::Stream::current(device).expect("a stream");
        stream.wait_stream(&current).expect("an order");
        {
            let _guard = tch_extension::cuda::StreamGuard::new(&stream).expect("a guard");
            (0..3).for_each(|_| step().expect("a step"));
        }
        let graph =
            is_captured.then(|| Graph::capture_on(&stream, &mut step).expect("a capture").0);
        current.wait_stream(&stream).expect("an order");
        for _ in 0..10 {
            match &graph {
                Some(graph) => graph.replay().expect("a replay"),
                None => {
                    stream.wait_stream(&current).expect("an order");
                    let _guard = tch_extension::cuda::StreamGuard::new(&stream).expect("a guard");
                    step().expect("a step");
                }
            }
        }
        current.wait_stream(&stream).expect("an order");
        let _ = &mut x;
        bits(&leaves)
    };
    assert!(run(true) == run(false));
}

#[test]
fn cuda_scaled_steps_wait_for_nothing() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_scaled_steps_wait_for_nothing") else { return };
    tch::manual_seed(43);
    let leaves = with_gradients(device);
    let mut optimizer = build(rules()[0], &leaves, 0.01);
    let mut scaler =
        GradScaler::new(GradScalerOptions { init_scale: 4.0, ..Default::default() }).expect("one");
    let loss = Tensor::ones([], (Kind::Float, device));
    let mut step = || {
        let _ = scaler.scale(&loss)?;
        assert!(scaler.step(&mut optimizer)?);
        scaler.update()
    };
    step().expect("a step");
    // Whatever waits for the GPU cannot be captured.
    let (graph, ()) = Graph::capture(device, step).expect("a capture");
    let before = bits(&leaves);
    refill(&leaves);
    let _ = leaves[3].grad().get(2).fill_(f64::NAN);
    graph.replay().expect("a replay");
    assert!(bits(&leaves) == before, "skipped");
    assert_eq!(scaler.scale_factor().expect("a scale"), 2.0);
    refill(&leaves);
    graph.replay().expect("a replay");
    assert!(bits(&leaves) != before);
}

#[test]
fn cuda_captures_refuse_what_a_replay_could_not_do() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_captures_refuse_what_a_replay_could_not_do") else {
        return;
    };
    tch::manual_seed(44);
    let leaves = with_gradients(device);
    let mut optimizer = build(rules()[0], &leaves, 0.01);
    let before = bits(&leaves);
    let message = text(Graph::capture(device, || optimizer.step()));
    assert_eq!(
        message,
        "FusedOptimizer::step: the state of w0 would be made in a capture; run a step before it"
    );
    assert!(bits(&leaves) == before);
    optimizer.step().expect("step");
    let why = "a capture would repeat it in every replay; call it before";
    let message = text(Graph::capture(device, || optimizer.set_lr(0.5)));
    assert_eq!(message, format!("FusedOptimizer::set_lr: {why}"));
    assert_eq!(optimizer.lr_of_group(0), Some(0.01));
    optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
    let message = text(Graph::capture(device, || optimizer.set_clip_norm(Some(0.5))));
    assert_eq!(message, format!("FusedOptimizer::set_clip_norm: {why}"));
    optimizer.step().expect("step");
}

#[test]
fn cuda_graphs_go_on_from_a_loaded_state() {
    let _alone = serially();
    let Some(device) = caching_or_skip("cuda_graphs_go_on_from_a_loaded_state") else { return };
    for rule in [rules()[0], rules()[4], rules()[8]] {
        tch::manual_seed(47);
        let leaves = with_gradients(device);
        let mut optimizer = build(rule, &leaves, 0.01);
        optimizer.step().expect("step");
        let (graph, ()) = Graph::capture(device, || optimizer.step()).expect("a capture");
        graph.replay().expect("a replay");
        let (weights, state) = (copies(&leaves), optimizer.state_dict().expect("state_dict"));
        let mut run = |is_first: bool| {
            if !is_first {
                let _no_grad = tch::no_grad_guard();
                for (leaf, weight) in leaves.iter().zip(&weights) {
                    leaf.shallow_clone().copy_(weight);
                }
                optimizer.load_state_dict(&state).expect("load_state_dict");
            }
            (0..3).for_each(|_| graph.replay().expect("a replay"));
            bits(&leaves)
        };
        let expected = run(true);
        assert!(run(false) == expected && run(false) == expected);
    }
}

#[test]
fn cuda_steps_agree_with_the_cpus() {
    let _alone = serially();
    let Some(device) = cuda_or_skip("cuda_steps_agree_with_the_cpus") else { return };
    for rule in rules() {
        let run = |device: Device| {
            tch::manual_seed(45);
            let leaves = leaves(&SIZES, Kind::Double, device);
            let mut optimizer = build(rule, &leaves, 0.01);
            optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
            for _ in 0..5 {
                accumulate(&leaves, 1.0);
                optimizer.step().expect("step");
            }
            leaves.iter().map(|leaf| leaf.detach().to_device(CPU)).collect::<Vec<_>>()
        };
        for (ours, expected) in run(device).iter().zip(&run(CPU)) {
            tch_extension::testing::assert_close(ours, expected, 1e-13, 1e-14);
        }
    }
}

/// Parameters on two devices, of which only the second one's have a gradient in the last step.
#[test]
fn cuda_the_norm_is_that_of_the_last_step() {
    let _alone = serially();
    let Some(device) = cuda_or_skip("cuda_the_norm_is_that_of_the_last_step") else { return };
    tch::manual_seed(48);
    let leaves: Vec<Tensor> = [CPU, device]
        .map(|device| normal(&[100], Kind::Float, device).set_requires_grad(true))
        .into();
    let mut optimizer = build(rules()[0], &leaves, 0.01);
    optimizer.set_clip_norm(Some(f64::INFINITY)).expect("set_clip_norm");
    for (some, on) in [(0..2, CPU), (1..2, device), (0..1, CPU)] {
        optimizer.zero_grad().expect("zero_grad");
        accumulate(&leaves[some.clone()], 1.0);
        optimizer.step().expect("step");
        let norm = optimizer.grad_norm().expect("grad_norm").expect("a norm");
        assert_eq!(norm.device(), on);
        let expected = Reference::norm(
            &gradients(&leaves[some]).iter().map(|g| g.to_device(CPU)).collect::<Vec<_>>(),
        );
        assert!((norm.double_value(&[]) / expected - 1.0).abs() < 1e-6, "{norm} and {expected}");
    }
}

/// A graph has the address of the caller's master weights.
#[test]
fn cuda_captured_steps_follow_masters_with_other_data() {
    let _alone = serially();
    let test = "cuda_captured_steps_follow_masters_with_other_data";
    let Some(device) = caching_or_skip(test) else { return };
    for config in [AdamW::default(), AdamW::default().beta2(0.5).amsgrad(true).maximize(true)] {
        let run = |capture: bool| {
            tch::manual_seed(49);
            let weight = normal(&[30, 20], Kind::BFloat16, device).set_requires_grad(true);
            let mut master = weight.detach().to_kind(Kind::Float);
            let mut optimizer =
                config.build_of(named(&[weight.shallow_clone()]), 0.01).expect("an optimizer");
            optimizer.set_masters(&[("w0", &master)]).expect("shared");
            optimizer.set_clip_norm(Some(1.0)).expect("set_clip_norm");
            let options = StepOptions { capture, ..Default::default() };
            let mut step = Step::new(options, optimizer, |batch: &[Tensor]| {
                Ok(batch[0].f_matmul(&weight)?.tanh().square().mean(Kind::Float))
            })
            .expect("a step");
            for number in 0..16 {
                if number == 8 {
                    assert_eq!(step.stats().captured, capture);
                    master.set_data(&(&master * 0.5));
                }
                let x = normal(&[8, 30], Kind::BFloat16, device);
                let _ = step.step(&[&x]).expect("a step");
            }
            assert_eq!(step.stats().captured, capture);
            assert_eq!(bits(&[weight.shallow_clone()]), bits(&[master.to_kind(Kind::BFloat16)]));
            bits(&[master])
        };
        assert!(run(true) == run(false), "{config:?}");
    }
}

/// More values than a block's chunk times many blocks, so that several waves of blocks run.
#[test]
fn cuda_large_parameters_are_right() {
    let _alone = serially();
    let Some(device) = cuda_or_skip("cuda_large_parameters_are_right") else { return };
    tch::manual_seed(46);
    let leaves: Vec<Tensor> = [[5003, 4001], [1, 77_777], [2048, 1024]]
        .iter()
        .map(|size| Tensor::randn(size, (Kind::Float, device)).set_requires_grad(true))
        .collect();
    for rule in [rules()[1], rules()[7]] {
        let mut reference = Reference::new(rule, 0.01, &leaves);
        let mut optimizer = build(rule, &leaves, 0.01);
        optimizer.set_clip_norm(Some(10.0)).expect("set_clip_norm");
        for _ in 0..3 {
            for leaf in &leaves {
                leaf.shallow_clone().zero_grad();
                (leaf * leaf.randn_like()).sum(Kind::Float).backward();
            }
            reference.step(&gradients(&leaves), Some(10.0));
            optimizer.step().expect("step");
        }
        assert_agree(&leaves, &reference, Kind::Float);
    }
}
