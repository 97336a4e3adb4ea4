//! Trains a character-level language model on real text with the LLTM, each sequence as one
//! operator. With `--op all`, it also trains with the fused cell, step by step, and with the same
//! maths composed of tch operators, and compares the three. With `--op lstm` or `--op gru`, it
//! trains with this crate's LSTM or GRU and with libtorch's, and compares the two.
//! ```text
//! cargo run --example char_lltm                        # this repository's own text
//! cargo run --example char_lltm -- --op all            # and the comparison
//! cargo run --example char_lltm -- --op lstm           # the LSTM, compared with libtorch's
//! cargo run --example char_lltm -- --text book.txt --op fused --steps 2000
//! cargo run --example char_lltm -- --help
//! ```

mod checkpoint;
mod data;
mod guard;
mod layer;
mod model;
mod options;
mod output;
mod plot;
mod report;
mod train;

use anyhow::Result;
use checkpoint::Checkpoint;
use clap::Parser;
use data::Corpus;
use model::CharModel;
use options::{Op, Options};
use output::OutputFolder;
use report::Run;
use std::process::ExitCode;
use tch::Device;
use train::Learner;

fn main() -> ExitCode {
    let options = Options::parse();
    match guard::without_panics(|| run(&options)) {
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
    let device = options.device()?;
    let text = data::load(options.text.as_deref())?;
    let corpus = Corpus::new(&text, options.batch, options.seq_len, device)?;
    model::check_memory(options, corpus.vocabulary.len() as i64, device)?;
    let resume = match &options.resume {
        Some(path) => {
            Some(Checkpoint::load(path, options.op.family(), &corpus.vocabulary, options.hidden)?)
        }
        None => None,
    };
    let output = OutputFolder::prepare(&options.out, options.op.each())?;
    report::say(&corpus.describe(&text))?;
    report::say(&options.describe(device))?;

    let mut learners = new_learners(options, &corpus, device, resume.as_ref())?;
    train::train(&mut learners, options, &corpus.train, |learner| {
        checkpoint::save(&learner.model, &corpus.vocabulary, &output.weights(learner.op))
    })?;
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
    device: Device,
    resume: Option<&Checkpoint>,
) -> Result<Vec<Learner>> {
    let vocabulary = corpus.vocabulary.len() as i64;
    let new = |op: &Op| {
        let model = CharModel::new(device, vocabulary, options.hidden, *op, options.seed);
        if let Some(checkpoint) = resume {
            checkpoint.copy_into(&model)?;
        }
        Learner::new(*op, model, options)
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
    report::say(&format!("\n--- {heading} ---\n{text}\n--- end of the sample ---\n"))
}
