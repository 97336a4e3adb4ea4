//! Truncated backpropagation through time, and the loss on the held-out text.

use crate::data::{Corpus, Streams};
use crate::layer::State;
use crate::model::CharModel;
use crate::options::{Op, Options};
use crate::ranks::{Ranks, Together, Trained, inner};
use crate::report::Progress;
use anyhow::{Context, Result, bail, ensure};
use std::rc::Rc;
use std::time::{Duration, Instant};
use tch::{Device, Kind, Reduction, Tensor};
use tch_extension::ops::{CrossEntropyOptions, f_cross_entropy};
use tch_extension::optim::{AdamW, OptimizerConfig};
use tch_extension::train::{Step, StepOptions, StepOutput};

/// The largest norm of the gradient of all weights together. A larger gradient is scaled down to
/// it.
const LARGEST_GRADIENT: f64 = 1.0;

/// The approximate time of a turn. It is short enough that the line of progress changes often, and long
/// enough that the device does not idle between turns.
const TURN: Duration = Duration::from_millis(200);

/// The steps of a turn if there are several ranks.
const TURN_OF_SEVERAL: i64 = 10;

/// Trains all learners, which take turns of a few steps. Other work on the machine then slows all
/// of them equally, and their speeds can be compared. `save` is called every `--save-every` steps
/// and at the end.
pub fn train(
    learners: &mut [Learner],
    options: &Options,
    streams: &Streams,
    ranks: &Ranks,
    save: impl Fn(&Learner) -> Result<()>,
) -> Result<()> {
    let mut progress = Progress::new(options.steps);
    let mut step = 0;
    let mut turn = 1;
    while step < options.steps {
        let until_save = (options.save_every - step % options.save_every).min(options.steps - step);
        let count = until_save.min(turn);
        let begun = Instant::now();
        for learner in learners.iter_mut() {
            learner.turn(options, streams, ranks, step, count)?;
        }
        step += count;
        turn = match ranks.size() {
            1 => steps_within(TURN * learners.len() as u32, begun.elapsed() / count as u32),
            // All ranks must take the same turns.
            _ => TURN_OF_SEVERAL,
        };
        progress.update(step, learners);
        if count == until_save {
            learners.iter().try_for_each(|learner| learner.check_weights(options.lr))?;
            learners.iter().try_for_each(&save)?;
            learners.iter_mut().for_each(|learner| learner.saved = Some(step));
        }
    }
    Ok(())
}

fn steps_within(time: Duration, each: Duration) -> i64 {
    ((time.as_secs_f64() / each.as_secs_f64()) as i64).clamp(1, 100)
}

/// A model in training.
pub struct Learner {
    pub op: Op,
    pub model: Rc<CharModel>,
    /// The loss of each step, in nats per character.
    pub losses: Vec<f64>,
    /// The speed in each turn, in characters per second.
    speeds: Vec<f64>,
    step: Step<Trained, Closure>,
    state: State,
    /// The column of the streams at which the next chunk begins.
    column: i64,
    /// The last step after which the weights were written.
    saved: Option<i64>,
}

/// Takes inputs, targets and state, and returns the loss and the next state.
type Closure = Box<dyn FnMut(&[Tensor]) -> tch_extension::Result<StepOutput>>;

impl Learner {
    /// Drops the graphs, before the processes end their group: NCCL keeps its connections for them.
    pub fn drop_graphs(&mut self) {
        self.step.recapture();
    }

    /// A learner whose rank trains on so many rows.
    pub fn new(
        op: Op,
        model: CharModel,
        options: &Options,
        ranks: &Ranks,
        rows: i64,
    ) -> Result<Learner> {
        // Without weight decay, it is Adam.
        let mut optimizer =
            AdamW { wd: 0.0, ..Default::default() }.build(&model.variables, options.lr)?;
        optimizer.set_clip_norm(Some(LARGEST_GRADIENT))?;
        let state = model.zero_state(rows);
        let (together, optimizer) = ranks.train(&model.variables, optimizer)?;
        let model = Rc::new(model);
        let step = Step::new(StepOptions::default(), optimizer, closure(&model, together))?;
        let (losses, speeds) = (Vec::new(), Vec::new());
        Ok(Learner { op, model, losses, speeds, step, state, column: 0, saved: None })
    }

    /// The speed in the latest turn.
    pub fn speed_now(&self) -> f64 {
        self.speeds.last().copied().unwrap_or(f64::NAN)
    }

    /// The median over the turns, which ignores moments in which the machine was busy with
    /// something else.
    pub fn characters_per_second(&self) -> f64 {
        let mut speeds = self.speeds.clone();
        speeds.sort_by(f64::total_cmp);
        speeds.get(speeds.len() / 2).copied().unwrap_or(f64::NAN)
    }

