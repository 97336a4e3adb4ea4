//! Tests of `GradScaler` that the trace in `trace.rs` does not cover.

use super::*;
use support::gpu::caching_or_skip;
use tch::nn::{self, OptimizerConfig};
use tch_extension::optim::Optimizer;
use tch_extension::testing::{cuda_or_skip, devices};

const CPU: Device = Device::Cpu;

fn scaler(init_scale: f64) -> GradScaler {
    GradScaler::new(GradScalerOptions { init_scale, ..Default::default() }).expect("a scaler")
}

fn sgd(vs: &nn::VarStore) -> nn::Optimizer {
    nn::Sgd::default().build(vs, 1.0).expect("an optimizer")
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_device(CPU).to_kind(Kind::Double).view(-1)).expect("numbers")
}

fn text<T>(result: Result<T>) -> String {
    result.map(drop).expect_err("an error").to_string()
}

/// A user-defined optimizer.
struct Own {
    parameters: Vec<Tensor>,
    steps: usize,
}

impl Own {
    fn of(parameters: &[&Tensor]) -> Own {
        Own {
            parameters: parameters.iter().map(|tensor| tensor.shallow_clone()).collect(),
            steps: 0,
        }
    }
}

impl Optimizer for Own {
    fn parameters(&self) -> Vec<Tensor> {
        self.parameters.iter().map(Tensor::shallow_clone).collect()
    }
    fn step(&mut self) -> Result<()> {
        self.steps += 1;
        if self.steps > 1 { Err(Error::msg("only once")) } else { Ok(()) }
    }
}

fn leaf(values: &[f32], kind: Kind, device: Device) -> Tensor {
    Tensor::from_slice(values).to_kind(kind).to_device(device).set_requires_grad(true)
}

#[test]
fn scaling_keeps_kind_shape_and_graph() {
    let _alone = alone();
    for device in devices() {
        let mut scaler = scaler(8.0);
        for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
            let x = leaf(&[1.0, 2.0], kind, device);
            let scaled = scaler.scale(&x).expect("scaled");
            assert_eq!((scaled.kind(), values(&scaled)), (kind, vec![8.0, 16.0]));
            scaled.sum(kind).backward();
            assert_eq!(values(&x.grad()), [8.0, 8.0]);
        }
        let [x, y] = [leaf(&[1.0], Kind::Float, device), leaf(&[0.5, 3.0], Kind::Double, CPU)];
        let scaled = scaler.scale_all(&[&x, &y]).expect("scaled");
        assert_eq!(scaled.iter().map(values).collect::<Vec<_>>(), [vec![8.0], vec![4.0, 24.0]]);
        assert_eq!(scaled[1].device(), CPU);
        assert!(
            text(scaler.scale(&Tensor::new()))
                .starts_with("GradScaler::scale: loss: expected a tensor")
        );
    }
    let mut off = GradScaler::new(GradScalerOptions {
        enabled: false,
        init_scale: -1.0,
        ..Default::default()
    })
    .expect("whatever the numbers");
    assert_eq!(values(&off.scale(&leaf(&[1.5], Kind::Float, CPU)).expect("as it is")), [1.5]);
    assert_eq!(
        (off.is_enabled(), off.state().expect("none"), off.scale_factor().expect("1")),
        (false, None, 1.0)
    );
}

