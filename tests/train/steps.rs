//! What a step computes without a graph, on the CPU and on a GPU.

use super::*;

/// The loop that a step replaces.
fn by_hand(device: Device, calls: i64) -> (Vec<Tensor>, Vec<Tensor>) {
    let (model, mut optimizer) = Model::new(device, 0.0);
    let mut losses = Vec::new();
    for call in 0..calls {
        let (x, y) = batch(call, 16);
        optimizer.weights.iter_mut().for_each(Tensor::zero_grad);
        let loss = model.loss(&[x.to_device(device), y.to_device(device)]).expect("a loss");
        loss.backward();
        optimizer.step().expect("a step");
        losses.push(kept(&loss));
    }
    (losses, all_kept(&optimizer.weights))
}

#[test]
fn a_step_is_the_loop_written_by_hand() {
    let _serial = serially();
    for device in devices() {
        let run = train(device, options(false), 0.0, 6, |_| 16);
        let (losses, weights) = by_hand(device, 6);
        same_bits(&run.losses, &losses);
        same_bits(&run.weights, &weights);
        assert!(run.losses[5].double_value(&[]) < run.losses[0].double_value(&[]));
        let stats = run.stats;
        assert_eq!((stats.steps, stats.eager_calls, stats.replays, stats.graphs), (6, 6, 0, 0));
        assert!(!stats.captured);
        assert!(run.losses[0].size().is_empty());
    }
}

#[test]
fn on_the_cpu_capture_changes_nothing() {
    let _serial = serially();
    let run = train(Device::Cpu, options(true), 0.1, 6, |call| 8 + call % 2);
    same_run(&run, &train(Device::Cpu, options(false), 0.1, 6, |call| 8 + call % 2));
    assert_eq!((run.stats.eager_calls, run.stats.graphs), (6, 0));
}

/// `w` with loss `w x`, so that gradients are the batches themselves. A rate of 1 makes the steps
/// their differences.
struct Descent {
    weight: Tensor,
}

impl Optimizer for Descent {
    fn parameters(&self) -> Vec<Tensor> {
        vec![self.weight.shallow_clone()]
    }

    fn step(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let gradient = self.weight.grad();
        let _ = self.weight.f_sub_(&gradient)?;
        Ok(())
    }

    fn capturable(&self) -> bool {
        true
    }
}

fn descent(device: Device) -> Descent {
    let weight = Tensor::zeros([2], (Kind::Float, device)).set_requires_grad(true);
    Descent { weight }
}

fn product(weight: &Tensor) -> impl FnMut(&[Tensor]) -> Result<Tensor> + use<> {
    let weight = weight.shallow_clone();
    move |batch| Ok((&weight * &batch[0]).f_sum(Kind::Float)?)
}

fn values(tensor: &Tensor) -> [f32; 2] {
    [0, 1].map(|index| tensor.double_value(&[index]) as f32)
}

#[test]
fn gradients_add_up_and_the_last_call_steps() {
    let _serial = serially();
    for (device, capture) in
        devices().into_iter().flat_map(|device| [(device, false), (device, true)])
    {
        let optimizer = descent(device);
        let weight = optimizer.weight.shallow_clone();
        // Four is exact, and the sums are exact.
        let options = StepOptions { accumulate: 4, warm_up: 1, capture, ..Default::default() };
        let mut step = Step::new(options, optimizer, product(&weight)).expect("a step");
        let mut expected = [0.0_f32; 2];
        for round in 0..5_u8 {
            let mut sum = [0.0; 2];
            for call in 0..4_u8 {
                let x = [f32::from(round + 1), f32::from(call) - 1.0];
                let loss = step.step(&[&Tensor::from_slice(&x)]).expect("a loss");
                let now = weight.double_value(&[0]) as f32 * x[0]
                    + weight.double_value(&[1]) as f32 * x[1];
                if call < 3 {
                    assert_eq!(loss.double_value(&[]) as f32, now, "the loss is not divided");
                    assert_eq!(values(&weight), expected);
                }
                sum = [sum[0] + x[0] / 4.0, sum[1] + x[1] / 4.0];
                assert_eq!(values(&weight.grad()), sum, "round {round}, call {call}");
            }
            expected = [expected[0] - sum[0], expected[1] - sum[1]];
            assert_eq!(values(&weight), expected);
            assert_eq!(step.stats().steps, u64::from(round) + 1);
        }
        let graphs = if capture && device != Device::Cpu { 2 } else { 0 };
        assert_eq!(step.stats().graphs, graphs);
    }
}

