//! Trains a character-level language model on real text with the LLTM, each sequence as one
//! operator. With `--op all`, it also trains with the fused cell, step by step, and with the same
//! maths composed of tch operators, and compares the three. With `--op lstm` or `--op gru`, it
//! trains with this crate's LSTM or GRU and with libtorch's, and compares the two.
//! ```text
//! cargo run -p char_lltm                       # this repository's own prose
//! cargo run -p char_lltm -- --op all           # and the comparison
//! cargo run -p char_lltm -- --op lstm          # the LSTM, compared with libtorch's
//! cargo run -p char_lltm -- --text book.txt --op fused --steps 2000
//! tch-run -n 2 target/debug/char_lltm          # two processes; built with `--features distributed`
//! cargo run -p char_lltm -- --help
//! ```

mod arguments;
mod checkpoint;
mod data;
mod guard;
mod layer;
mod model;
mod options;
mod output;
mod ranks;
mod report;
mod train;

use anyhow::{Result, anyhow};
use arguments::Request;
use checkpoint::Checkpoint;
use data::Corpus;
use lexopt::Parser;
use model::CharModel;
use options::{Op, Options};
use output::OutputFolder;
use ranks::Ranks;
use report::Run;
use std::process::ExitCode;
use train::Learner;

fn main() -> ExitCode {
    let request = match arguments::parse(Parser::from_env()) {
        Ok(request) => request,
        Err(error) => {
            report::error(&anyhow!("{error:#} (see --help)"));
            return ExitCode::from(2);
        }
    };
    let work = || match &request {
        Request::Train(options) => run(options),
        Request::Help => report::say(arguments::help().trim_end()),
    };
    match guard::without_panics(work) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            report::error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Checks all input before the first file is touched.
fn run(options: &Options) -> Result<()> {
    options.check()?;
    let ranks = Ranks::join(options)?;
    ranks.run(|| run_with(options, &ranks))
}

fn run_with(options: &Options, ranks: &Ranks) -> Result<()> {
    if !ranks.is_main() {
        report::silence();
    }
    let device = ranks.device();
    let text = data::load(options.text.as_deref())?;
    let corpus = Corpus::new(&text, options.batch, options.seq_len, device)?;
    let (first, rows) = ranks.rows(options.batch)?;
    let streams = corpus.train.part(first, rows);
    model::check_memory(options, corpus.vocabulary.len() as i64, device)?;
    let resume = match &options.resume {
        Some(path) => {
            Some(Checkpoint::load(path, options.op.family(), &corpus.vocabulary, options.hidden)?)
        }
        None => None,
    };
    let output = match ranks.is_main() {
        true => Some(OutputFolder::prepare(&options.out, options.op.each())?),
        false => None,
    };
    report::say(&corpus.describe(&text))?;
    report::say(&options.describe(device))?;

    let mut learners = new_learners(options, &corpus, ranks, rows, resume.as_ref())?;
    train::train(&mut learners, options, &streams, ranks, |learner| match &output {
        Some(output) => {
            checkpoint::save(&learner.model, &corpus.vocabulary, &output.weights(learner.op))
        }
        None => Ok(()),
    })?;
    learners.iter_mut().for_each(train::Learner::drop_graphs);
    ranks.leave()?;
    // What remains is done by one process.
    let Some(output) = output else { return Ok(()) };
    let runs = learners
        .iter()
        .map(|learner| Run::of(learner, options, &corpus))
        .collect::<Result<Vec<_>>>()?;
    output.write_curves(&runs, corpus.unigram)?;
    if let Some(learner) = learners.first() {
        print_sample(learner.op, &learner.model, options, &corpus)?;
    }
    report::say(&report::table(&runs, corpus.unigram, options.seed))?;
    report::say(&format!(
        "written to {}: {}",
        output.folder().display(),
        output.file_names().join(", ")
    ))
}

/// Makes one learner for each operator. All have the same initial weights, which the seed or the
/// resume file gives.
fn new_learners(
    options: &Options,
    corpus: &Corpus,
    ranks: &Ranks,
    rows: i64,
    resume: Option<&Checkpoint>,
) -> Result<Vec<Learner>> {
    let vocabulary = corpus.vocabulary.len() as i64;
    let new = |op: &Op| {
        let model = CharModel::new(ranks.device(), vocabulary, options.hidden, *op, options.seed);
        if let Some(checkpoint) = resume {
            checkpoint.copy_into(&model)?;
        }
        Learner::new(*op, model, options, ranks, rows)
    };
    options.op.each().iter().map(new).collect()
}

fn print_sample(op: Op, model: &CharModel, options: &Options, corpus: &Corpus) -> Result<()> {
    if options.sample == 0 {
        return Ok(());
    }
    tch::manual_seed(options.seed);
    let text = model.sample(&corpus.vocabulary, options.sample, options.temperature)?;
    let heading =
        format!("sample of the {} model at temperature {}", op.name(), options.temperature);
    let text = report::wrapped(&text);
    report::say(&format!("\n--- {heading} ---\n{text}\n--- end of the sample ---\n"))
}