#[test]
fn each_kind_of_gradient_is_unscaled_but_half_is_refused() {
    let _alone = alone();
    for device in devices() {
        // libtorch has no unscaling kernel for BFloat16 on CUDA.
        let (third, refused) = match device {
            Device::Cpu => (Kind::BFloat16, "kind Float, Double or BFloat16, got Half"),
            _ => (Kind::Double, "kind Float or Double, got Half"),
        };
        let leaves =
            [Kind::Float, Kind::Double, third].map(|kind| leaf(&[1.0, -2.0], kind, device));
        let without = leaf(&[1.0], Kind::Half, device);
        let backward = |scaler: &mut GradScaler, leaves: &[&Tensor]| {
            for leaf in leaves {
                leaf.shallow_clone().zero_grad();
                let loss = (*leaf * 1.5).sum(leaf.kind());
                scaler.scale(&loss).expect("scaled").backward();
            }
        };
        let [a, b, c] = &leaves;
        let mut scaler = scaler(4.0);
        backward(&mut scaler, &[a, b, c]);
        scaler.unscale(&Own::of(&[&without, a, b, c])).expect("unscaled");
        for leaf in &leaves {
            assert_eq!(values(&leaf.grad()), [1.5, 1.5]);
        }
        scaler.update().expect("an update");

        backward(&mut scaler, &[a, &without]);
        let error = text(scaler.unscale(&Own::of(&[b, a, &without])));
        assert_eq!(
            error,
            format!(
                "GradScaler::unscale: the gradient of parameter 2: expected {refused}, which cannot be unscaled; keep \
                 the weights in Float, and let Autocast cast them"
            )
        );
        if device != Device::Cpu {
            let bfloat = leaf(&[1.0], Kind::BFloat16, device);
            backward(&mut scaler, &[a, &bfloat]);
            assert!(
                text(scaler.unscale(&Own::of(&[a, &bfloat])))
                    .contains("got BFloat16, which cannot")
            );
        }
        assert_eq!(values(&a.grad()), [6.0, 6.0], "nothing has changed");
        assert!(
            text(scaler.step(&mut Own::of(&[&without])))
                .starts_with("GradScaler::step: the gradient")
        );
        assert!(text(scaler.update()).contains("no gradient was unscaled"));
        scaler.unscale(&Own::of(&[a])).expect("unscaled");

        let complex = leaf(&[1.0], Kind::ComplexFloat, device);
        (&complex * 4.0).real().sum(Kind::Float).backward();
        assert!(text(scaler.unscale(&Own::of(&[&complex]))).contains("got ComplexFloat"));
    }
}

#[test]
fn of_sparse_gradients_the_values_are_unscaled() {
    let _alone = alone();
    for device in devices() {
        let table = leaf(&[1.0, 2.0, 3.0, 4.0], Kind::Float, device)
            .view([4, 1])
            .detach()
            .set_requires_grad(true);
        let rows = Tensor::from_slice(&[2_i64, 0, 2]).to_device(device);
        let mut scaler = scaler(8.0);
        for (factor, stepped) in [(1.0, true), (f64::NAN, false)] {
            table.shallow_clone().zero_grad();
            let loss =
                (Tensor::embedding(&table, &rows, -1, false, true) * factor).sum(Kind::Float);
            scaler.scale(&loss).expect("scaled").backward();
            assert!(table.grad().is_sparse());
            assert_eq!(scaler.step(&mut Own::of(&[&table])).expect("a step"), stepped);
            if stepped {
                assert_eq!(values(&(table.zeros_like() + table.grad())), [1.0, 0.0, 2.0, 0.0]);
            }
            scaler.update().expect("an update");
        }
        assert_eq!(scaler.scale_factor().expect("a scale"), 4.0);
    }
}

/// Makes one parameter, w = 1, and its optimizer, and runs the backward pass of the scaled w.
fn pair(scaler: &mut GradScaler) -> (nn::VarStore, nn::Optimizer) {
    let vs = nn::VarStore::new(CPU);
    let w = vs.root().ones("w", &[1]);
    let optimizer = sgd(&vs);
    scaler.scale(&w.sum(Kind::Float)).expect("scaled").backward();
    (vs, optimizer)
}

#[test]
fn calls_out_of_turn_say_what_is_wrong() {
    let mut scaler = scaler(8.0);
    let vs = nn::VarStore::new(CPU);
    let mut optimizer = sgd(&vs);
    for (call, error) in [
        ("unscale", text(scaler.unscale(&optimizer))),
        ("step", text(scaler.step(&mut optimizer))),
        ("update", text(scaler.update())),
        ("update_to", text(scaler.update_to(2.0))),
    ] {
        assert!(
            error.starts_with(&format!("GradScaler::{call}: nothing was scaled yet")),
            "{error}"
        );
    }

    let (_vs, optimizer) = pair(&mut scaler);
    scaler.unscale(&optimizer).expect("the first");
    // An optimizer that was moved in memory is still recognised as the same.
    let mut moved = Box::new(optimizer);
    let turn = |call: &str, after: &str| {
        format!(
            "GradScaler::{call}: optimizer: expected an optimizer that was neither unscaled nor stepped since the last update, got one after {after}; GradScaler::update ends \
             an iteration"
        )
    };
    assert_eq!(text(scaler.unscale(&*moved)), turn("unscale", "unscale"));
    assert!(scaler.step(&mut *moved).expect("a step"));
    assert_eq!(text(scaler.step(&mut *moved)), turn("step", "step"));
    assert_eq!(text(scaler.unscale(&*moved)), turn("unscale", "step"));
    scaler.update().expect("an update");
    assert!(text(scaler.update()).contains("no gradient was unscaled since the last update"));

    moved.zero_grad();
    let error = text(scaler.step(&mut *moved));
    assert!(
        error.starts_with(
            "GradScaler::step: optimizer: expected a parameter with a gradient, got none"
        ),
        "{error}"
    );
}