#[test]
fn gradients_set_by_hand_are_discarded() {
    let _serial = serially();
    for device in devices() {
        for accumulate in [1, 2] {
            let optimizer = descent(device);
            let weight = optimizer.weight.shallow_clone();
            let options = StepOptions { accumulate, warm_up: 1, ..Default::default() };
            let mut step = Step::new(options, optimizer, product(&weight)).expect("a step");
            let x = Tensor::from_slice(&[1.0_f32, 2.0]);
            for round in 1..5 {
                for _ in 0..accumulate {
                    let _ = step.step(&[&x]).expect("a loss");
                }
                assert_eq!(values(&weight), [-round as f32, -2.0 * round as f32]);
                assert_eq!(values(&weight.grad()), [1.0, 2.0]);
                let _ = weight.grad().fill_(100.0);
            }
        }
    }
}

#[test]
fn the_stage_after_the_backward_pass_changes_gradients() {
    let _serial = serially();
    for device in devices() {
        let optimizer = descent(device);
        let weight = optimizer.weight.shallow_clone();
        let options = StepOptions { accumulate: 2, warm_up: 1, ..Default::default() };
        let mut step = Step::new(options, optimizer, product(&weight))
            .expect("a step")
            .after_backward(|parameters| {
                assert_eq!(parameters.len(), 1);
                let _ = parameters[0].f_grad()?.f_clamp_(-1.0, 1.0)?;
                Ok(())
            });
        let x = Tensor::from_slice(&[0.5_f32, 2.0]);
        for round in 1..5 {
            let _ = step.step(&[&x]).expect("a loss");
            let _ = step.step(&[&x]).expect("a loss");
            assert_eq!(values(&weight), [-0.5 * round as f32, -round as f32]);
        }
    }
}

#[test]
fn further_tensors_are_copies_and_carry_a_state() {
    let _serial = serially();
    for device in devices() {
        let optimizer = descent(device);
        let weight = optimizer.weight.shallow_clone();
        let mut loss = product(&weight);
        let options = StepOptions { warm_up: 2, ..Default::default() };
        let mut step = Step::new(options, optimizer, move |batch: &[Tensor]| {
            let state = &batch[1] + &batch[0];
            // The last of them is the parameter itself.
            Ok(StepOutput { loss: loss(batch)?, extra: vec![state, weight.shallow_clone()] })
        })
        .expect("a step");
        let mut state = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let mut seen = Vec::new();
        for call in 1..7 {
            let x = Tensor::from_slice(&[1.0_f32, call as f32]);
            let mut output = step.step_with_extra(&[&x, &state]).expect("an output");
            assert!(!output.loss.requires_grad() && !output.extra[1].requires_grad());
            seen.push(output.extra.remove(1));
            state = output.extra.remove(0);
            assert_eq!(state.device(), device);
            assert_eq!(values(&state), [call as f32, (call * (call + 1) / 2) as f32]);
        }
        for (call, weight) in seen.iter().enumerate() {
            assert_eq!(values(weight)[0], -(call as f32 + 1.0));
        }
    }
}

