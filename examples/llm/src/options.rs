//! The options of `train`, and what stands in for those that are not given.

use crate::apart::Documents;
use crate::checkpoint;
use crate::device::Precision;
use crate::family::{Llama, Member, Scaling};
use crate::files;
use crate::lora::Lora;
use crate::model::ModelConfig;
use crate::origin::Origin;
use crate::prepare::TextOptions;
use crate::range;
use crate::sample::{Drawing, LENGTHS};
use crate::settings::{DataId, Difference, Optimizer, Settings, Source};
use crate::step::TrainerOptions;
use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use tch::Device;

/// Steps and windows.
const COUNTS: [i64; 2] = [1, 1 << 40];
/// The context in which a large model is trained further, unless another one is given.
const FINE_TUNED: i64 = 2048;

/// A model's size, with batch, steps and learning rate that suit it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Size {
    /// 4 layers of 128 features, context 64: about two minutes on two CPU cores
    Mini,
    /// 6 layers of 384 features, context 256: minutes on a GPU
    Char,
    /// GPT-2: 12 layers of 768 features, context 1024
    #[value(name = "124m")]
    M124,
    /// GPT-2 medium: 24 layers of 1024 features
    #[value(name = "350m")]
    M350,
    /// GPT-2 large: 36 layers of 1280 features
    #[value(name = "774m")]
    M774,
    /// As mini, with Llama's architecture
    LlamaMini,
    /// Llama 3.2 1B: 16 layers of 2048 features, context 2048
    #[value(name = "llama-1b")]
    Llama1B,
}

impl Size {
    pub fn of(device: Device) -> Size {
        if device.is_cuda() { Size::Char } else { Size::Mini }
    }

    /// Context, layers, heads and features; rows of a batch, batches of a step, steps, and those of the
    /// warm-up; the learning rate.
    fn numbers(self) -> ([i64; 4], [i64; 4], f64) {
        match self {
            Size::Mini | Size::LlamaMini => ([64, 4, 4, 128], [12, 1, 3000, 100], 3e-3),
            Size::Char => ([256, 6, 6, 384], [64, 1, 5000, 100], 1e-3),
            Size::M124 => ([1024, 12, 12, 768], [16, 30, 20_000, 700], 6e-4),
            Size::M350 => ([1024, 24, 16, 1024], [8, 60, 20_000, 700], 3e-4),
            Size::M774 => ([1024, 36, 20, 1280], [4, 120, 20_000, 700], 2.5e-4),
            Size::Llama1B => ([2048, 16, 32, 2048], [4, 60, 20_000, 700], 3e-4),
        }
    }

    /// Heads of keys and values, features of the feed-forward part, and the base of the angles.
    fn llama(self) -> Option<Llama> {
        let (kv_heads, hidden, theta) = match self {
            Size::LlamaMini => (2, 352, 1e4),
            Size::Llama1B => (8, 8192, 5e5),
            _ => return None,
        };
        let ([context, _, heads, dim], ..) = self.numbers();
        Some(Llama {
            member: Member::Llama,
            kv_heads,
            head_dim: dim / heads,
            hidden,
            eps: 1e-5,
            theta,
            scaling: Scaling::Default,
            tied: true,
            bias: false,
            positions: context,
            window: None,
        })
    }

    /// The model of this size, for a vocabulary of so many tokens.
    pub fn model(self, vocabulary: usize) -> ModelConfig {
        let ([context, layers, heads, dim], ..) = self.numbers();
        ModelConfig {
            // Rows in multiples of 64, so that the products of the last layer are fast.
            vocabulary: vocabulary.next_multiple_of(64) as i64,
            context,
            layers,
            heads,
            dim,
            llama: self.llama(),
            ..Default::default()
        }
    }