#[test]
fn what_an_optimizer_reports_reaches_the_caller() {
    let mut scaler = scaler(8.0);
    let (vs, _) = pair(&mut scaler);
    let mut own = Own { parameters: vs.trainable_variables(), steps: 1 };
    assert_eq!(text(scaler.step(&mut own)), "only once");
    own.steps = 0;
    assert!(scaler.step(&mut own).expect("its gradients are unscaled, but it did not step"));
    assert_eq!((own.steps, values(&own.parameters[0].grad())), (1, vec![1.0]));
}

#[test]
fn a_gradient_is_never_unscaled_twice_nor_stepped_on_unscaled() {
    let mut scaler = scaler(8.0);
    let [a, b] = [leaf(&[1.0], Kind::Float, CPU), leaf(&[1.0], Kind::Float, CPU)];
    scaler.scale(&(&a + &b).sum(Kind::Float)).expect("scaled").backward();
    scaler.unscale(&Own::of(&[&a, &a])).expect("unscaled once");
    assert!(
        text(scaler.unscale(&Own::of(&[&a]))).contains("got one after unscale"),
        "another, of the same parameter"
    );
    for mut both in [Own::of(&[&a, &b]), Own::of(&[&b, &a])] {
        let error = text(scaler.step(&mut both));
        assert!(
            error.contains("whose gradient was not, together with parameters whose gradients were"),
            "{error}"
        );
        assert_eq!(both.steps, 0);
    }
    assert_eq!((values(&a.grad()), values(&b.grad())), (vec![1.0], vec![8.0]));

    // A variable that was added later and has no gradient is accepted.
    let (vs, mut optimizer) = pair(&mut scaler);
    scaler.unscale(&optimizer).expect("unscaled");
    let late = vs.root().ones("late", &[1]);
    assert!(scaler.step(&mut optimizer).expect("a step"));
    assert_eq!(values(&late), [1.0]);
}

#[test]
fn parameters_that_are_gone_leave_no_trace() {
    let mut scaler = scaler(8.0);
    // New tensors often get the addresses of tensors that were dropped.
    for _ in 0..50 {
        let (_vs, mut optimizer) = pair(&mut scaler);
        assert!(scaler.step(&mut optimizer).expect("each is new"));
    }
    scaler.update().expect("an update");
}

#[test]
fn numbers_that_make_no_sense_are_refused() {
    let good = GradScalerOptions::default();
    let nan = f64::NAN;
    let refused = [
        (
            GradScalerOptions { init_scale: 0.0, ..good },
            "init_scale: expected a positive f32, got 0.0",
        ),
        (
            GradScalerOptions { init_scale: 1e39, ..good },
            "init_scale: expected a positive f32, got 1e39",
        ),
        (
            GradScalerOptions { growth_factor: 1.0, ..good },
            "growth_factor: expected more than 1, got 1.0",
        ),
        (
            GradScalerOptions { growth_factor: nan, ..good },
            "growth_factor: expected more than 1, got NaN",
        ),
        (
            GradScalerOptions { backoff_factor: 1.0, ..good },
            "backoff_factor: expected between 0 and 1, got 1.0",
        ),
        (
            GradScalerOptions { backoff_factor: 0.0, ..good },
            "backoff_factor: expected between 0 and 1, got 0.0",
        ),
        (
            GradScalerOptions { growth_interval: 0, ..good },
            "growth_interval: expected 1 or more, in 32 bits, got 0",
        ),
        (
            GradScalerOptions { growth_interval: 1 << 32, ..good },
            "growth_interval: expected 1 or more, in 32 bits, got",
        ),
    ];
    for (options, expected) in refused {
        let error = text(GradScaler::new(options));
        assert!(error.starts_with(&format!("GradScaler::new: {expected}")), "{error}");
    }

    let mut scaler = scaler(8.0);
    let _ = pair(&mut scaler);
    let state = scaler.state().expect("readable").expect("enabled");
    for bad in [
        GradScalerState { scale: -1.0, ..state },
        GradScalerState { scale: nan, ..state },
        GradScalerState { growth_factor: 0.5, ..state },
        GradScalerState { backoff_factor: 2.0, ..state },
        GradScalerState { growth_interval: -1, ..state },
        GradScalerState { growth_tracker: -1, ..state },
    ] {
        assert!(text(scaler.load_state(&bad)).starts_with("GradScaler::load_state: "));
        assert_eq!(scaler.state().expect("readable"), Some(state));
    }
    assert!(
        text(scaler.update_to(f64::INFINITY))
            .starts_with("GradScaler::update_to: scale: expected a positive f32")
    );
    scaler
        .load_state(&GradScalerState { scale: 0.0, ..state })
        .expect("so far down a scale may come");
}

