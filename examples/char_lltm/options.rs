//! The command line and the checks of its values.

use anyhow::{Result, bail, ensure};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;
use tch::{Cuda, Device};
use tch_extension::cuda;

/// Trains a character-level language model with the LLTM: the whole sequence as one operator, the
/// fused cell step by step, or the cell composed of tch operators. It can also train several of
/// them and compare their results, and it can train the LSTM or the GRU next to libtorch's.
#[derive(Debug, Parser)]
#[command(name = "char_lltm", allow_negative_numbers = true, args_override_self = true)]
pub struct Options {
    /// Text to train on, UTF-8 [default: this repository's own prose]
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,
    /// Where to train: auto (a GPU if there is one), cpu, cuda or cuda:N
    #[arg(long, default_value = "auto")]
    pub device: String,
    /// Which implementation to train; several are trained in turns, from the same initial weights
    #[arg(long, value_enum, default_value_t = OpChoice::Sequence)]
    pub op: OpChoice,
    /// Units of the recurrent layer
    #[arg(long, value_name = "N", default_value_t = 128)]
    pub hidden: i64,
    /// Characters per stream and step; the gradient reaches back this far
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub seq_len: i64,
    /// Streams that are trained at the same time; several processes divide them
    #[arg(long, value_name = "N", default_value_t = 32)]
    pub batch: i64,
    /// Optimiser steps
    #[arg(long, value_name = "N", default_value_t = 1500)]
    pub steps: i64,
    /// Peak learning rate of Adam; it falls to a tenth along a cosine
    #[arg(long, value_name = "RATE", default_value_t = 5e-3)]
    pub lr: f64,
    /// Seed of the initial weights and of the sample
    #[arg(long, default_value_t = 1)]
    pub seed: i64,
    /// Folder for the weights and the losses
    #[arg(long, value_name = "FOLDER", default_value = "runs/char_lltm")]
    pub out: PathBuf,
    /// Start from these weights, written by an earlier run on the same text (the optimiser starts
    /// afresh)
    #[arg(long, value_name = "FILE")]
    pub resume: Option<PathBuf>,
    /// Write the weights after every N steps and at the end
    #[arg(long, value_name = "N", default_value_t = 100)]
    pub save_every: i64,
    /// Characters to generate at the end; 0 for none
    #[arg(long, value_name = "N", default_value_t = 400)]
    pub sample: i64,
    /// Temperature of the sample: below 1 keeps to likely characters, above 1 is more daring
    #[arg(long, default_value_t = 0.5)]
    pub temperature: f64,
}

/// The value of `--op`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum OpChoice {
    /// The LLTM's whole sequence as one operator (`lltm` means the same)
    #[value(alias = "lltm")]
    Sequence,
    /// The LLTM's fused cell, step by step
    Fused,
    /// The LLTM's cell composed of tch operators
    Composite,
    /// The LLTM's fused cell and the cell composed of tch operators
    Both,
    /// All three implementations of the LLTM
    All,
    /// This crate's LSTM and libtorch's
    Lstm,
    /// This crate's GRU and libtorch's
    Gru,
}

impl OpChoice {
    /// The operators to train, in this order.
    pub fn each(self) -> &'static [Op] {
        match self {
            OpChoice::Sequence => &[Op::Sequence],
            OpChoice::Fused => &[Op::Fused],
            OpChoice::Composite => &[Op::Composite],
            OpChoice::Both => &[Op::Fused, Op::Composite],
            OpChoice::All => &[Op::Sequence, Op::Fused, Op::Composite],
            OpChoice::Lstm => &[Op::Lstm, Op::TchLstm],
            OpChoice::Gru => &[Op::Gru, Op::TchGru],
        }
    }

    /// The family of these operators, which all have the same.
    pub fn family(self) -> Family {
        self.each()[0].family()
    }
}

/// One of the implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Sequence,
    Fused,
    Composite,
    Lstm,
    TchLstm,
    Gru,
    TchGru,
}

impl Op {
    pub fn name(self) -> &'static str {
        match self {
            Op::Sequence => "sequence",
            Op::Fused => "fused",
            Op::Composite => "composite",
            Op::Lstm => "lstm",
            Op::TchLstm => "tch_lstm",
            Op::Gru => "gru",
            Op::TchGru => "tch_gru",
        }
    }

    pub fn family(self) -> Family {
        match self {
            Op::Sequence | Op::Fused | Op::Composite => Family::Lltm,
            Op::Lstm | Op::TchLstm => Family::Lstm,
            Op::Gru | Op::TchGru => Family::Gru,
        }
    }
}

