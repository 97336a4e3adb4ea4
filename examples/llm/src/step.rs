//! One training step: forward and backward passes of its batches, clipping, AdamW or Muon. On a GPU all of
//! it is captured as CUDA graphs.

use crate::apart::Apart;
use crate::data::{Loader, mix};
use crate::device::Precision;
use crate::model::Model;
use crate::range;
use crate::ranks::{Division, Ranks};
use crate::settings::{Optimizer, Settings};
use crate::trained::{State, Trained};
use anyhow::Result;
use std::rc::Rc;
use tch::{Device, Kind, Reduction, Tensor};
#[cfg(feature = "distributed")]
use tch_extension::distributed::{
    CommHook, Compression, Ddp, DdpOptions, ShardedOptimizer, ShardedOptions,
};
use tch_extension::optim::{AdamW, AdjustLr, FusedOptimizer, Muon, OptimizerConfig};
use tch_extension::train::{Step, StepOptions, StepStats};

type Closure = Box<dyn FnMut(&[Tensor]) -> tch_extension::Result<Tensor>>;

/// Where and how steps are run. It does not change what they compute, except for rounding.
#[derive(Debug, clap::Args)]
#[cfg_attr(not(feature = "distributed"), allow(dead_code))]
pub struct TrainerOptions {
    /// Where to train: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// On a GPU, launch each kernel of a step by itself, and capture no CUDA graph
    #[arg(long)]
    pub no_capture: bool,
    /// With several processes, round the gradients that they exchange to BFloat16
    #[arg(long)]
    half_gradients: bool,
    /// With several processes, keep a part of the optimizer's state on each (ZeRO-1)
    #[arg(long)]
    pub sharded: bool,
    /// With several processes, how many MiB of gradients are sent at once
    #[arg(long, value_name = "MIB")]
    bucket_mb: Option<f64>,
    /// With several processes, how long one waits for the others
    #[arg(long, value_name = "SECONDS", default_value_t = 600)]
    pub timeout: i64,
}

impl TrainerOptions {
    pub fn check(&self) -> Result<()> {
        range::check_above_0("--bucket-mb", self.bucket_mb.unwrap_or(1.0), 1e6)
    }
}

/// A model in training.
pub struct Trainer {
    step: Step<Box<dyn Trained>, Closure>,
    division: Division,
    adamw_lr_ratio: f64,
    /// The seed of dropout, if there is any.
    seed: Option<u64>,
}

impl Trainer {
    /// All ranks call this with the same model and settings. The model then has rank 0's weights.
    pub fn new(
        model: Rc<Model>,
        settings: &Settings,
        apart: Option<Apart>,
        ranks: &Ranks,
        division: Division,
        options: &TrainerOptions,
    ) -> Result<Trainer> {
        let optimizer = optimizer_of(&model, settings)?;
        let (optimizer, closure) = together(model, optimizer, settings, apart, ranks, options)?;
        let accumulate = division.accumulate as usize;
        let capture = !options.no_capture;
        let options = StepOptions { capture, accumulate, ..Default::default() };
        Ok(Trainer {
            step: Step::new(options, optimizer, closure)?,
            division,
            adamw_lr_ratio: settings.adamw_lr_ratio(),
            seed: (settings.model.dropout > 0.0).then_some(settings.seed as u64),
        })
    }

    /// Trains the step after `done` steps and returns its loss, which is still on the device.
    pub fn step(&mut self, loader: &mut Loader, done: i64, rate: f64) -> Result<Tensor> {
        self.step.optimizer_mut().set_lr(rate / self.adamw_lr_ratio)?;
        let accumulate = self.division.accumulate as u64;
        let first = done as u64 * accumulate;
        let mut losses = Vec::new();
        for index in first..first + accumulate {
            if let Some(seed) = self.seed {
                // So that the step decides the random numbers, also in a run that resumed.
                let number = self.division.number(index);
                tch::manual_seed((mix(seed ^ mix(number)) >> 1) as i64);
            }
            let batch = loader.batch(index)?;
            losses.push(self.step.step(&batch.iter().collect::<Vec<_>>())?);
        }
        match losses.len() {
            1 => Ok(losses.remove(0)),
            _ => Ok(Tensor::f_stack(&losses, 0)?.f_mean(None)?),
        }
    }

    /// Drops the graphs, before the processes end their group: NCCL keeps its connections for them.
    pub fn drop_graphs(&mut self) {
        self.step.recapture();
    }

    /// The optimizer's state, on the rank that `is_main`, where the model has all master weights then.
    /// All ranks call it.
    pub fn state(&self, model: &Model, is_main: bool) -> Result<Option<State>> {
        Ok(self.step.optimizer().whole_state(is_main, &model.masters())?)
    }

