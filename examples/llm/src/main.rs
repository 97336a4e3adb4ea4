//! Trains GPT-2 and Llama's family with this crate's operators: from text, or from a folder of Hugging
//! Face's, to a model that generates, and back to such a folder.
//! ```text
//! cargo run -p llm                                  # a small model on this repository's own text
//! cargo run -p llm -- train --text book.txt --size char --out runs/book
//! cargo run -p llm -- sample --from runs/book --prompt "It was"
//! cargo run -p llm -- help
//! tch-run -n 2 target/debug/llm train ...           # on two processes, built with `--features distributed`
//! ```

mod apart;
mod bench;
mod checkpoint;
mod config;
mod data;
mod decode;
mod device;
mod documents;
mod export;
#[cfg(test)]
#[path = "../tests/families/mod.rs"]
mod families;
mod family;
mod files;
mod guard;
mod log;
mod lora;
mod model;
mod options;
mod origin;
mod plot;
mod positions;
mod prepare;
mod progress;
mod range;
mod ranks;
mod sample;
mod settings;
mod step;
mod tokenizer;
mod tokens;
mod train;
mod trained;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

/// Trains language models and generates text. Without a command, it trains a small model on this repository's
/// text.
#[derive(Debug, Parser)]
#[command(name = "llm", allow_negative_numbers = true, args_override_self = true)]
struct Program {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Train a model
    #[command(allow_negative_numbers = true)]
    Train(Box<options::TrainOptions>),
    /// Turn texts into a token file and a vocabulary, for `train --data`
    #[command(allow_negative_numbers = true)]
    Prepare(PrepareOptions),
    /// Generate text with a trained model
    #[command(allow_negative_numbers = true)]
    Sample(sample::SampleOptions),
    /// Write a model in the format of Hugging Face's transformers
    Export(export::ExportOptions),
    /// Read a model in the format of Hugging Face's transformers
    Import(export::ImportOptions),
    /// Draw the losses of runs
    Plot(plot::PlotOptions),
    /// Time steps on given batches, for a comparison
    Bench(bench::BenchOptions),
}

#[derive(Debug, clap::Args)]
struct PrepareOptions {
    #[command(flatten)]
    text: prepare::TextOptions,
    /// Folder for the token file and the vocabulary
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
}

fn main() -> ExitCode {
    let begun = Instant::now();
    let program = Program::parse();
    match guard::without_panics(|| run(program, begun)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error.is::<ranks::OnRank0>() {
                progress::error(&error);
            }
            ExitCode::FAILURE
        }
    }
}

fn run(program: Program, begun: Instant) -> Result<()> {
    let default = || Program::parse_from(["llm", "train"]).command;
    match program.command.or_else(default) {
        None => Ok(()),
        Some(Command::Train(options)) => train::run(&options.with_vocabulary_of_init()),
        Some(Command::Prepare(options)) => {
            progress::say(&prepare::prepare(&options.text, "--out", &options.out)?)
        }
        Some(Command::Sample(options)) => sample::run(&options),
        Some(Command::Export(options)) => export::export(&options),
        Some(Command::Import(options)) => export::import(&options),
        Some(Command::Plot(options)) => plot::run(&options),
        Some(Command::Bench(options)) => bench::run(&options, begun),
    }
}
