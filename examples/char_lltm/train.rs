//! Truncated backpropagation through time, and the held-out loss.

use crate::data::{Corpus, Streams};
use crate::model::CharModel;
use crate::options::{Op, Options};
use crate::report::Progress;
use anyhow::{Context, Result, ensure};
use std::time::{Duration, Instant};
use tch::nn::{self, OptimizerConfig};
use tch::{Kind, Reduction, Tensor};
use tch_extension::nn::LltmState;

/// Gradients longer than this, over all weights together, are scaled down to it.
const LARGEST_GRADIENT: f64 = 1.0;

/// Losses wait on the device until this many are there or this much time has passed: on a GPU, asking for
/// each would stop the queue at every step.
const LOSSES_PER_LOOK: usize = 64;
const TIME_PER_LOOK: Duration = Duration::from_millis(100);

/// What training left behind.
pub struct Curve {
    /// Loss of each step, in nats per character.
    pub losses: Vec<f64>,
    /// Characters trained on, and the time that took without writing files.
    pub characters: i64,
    pub seconds: f64,
}

impl Curve {
    pub fn characters_per_second(&self) -> f64 {
        self.characters as f64 / self.seconds
    }
}

/// Trains `model`; `save` is called every `--save-every` steps and at the end, and only after the losses
/// until then are known to be finite.
pub fn train(
    model: &CharModel,
    op: Op,
    options: &Options,
    corpus: &Corpus,
    save: impl Fn() -> Result<()>,
) -> Result<Curve> {
    let mut trainer = Trainer::new(model, options, &corpus.train)?;
    let mut losses = Losses::default();
    let mut progress = Progress::new(op.name(), options.steps, options.batch * options.seq_len);
    let mut training = Duration::ZERO;
    let mut last_saved = None;
    let mut begun = Instant::now();
    for step in 1..=options.steps {
        losses.push(trainer.step(step)?);
        let saving = step % options.save_every == 0 || step == options.steps;
        if saving || losses.due() {
            losses.look().with_context(|| diverged(op, options.lr, last_saved))?;
            progress.update(step, losses.latest(), training + begun.elapsed());
        }
        if saving {
            training += begun.elapsed();
            save().with_context(|| format!("the {} run stopped at step {step}", op.name()))?;
            last_saved = Some(step);
            begun = Instant::now();
        }
    }
    progress.finish();
    let characters = options.steps * options.batch * options.seq_len;
    Ok(Curve { losses: losses.known, characters, seconds: training.as_secs_f64() })
}

fn diverged(op: Op, lr: f64, last_saved: Option<i64>) -> String {
    let kept = match last_saved {
        Some(step) => format!("the weights of step {step} are kept"),
        None => "no weights were written".to_string(),
    };
    format!("the {} run diverged: lower --lr (now {lr:?}); {kept}", op.name())
}

/// The optimiser, and where in the text it stands.
struct Trainer<'a> {
    model: &'a CharModel,
    options: &'a Options,
    streams: &'a Streams,
    optimizer: nn::Optimizer,
    state: LltmState,
    column: i64,
}

impl<'a> Trainer<'a> {
    fn new(model: &'a CharModel, options: &'a Options, streams: &'a Streams) -> Result<Trainer<'a>> {
        let optimizer = nn::Adam::default().build(&model.variables, options.lr)?;
        let state = model.zero_state(streams.rows());
        Ok(Trainer { model, options, streams, optimizer, state, column: 0 })
    }

    /// One step on the next chunk; the loss, still on the device.
    fn step(&mut self, step: i64) -> Result<Tensor> {
        let (inputs, targets) = self.next_chunk();
        let (logits, state) = self.model.forward(&inputs, &self.state)?;
        self.state = state.detach();
        let loss = cross_entropy(&logits, &targets, Reduction::Mean)?;
        self.optimizer.zero_grad();
        loss.f_backward()?;
        clip_gradients(&self.model.variables);
        self.optimizer.set_lr(learning_rate(self.options, step));
        self.optimizer.step();
        Ok(loss.detach())
    }

    /// After the last whole chunk the rows start over, and their state with them.
    fn next_chunk(&mut self) -> (Tensor, Tensor) {
        let count = self.options.seq_len;
        if self.column + count > self.streams.length() {
            self.column = 0;
            self.state = self.model.zero_state(self.streams.rows());
        }
        let chunk = self.streams.chunk(self.column, count);
        self.column += count;
        chunk
    }
}

/// From the full rate down to a tenth of it, along half a cosine.
fn learning_rate(options: &Options, step: i64) -> f64 {
    let done = (step - 1) as f64 / options.steps as f64;
    options.lr * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
}

/// Norm clipping as tch's `clip_grad_norm`, which however waits for the device at every step.
fn clip_gradients(variables: &nn::VarStore) {
    let _no_grad = tch::no_grad_guard();
    let gradients: Vec<Tensor> = variables.trainable_variables().iter().map(Tensor::grad).collect();
    let norms: Vec<Tensor> = gradients.iter().map(Tensor::norm).collect();
    let scale = (LARGEST_GRADIENT / (Tensor::stack(&norms, 0).norm() + 1e-6)).clamp_max(1.0);
    for mut gradient in gradients {
        let _ = gradient.g_mul_(&scale);
    }
}

fn cross_entropy(logits: &Tensor, targets: &Tensor, reduction: Reduction) -> Result<Tensor> {
    let vocabulary = logits.size()[2];
    let logits = logits.f_reshape([-1, vocabulary])?;
    Ok(logits.f_cross_entropy_loss(&targets.f_reshape([-1])?, None::<Tensor>, reduction, -100, 0.0)?)
}

/// The losses so far: those looked at, and those still on the device.
#[derive(Default)]
struct Losses {
    known: Vec<f64>,
    waiting: Vec<Tensor>,
    last_look: Option<Instant>,
}

impl Losses {
    fn push(&mut self, loss: Tensor) {
        self.waiting.push(loss);
    }

    fn due(&self) -> bool {
        self.waiting.len() >= LOSSES_PER_LOOK || self.last_look.is_none_or(|at| at.elapsed() >= TIME_PER_LOOK)
    }

    /// Fetches what waits; an error if a loss is not a finite number.
    fn look(&mut self) -> Result<()> {
        let fetched: Vec<f64> = Tensor::f_stack(&self.waiting, 0)?.to_kind(Kind::Double).try_into()?;
        self.waiting.clear();
        self.last_look = Some(Instant::now());
        for loss in fetched {
            ensure!(loss.is_finite(), "the loss of step {} is {loss}", self.known.len() + 1);
            self.known.push(loss);
        }
        Ok(())
    }

    fn latest(&self) -> f64 {
        self.known.last().copied().unwrap_or(f64::NAN)
    }
}

/// Mean loss over the held-out text, each row read from its beginning to its end.
pub fn held_out_loss(model: &CharModel, corpus: &Corpus, seq_len: i64) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let streams = &corpus.held_out;
    let mut state = model.zero_state(streams.rows());
    let mut nats = 0.0;
    for column in (0..streams.length()).step_by(seq_len as usize) {
        let (inputs, targets) = streams.chunk(column, seq_len.min(streams.length() - column));
        let (logits, next) = model.forward(&inputs, &state)?;
        state = next;
        nats += cross_entropy(&logits.to_kind(Kind::Double), &targets, Reduction::Sum)?.double_value(&[]);
    }
    Ok(nats / (streams.rows() * streams.length()) as f64)
}