    pub fn settings(self, device: Device, vocabulary: usize, data: DataId) -> Settings {
        let (_, [batch, accumulate, steps, warm_up], lr) = self.numbers();
        Settings {
            model: self.model(vocabulary),
            precision: Precision::of(device),
            batch,
            accumulate,
            steps,
            lr,
            warm_up,
            weight_decay: 0.1,
            updates: Default::default(),
            clip: 1.0,
            seed: 1,
            data,
            documents: Default::default(),
            lora: None,
            source: Default::default(),
        }
    }
}

/// What the command line calls a value.
pub fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or(String::new(), |value| value.get_name().to_string())
}

#[derive(Debug, Args)]
pub struct TrainOptions {
    /// The model's size, with its batch, steps and learning rate [default: mini on the CPU, char on
    /// a GPU]
    #[arg(long, value_enum)]
    pub size: Option<Size>,
    #[command(flatten)]
    pub text: TextOptions,
    /// Data that `prepare` wrote, in place of a text
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["text", "vocabulary", "vocabulary_size", "vocabulary_from", "held_out"])]
    pub data: Option<PathBuf>,
    /// Folder for checkpoints, losses and their plot
    #[arg(long, value_name = "FOLDER", default_value = "runs/llm")]
    pub out: PathBuf,
    /// Continue the run in --out, if it has a checkpoint
    #[arg(long)]
    pub resume: bool,
    /// Begin with the weights of this run, or of this model in Hugging Face's format; it needs the same
    /// vocabulary. With --resume, where the model of an adapter is now
    #[arg(long, value_name = "FOLDER")]
    pub init: Option<PathBuf>,
    /// Continue to train this adapter of --init, in PEFT's format
    #[arg(long, value_name = "FOLDER", requires = "init", conflicts_with = "lora")]
    pub adapter: Option<PathBuf>,
    /// Begin again where --out has a run already
    #[arg(long, conflicts_with = "resume")]
    pub overwrite: bool,
    #[command(flatten)]
    pub how: TrainerOptions,
    #[command(flatten)]
    pub changes: Changes,
    /// Measure the held-out loss after every N steps and at the end [default: a tenth of the steps]
    #[arg(long, value_name = "N")]
    pub eval_every: Option<i64>,
    /// Windows of the held-out text that are measured
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub eval_windows: i64,
    /// Write a checkpoint after every N steps and at the end [default: a tenth of the steps]
    #[arg(long, value_name = "N")]
    pub save_every: Option<i64>,
    /// Read the losses from the device after every N steps
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub log_every: i64,
    /// The device's peak in TFLOP/s, for the MFU [default: by the GPU's name]
    #[arg(long, value_name = "TFLOPS")]
    pub peak: Option<f64>,
    /// Tokens to generate at the end; 0 for none
    #[arg(long, value_name = "N", default_value_t = 300)]
    pub sample: i64,
    #[command(flatten)]
    pub drawing: Drawing,
}

