//! A fixed number of steps on given batches with given weights, for comparisons with another
//! program that trains the same.

use crate::data::{Loader, Order, windows};
use crate::device::{self, Precision};
use crate::files::{read_text, take_folder, write_json};
use crate::lora::Lora;
use crate::model::Model;
use crate::options::{Recomputed, Size};
use crate::progress::say;
use crate::range;
use crate::ranks::{Division, Ranks};
use crate::settings::{Optimizer, Settings};
use crate::step::{Trainer, TrainerOptions, on_host};
use crate::tokens::{Part, Tokens};
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::io::BufRead;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;
use tch::{Device, Kind};
use tch_extension::cuda;
use tch_extension::nn::state_dict;

const SETTINGS: &str = "settings.json";
const WEIGHTS: &str = "weights.safetensors";
const ADAPTERS: &str = "adapters.safetensors";
const BATCHES: &str = "batches.safetensors";
/// Rounds of which each is timed. One before them is not.
const ROUNDS: i64 = 5;

#[derive(Debug, clap::Args)]
pub struct BenchOptions {
    /// The folder with settings, weights and batches; --write makes it, in one process
    #[arg(long, value_name = "FOLDER")]
    pub inputs: PathBuf,
    /// Write --inputs from the data of this folder, which `prepare` wrote, and train nothing
    #[arg(long, value_name = "FOLDER")]
    pub write: Option<PathBuf>,
    /// With --write: the model's size and the rows of a batch
    #[arg(long, value_enum, default_value_t = Size::Char)]
    pub size: Size,
    /// With --write: the steps of the whole run
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub steps: i64,
    /// With --write: the rows of the embedding [default: the vocabulary, as a multiple of 64]
    #[arg(long, value_name = "N")]
    pub rows_of_embedding: Option<i64>,
    /// With --write: seed of the weights and of the order of the batches
    #[arg(long, default_value_t = 1)]
    pub seed: i64,
    /// Train adapters of this rank with frozen weights; --write writes those to begin with
    #[arg(long, value_name = "RANK")]
    pub lora: Option<i64>,
    /// What updates the matrices of the blocks; AdamW updates all else [default: what was given with
    /// --write, or adamw]
    #[arg(long, value_enum, value_name = "NAME")]
    pub optimizer: Option<Optimizer>,
    /// Kinds of weights, features and products [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    pub precision: Option<Precision>,
    #[command(flatten)]
    pub recomputed: Recomputed,
    #[command(flatten)]
    pub how: TrainerOptions,
    /// Train as many steps as each line on stdin says, and print the result of each
    #[arg(long)]
    pub by_line: bool,
}

/// The subcommand. `begun` is when the program began.
pub fn run(options: &BenchOptions, begun: Instant) -> Result<()> {
    match &options.write {
        Some(data) => write(options, data),
        None => Bench::new(options, begun)?.run(options.by_line),
    }
}

fn write(options: &BenchOptions, data: &Path) -> Result<()> {
    range::check("--steps", options.steps, [1, 1_000_000])?;
    let tokens = Tokens::open(data)?;
    let id = tokens.id(String::new());
    let mut settings = options.size.settings(Device::Cpu, tokens.vocabulary(), id);
    if let Some(rows) = options.rows_of_embedding {
        ensure!(
            rows >= tokens.vocabulary() as i64,
            "--rows-of-embedding {rows} is too small: give {} or more",
            tokens.vocabulary()
        );
        settings.model.vocabulary = rows;
    }
    (settings.steps, settings.accumulate, settings.seed) = (options.steps, 1, options.seed);
    settings.warm_up = settings.warm_up.min(options.steps / 10);
    settings.updates.optimizer = options.optimizer.unwrap_or_default();
    settings.lora = options.lora.map(|rank| Lora::new(rank, &settings.model));
    settings.check()?;
    let mut model = Model::new(&settings.model, Device::Cpu, settings.seed)?;
    let order = Order::new(tokens.len(Part::Train), settings.model.context, settings.seed)?;
    let _inputs = take_folder("--inputs", &options.inputs)?;
    state_dict::save(&model.variables, options.inputs.join(WEIGHTS), &Default::default())?;
    if let Some(lora) = settings.lora.take() {
        model.adapt(&lora, settings.seed)?;
        state_dict::save(model.trained(), options.inputs.join(ADAPTERS), &Default::default())?;
    }
    let windows_needed = (settings.steps * settings.batch) as u64;
    let starts: Vec<usize> = (0..windows_needed).map(|window| order.start(window)).collect();
    let context = settings.model.context as usize;
    let all = windows(&tokens, Part::Train, &starts, context, None)?;
    let shape = [2, settings.steps, settings.batch, settings.model.context];
    let batches = all.f_view(shape)?.f_to_kind(Kind::Int)?;
    let batches = BTreeMap::from([("batches".to_string(), batches)]);
    state_dict::save_tensors(&batches, options.inputs.join(BATCHES))?;
    let rates = (0..settings.steps).map(|step| settings.learning_rate(step)).collect();
    write_json(&options.inputs.join(SETTINGS), &Inputs { rates, settings })?;
    say(&format!("{} batches in {}", options.steps, options.inputs.display()))
}