#[test]
fn the_defaults_are_torchs() {
    let state =
        GradScaler::new(Default::default()).and_then(|scaler| scaler.state()).expect("a state");
    let expected = GradScalerState {
        scale: 65536.0,
        growth_factor: 2.0,
        backoff_factor: 0.5,
        growth_interval: 2000,
        growth_tracker: 0,
    };
    assert_eq!(state, Some(expected));
}

#[test]
fn it_may_move_to_another_thread() {
    fn sent<T: Send>(_: &T) {}
    sent(&scaler(1.0));
}

#[test]
fn cuda_parameters_on_several_devices() {
    let _alone = alone();
    let Some(device) = cuda_or_skip("cuda_parameters_on_several_devices") else { return };
    // The scale is on the device of the first tensor that is scaled.
    for first in [CPU, device] {
        let mut scaler = scaler(8.0);
        let _ = scaler.scale(&Tensor::zeros([], (Kind::Float, first))).expect("scaled");
        for (slope, scale) in
            [([1.0, 2.0], 8.0), ([f64::INFINITY, 1.0], 4.0), ([1.0, f64::NAN], 2.0)]
        {
            let leaves =
                [leaf(&[1.0; 1000], Kind::Float, CPU), leaf(&[1.0; 1000], Kind::Float, device)];
            for (leaf, slope) in leaves.iter().zip(slope) {
                let loss = (leaf * slope).sum(Kind::Float);
                scaler.scale(&loss).expect("scaled").backward();
            }
            let mut both = Own::of(&[&leaves[0], &leaves[1]]);
            let finite = slope.iter().all(|slope| slope.is_finite());
            assert_eq!(scaler.step(&mut both).expect("a step"), finite);
            assert_eq!(both.steps, usize::from(finite));
            if finite {
                assert_eq!(values(&leaves[0].grad())[999], slope[0]);
                assert_eq!(values(&leaves[1].grad())[999], slope[1]);
            }
            scaler.update().expect("an update");
            assert_eq!(scaler.scale_factor().expect("a scale"), scale);
        }
    }
}

/// Checks this in a capture, which a wait for the GPU would end with an error.
#[test]
fn cuda_unscale_and_update_do_not_wait() {
    let _alone = alone();
    let test = "cuda_unscale_and_update_do_not_wait";
    let Some(device) = caching_or_skip(test) else { return };
    let mut scaler = scaler(8.0);
    let leaves = [leaf(&[1.0, 2.0], Kind::Float, device), leaf(&[1.0], Kind::Double, device)];
    for leaf in &leaves {
        scaler.scale(&leaf.sum(leaf.kind())).expect("scaled").backward();
    }
    let own = Own::of(&[&leaves[0], &leaves[1]]);
    // CUDA loads a kernel when it runs for the first time, which is not allowed during a capture.
    scaler.unscale(&own).and_then(|()| scaler.update()).expect("outside");
    let gradient = values(&leaves[0].grad());
    let (graph, ()) = tch_extension::cuda::Graph::capture(device, || {
        scaler.unscale(&own)?;
        scaler.update()
    })
    .expect("nothing waits");
    assert_eq!(values(&leaves[0].grad()), gradient, "not done yet");
    graph.replay().expect("replayed");
    assert_eq!((gradient, values(&leaves[0].grad())), (vec![1.0; 2], vec![0.125; 2]));
    assert_eq!(scaler.growth_tracker().expect("a count"), 2);
}
