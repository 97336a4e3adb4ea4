//! The training loop.

use crate::checkpoint::{self, Checkpoint};
use crate::data::{HeldOut, Loader, Order};
use crate::device;
use crate::files::{lock, make_folder, prepare_folder, write_bytes};
use crate::log::{self, Log};
use crate::model::Gpt;
use crate::options::TrainOptions;
use crate::plot::{self, Curve};
use crate::prepare::{self, Prepared};
use crate::progress::{Progress, say, warn};
use crate::sample::{model_tensors, sample};
use crate::settings::{DataId, Settings};
use crate::step::Trainer;
use crate::tokenizer::Tokenizer;
use crate::tokens::{self, Part, Tokens};
use anyhow::{Context, Result, anyhow, ensure};

use std::rc::Rc;
use tch::{Device, Kind, Tensor};

/// The folder, in that of the run, with the data of a text.
const DATA: &str = "data";
const PLOT: &str = "losses.svg";

/// The subcommand.
pub fn run(options: &TrainOptions) -> Result<()> {
    let device = device::parse(&options.device)?;
    options.check(device)?;
    let init =
        options.init.as_ref().map(|run| checkpoint::of_run("--init", run, warn)).transpose()?;
    make_folder("--out", &options.out)?;
    let _lock = lock("--out", &options.out)?;
    prepare_folder("--out", &options.out)?;
    let checkpoint = earlier(options)?;
    let earlier = checkpoint.as_ref().map(|checkpoint| &checkpoint.state.settings);
    let Data { tokens, tokenizer, new } = data(options, earlier)?;
    let settings = {
        let data = data_id(&tokens, &tokenizer);
        let of_init = init.as_ref().map(|init| &init.state.settings);
        options.settings(device, tokenizer.len(), data, earlier, of_init)?
    };
    let tokens = Rc::new(tokens);
    let mut run = Run::new(options, settings, tokens, device, [checkpoint, init], new)?;
    tokenizer.save(&options.out)?;
    run.train()?;
    run.finish(&tokenizer)
}

/// The checkpoint to continue from. Refuses to begin anew where a run is.
fn earlier(options: &TrainOptions) -> Result<Option<Checkpoint>> {
    let folder = options.out.join(checkpoint::FOLDER);
    prepare_folder("--out", &folder)?;
    if options.resume {
        let newest = checkpoint::newest(&folder, warn)?;
        if let Some(checkpoint) = &newest {
            ensure!(
                !checkpoint.with_prefix(OPTIMIZER).is_empty(),
                "{} was imported, and has no optimizer's state: give --init in place of --resume, and another --out",
                checkpoint.path.display()
            );
        }
        return Ok(newest);
    }
    if !options.overwrite {
        ensure!(
            !checkpoint::any(&folder)?,
            "--out {} has a run already: give --resume to continue it, --overwrite to begin again, or another \
             folder",
            options.out.display()
        );
    }
    Ok(None)
}

/// What a run is trained on.
struct Data {
    tokens: Tokens,
    tokenizer: Tokenizer,
    /// What is to replace the data of an earlier run, once nothing can fail any more.
    new: Option<Prepared>,
}

/// The tokens and their vocabulary. A text is prepared first, unless a run continues.
fn data(options: &TrainOptions, earlier: Option<&Settings>) -> Result<Data> {
    let own = options.out.join(DATA);
    let folder = match (&options.data, earlier) {
        (Some(folder), _) => folder.clone(),
        (None, Some(earlier)) => {
            options.check_text(earlier)?;
            let folder = earlier.source.data.clone().unwrap_or(own);
            ensure!(
                folder.join(tokens::FILE).exists(),
                "the data of the run in {} are not in {} any more: give --data, the folder of this run's data",
                options.out.display(),
                folder.display()
            );
            folder
        }
        (None, None) => {
            let new = prepare::beside(&options.text, "--out", &own)?;
            let (tokens, tokenizer) = (new.tokens()?, new.tokenizer.clone());
            return Ok(Data { tokens, tokenizer, new: Some(new) });
        }
    };
    let (tokens, tokenizer) = (Tokens::open(&folder)?, Tokenizer::load(&folder)?);
    ensure!(
        tokens.vocabulary_hash() == tokenizer.hash(),
        "the tokens and the vocabulary in {} do not belong together; write both again with `prepare`",
        folder.display()
    );
    Ok(Data { tokens, tokenizer, new: None })
}

fn data_id(tokens: &Tokens, tokenizer: &Tokenizer) -> DataId {
    DataId {
        vocabulary: tokenizer.hash_in_hex(),
        tokens: tokens.len(Part::Train),
        checksum: tokens.checksum(),
    }
}

/// A run in this process.
struct Run<'a> {
    options: &'a TrainOptions,
    settings: Settings,
    device: Device,
    model: Rc<Gpt>,
    trainer: Trainer,
    loader: Loader,
    held_out: HeldOut,
    log: Log,
    peak: Option<f64>,
    /// How many steps are done.
    step: i64,
    /// Losses that the host has not read yet, of the steps up to this one.
    unread: Vec<Tensor>,
    saved: Option<i64>,
}