#[test]
fn a_scaler_skips_the_steps_that_overflow() {
    let _serial = serially();
    let device = Device::Cpu;
    let optimizer = descent(device);
    let weight = optimizer.weight.shallow_clone();
    let scaler = GradScaler::new(GradScalerOptions { init_scale: 4.0, ..Default::default() });
    let mut step = Step::new(options(true), optimizer, product(&weight))
        .expect("a step")
        .with_scaler(scaler.expect("a scaler"));
    let x = Tensor::from_slice(&[1.0_f32, 2.0]);
    let loss = step.step(&[&x]).expect("a loss");
    assert_eq!((loss.double_value(&[]), values(&weight)), (0.0, [-1.0, -2.0]));
    let _ = step.step(&[&(&x * f64::INFINITY)]).expect("a loss");
    assert_eq!(values(&weight), [-1.0, -2.0]);
    assert_eq!(step.scaler().expect("a scaler").scale_factor().expect("a scale"), 2.0);
    let _ = step.step(&[&x]).expect("a loss");
    assert_eq!(values(&weight), [-2.0, -4.0]);
    let state = step.scaler().expect("a scaler").state().expect("a state").expect("enabled");
    step.scaler_mut().expect("a scaler").load_state(&state).expect("loaded");
    let _ = step.step(&[&x]).expect("a loss");
    assert_eq!(values(&weight), [-3.0, -6.0]);
}

#[test]
fn casts_of_old_weights_are_not_used() {
    let _serial = serially();
    for device in devices() {
        let optimizer = descent(device);
        let weight = optimizer.weight.shallow_clone();
        let matrix = weight.shallow_clone();
        let options = StepOptions { warm_up: 1, ..Default::default() };
        let mut step = Step::new(options, optimizer, move |batch: &[Tensor]| {
            // The cache has casts of leaves only.
            Ok(batch[0].view([1, 2]).f_matmul(&matrix)?.f_sum(Kind::Float)?)
        })
        .expect("a step");
        // A region around the steps, whose cache lives as long as the region.
        let _autocast = Autocast::new(device, Kind::BFloat16).expect("autocast");
        let x = Tensor::from_slice(&[1.0_f32, 2.0]);
        for call in 0..5 {
            let loss = step.step(&[&x]).expect("a loss");
            assert_eq!(loss.double_value(&[]), -5.0 * f64::from(call));
        }
    }
}

#[test]
fn parameters_may_be_added() {
    let _serial = serially();
    for device in devices() {
        let (model, mut optimizer) = Model::new(device, 0.0);
        let added = optimizer.weights.pop().expect("a weight");
        let options = StepOptions { warm_up: 1, ..Default::default() };
        let mut step =
            Step::new(options, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
        let (x, y) = batch(0, 4);
        for _ in 0..3 {
            let _ = step.step(&[&x, &y]).expect("a loss");
        }
        let before = kept(&added);
        let mut weights = step.optimizer().parameters();
        weights.push(added.shallow_clone());
        *step.optimizer_mut() = AdamW::new(weights);
        for _ in 0..3 {
            let _ = step.step(&[&x, &y]).expect("a loss");
        }
        assert!(!kept(&added).equal(&before), "the new parameter is trained");
        let graphs = usize::from(device != Device::Cpu);
        assert_eq!((step.stats().steps, step.stats().graphs), (6, graphs));
    }
}

#[test]
fn what_may_cross_threads() {
    fn crosses<T: Send>(_: &T) {}
    let optimizer = descent(Device::Cpu);
    let loss = product(&optimizer.weight);
    let step = Step::new(options(true), optimizer, loss).expect("a step");
    crosses(&step);
    let mut step = std::thread::spawn(move || {
        let mut step = step;
        step.step(&[&Tensor::from_slice(&[1.0_f32, 2.0])]).map(|_| step)
    })
    .join()
    .expect("a thread")
    .expect("a loss");
    assert_eq!(values(&step.optimizer_mut().weight), [-1.0, -2.0]);
}

/// A type that can be a field.
#[test]
fn a_boxed_closure_has_a_name() {
    type Boxed = Step<Descent, Box<dyn FnMut(&[Tensor]) -> Result<StepOutput>>>;
    let optimizer = descent(Device::Cpu);
    let mut loss = product(&optimizer.weight);
    let mut step: Boxed = Step::new(
        options(true),
        optimizer,
        Box::new(move |batch: &[Tensor]| loss(batch).map(Into::into)) as _,
    )
    .expect("a step");
    let _ = step.step(&[&Tensor::from_slice(&[1.0_f32, 2.0])]).expect("a loss");
    assert!(format!("{step:?}").contains("steps: 1"));
}