    /// Takes over a state of [`Trainer::state`], on all ranks. The weights come first.
    pub fn load_state(&mut self, model: &Model, state: &State) -> Result<()> {
        Ok(self.step.optimizer_mut().load_state(state, &model.masters())?)
    }

    /// What DDP has measured, if there are several ranks.
    pub fn ddp_statistics(&self) -> Result<Option<serde_json::Value>> {
        Ok(self.step.optimizer().ddp_statistics()?)
    }

    /// What was captured.
    pub fn stats(&self) -> StepStats {
        self.step.stats()
    }
}

/// Copies losses to the host, which waits for the device.
pub fn on_host(losses: &[Tensor]) -> Result<Tensor> {
    Ok(Tensor::f_stack(losses, 0)?.f_to_kind(Kind::Double)?.f_to_device(Device::Cpu)?)
}

/// What updates the weights that are trained, adapters or all.
fn optimizer_of(model: &Model, settings: &Settings) -> Result<FusedOptimizer> {
    let Settings { updates, weight_decay, .. } = *settings;
    let adamw = AdamW { beta2: 0.95, wd: weight_decay, ..Default::default() };
    let mut optimizer = match updates.optimizer {
        Optimizer::AdamW => adamw.build(model.trained(), settings.lr)?,
        Optimizer::Muon => {
            let mut muon = Muon { weight_decay, adamw, ..Default::default() };
            muon.momentum = updates.muon_momentum.unwrap_or(muon.momentum);
            muon.adjust_lr_fn = AdjustLr::MatchRmsAdamw;
            muon.adamw_lr_ratio = settings.adamw_lr_ratio();
            let mut optimizer = muon.build(model.trained(), settings.lr)?;
            let is_of_block = |name: &str| name.starts_with("h.") || name.starts_with("layers.");
            optimizer.leave_to_adamw(|name, _| !is_of_block(name))?;
            optimizer.split_matrices(|name, weight| match name.ends_with("c_attn.weight") {
                true => vec![weight.size()[0] / 3; 3],
                false => vec![],
            })?;
            optimizer
        }
    };
    // As in GPT-2: biases and norms do not decay.
    optimizer.no_weight_decay(|_, weight| weight.dim() < 2);
    optimizer.set_clip_norm(Some(settings.clip))?;
    optimizer.set_masters(&model.masters())?;
    if settings.precision == Precision::Bf16True {
        optimizer.set_master_weights(false)?;
        optimizer.set_half_moments(true)?;
    }
    Ok(optimizer)
}

/// The closure of a step, and its optimizer. With several ranks, the closure's gradients are averaged.
#[cfg_attr(not(feature = "distributed"), expect(unused_variables))]
fn together(
    model: Rc<Model>,
    optimizer: FusedOptimizer,
    settings: &Settings,
    apart: Option<Apart>,
    ranks: &Ranks,
    options: &TrainerOptions,
) -> Result<(Box<dyn Trained>, Closure)> {
    let share = apart.map(|apart| apart.learned_share()).or(settings.data.learned_share());
    let loss = move |model: &Model, batch: &[Tensor]| match share {
        None => model.loss(batch, None, true, Reduction::Mean),
        // Batches have different numbers of targets that are learned. By the expected number, losses of
        // batches and ranks add up to that of all of them, and none is divided by zero.
        Some(share) => {
            let expected = share * batch[0].numel() as f64;
            let sum = model.loss(batch, apart, true, Reduction::Sum)?;
            Ok(sum.f_div_scalar(expected)?)
        }
    };
    #[cfg(feature = "distributed")]
    if let Some(group) = ranks.group() {
        for (_, master) in model.masters() {
            group.broadcast(&master.detach(), 0)?;
        }
        for variable in model.frozen() {
            group.broadcast(&variable, 0)?;
        }
        if options.sharded {
            let mut sharded = ShardedOptions::default();
            if options.half_gradients {
                sharded.compression = Compression::BFloat16;
            }
            sharded.bucket_mb = options.bucket_mb.unwrap_or(sharded.bucket_mb);
            let optimizer = ShardedOptimizer::new(group, optimizer, &sharded)?;
            return Ok((Box::new(optimizer), Box::new(move |batch| loss(&model, batch))));
        }
        let mut ddp = DdpOptions::default();
        if options.half_gradients {
            ddp.hook = CommHook::Bf16;
        }
        ddp.bucket_cap_mb = options.bucket_mb.unwrap_or(ddp.bucket_cap_mb);
        let ddp = Ddp::new(group, model.trained(), ddp)?;
        let optimizer = Box::new(ddp.guard(optimizer)?);
        return Ok((optimizer, Box::new(move |batch| ddp.forward(|| loss(&model, batch)))));
    }
    Ok((Box::new(optimizer), Box::new(move |batch| loss(&model, batch))))
}