impl<'a> Run<'a> {
    /// A run that goes on where the first checkpoint is, or a new one with the weights of the second,
    /// which removes what an earlier run left when all that its input can spoil was done.
    fn new(
        options: &'a TrainOptions,
        settings: Settings,
        tokens: Rc<Tokens>,
        device: Device,
        [checkpoint, init]: [Option<Checkpoint>; 2],
        new: Option<Prepared>,
    ) -> Result<Run<'a>> {
        let (context, seed, rows) = (settings.model.context, settings.seed, settings.batch);
        let order = Order::new(tokens.len(Part::Train), context, seed)?;
        let held_out = HeldOut::new(tokens.clone(), rows, context, options.eval_windows)?;
        device::check_memory(device, settings.model.training_bytes(rows * context))?;
        let mut model = Gpt::new(&settings.model, device, seed)?;
        if let Some(kind) = settings.precision.half() {
            model.round(kind)?;
        }
        let model = Rc::new(model);
        let mut trainer = Trainer::new(model.clone(), &settings, !options.no_capture)?;
        let mut step = 0;
        if let Some(checkpoint) = &checkpoint {
            resume(checkpoint, &model, &mut trainer)?;
            step = checkpoint.state.step;
            say(&format!("continues after step {step}, from {}", checkpoint.path.display()))?;
        } else if let Some(init) = init {
            begin_with(&init, &model, &settings)?;
        }
        let loader = Loader::new(tokens, order, rows, context, device)?;
        if checkpoint.is_none() {
            checkpoint::remove_all(&options.out.join(checkpoint::FOLDER))?;
        }
        if let Some(new) = new {
            say(&new.put()?)?;
        }
        let run = Run {
            loader,
            log: Log::open(&options.out, step)?,
            peak: options.peak.or_else(|| peak(&settings, device)),
            saved: checkpoint.map(|_| step),
            unread: Vec::new(),
            trainer,
            held_out,
            step,
            options,
            settings,
            device,
            model,
        };
        say(&run.describe())?;
        Ok(run)
    }

    fn describe(&self) -> String {
        let Settings { model, batch, accumulate, steps, lr, seed, precision, .. } = &self.settings;
        format!(
            "{}; {} layers of {} features, {} heads, context {}, vocabulary {}: {:.1} M parameters\n\
             {steps} steps of {accumulate} × {batch} rows, learning rate {lr:?}, {}, seed {seed}",
            device::describe(self.device),
            model.layers,
            model.dim,
            model.heads,
            model.context,
            model.vocabulary,
            model.parameters() as f64 / 1e6,
            precision.name()
        )
    }

    fn train(&mut self) -> Result<()> {
        let steps = self.settings.steps;
        let tenth = (steps / 10).max(1);
        let eval_every = self.options.eval_every.unwrap_or(tenth);
        let save_every = self.options.save_every.unwrap_or(tenth);
        let mut progress = Progress::new(&self.settings, self.step, self.peak);
        while self.step < steps {
            let rate = self.settings.learning_rate(self.step);
            self.unread.push(self.trainer.step(&mut self.loader, self.step, rate)?);
            self.step += 1;
            let is_due = |every: i64| self.step % every == 0 || self.step == steps;
            let (evaluates, saves) = (is_due(eval_every), is_due(save_every));
            if evaluates || saves || is_due(self.options.log_every) {
                self.read_losses(&mut progress)?;
            }
            if evaluates {
                progress.pause(|| self.evaluate())?;
            }
            if saves {
                progress.pause(|| self.save())?;
            }
        }
        if let Some(speed) = progress.tokens_per_second() {
            drop(progress);
            say(&format!("median of {speed:.0} tokens/s"))?;
        }
        Ok(())
    }

    /// Copies the losses since the last call to the host. On a GPU, this is the only time at which a
    /// step waits for the device.
    fn read_losses(&mut self, progress: &mut Progress) -> Result<()> {
        if self.unread.is_empty() {
            return Ok(());
        }
        let losses = Tensor::f_stack(&std::mem::take(&mut self.unread), 0)?;
        let losses: Vec<f64> = losses.f_to_kind(Kind::Double)?.try_into()?;
        let first = self.step - losses.len() as i64 + 1;
        if let Some(place) = losses.iter().position(|loss| !loss.is_finite()) {
            let (step, loss) = (first + place as i64, losses[place]);
            return Err(self.diverged(&format!("the loss of step {step} is {loss}")));
        }
        progress.update(self.step, losses[losses.len() - 1]);
        let settings = &self.settings;
        self.log.train(first, &losses, |step| settings.learning_rate(step - 1))
    }

    /// The error of a run that cannot go on with its learning rate.
    fn diverged(&self, what: &str) -> anyhow::Error {
        let (lr, out) = (self.settings.lr, self.options.out.display());
        match self.saved {
            Some(step) => anyhow!(
                "{what}: lower --lr (now {lr:?}); the checkpoint of step {step} is kept, from whose weights \
                 --init {out} --out NEW --lr RATE goes on"
            ),
            None => anyhow!("{what}: lower --lr (now {lr:?}); no checkpoint was written"),
        }
    }

    fn evaluate(&mut self) -> Result<()> {
        let loss = held_out_loss(&self.model, &self.held_out, self.settings.precision.half())?;
        self.log.held_out(self.step, loss)
    }

    fn save(&mut self) -> Result<()> {
        // The losses first: a checkpoint promises those of all steps before it.
        self.log.sync()?;
        let folder = self.options.out.join(checkpoint::FOLDER);
        let tensors = tensors(&self.model, &self.trainer)?;
        if !are_finite(&self.model)? {
            let what = format!("the weights after step {} are not finite", self.step);
            return Err(self.diverged(&what));
        }
        checkpoint::save(&folder, self.step, &self.settings, &tensors)?;
        self.saved = Some(self.step);
        self.plot()
    }

    fn plot(&self) -> Result<()> {
        let curves = &self.log.curves;
        let picture = plot::svg(
            &format!("GPT, {:.1} M parameters", self.settings.model.parameters() as f64 / 1e6),
            "nats per token",
            &[
                Curve::new("training".to_string(), &curves.train, false),
                Curve::new("held out".to_string(), &curves.held_out, true),
            ],
        )?;
        write_bytes(&self.options.out.join(PLOT), picture)
    }

    /// The sample, and what came out of the run.
    fn finish(&self, tokenizer: &Tokenizer) -> Result<()> {
        let options = self.options;
        if options.sample > 0 {
            let Settings { seed, precision, .. } = self.settings;
            let text =
                sample(&self.model, precision, tokenizer, &options.drawing, options.sample, seed)?;
            let heading = format!("sample at temperature {}", options.drawing.temperature);
            say(&format!("\n--- {heading} ---\n{text}\n--- end of the sample ---\n"))?;
        }
        let curves = &self.log.curves;
        let last = |curve: &[(i64, f64)]| {
            curve.last().map_or("none".to_string(), |(_, loss)| format!("{loss:.4}"))
        };
        say(&format!(
            "loss {}, held out {} nats per token\nwritten to {}: {}, {PLOT}, {}",
            last(&curves.train),
            last(&curves.held_out),
            options.out.display(),
            log::FILE,
            checkpoint::FOLDER
        ))
    }
}