/// Settings that are given instead of the size's, or instead of those of the run that is continued.
#[derive(Debug, Args)]
pub struct Changes {
    /// Tokens of a sequence
    #[arg(long, value_name = "N")]
    context: Option<i64>,
    /// Blocks of the model
    #[arg(long, value_name = "N")]
    layers: Option<i64>,
    /// Heads of attention
    #[arg(long, value_name = "N")]
    heads: Option<i64>,
    /// Features of a token
    #[arg(long, value_name = "N")]
    dim: Option<i64>,
    /// Probability of dropout [default: 0]
    #[arg(long, value_name = "P")]
    dropout: Option<f64>,
    #[command(flatten)]
    pub recomputed: Recomputed,
    /// Kinds of weights, features and products [default: bf16 on a GPU, f32 on the CPU]
    #[arg(long, value_enum)]
    precision: Option<Precision>,
    /// Rows of a batch; several processes divide the batches of a step, and then the rows of each
    #[arg(long, value_name = "N")]
    batch: Option<i64>,
    /// Batches of a step, whose gradients are added up
    #[arg(long, value_name = "N")]
    accumulate: Option<i64>,
    /// Steps of the whole run
    #[arg(long, value_name = "N")]
    steps: Option<i64>,
    /// What updates the matrices of the blocks; AdamW updates all else [default: adamw]
    #[arg(long, value_enum, value_name = "NAME")]
    optimizer: Option<Optimizer>,
    /// Peak learning rate of Muon's matrices, whose updates are as large as AdamW's [default: --lr]
    #[arg(long, value_name = "RATE")]
    muon_lr: Option<f64>,
    /// How much of the mean of earlier gradients Muon keeps [default: 0.95]
    #[arg(long, value_name = "SHARE")]
    muon_momentum: Option<f64>,
    /// Peak learning rate, which falls to a tenth along a cosine [default: the size's, with
    /// --init a tenth of it, unless adapters are trained]
    #[arg(long, value_name = "RATE")]
    lr: Option<f64>,
    /// Steps until the peak
    #[arg(long, value_name = "N")]
    warm_up: Option<i64>,
    /// Decay of matrices [default: 0.1]
    #[arg(long, value_name = "DECAY")]
    weight_decay: Option<f64>,
    /// Largest norm of all gradients together [default: 1]
    #[arg(long, value_name = "NORM")]
    clip: Option<f64>,
    /// Whether the documents of a window see one another [default: as in the run of --init, or
    /// together]
    #[arg(long, value_enum)]
    documents: Option<Documents>,
    /// Seed of the initial weights, the order of the text and dropout [default: 1]
    #[arg(long)]
    seed: Option<i64>,
    /// Freeze the weights of --init, and train low-rank adapters of this rank (LoRA)
    #[arg(long, value_name = "RANK")]
    pub lora: Option<i64>,
    /// What the adapters' output is multiplied with, divided by the rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", requires = "lora")]
    lora_alpha: Option<f64>,
    /// Layers with adapters: some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj, in
    /// GPT-2 of c_attn, c_proj and c_fc [default: those of attention; c_attn]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', requires = "lora")]
    lora_targets: Vec<String>,
}

/// What is no part of a run's settings, because it changes no numbers.
#[derive(Debug, Args)]
pub struct Recomputed {
    /// GPT-2: compute the activations of the feed-forward parts again in the backward pass, which saves
    /// memory; Llama's family always does
    #[arg(long)]
    recompute: bool,
    /// Keep only the input of each layer, and compute the layer again in the backward pass, which
    /// saves most memory and takes a third more operations
    #[arg(long)]
    recompute_layers: bool,
}

impl Recomputed {
    pub fn set(&self, model: &mut ModelConfig) {
        (model.recompute, model.recompute_layers) = (self.recompute, self.recompute_layers);
    }
}

impl Changes {
    /// The settings with what was given.
    pub fn apply(&self, mut settings: Settings) -> Settings {
        fn set<T: Copy>(target: &mut T, given: Option<T>) {
            *target = given.unwrap_or(*target);
        }
        let model = &mut settings.model;
        set(&mut model.context, self.context);
        set(&mut model.layers, self.layers);
        set(&mut model.heads, self.heads);
        set(&mut model.dim, self.dim);
        set(&mut model.dropout, self.dropout);
        self.recomputed.set(model);
        set(&mut settings.precision, self.precision);
        set(&mut settings.batch, self.batch);
        set(&mut settings.accumulate, self.accumulate);
        set(&mut settings.steps, self.steps);
        set(&mut settings.lr, self.lr);
        set(&mut settings.warm_up, self.warm_up);
        set(&mut settings.weight_decay, self.weight_decay);
        let updates = &mut settings.updates;
        set(&mut updates.optimizer, self.optimizer);
        updates.muon_lr = self.muon_lr.or(updates.muon_lr);
        updates.muon_momentum = self.muon_momentum.or(updates.muon_momentum);
        set(&mut settings.clip, self.clip);
        set(&mut settings.documents, self.documents);
        set(&mut settings.seed, self.seed);
        let lora = settings.lora.take();
        settings.lora = self.lora_of(&settings.model, lora);
        settings
    }

