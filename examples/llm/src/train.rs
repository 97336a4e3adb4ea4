//! The training loop.

use crate::apart::{Apart, Documents};
use crate::checkpoint::{self, Checkpoint};
use crate::data::{HeldOut, IGNORED, Loader, Order};
use crate::device;
use crate::files::{self, Taken, clean_folder, is_there, take_folder, write_bytes};
use crate::log::{self, Curves, Log};
use crate::model::Model;
use crate::options::{TrainOptions, name_of};
use crate::origin::{Origin, model_tensors};
use crate::plot::{self, Curve};
use crate::prepare::{self, Prepared};
use crate::progress::{Progress, say, warn};
use crate::ranks::{Division, OnRank0, Ranks};
use crate::sample::sample;
use crate::settings::{Optimizer, Settings};
use crate::step::{Trainer, on_host};
use crate::tokenizer::Tokenizer;
use crate::tokens::{self, Part, Tokens};
use crate::trained::State;
use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use tch::{Device, Kind, Reduction, Tensor};

/// The folder, in that of the run, with the data of a text.
const DATA: &str = "data";
const PLOT: &str = "losses.svg";

/// The subcommand.
pub fn run(options: &TrainOptions) -> Result<()> {
    let (ranks, device) = Ranks::join(&options.how.device, options.how.timeout)?;
    ranks.run(|| run_with(options, &ranks, device))
}

fn run_with(options: &TrainOptions, ranks: &Ranks, device: Device) -> Result<()> {
    options.check(device)?;
    let mut main = ranks.on_main(|| Main::prepare(options, device, ranks.size()))?;
    let plan = ranks.share(&main.as_ref().map(|main| main.plan.clone()))?;
    let mut plan = plan.context("rank 0 sent no plan")?;
    options.changes.recomputed.set(&mut plan.settings.model);
    let mut run = Run::new(options, plan, ranks, device, main.as_mut())?;
    run.train()?;
    run.trainer.drop_graphs();
    ranks.leave()?;
    match &main {
        Some(main) => run.finish(&main.data.tokenizer),
        None => Ok(()),
    }
}

/// What rank 0 tells the others.
#[derive(Clone, Serialize, Deserialize)]
struct Plan {
    settings: Settings,
    apart: Option<Apart>,
    /// Where the tokens are, once the new ones are in place.
    data: PathBuf,
}

/// What only rank 0 has: the files of the run.
struct Main {
    plan: Plan,
    checkpoint: Option<Checkpoint>,
    init: Option<Origin>,
    data: Data,
    // Released last, when the temporary files are gone.
    _out: Taken,
}

impl Main {
    fn prepare(options: &TrainOptions, device: Device, ranks: usize) -> Result<Main> {
        let _out = take_folder("--out", &options.out)?;
        let checkpoint = earlier(options)?;
        let earlier = checkpoint.as_ref().map(|checkpoint| &checkpoint.state.settings);
        let base = earlier.and_then(|earlier| earlier.source.base.clone());
        let base = base.map(|base| base.moved_to(options.init.as_deref()));
        let init =
            match (&base, &options.init) {
                (Some(base), _) => Some(base.open("--init").context(
                    "the base cannot be opened: give --init, the folder where it is now",
                )?),
                (None, Some(from)) => {
                    let init = Origin::open("--init", from, options.adapter.as_deref())?;
                    ensure!(
                        !options.resume || init.adapter.is_some() || options.changes.lora.is_some(),
                        "--init with --resume is for adapters: leave one of them out"
                    );
                    Some(init)
                }
                (None, None) => {
                    let lora = options.changes.lora;
                    ensure!(lora.is_none(), "--lora needs --init: give the model to adapt");
                    None
                }
            };
        let is_adapted = options.changes.lora.is_some() || options.adapter.is_some();
        if let (Some(from), true) = (&options.init, base.is_some() || is_adapted) {
            // The run would replace the weights that its adapter needs.
            ensure!(
                from.canonicalize().ok() != options.out.canonicalize().ok(),
                "--out is the folder of --init, whose weights an adapter needs: give another --out"
            );
        }
        ensure!(
            options.adapter.is_none() || earlier.is_none(),
            "--adapter begins a run, and this one goes on with its own: leave it out"
        );
        if let Some(init) = init.as_ref().filter(|_| earlier.is_none()) {
            // Before a text is prepared.
            let lora = options.changes.lora_of(&init.config, None);
            lora.map_or(Ok(()), |lora| lora.check(&init.config))?;
        }
        let data = data(options, earlier)?;
        let Data { tokens, tokenizer, .. } = &data;
        let id = tokens.id(tokenizer.hash_in_hex());
        let mut settings = options.settings(device, tokenizer.len(), id, earlier, init.as_ref())?;
        settings.source.base = match (base, &init) {
            (None, Some(init)) if settings.lora.is_some() => Some(init.base()?),
            (base, _) => base,
        };
        // What cannot work is refused before anything is computed.
        Division::new(settings.batch, settings.accumulate, 0, ranks)?;
        let apart = Apart::of(settings.documents, tokens, tokenizer, settings.model.context)?;
        windows(&settings, apart, tokens, options.eval_windows)?;
        let plan = Plan { settings, apart, data: data.folder.clone() };
        Ok(Main { plan, checkpoint, init, data, _out })
    }
}