/// The implementations of one formula, which can resume from one another's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    Lltm,
    Lstm,
    Gru,
}

impl Family {
    /// Its value of `--op`, which is also the folder of the recurrent layer's variables.
    pub fn name(self) -> &'static str {
        match self {
            Family::Lltm => "lltm",
            Family::Lstm => "lstm",
            Family::Gru => "gru",
        }
    }

    /// How the names of the recurrent layer's variables begin.
    pub fn prefix(self) -> String {
        format!("{}.", self.name())
    }
}

impl Options {
    /// Checks the ranges. They keep every product of sizes far from overflow; whether everything
    /// fits in memory is checked once the text is known.
    pub fn check(&self) -> Result<()> {
        in_range("--hidden", self.hidden, 1, 65_536)?;
        in_range("--seq-len", self.seq_len, 1, 1_000_000)?;
        in_range("--batch", self.batch, 1, 1_000_000)?;
        in_range("--steps", self.steps, 1, 1_000_000_000)?;
        in_range("--save-every", self.save_every, 1, 1_000_000_000)?;
        in_range("--sample", self.sample, 0, 1_000_000)?;
        // libtorch's optimiser rejects a rate that is infinite as an f32.
        positive("--lr", self.lr, 1e30)?;
        positive("--temperature", self.temperature, 1e30)
    }

    /// The device to train on.
    pub fn device(&self) -> Result<Device> {
        let name = self.device.as_str();
        match name {
            // Without our CUDA kernels, a GPU could run only half of the comparison.
            "auto" if cuda::is_compiled() => Ok(Device::cuda_if_available()),
            "auto" | "cpu" => Ok(Device::Cpu),
            "cuda" => self.cuda(0),
            _ => match name.strip_prefix("cuda:").map(str::parse) {
                Some(Ok(index)) => self.cuda(index),
                _ => bail!(
                    "--device {name:?} is unknown: give auto, cpu, cuda or cuda:N, such as cuda:0"
                ),
            },
        }
    }

    /// The GPU of a rank.
    #[cfg(feature = "distributed")]
    pub fn device_of(&self, rank: usize) -> Result<Device> {
        self.cuda(rank as i64)
    }

    fn cuda(&self, index: i64) -> Result<Device> {
        ensure!(
            Cuda::is_available(),
            "--device cuda: libtorch sees no CUDA device (no GPU or driver, or a libtorch built for CPU only); \
             give --device cpu, or let `cargo xtask doctor` say what is missing"
        );
        let count = Cuda::device_count();
        ensure!(
            (0..count).contains(&index),
            "--device cuda:{index} does not exist: this machine has {count}, cuda:0 to cuda:{}",
            count - 1
        );
        ensure!(
            cuda::is_compiled() || matches!(self.op, OpChoice::Composite),
            "--device cuda: the fused operator was built without CUDA; give --device cpu or --op composite, or \
             set TCH_EXTENSION_CUDA=1, which compiles the kernels or says what is missing"
        );
        Ok(Device::Cuda(index as usize))
    }

    /// A description of the run for its heading.
    pub fn describe(&self, device: Device) -> String {
        let device = match device {
            Device::Cuda(index) => format!("cuda:{index}"),
            _ if Cuda::is_available() && !cuda::is_compiled() => {
                "cpu (a GPU is there, but this build has no CUDA kernels: TCH_EXTENSION_CUDA=1 compiles them)"
                    .to_string()
            }
            _ => format!("cpu, {} threads", tch::get_num_threads()),
        };
        format!(
            "{device}; hidden {}, sequence {}, batch {}, {} steps, learning rate {:?}, seed {}",
            self.hidden, self.seq_len, self.batch, self.steps, self.lr, self.seed
        )
    }
}

fn in_range(option: &str, value: i64, low: i64, high: i64) -> Result<()> {
    ensure!(
        (low..=high).contains(&value),
        "{option} {value} is out of range: give {low} to {high}"
    );
    Ok(())
}

fn positive(option: &str, value: f64, high: f64) -> Result<()> {
    ensure!(
        value > 0.0 && value <= high,
        "{option} {value:?} is out of range: give a number above 0, up to {high:e}"
    );
    Ok(())
}