    /// The adapters of this model with what was given.
    pub fn lora_of(&self, model: &ModelConfig, lora: Option<Lora>) -> Option<Lora> {
        let Some(rank) = self.lora else { return lora };
        let lora = lora.unwrap_or_else(|| Lora::new(rank, model));
        let alpha = self.lora_alpha.unwrap_or(lora.alpha);
        let targets = match &self.lora_targets[..] {
            [] => lora.targets,
            names => names.iter().cloned().collect(),
        };
        Some(Lora { rank, alpha, targets, ..lora })
    }

    /// The settings of a new run with the model's sizes that were given, and no steps of warm-up after
    /// the end. A new model's other sizes follow; one that is trained further has as many tokens a batch
    /// as with the context of the `preset`.
    pub fn apply_to_preset(&self, settings: Settings, preset: i64, is_new: bool) -> Settings {
        let mut settings = self.apply(settings);
        if is_new {
            self.fit_llama(&mut settings.model);
        }
        if self.batch.is_none() && !is_new {
            // As many tokens as the size's.
            settings.batch = (settings.batch * preset / settings.model.context.max(1)).max(1);
        }
        if self.warm_up.is_none() {
            settings.warm_up = settings.warm_up.min(settings.steps / 10);
        }
        settings
    }

    /// Gives a size of Llama's architecture what follows from its other sizes.
    fn fit_llama(&self, model: &mut ModelConfig) {
        let ModelConfig { context, heads, dim, ref mut llama, .. } = *model;
        let Some(llama) = llama else { return };
        (llama.positions, llama.head_dim) = (context, dim / heads.max(1));
        if self.dim.is_some() {
            // As in Llama 2, and a multiple of 32.
            llama.hidden = (dim.saturating_mul(8) / 3 + 31) & !31;
        }
        if self.heads.is_some() {
            llama.kv_heads = heads;
        }
    }
}

impl TrainOptions {
    /// A text has the vocabulary of --init, unless another one is named.
    pub fn with_vocabulary_of_init(mut self) -> TrainOptions {
        let text = &mut self.text;
        let is_given = text.vocabulary.is_some() || text.vocabulary_from.is_some();
        let continues = || checkpoint::any(&self.out.join(checkpoint::FOLDER)).unwrap_or(false);
        if self.data.is_none() && !is_given && !(self.resume && continues()) {
            text.vocabulary_from = self.init.clone();
        }
        self
    }

    /// Checks what does not depend on the data.
    pub fn check(&self, device: Device) -> Result<()> {
        range::check("--eval-every", self.eval_every.unwrap_or(1), COUNTS)?;
        range::check("--eval-windows", self.eval_windows, COUNTS)?;
        range::check("--save-every", self.save_every.unwrap_or(1), COUNTS)?;
        range::check("--log-every", self.log_every, COUNTS)?;
        range::check_above_0("--peak", self.peak.unwrap_or(1.0), 1e9)?;
        range::check("--sample", self.sample, LENGTHS)?;
        self.drawing.check()?;
        self.how.check()?;
        if self.resume || self.init.is_some() {
            // The sizes are those of a checkpoint.
            return Ok(());
        }
        // These checks need no data, so settings that cannot work fail before text is prepared.
        let size = self.size.unwrap_or(Size::of(device));
        let settings = size.settings(device, 256, DataId::default());
        self.changes.apply_to_preset(settings, 0, true).check()
    }

    /// Where the data of a new run come from.
    fn source(&self) -> Source {
        match &self.data {
            Some(folder) => Source { data: Some(files::absolute(folder)), ..Default::default() },
            None => Source { text: self.text.by_name(), ..Default::default() },
        }
    }

