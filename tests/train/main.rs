//! Tests of `tch_extension::train`: what a step computes, on the CPU and on a GPU, and what its
//! graphs must keep right.

mod cuda;
mod errors;
mod graphs;
mod optim;
mod steps;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::nn::{self, Module};
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::amp::{Autocast, GradScaler, GradScalerOptions};
use tch_extension::optim::Optimizer;
use tch_extension::testing::devices;
use tch_extension::train::{Step, StepOptions, StepOutput, StepStats};
use tch_extension::{Error, Result};

/// Lets only one test run at a time: captures would be disturbed by other threads, and all threads
/// share one cache of autocast and one random number generator.
fn serially() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// AdamW of plain operations, whose numbers are all tensors on the device.
struct AdamW {
    weights: Vec<Tensor>,
    means: Vec<Tensor>,
    variances: Vec<Tensor>,
    updates: Tensor,
    rate: Tensor,
    capturable: bool,
    /// Gradients are clipped to this; as a number on the CPU, which a graph would repeat.
    clip: Option<f64>,
}

impl AdamW {
    fn new(weights: Vec<Tensor>) -> AdamW {
        let zeros = || weights.iter().map(|weight| weight.detach().zeros_like()).collect();
        let number = |value| Tensor::full([1], value, (Kind::Float, weights[0].device()));
        let (means, variances) = (zeros(), zeros());
        let (updates, rate) = (number(0.0), number(0.01));
        AdamW { means, variances, updates, rate, weights, capturable: true, clip: None }
    }

    fn set_rate(&mut self, rate: f64) {
        let _ = self.rate.fill_(rate);
    }
}

impl Optimizer for AdamW {
    fn parameters(&self) -> Vec<Tensor> {
        self.weights.iter().map(Tensor::shallow_clone).collect()
    }

    fn step(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        self.updates += 1.0;
        let correction =
            |beta: f64| Tensor::f_pow_scalar(beta, &self.updates).map(|power| 1.0 - power);
        let (first, second) = (correction(0.9)?, correction(0.999)?);
        for (index, weight) in self.weights.iter_mut().enumerate() {
            let gradient = weight.f_grad()?;
            if !gradient.defined() {
                continue;
            }
            let gradient = match self.clip {
                Some(clip) => gradient.f_clamp(-clip, clip)?,
                None => gradient,
            };
            let (mean, variance) = (&mut self.means[index], &mut self.variances[index]);
            let _ = mean.f_lerp_(&gradient, 0.1)?;
            let _ = variance.f_lerp_(&gradient.f_square()?, 0.001)?;
            let change = (&*mean / &first) / ((&*variance / &second).sqrt() + 1e-8);
            let change = (change + &*weight * 0.01) * &self.rate;
            let _ = weight.f_sub_(&change)?;
        }
        Ok(())
    }

    fn capturable(&self) -> bool {
        self.capturable
    }

    fn revision(&self) -> u64 {
        self.clip.map_or(0, f64::to_bits)
    }
}

struct Model {
    _vs: nn::VarStore,
    wide: nn::Linear,
    narrow: nn::Linear,
    dropout: f64,
}

impl Model {
    /// The same weights each time, drawn on the CPU.
    fn new(device: Device, dropout: f64) -> (Model, AdamW) {
        tch::manual_seed(7);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let wide = nn::linear(vs.root() / "wide", 8, 32, Default::default());
        let narrow = nn::linear(vs.root() / "narrow", 32, 1, Default::default());
        vs.set_device(device);
        let optimizer = AdamW::new(vs.trainable_variables());
        (Model { _vs: vs, wide, narrow, dropout }, optimizer)
    }

    fn loss(&self, batch: &[Tensor]) -> Result<Tensor> {
        let hidden = self.wide.forward(&batch[0]).f_relu()?.f_dropout(self.dropout, true)?;
        Ok(self.narrow.forward(&hidden).f_mse_loss(&batch[1], Reduction::Mean)?)
    }
}

/// A batch on the CPU.
fn batch(number: i64, rows: i64) -> (Tensor, Tensor) {
    let options = (Kind::Float, Device::Cpu);
    let x = (Tensor::arange(rows * 8, options) * 0.7 + number as f64).sin().view([rows, 8]);
    let y = x.sum_dim_intlist(1, true, Kind::Float).cos();
    (x, y)
}

fn options(capture: bool) -> StepOptions {
    StepOptions { capture, ..Default::default() }
}

/// A copy on the CPU, which no later step changes.
fn kept(tensor: &Tensor) -> Tensor {
    tensor.detach().to_device(Device::Cpu).copy()
}

fn all_kept(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(kept).collect()
}

#[track_caller]
fn same_bits(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let (found, expected) = (kept(found), kept(expected));
        assert!(found.equal(&expected), "tensor {place}: {found:?} {expected:?}");
    }
}

/// What a run of several calls made.
struct Run {
    losses: Vec<Tensor>,
    weights: Vec<Tensor>,
    gradients: Vec<Tensor>,
    stats: StepStats,
}

/// Trains the model for some calls. `rows` says how many rows the batch of a call has.
fn train(
    device: Device,
    options: StepOptions,
    dropout: f64,
    calls: i64,
    rows: impl Fn(i64) -> i64,
) -> Run {
    let (model, optimizer) = Model::new(device, dropout);
    let mut step =
        Step::new(options, optimizer, |batch: &[Tensor]| model.loss(batch)).expect("a step");
    tch::manual_seed(3);
    let mut losses = Vec::new();
    for call in 0..calls {
        let (x, y) = batch(call, rows(call));
        losses.push(step.step(&[&x, &y]).expect("a loss"));
    }
    let stats = step.stats();
    let weights = step.into_optimizer().weights;
    let gradients = all_kept(&weights.iter().map(Tensor::grad).collect::<Vec<_>>());
    Run { losses: all_kept(&losses), weights: all_kept(&weights), gradients, stats }
}

#[track_caller]
fn same_run(found: &Run, expected: &Run) {
    same_bits(&found.losses, &expected.losses);
    same_bits(&found.weights, &expected.weights);
    same_bits(&found.gradients, &expected.gradients);
    assert_eq!(found.stats.steps, expected.stats.steps);
}

#[track_caller]
fn refuses<T>(result: Result<T>, says: &[&str]) {
    let Err(error) = result else { panic!("no error") };
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    for says in says {
        assert!(text.contains(says), "{text}: lacks {says}");
    }
}