    /// Runs `count` steps after the first `done` steps. The losses are copied to the host only at
    /// the end: on a GPU, reading each one would make the host wait at every step.
    fn turn(
        &mut self,
        options: &Options,
        streams: &Streams,
        ranks: &Ranks,
        done: i64,
        count: i64,
    ) -> Result<()> {
        let begun = Instant::now();
        let steps = done + 1..=done + count;
        let losses =
            steps.map(|step| self.step(options, streams, step)).collect::<Result<Vec<_>>>()?;
        let losses = Tensor::f_stack(&losses, 0)?.to_kind(Kind::Double).to_device(Device::Cpu);
        ranks.mean(&losses)?;
        let losses: Vec<f64> = losses.try_into()?;
        let characters = count * options.batch * options.seq_len;
        self.speeds.push(characters as f64 / begun.elapsed().as_secs_f64());
        self.losses.extend(losses);
        self.check_finite(done as usize).with_context(|| self.diverged(options.lr))
    }

    /// Checks the losses after the first `done`.
    fn check_finite(&self, done: usize) -> Result<()> {
        match (done..self.losses.len()).find(|&index| !self.losses[index].is_finite()) {
            Some(index) => bail!("the loss of step {} is {}", index + 1, self.losses[index]),
            None => Ok(()),
        }
    }

    /// Checks the weights, which the last step may have spoilt although its loss was finite. All ranks
    /// have the same.
    fn check_weights(&self, lr: f64) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let weights = self.model.variables.trainable_variables();
        let each = weights.iter().map(|weight| Ok(weight.f_isfinite()?.f_all()?));
        let all = Tensor::f_stack(&each.collect::<Result<Vec<_>>>()?, 0)?.f_all()?;
        ensure!(all.f_int64_value(&[])? != 0, "a weight is not finite; {}", self.diverged(lr));
        Ok(())
    }

    fn diverged(&self, lr: f64) -> String {
        let kept = match self.saved {
            Some(step) => format!("the weights of step {step} are kept"),
            None => "no weights were written".to_string(),
        };
        format!("the {} run diverged: lower --lr (now {lr:?}); {kept}", self.op.name())
    }

    /// Trains one step on the next chunk and returns the loss, which is still on the device. On a
    /// GPU the step is one CUDA graph.
    fn step(&mut self, options: &Options, streams: &Streams, step: i64) -> Result<Tensor> {
        let (inputs, targets) = self.next_chunk(options.seq_len, streams);
        inner(self.step.optimizer_mut()).set_lr(learning_rate(options, step))?;
        let batch: Vec<&Tensor> = [&inputs, &targets].into_iter().chain(&self.state).collect();
        let output = self.step.step_with_extra(&batch)?;
        self.state = output.extra;
        Ok(output.loss)
    }

    /// After the last whole chunk, the rows start again from their beginning, with a new state.
    fn next_chunk(&mut self, count: i64, streams: &Streams) -> (Tensor, Tensor) {
        if self.column + count > streams.length() {
            self.column = 0;
            self.state = self.model.zero_state(streams.rows());
        }
        let chunk = streams.chunk(self.column, count);
        self.column += count;
        chunk
    }
}

/// Falls from the full rate to a tenth of it, along half a cosine.
fn learning_rate(options: &Options, step: i64) -> f64 {
    let done = (step - 1) as f64 / options.steps as f64;
    options.lr * (0.55 + 0.45 * (std::f64::consts::PI * done).cos())
}

fn closure(model: &Rc<CharModel>, together: Together) -> Closure {
    let model = Rc::clone(model);
    Box::new(move |batch| {
        let (inputs, targets, state) = (&batch[0], &batch[1], &batch[2..]);
        let mut next = Vec::new();
        let loss = together.forward(&mut || {
            let (logits, state) = model.forward(inputs, state);
            next = state.iter().map(Tensor::detach).collect();
            cross_entropy(&logits, targets, Reduction::Mean)
        })?;
        Ok((loss, next).into())
    })
}

fn cross_entropy(
    logits: &Tensor,
    targets: &Tensor,
    reduction: Reduction,
) -> tch_extension::Result<Tensor> {
    let vocabulary = logits.size()[2];
    let options = CrossEntropyOptions { reduction, ..Default::default() };
    f_cross_entropy(&logits.f_reshape([-1, vocabulary])?, &targets.f_reshape([-1])?, &options)
}

/// The mean loss over the held-out text; each row is read from its beginning to its end.
pub fn held_out_loss(model: &CharModel, corpus: &Corpus, seq_len: i64) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let streams = &corpus.held_out;
    let mut state = model.zero_state(streams.rows());
    let mut nats = 0.0;
    for column in (0..streams.length()).step_by(seq_len as usize) {
        let (inputs, targets) = streams.chunk(column, seq_len.min(streams.length() - column));
        let (logits, next) = model.forward(&inputs, &state);
        state = next;
        nats += cross_entropy(&logits.to_kind(Kind::Double), &targets, Reduction::Sum)?
            .double_value(&[]);
    }
    Ok(nats / (streams.rows() * streams.length()) as f64)
}
