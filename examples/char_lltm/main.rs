//! Trains a character-level language model on real text through the LLTM, once with the fused operator and
//! once with the same maths composed of tch operators, and compares the two.
//!
//! ```text
//! cargo run --example char_lltm                        # this repository's own text, about a minute
//! cargo run --example char_lltm -- --text book.txt --op fused --steps 2000
//! cargo run --example char_lltm -- --help
//! ```

mod checkpoint;
mod data;
mod guard;
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

/// Everything that can be wrong with the input is found before the first file is touched.
fn run(options: &Options) -> Result<()> {
    options.check()?;
    let device = options.device()?;
    let text = data::load(options.text.as_deref())?;
    let corpus = Corpus::new(&text, options.batch, options.seq_len, device)?;
    model::check_memory(options, corpus.vocabulary.len() as i64, device)?;
    let resume = match &options.resume {
        Some(path) => Some(Checkpoint::load(path, &corpus.vocabulary, options.hidden)?),
        None => None,
    };
    let output = OutputFolder::prepare(&options.out, options.op.each())?;
    report::say(&corpus.describe(&text))?;
    report::say(&options.describe(device))?;

    let mut runs = Vec::new();
    let mut sampled = None;
    for &op in options.op.each() {
        let (model, run) = train_one(op, options, &corpus, device, resume.as_ref(), &output)?;
        runs.push(run);
        output.write_curves(&runs, corpus.unigram)?;
        sampled.get_or_insert((op, model));
    }
    if let Some((op, model)) = sampled {
        print_sample(op, &model, options, &corpus)?;
    }
    report::say(&report::table(&runs, corpus.unigram, options.seed))?;
    report::say(&format!("written to {}: {}", output.folder().display(), output.file_names().join(", ")))
}

/// Trains one operator from the initial state that the seed (or the resume file) gives: the same for each
/// operator, as are the batches.
fn train_one(
    op: Op,
    options: &Options,
    corpus: &Corpus,
    device: Device,
    resume: Option<&Checkpoint>,
    output: &OutputFolder,
) -> Result<(CharModel, Run)> {
    let model = CharModel::new(device, corpus.vocabulary.len() as i64, options.hidden, op, options.seed);
    if let Some(checkpoint) = resume {
        checkpoint.copy_into(&model)?;
    }
    let weights = output.weights(op);
    let curve =
        train::train(&model, op, options, corpus, || checkpoint::save(&model, &corpus.vocabulary, &weights))?;
    let held_out = train::held_out_loss(&model, corpus, options.seq_len)?;
    Ok((model, Run { op, curve, held_out }))
}

fn print_sample(op: Op, model: &CharModel, options: &Options, corpus: &Corpus) -> Result<()> {
    if options.sample == 0 {
        return Ok(());
    }
    tch::manual_seed(options.seed);
    let text = model.sample(&corpus.vocabulary, options.sample, options.temperature)?;
    let heading = format!("sample of the {} model at temperature {}", op.name(), options.temperature);
    report::say(&format!("\n--- {heading} ---\n{text}\n--- end of the sample ---\n"))
}
