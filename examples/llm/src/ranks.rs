//! The processes that train one model together. Without a launcher there is one. With the feature
//! `distributed`, tch-run, torchrun or Slurm start several, each of which is a rank.

use crate::range;
use anyhow::{Result, anyhow, ensure};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tch::{Device, Tensor};
#[cfg(feature = "distributed")]
use tch_extension::distributed::{Env, GroupOptions, ProcessGroup, ReduceOp};

/// Who this process is.
pub struct Ranks {
    rank: usize,
    size: usize,
    /// `None` if there is one process.
    #[cfg(feature = "distributed")]
    group: Option<ProcessGroup>,
}

/// The error of a rank whose cause rank 0 has printed.
#[derive(Debug)]
pub struct OnRank0;

impl std::fmt::Display for OnRank0 {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("rank 0 failed")
    }
}

impl std::error::Error for OnRank0 {}

impl Ranks {
    /// Joins the processes that the launcher started, and takes this one's device: the one that is
    /// named, or its own GPU.
    pub fn join(device: &str, timeout: i64) -> Result<(Ranks, Device)> {
        range::check("--timeout", timeout, [1, 1 << 30])?;
        Ranks::of_launcher(device, Duration::from_secs(timeout as u64))
    }

    #[cfg(feature = "distributed")]
    fn of_launcher(device: &str, timeout: Duration) -> Result<(Ranks, Device)> {
        let env = Env::from_env()?;
        if env.world_size == 1 {
            return Ok((Ranks { rank: 0, size: 1, group: None }, crate::device::parse(device)?));
        }
        let device = match device {
            "auto" if tch_extension::cuda::is_compiled() => env.device(),
            "auto" => Device::Cpu,
            "cuda" => crate::device::parse(&format!("cuda:{}", env.local_rank))?,
            "cpu" => Device::Cpu,
            other => anyhow::bail!(
                "--device {other:?} with {} processes: each has a GPU of its own; give auto, cpu or cuda",
                env.world_size
            ),
        };
        let mut options = GroupOptions::with_timeout(timeout);
        options.device = Some(device);
        // The checks cost an exchange for each operation. The models are compared once in any case.
        options.check =
            std::env::var("TORCH_DISTRIBUTED_DEBUG").is_ok_and(|level| level == "DETAIL");
        let group = ProcessGroup::init(&env, &options)?;
        if env.rank != 0 {
            crate::progress::silence();
        }
        Ok((Ranks { rank: env.rank, size: env.world_size, group: Some(group) }, device))
    }

    #[cfg(not(feature = "distributed"))]
    fn of_launcher(device: &str, _timeout: Duration) -> Result<(Ranks, Device)> {
        for name in ["WORLD_SIZE", "SLURM_NTASKS"] {
            let is_one = std::env::var(name).map_or(true, |value| value.trim() == "1");
            ensure!(
                is_one,
                "{name} asks for several processes, and this program was built for one: build it with \
                 `--features distributed`"
            );
        }
        Ok((Ranks { rank: 0, size: 1 }, crate::device::parse(device)?))
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Whether this rank writes files.
    pub fn is_main(&self) -> bool {
        self.rank == 0
    }

    /// The group, if there are several processes.
    #[cfg(feature = "distributed")]
    pub fn group(&self) -> Option<&ProcessGroup> {
        self.group.as_ref()
    }

    /// Runs `body` on rank 0 only. If it fails, all ranks fail.
    pub fn on_main<T>(&self, body: impl FnOnce() -> Result<T>) -> Result<Option<T>> {
        let made = self.is_main().then(body).transpose();
        let failed = made.as_ref().err().map(|error| format!("{error:#}"));
        // An error of rank 0 is worth more than one of telling the others.
        let told = self.share(&failed);
        let made = made?;
        match told? {
            Some(_) if !self.is_main() => Err(anyhow!(OnRank0)),
            _ => Ok(made),
        }
    }

    /// The value of rank 0, on all ranks.
    pub fn share<T: Serialize + DeserializeOwned>(&self, value: &T) -> Result<T> {
        let bytes = match self.is_main() {
            true => serde_json::to_vec(value)?,
            false => Vec::new(),
        };
        Ok(serde_json::from_slice(&self.share_bytes(bytes)?)?)
    }

    /// The bytes of rank 0, on all ranks.
    pub fn share_bytes(&self, bytes: Vec<u8>) -> Result<Vec<u8>> {
        #[cfg(feature = "distributed")]
        if let Some(group) = &self.group {
            let length = Tensor::from(bytes.len() as i64);
            group.broadcast(&length, 0)?;
            let content = match self.is_main() {
                true => Tensor::f_from_slice(&bytes)?,
                false => {
                    Tensor::f_zeros([length.f_int64_value(&[])?], (tch::Kind::Uint8, Device::Cpu))?
                }
            };
            group.broadcast(&content, 0)?;
            return match self.is_main() {
                true => Ok(bytes),
                false => Ok(Vec::try_from(&content)?),
            };
        }
        Ok(bytes)
    }

    /// Adds up the numbers of all ranks, in place. They are on the CPU.
    pub fn sum(&self, numbers: &Tensor) -> Result<()> {
        #[cfg(feature = "distributed")]
        if let Some(group) = &self.group {
            group.all_reduce(numbers, ReduceOp::Sum)?;
        }
        debug_assert_eq!(numbers.device(), Device::Cpu);
        Ok(())
    }

    /// The means of the numbers of all ranks, which are on the CPU.
    pub fn means(&self, numbers: &Tensor) -> Result<Vec<f64>> {
        self.sum(numbers)?;
        Ok(Vec::try_from(numbers.f_div_scalar(self.size as f64)?)?)
    }

    /// Tells the other ranks if `body` fails, so that none waits for this one.
    pub fn run(&self, body: impl FnOnce() -> Result<()>) -> Result<()> {
        #[cfg(feature = "distributed")]
        if let Some(group) = &self.group {
            return group.run(body);
        }
        body()
    }

    /// Waits for all ranks at the end of what they do together. Rank 0 may go on alone.
    pub fn leave(&self) -> Result<()> {
        #[cfg(feature = "distributed")]
        if let Some(group) = &self.group {
            group.shutdown()?;
        }
        Ok(())
    }
}

/// A process' part of each step. The rows of a step are those of the settings, whatever the number of
/// processes: they divide its batches, and the rows of a batch where there are too few batches. So
/// the number of processes does not change the curve, and may be another one when a run goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Division {
    /// The batches of a step, and the rows of each, on this rank.
    pub accumulate: i64,
    pub rows: i64,
    /// Where its first batch begins, and how many rows of all ranks come until its next.
    offset: i64,
    stride: i64,
}