#[derive(Debug, Serialize, Deserialize)]
struct Inputs {
    /// The learning rate of each step.
    rates: Vec<f64>,
    settings: Settings,
}

struct Bench {
    ranks: Ranks,
    device: Device,
    settings: Settings,
    rates: Vec<f64>,
    trainer: Trainer,
    loader: Loader,
    /// Seconds from the program's begin until it was ready for the first step.
    ready: f64,
    /// The same, and those of the first step.
    first_step: Option<f64>,
    step: i64,
}

impl Bench {
    fn new(options: &BenchOptions, begun: Instant) -> Result<Bench> {
        let (ranks, device) = Ranks::join(&options.how.device, options.how.timeout)?;
        ensure!(
            ranks.size() == 1 || !options.by_line,
            "--by-line is for one process: leave it out with {}",
            ranks.size()
        );
        let file = options.inputs.join(SETTINGS);
        let text = read_text(&file, "make --inputs with `bench --write`")?;
        let Inputs { rates, mut settings } = serde_json::from_str(&text)
            .with_context(|| format!("{} is not what --write makes", file.display()))?;
        settings.precision = options.precision.unwrap_or(Precision::of(device));
        options.recomputed.set(&mut settings.model);
        settings.lora = options.lora.map(|rank| Lora::new(rank, &settings.model));
        settings.updates.optimizer = options.optimizer.unwrap_or(settings.updates.optimizer);
        settings.check()?;
        options.how.check()?;
        if device.is_cuda() {
            cuda::reset_peak_memory_stats(device)?;
        }
        let mut model = Model::zeros(&settings.model, device)?;
        state_dict::load(&model.variables, &[options.inputs.join(WEIGHTS)], &Default::default())?;
        if let Some(lora) = &settings.lora {
            model.adapt(lora, settings.seed)?;
            let file = options.inputs.join(ADAPTERS);
            state_dict::load(model.trained(), &[file], &Default::default())?;
        }
        model.set_precision(settings.precision)?;
        // Each process has as many rows as one alone, of batches of its own.
        let all_rows = settings.batch * ranks.size() as i64;
        let division = Division::new(all_rows, 1, ranks.rank(), ranks.size())?;
        let loader = loader(&options.inputs.join(BATCHES), &settings, division, device)?;
        let (model, how) = (Rc::new(model), &options.how);
        let trainer = Trainer::new(model, &settings, None, &ranks, division, how)?;
        let ready = begun.elapsed().as_secs_f64();
        let (first_step, step) = (None, 0);
        Ok(Bench { ranks, device, settings, rates, trainer, loader, ready, first_step, step })
    }

