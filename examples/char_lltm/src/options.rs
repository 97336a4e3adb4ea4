//! The options, and the checks of their values.

use anyhow::{Result, bail, ensure};
use std::path::PathBuf;
use tch::{Cuda, Device};
use tch_extension::cuda;

/// The options, which [`crate::arguments`] reads and describes.
#[derive(Debug)]
pub struct Options {
    pub text: Option<PathBuf>,
    pub device: String,
    pub op: OpChoice,
    pub hidden: i64,
    pub seq_len: i64,
    pub batch: i64,
    pub steps: i64,
    pub lr: f64,
    pub seed: i64,
    pub out: PathBuf,
    pub resume: Option<PathBuf>,
    pub save_every: i64,
    pub sample: i64,
    pub temperature: f64,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            text: None,
            device: "auto".to_string(),
            op: OpChoice::Sequence,
            hidden: 128,
            seq_len: 64,
            batch: 32,
            steps: 1500,
            lr: 5e-3,
            seed: 1,
            out: "runs/char_lltm".into(),
            resume: None,
            save_every: 100,
            sample: 400,
            temperature: 0.5,
        }
    }
}

/// The value of `--op`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpChoice {
    Sequence,
    Fused,
    Composite,
    Both,
    All,
    Lstm,
    Gru,
}

impl OpChoice {
    /// The names of all choices, and what each one means.
    pub const ALL: [(&'static str, OpChoice, &'static str); 7] = [
        (
            "sequence",
            OpChoice::Sequence,
            "The LLTM's whole sequence as one operator (`lltm` means the same)",
        ),
        ("fused", OpChoice::Fused, "The LLTM's fused cell, step by step"),
        ("composite", OpChoice::Composite, "The LLTM's cell composed of tch operators"),
        ("both", OpChoice::Both, "The LLTM's fused cell and the cell composed of tch operators"),
        ("all", OpChoice::All, "All three implementations of the LLTM"),
        ("lstm", OpChoice::Lstm, "This crate's LSTM and libtorch's"),
        ("gru", OpChoice::Gru, "This crate's GRU and libtorch's"),
    ];

    /// The choice with this name.
    pub fn of(name: &str) -> Option<OpChoice> {
        let name = if name == "lltm" { "sequence" } else { name };
        Self::ALL.iter().find(|(known, ..)| *known == name).map(|(_, choice, _)| *choice)
    }

    /// Its name among [`OpChoice::ALL`].
    pub fn name(self) -> &'static str {
        Self::ALL.iter().find(|(_, choice, _)| *choice == self).map_or("", |(name, ..)| name)
    }

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