impl Division {
    pub fn new(batch: i64, accumulate: i64, rank: usize, size: usize) -> Result<Division> {
        let (rank, size) = (rank as i64, size as i64);
        // So many ranks have batches of their own, and the others divide the rows of each.
        let batches_at_once = greatest_common_divisor(accumulate, size);
        let parts = size / batches_at_once;
        ensure!(
            batch % parts == 0,
            "{size} processes cannot divide a step of --accumulate {accumulate} × --batch {batch} rows: give an \
             --accumulate or a --batch that is a multiple of {size}"
        );
        let rows = batch / parts;
        Ok(Division {
            accumulate: accumulate / batches_at_once,
            rows,
            offset: rank / parts * batch + rank % parts * rows,
            stride: batches_at_once * batch,
        })
    }

    /// Where this rank's `index`-th batch of the training begins, counted in rows of all ranks.
    pub fn first_row(&self, index: u64) -> u64 {
        index * self.stride as u64 + self.offset as u64
    }

    /// A number that no other batch of any rank has. With one process it is the batch's own.
    pub fn number(&self, index: u64) -> u64 {
        self.first_row(index) / self.rows as u64
    }
}

fn greatest_common_divisor(mut a: i64, mut b: i64) -> i64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a step, by all ranks.
    fn rows(batch: i64, accumulate: i64, size: usize, step: u64) -> Vec<u64> {
        let mut all = Vec::new();
        for rank in 0..size {
            let division = Division::new(batch, accumulate, rank, size).unwrap();
            let here = division.accumulate as u64;
            for index in step * here..(step + 1) * here {
                let first = division.first_row(index);
                all.extend(first..first + division.rows as u64);
            }
        }
        all.sort_unstable();
        all
    }

    #[test]
    fn each_step_has_the_same_rows_for_each_number_of_ranks() {
        for (batch, accumulate) in [(12, 1), (4, 3), (2, 6), (1, 12), (16, 30)] {
            let each = (batch * accumulate) as u64;
            for size in [1, 2, 3, 4, 6, 12] {
                let Ok(_) = Division::new(batch, accumulate, 0, size) else { continue };
                for step in [0, 1, 7] {
                    let expected: Vec<u64> = (step * each..(step + 1) * each).collect();
                    assert_eq!(
                        rows(batch, accumulate, size, step),
                        expected,
                        "{batch} {accumulate} {size}"
                    );
                }
            }
        }
    }

    #[test]
    fn batches_are_divided_before_their_rows() {
        let here = |batch, accumulate, size| {
            let division = Division::new(batch, accumulate, 0, size).unwrap();
            (division.accumulate, division.rows)
        };
        assert_eq!(here(16, 30, 2), (15, 16));
        assert_eq!(here(16, 30, 8), (15, 4));
        assert_eq!(here(12, 1, 3), (1, 4));
        assert_eq!(here(5, 3, 1), (3, 5));
        let error = Division::new(5, 3, 0, 2).unwrap_err().to_string();
        assert!(error.contains("2 processes") && error.contains("multiple of 2"), "{error}");
    }

    #[test]
    fn batches_of_all_ranks_have_different_numbers() {
        for (batch, accumulate, size) in [(4, 1, 4), (4, 6, 4), (3, 5, 1)] {
            let mut numbers = Vec::new();
            for rank in 0..size {
                let division = Division::new(batch, accumulate, rank, size).unwrap();
                numbers.extend((0..20).map(|index| division.number(index)));
            }
            if size == 1 {
                assert_eq!(numbers, (0..20).collect::<Vec<_>>());
            }
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), 20 * size);
        }
    }
}