    fn run(mut self, by_line: bool) -> Result<()> {
        if by_line {
            say(&json!({"ready": self.ready}).to_string())?;
            for line in std::io::stdin().lock().lines() {
                let line = line.context("cannot read stdin")?;
                let Ok(steps) = line.trim().parse() else {
                    bail!("stdin: expected a number of steps, got {line:?}: give one on each line");
                };
                let (seconds, losses) = self.round(steps)?;
                let result = json!({"steps": steps, "seconds": seconds, "losses": losses});
                say(&result.to_string())?;
            }
            return say(&self.summary()?.to_string());
        }
        let each = (self.settings.steps / (ROUNDS + 1)).max(1);
        let mut losses = Vec::new();
        let mut times = Vec::new();
        while self.step < self.settings.steps {
            let steps = each.min(self.settings.steps - self.step);
            let (seconds, of_round) = self.round(steps)?;
            losses.extend(of_round);
            times.push(seconds / steps as f64);
        }
        // The first round warms up.
        times.remove(0);
        times.sort_by(f64::total_cmp);
        let mut summary = self.summary()?;
        if let Some(each) = times.get(times.len() / 2) {
            let tokens = self.settings.tokens_per_step() as f64;
            let world = self.ranks.size() as f64;
            summary["ms_per_step"] = json!(1e3 * each);
            summary["tokens_per_s"] = json!(world * tokens / each);
            summary["tokens_per_s_each"] = json!(tokens / each);
        }
        summary["losses"] = json!(losses);
        self.trainer.drop_graphs();
        self.ranks.leave()?;
        say(&summary.to_string())
    }

    /// Trains some steps and returns the seconds that they took, and their losses.
    fn round(&mut self, steps: i64) -> Result<(f64, Vec<f64>)> {
        ensure!(
            steps >= 1 && self.step + steps <= self.settings.steps,
            "expected 1 to {} steps, got {steps}",
            self.settings.steps - self.step
        );
        let begun = Instant::now();
        let mut losses = Vec::new();
        for _ in 0..steps {
            let rate = self.rates.get(self.step as usize).copied();
            let rate = rate.context("the settings lack a learning rate")?;
            let loss = self.trainer.step(&mut self.loader, self.step, rate)?;
            if self.first_step.is_none() {
                loss.f_double_value(&[])?;
                self.first_step = Some(self.ready + begun.elapsed().as_secs_f64());
            }
            losses.push(loss);
            self.step += 1;
        }
        // Copying the losses to the host waits for the device.
        let losses = on_host(&losses)?;
        let seconds = begun.elapsed().as_secs_f64();
        Ok((seconds, self.ranks.means(&losses)?))
    }

    fn summary(&self) -> Result<serde_json::Value> {
        let memory = match self.device.is_cuda() {
            true => Some(cuda::memory_stats(self.device)?),
            false => None,
        };
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        Ok(json!({
            "device": device::describe(self.device)?,
            "precision": self.settings.precision,
            "world": self.ranks.size(),
            "batch": self.settings.batch,
            "ddp": self.trainer.ddp_statistics()?,
            "parameters": self.settings.model.parameters(),
            "steps": self.step,
            "kernels": self.trainer.stats().kernels,
            "first_step_s": self.first_step,
            "peak_MiB": memory.map(|memory| mib(memory.peak_allocated)),
            "reserved_MiB": memory.map(|memory| mib(memory.peak_reserved)),
        }))
    }
}

/// Loads the batches of a file, from the beginning again after the last one.
fn loader(file: &Path, settings: &Settings, division: Division, device: Device) -> Result<Loader> {
    let name = file.display();
    let found = state_dict::load_tensors(file)?.remove("batches");
    let batches = found.with_context(|| format!("{name} has no tensor \"batches\""))?;
    let (rows, context) = (settings.batch, settings.model.context);
    let size = batches.size();
    ensure!(
        matches!(size[..], [2, steps, b, t] if steps > 0 && (b, t) == (rows, context)),
        "{name}: expected batches [2, steps, {rows}, {context}], got {size:?}"
    );
    let source = move |index: u64| {
        let index = (division.number(index) % size[1] as u64) as i64;
        Ok(batches.f_select(1, index)?.f_to_kind(Kind::Int64)?.f_reshape([-1])?)
    };
    Loader::from(Box::new(source), [rows, context, 0], device)
}