/// Takes over the weights of another run.
fn begin_with(init: &Checkpoint, model: &Gpt, settings: &Settings) -> Result<()> {
    ensure!(
        init.state.settings.data.vocabulary == settings.data.vocabulary,
        "the data have another vocabulary than --init: prepare them with --vocabulary-from, and the folder of that \
         run"
    );
    init.copy_into(&model_tensors(model))
        .context("--init does not fit: leave out --size and the model's sizes")?;
    model.round_again()
}

/// The rate to compare with: that of the kind in which products are computed.
fn peak(settings: &Settings, device: Device) -> Option<f64> {
    settings.precision.half().and_then(|_| device::peak_tflops(device))
}

/// What stands before the names of the optimizer's tensors in a checkpoint.
const OPTIMIZER: &str = "optimizer.";

/// The tensors that a checkpoint has.
fn tensors(model: &Gpt, trainer: &Trainer) -> Result<Vec<(String, Tensor)>> {
    let mut tensors = model_tensors(model);
    let state = trainer.state()?.into_iter();
    tensors.extend(state.map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)));
    Ok(tensors)
}

/// Whether all weights are finite. The host waits once.
fn are_finite(model: &Gpt) -> Result<bool> {
    let _no_grad = tch::no_grad_guard();
    let weights = model.named_variables().into_iter();
    let each: Vec<Tensor> =
        weights.map(|(_, weight)| Ok(weight.f_isfinite()?.f_all()?)).collect::<Result<_>>()?;
    Ok(Tensor::f_stack(&each, 0)?.f_all()?.f_int64_value(&[])? != 0)
}

/// Goes to where the checkpoint was written.
fn resume(checkpoint: &Checkpoint, model: &Gpt, trainer: &mut Trainer) -> Result<()> {
    checkpoint.copy_into(&model_tensors(model))?;
    model.round_again()?;
    trainer.load_state(&checkpoint.with_prefix(OPTIMIZER))
}

/// The mean loss over the held-out windows.
fn held_out_loss(model: &Gpt, held_out: &HeldOut, half: Option<Kind>) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut weighted = Vec::new();
    let mut rows = 0;
    for batch in held_out.batches(model.device()) {
        let (inputs, targets) = batch?;
        let here = inputs.size2()?.0;
        let loss = model.loss(&inputs, &targets, half, false)?;
        weighted.push(loss.f_mul_scalar(here as f64)?);
        rows += here;
    }
    let total = Tensor::f_stack(&weighted, 0).context("no held-out text")?.f_sum(Kind::Double)?;
    Ok(total.f_double_value(&[])? / rows as f64)
}