/// The order of the windows to train on, and those held out.
fn windows(
    settings: &Settings,
    apart: Option<Apart>,
    tokens: &Rc<Tokens>,
    eval_windows: i64,
) -> Result<(Order, HeldOut)> {
    let (context, seed, rows) = (settings.model.context, settings.seed, settings.batch);
    let order = Order::new(tokens.len(Part::Train), context, seed)?;
    Ok((order, HeldOut::new(Rc::clone(tokens), rows, context, eval_windows, apart)?))
}

/// The checkpoint to continue from. Refuses to begin anew where a run is.
fn earlier(options: &TrainOptions) -> Result<Option<Checkpoint>> {
    let folder = options.out.join(checkpoint::FOLDER);
    if is_there(&folder) {
        clean_folder("--out", &folder)?;
    }
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
    tokens: Rc<Tokens>,
    tokenizer: Tokenizer,
    /// Where the tokens are, once the new ones are in place.
    folder: PathBuf,
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
            let (tokens, tokenizer) = (Rc::new(new.tokens()?), new.tokenizer.clone());
            return Ok(Data { tokens, tokenizer, folder: files::absolute(&own), new: Some(new) });
        }
    };
    let (tokens, tokenizer) = (Rc::new(Tokens::open(&folder)?), Tokenizer::load(&folder)?);
    ensure!(
        tokens.vocabulary_hash() == tokenizer.hash(),
        "the tokens and the vocabulary in {} do not belong together; write both again with `prepare`",
        folder.display()
    );
    Ok(Data { tokens, tokenizer, folder: files::absolute(&folder), new: None })
}

/// The tokens of a rank that has not prepared them, from its own machine.
fn tokens_of_others(folder: &Path, settings: &Settings) -> Result<Rc<Tokens>> {
    let tokens = Tokens::open(folder)?;
    ensure!(
        tokens.id(settings.data.vocabulary.clone()) == settings.data,
        "the tokens in {} are not those of rank 0: give every machine the same files",
        folder.display()
    );
    Ok(Rc::new(tokens))
}

/// A run in this process.
struct Run<'a> {
    options: &'a TrainOptions,
    settings: Settings,
    ranks: &'a Ranks,
    device: Device,
    model: Rc<Model>,
    trainer: Trainer,
    loader: Loader,
    held_out: HeldOut,
    /// On rank 0.
    log: Option<Log>,
    /// Of all devices together.
    peak: Option<f64>,
    /// How many steps are done.
    step: i64,
    /// Losses that the host has not read yet, of the steps up to this one.
    unread: Vec<Tensor>,
    saved: Option<i64>,
}

