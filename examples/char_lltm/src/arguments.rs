//! Reads the command line, and describes it for `--help`.

use crate::options::{OpChoice, Options};
use anyhow::{Context, Result, anyhow, bail};
use lexopt::{Arg, Parser};
use std::ffi::{OsStr, OsString};
use std::fmt::Display;
use std::str::FromStr;

/// What a command line asks for.
pub enum Request {
    Train(Options),
    Help,
}

/// Reads the arguments. Of an option that is given twice, the last value counts.
pub fn parse(mut parser: Parser) -> Result<Request> {
    let mut options = Options::default();
    while let Some(argument) = parser.next()? {
        let name = match argument {
            Arg::Short('h') => "help".to_string(),
            Arg::Long(name) => name.to_string(),
            Arg::Short(letter) => bail!("there is no option -{letter}"),
            Arg::Value(value) => bail!("{value:?} is no option"),
        };
        let value = Value { parser: &mut parser, name: &name };
        match name.as_str() {
            "help" => return Ok(Request::Help),
            "text" => options.text = Some(value.take()?.into()),
            "device" => options.device = value.text()?,
            "op" => options.op = value.op()?,
            "hidden" => options.hidden = value.number("whole number")?,
            "seq-len" => options.seq_len = value.number("whole number")?,
            "batch" => options.batch = value.number("whole number")?,
            "steps" => options.steps = value.number("whole number")?,
            "lr" => options.lr = value.number("number")?,
            "seed" => options.seed = value.number("whole number")?,
            "out" => options.out = value.take()?.into(),
            "resume" => options.resume = Some(value.take()?.into()),
            "save-every" => options.save_every = value.number("whole number")?,
            "sample" => options.sample = value.number("whole number")?,
            "temperature" => options.temperature = value.number("number")?,
            _ => bail!("there is no option --{name}{}", suggestion(&name)),
        }
    }
    Ok(Request::Train(options))
}

/// The value of an option, which is still to be read.
struct Value<'a> {
    parser: &'a mut Parser,
    name: &'a str,
}

impl Value<'_> {
    fn take(self) -> Result<OsString> {
        let Value { parser, name } = self;
        // What follows `=` may begin in any way. Without it, an option in the value's place means
        // that the value was forgotten.
        let value = parser.optional_value().or_else(|| {
            parser.try_raw_args().and_then(|mut rest| rest.next_if(|next| !is_option(next)))
        });
        value.with_context(|| format!("--{name} needs a value"))
    }

    fn text(self) -> Result<String> {
        let name = self.name;
        self.take()?.into_string().map_err(|value| anyhow!("--{name} {value:?} is not UTF-8"))
    }

    fn number<T: FromStr<Err: Display>>(self, kind: &str) -> Result<T> {
        let name = self.name;
        let text = self.text()?;
        text.parse().map_err(|error| anyhow!("--{name} {text:?} is no {kind} ({error})"))
    }

    fn op(self) -> Result<OpChoice> {
        let text = self.text()?;
        let names = OpChoice::ALL.map(|(name, ..)| name);
        OpChoice::of(&text).with_context(|| {
            let nearest = nearest(&text, names);
            let meant = nearest.map(|name| format!("; did you mean {name}?")).unwrap_or_default();
            format!("--op {text:?} is unknown: give one of {}{meant}", names.join(", "))
        })
    }
}

/// Whether an argument is an option, and not a value such as `-3`.
fn is_option(argument: &OsStr) -> bool {
    let text = argument.to_string_lossy();
    text.strip_prefix('-')
        .is_some_and(|rest| rest.starts_with(|c: char| c == '-' || c.is_alphabetic()))
}

fn suggestion(wrong: &str) -> String {
    let help = help();
    let names = help.split_whitespace().filter_map(|word| word.strip_prefix("--"));
    nearest(wrong, names).map(|name| format!("; did you mean --{name}?")).unwrap_or_default()
}

/// The most similar name, if one is similar enough to have been meant.
fn nearest<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let similar = names.into_iter().map(|name| (strsim::jaro(wrong, name), name));
    let best = similar.max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(similarity, _)| *similarity > 0.7).map(|(_, name)| name)
}