    /// Refuses options of the text that differ from those of the run that is continued.
    pub fn check_text(&self, earlier: &Settings) -> Result<()> {
        self.check_same(self.text.difference(&earlier.source.text))
    }

    /// Refuses a difference from the run that is continued.
    fn check_same(&self, difference: Option<Difference>) -> Result<()> {
        let Some(Difference { option, before, now }) = difference else { return Ok(()) };
        let run = format!("of the run in {}", self.out.display());
        match option.as_str() {
            "--data" => {
                bail!("the data {run} were others: give those with --data, or another --out")
            }
            "--llama" => bail!(
                "the architecture {run} was another one: leave --size out to --resume, or give another --out"
            ),
            _ => bail!(
                "{option} {run} was {before}, and is {now} now: leave it out to --resume, or give another --out"
            ),
        }
    }

    /// The settings of a new run, perhaps with the model of another one, `init`, or of the run that is
    /// continued, from which nothing may differ.
    pub fn settings(
        &self,
        device: Device,
        vocabulary: usize,
        data: DataId,
        earlier: Option<&Settings>,
        init: Option<&Origin>,
    ) -> Result<Settings> {
        let mut settings = match earlier {
            None => {
                let preset = self.size.unwrap_or(Size::of(device));
                let mut settings = preset.settings(device, vocabulary, data);
                let context = settings.model.context;
                settings.source = self.source();
                if let Some(init) = init {
                    settings.documents = init.documents;
                    let (init, adapter) = (&init.config, init.adapter.as_ref());
                    settings.lora = adapter.map(|adapter| adapter.lora.clone());
                    let Changes { lora, lora_alpha, lora_targets, .. } = &self.changes;
                    ensure!(
                        settings.lora.is_none()
                            || (lora.is_none() && lora_alpha.is_none() && lora_targets.is_empty()),
                        "--init has an adapter, which is trained further: leave out --lora, --lora-alpha and \
                         --lora-targets, or give what `export --merge` makes of it"
                    );
                    // What was trained already needs smaller steps. The promises of large models are
                    // longer sequences than texts and memory have.
                    if settings.lora.is_none() && self.changes.lora.is_none() {
                        settings.lr /= 10.0;
                    }
                    let most = if init.llama.is_some() { FINE_TUNED } else { init.context };
                    settings.model = ModelConfig { dropout: 0.0, ..init.clone() };
                    settings.model.context = init.context.min(most);
                }
                self.changes.apply_to_preset(settings, context, init.is_none())
            }
            Some(earlier) => {
                self.check_text(earlier)?;
                let mut settings = Settings { data, ..earlier.clone() };
                if let Some(size) = self.size {
                    let dropout = earlier.model.dropout;
                    settings.model = ModelConfig { dropout, ..size.model(vocabulary) };
                }
                settings = self.changes.apply(settings);
                if self.size.is_some() {
                    self.changes.fit_llama(&mut settings.model);
                }
                settings
            }
        };
        settings.check()?;
        ensure!(
            !self.how.sharded || settings.updates.optimizer == Optimizer::AdamW,
            "--sharded divides matrices, which Muon needs as wholes: leave it out, or give --optimizer adamw"
        );
        ensure!(
            self.how.no_capture
                || !(device.is_cuda()
                    && settings.model.recompute_layers
                    && settings.model.dropout > 0.0),
            "--recompute-layers would draw other random numbers for --dropout in a captured step: leave one of them \
             out, or give --no-capture"
        );
        self.check_same(earlier.and_then(|earlier| settings.difference(earlier)))?;
        if let (Some(_), Some(folder)) = (earlier, self.source().data) {
            // The same data, perhaps at another place.
            settings.source.data = Some(folder);
        }
        Ok(settings)
    }
}

#[cfg(test)]
#[path = "../tests/unit/options.rs"]
mod tests;