impl<'a> Run<'a> {
    /// A run that goes on where rank 0's checkpoint is, or a new one with the weights of `init`, which
    /// removes what an earlier run left when all that its input can spoil was done.
    fn new(
        options: &'a TrainOptions,
        Plan { settings, apart, data }: Plan,
        ranks: &'a Ranks,
        device: Device,
        mut main: Option<&mut Main>,
    ) -> Result<Run<'a>> {
        let Settings { batch, accumulate, .. } = settings;
        let (context, seed) = (settings.model.context, settings.seed);
        let division = Division::new(batch, accumulate, ranks.rank(), ranks.size())?;
        let (tokens, is_frozen) = (division.rows * context, settings.lora.is_some());
        device::check_memory(
            device,
            settings.model.training_bytes(settings.precision, tokens, is_frozen),
        )?;
        let checkpoint = main.as_mut().and_then(|main| main.checkpoint.take());
        let checkpoint = Checkpoint::on_all_ranks(checkpoint, ranks)?;
        let mut model = Model::new(&settings.model, device, seed)?;
        // All ranks get the weights of rank 0.
        let init = main.as_mut().and_then(|main| main.init.take());
        let init = init.filter(|_| checkpoint.is_none() || is_frozen);
        let init = init.as_ref();
        ranks.on_main(|| init.map_or(Ok(()), |init| begin_with(init, &model, &settings)))?;
        if let Some(lora) = &settings.lora {
            model.adapt(lora, seed)?;
            let adapter = init.and_then(|init| init.adapter.as_ref());
            ranks.on_main(|| adapter.map_or(Ok(()), |adapter| adapter.copy_into(&model)))?;
        }
        model.set_precision(settings.precision)?;
        let model = Rc::new(model);
        let how = &options.how;
        let mut trainer = Trainer::new(model.clone(), &settings, apart, ranks, division, how)?;
        let mut step = 0;
        if let Some(checkpoint) = &checkpoint {
            resume(checkpoint, &model, &mut trainer)?;
            step = checkpoint.state.step;
            say(&format!("continues after step {step}, from {}", checkpoint.path.display()))?;
        }
        // The files are changed last, and then the other ranks may read them.
        let log = ranks.on_main(|| {
            let main = main.as_mut().context("rank 0 has no files")?;
            begin(options, &mut main.data, checkpoint.is_none(), step)
        })?;
        let tokens = match &main {
            Some(main) => Rc::clone(&main.data.tokens),
            None => tokens_of_others(&data, &settings)?,
        };
        let (order, held_out) = windows(&settings, apart, &tokens, options.eval_windows)?;
        // To compare with: the rate in the kind in which products are computed.
        let peak = settings.precision.half().and_then(|_| device::peak_tflops(device));
        let peak = peak.map(|peak| peak * ranks.size() as f64);
        let run = Run {
            loader: Loader::new(tokens, order, division, context, apart, device)?,
            log,
            peak: options.peak.or(peak),
            saved: checkpoint.map(|_| step),
            unread: Vec::new(),
            trainer,
            held_out,
            step,
            options,
            settings,
            ranks,
            device,
            model,
        };
        say(&run.describe()?)?;
        Ok(run)
    }

    fn describe(&self) -> Result<String> {
        let Settings { model, batch, accumulate, steps, lr, seed, precision, .. } = &self.settings;
        let processes = match self.ranks.size() {
            1 => String::new(),
            size => format!(", {size} processes"),
        };
        let adapters = self.settings.lora.as_ref().map_or(String::new(), |lora| {
            let trained = self.model.named_variables();
            let trained: usize = trained.iter().map(|(_, variable)| variable.numel()).sum();
            format!(", and {:.2} M of adapters of rank {}", trained as f64 / 1e6, lora.rank)
        });
        let muon = match (self.settings.updates.optimizer, self.settings.updates.muon_lr) {
            (Optimizer::AdamW, _) => String::new(),
            (Optimizer::Muon, None) => "Muon, ".into(),
            (Optimizer::Muon, Some(rate)) => format!("Muon with learning rate {rate:?}, "),
        };
        let is_apart = self.settings.documents == Documents::Apart;
        Ok(format!(
            "{}{processes}; {} layers of {} features, {} heads, context {}, vocabulary {}: {:.1} M parameters{adapters}\n\
             {steps} steps of {accumulate} × {batch} rows, {muon}learning rate {lr:?}, {}{}{}, seed {seed}",
            device::describe(self.device)?,
            model.layers,
            model.dim,
            model.heads,
            model.context,
            model.vocabulary,
            model.parameters() as f64 / 1e6,
            name_of(precision),
            if is_apart { ", documents apart" } else { "" },
            if model.recompute_layers { ", layers computed again" } else { "" }
        ))
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
        let losses = self.ranks.means(&on_host(&std::mem::take(&mut self.unread))?)?;
        let first = self.step - losses.len() as i64 + 1;
        if let Some(place) = losses.iter().position(|loss| !loss.is_finite()) {
            let (step, loss) = (first + place as i64, losses[place]);
            return Err(self.diverged(&format!("the loss of step {step} is {loss}")));
        }
        progress.update(self.step, losses[losses.len() - 1]);
        let settings = &self.settings;
        match &mut self.log {
            Some(log) => log.train(first, &losses, |step| settings.learning_rate(step - 1)),
            None => Ok(()),
        }
    }

    /// The error of a run that cannot go on with its learning rate.
    fn diverged(&self, what: &str) -> anyhow::Error {
        if !self.ranks.is_main() {
            // All ranks find out the same.
            return anyhow!(OnRank0);
        }
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
        let loss = held_out_loss(&self.model, &self.held_out, self.ranks)?;
        match &mut self.log {
            Some(log) => log.held_out(self.step, loss),
            None => Ok(()),
        }
    }

    /// Writes a checkpoint, on rank 0. All ranks have the same weights.
    fn save(&mut self) -> Result<()> {
        if !are_finite(&self.model)? {
            let what = format!("the weights after step {} are not finite", self.step);
            return Err(self.diverged(&what));
        }
        let state = self.trainer.state(&self.model, self.ranks.is_main())?;
        if let (Some(log), Some(state)) = (&self.log, state) {
            // The losses first: a checkpoint promises those of all steps before it.
            log.sync()?;
            let folder = self.options.out.join(checkpoint::FOLDER);
            let tensors = tensors(&self.model, state);
            checkpoint::save(&folder, self.step, &self.settings, &tensors)?;
            self.plot(&log.curves)?;
        }
        self.saved = Some(self.step);
        Ok(())
    }

    fn plot(&self, curves: &Curves) -> Result<()> {
        let picture = plot::svg(
            &format!("{:.1} M parameters", self.settings.model.parameters() as f64 / 1e6),
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
            let seed = self.settings.seed;
            let text = sample(&self.model, tokenizer, &options.drawing, options.sample, seed)?;
            let heading = format!("sample at temperature {}", options.drawing.temperature);
            say(&format!("\n--- {heading} ---\n{text}\n--- end of the sample ---\n"))?;
        }
        let curves = self.log.as_ref().map(|log| &log.curves).context("no losses on this rank")?;
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

/// Takes over the weights of another model.
fn begin_with(init: &Origin, model: &Model, settings: &Settings) -> Result<()> {
    ensure!(
        init.tokenizer.hash_in_hex() == settings.data.vocabulary,
        "the data have another vocabulary than --init: prepare them with --vocabulary-from, and the folder of that \
         model"
    );
    init.copy_into(model).context("--init cannot be loaded into a model of this run's sizes")
}

/// What stands before the names of the optimizer's tensors in a checkpoint.
const OPTIMIZER: &str = "optimizer.";

/// The tensors that a checkpoint has.
fn tensors(model: &Model, state: State) -> Vec<(String, Tensor)> {
    let mut tensors = model_tensors(model);
    let state = state.into_iter();
    tensors.extend(state.map(|(name, tensor)| (format!("{OPTIMIZER}{name}"), tensor)));
    tensors
}

/// Whether all trained weights that the model computes with are finite. The host waits once.
fn are_finite(model: &Model) -> Result<bool> {
    let _no_grad = tch::no_grad_guard();
    let weights = model.trained().variables().into_iter();
    let each: Vec<Tensor> =
        weights.map(|(_, weight)| Ok(weight.f_isfinite()?.f_all()?)).collect::<Result<_>>()?;
    Ok(Tensor::f_stack(&each, 0)?.f_all()?.f_int64_value(&[])? != 0)
}

/// Goes to where the checkpoint was written.
fn resume(checkpoint: &Checkpoint, model: &Model, trainer: &mut Trainer) -> Result<()> {
    checkpoint.copy_into(&model_tensors(model))?;
    model.round_again()?;
    trainer.load_state(model, &checkpoint.with_prefix(OPTIMIZER))
}

/// The mean loss over the held-out windows, of which each rank computes a part.
fn held_out_loss(model: &Model, held_out: &HeldOut, ranks: &Ranks) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let mut sums = vec![Tensor::f_zeros([2], (Kind::Double, model.device()))?];
    for batch in held_out.batches(model.device(), ranks) {
        let batch = batch?;
        let loss = model.loss(&batch, held_out.apart, false, Reduction::Sum)?;
        let loss = loss.f_to_kind(Kind::Double)?;
        let learned = batch[1].f_ne(IGNORED)?.f_sum(Kind::Double)?;
        sums.push(Tensor::f_stack(&[loss, learned], 0)?);
    }
    // The host waits once.
    let all = Tensor::f_stack(&sums, 0)?.f_sum_dim_intlist([0].as_slice(), false, Kind::Double)?;
    let all = all.f_to_device(Device::Cpu)?;
    ranks.sum(&all)?;
    Ok(all.f_double_value(&[0])? / all.f_double_value(&[1])?)
}

/// Removes an earlier run if this one is new, puts new data in their place, and opens the log.
fn begin(options: &TrainOptions, data: &mut Data, is_new: bool, step: i64) -> Result<Log> {
    if is_new {
        checkpoint::remove_all(&options.out.join(checkpoint::FOLDER))?;
    }
    if let Some(new) = data.new.take() {
        say(&new.put()?)?;
    }
    let log = Log::open(&options.out, step)?;
    data.tokenizer.save(&options.out)?;
    Ok(log)
}