/// The text of `--help`. It names each option once, at the beginning of its line.
pub fn help() -> String {
    let Options { device, op, hidden, seq_len, batch, steps, lr, seed, out, save_every, .. } =
        Options::default();
    let Options { sample, temperature, .. } = Options::default();
    let (op, out) = (op.name(), out.display());
    let ops: String = OpChoice::ALL
        .iter()
        .map(|(name, _, what)| format!("\n{:31}{name:<11}{what}", ""))
        .collect();
    format!(
        "\
Trains a character-level language model with the LLTM: the whole sequence as one operator, the fused cell step by step,
or the cell composed of tch operators. It can also train several of them and compare their results, and it can train
the LSTM or the GRU next to libtorch's

Usage: char_lltm [OPTIONS]

Options:
      --text <FILE>            Text to train on, UTF-8 [default: this repository's own prose]
      --device <DEVICE>        Where to train: auto (a GPU if there is one), cpu, cuda or cuda:N [default: {device}]
      --op <OP>                Which implementation to train; several are trained in turns, from the same initial
                               weights [default: {op}]{ops}
      --hidden <N>             Units of the recurrent layer [default: {hidden}]
      --seq-len <N>            Characters per stream and step; the gradient reaches back this far [default: {seq_len}]
      --batch <N>              Streams that are trained at the same time; several processes divide them [default: {batch}]
      --steps <N>              Optimiser steps [default: {steps}]
      --lr <RATE>              Peak learning rate of Adam; it falls to a tenth along a cosine [default: {lr}]
      --seed <SEED>            Seed of the initial weights and of the sample [default: {seed}]
      --out <FOLDER>           Folder for the weights and the losses [default: {out}]
      --resume <FILE>          Start from these weights, written by an earlier run on the same text (the optimiser
                               starts afresh)
      --save-every <N>         Write the weights after every N steps and at the end [default: {save_every}]
      --sample <N>             Characters to generate at the end; 0 for none [default: {sample}]
      --temperature <VALUE>    Temperature of the sample: below 1 keeps to likely characters, above 1 is more daring
                               [default: {temperature}]
  -h, --help                   Print this text
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(arguments: &[&str]) -> Options {
        match parse(Parser::from_args(arguments)) {
            Ok(Request::Train(options)) => options,
            Ok(Request::Help) => panic!("{arguments:?} asks for help"),
            Err(error) => panic!("{arguments:?}: {error:#}"),
        }
    }

    fn refusal(arguments: &[&str]) -> String {
        let refused = parse(Parser::from_args(arguments)).err();
        refused.unwrap_or_else(|| panic!("{arguments:?} are accepted")).to_string()
    }

    #[test]
    fn the_last_value_counts_and_may_follow_an_equals_sign() {
        let found = options(&["--steps=3", "--seed=5", "--seed", "-9", "--out=--x", "--op=lltm"]);
        assert_eq!((found.steps, found.seed, found.op), (3, -9, OpChoice::Sequence));
        assert_eq!(found.out.to_str(), Some("--x"));
        let found = options(&["--op", "gru", "--lr", "-.5", "--resume", "-"]);
        assert_eq!((found.op, found.lr), (OpChoice::Gru, -0.5));
        assert_eq!(found.resume.as_deref().and_then(|path| path.to_str()), Some("-"));
        assert!(matches!(parse(Parser::from_args(["--steps", "1", "-h"])), Ok(Request::Help)));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_was_meant() {
        let cases: [(&[&str], &str); 15] = [
            (&["--nonsense", "1"], "there is no option --nonsense"),
            (&["--stesp", "1"], "there is no option --stesp; did you mean --steps?"),
            (&["--step=1"], "there is no option --step; did you mean --steps?"),
            (&["-x"], "there is no option -x"),
            (&["book.txt"], "\"book.txt\" is no option"),
            (
                &["--op", "quick"],
                "--op \"quick\" is unknown: give one of sequence, fused, composite, both, all, lstm, gru",
            ),
            (
                &["--op", "seqence"],
                "--op \"seqence\" is unknown: give one of sequence, fused, composite, both, all, lstm, gru; \
                 did you mean sequence?",
            ),
            (&["--op"], "--op needs a value"),
            (&["--hidden"], "--hidden needs a value"),
            (&["--steps", "--lr", "3"], "--steps needs a value"),
            (
                &["--hidden", "many"],
                "--hidden \"many\" is no whole number (invalid digit found in string)",
            ),
            (
                &["--hidden", "1.5"],
                "--hidden \"1.5\" is no whole number (invalid digit found in string)",
            ),
            (
                &["--steps="],
                "--steps \"\" is no whole number (cannot parse integer from empty string)",
            ),
            (
                &["--seed", "99999999999999999999"],
                "--seed \"99999999999999999999\" is no whole number (number too large to fit in target type)",
            ),
            (&["--lr", "fast"], "--lr \"fast\" is no number (invalid float literal)"),
        ];
        for (arguments, expected) in cases {
            assert_eq!(refusal(arguments), expected);
        }
    }

    #[test]
    fn help_lists_the_options_that_exist() {
        let help = help();
        let lines = help.lines().filter_map(|line| line.trim_start().strip_prefix("--"));
        let names: Vec<&str> = lines.filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names.len(), 14);
        for name in names {
            assert_eq!(refusal(&[&format!("--{name}")]), format!("--{name} needs a value"));
        }
        assert!(help.lines().all(|line| line.chars().count() <= 120), "{help}");
    }
}
