//! Several GPUs and several machines: ranks that compute together, by libtorch's own c10d.

mod checks;
mod collectives;
mod ddp;
mod env;
pub mod functional;
mod group;
mod ranks;
mod sampler;
mod sharded;
mod store;
mod work;

pub use collectives::ReduceOp;
pub use ddp::{Bucket, CommHook, Ddp, DdpOptimizer, DdpOptions, DdpStatistics, Outputs};
pub use env::{Env, Master};
pub use group::{GroupOptions, OnNcclError, ProcessGroup, nccl_missing};
pub use ranks::run_ranks;
pub use sampler::{DistributedSampler, SamplerOptions, Samples};
pub use sharded::{Compression, ShardedOptimizer, ShardedOptions};
pub use store::{Store, TcpStoreOptions};
pub use work::Work;

use crate::Error;

/// An error of a function that involves other ranks or a store.
fn failed(op: &str, reason: impl Into<String>) -> Error {
    // c10d's messages may have several lines, and some end with the list of its threads.
    let reason: String = reason.into();
    let lines: Vec<&str> = reason.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    Error::Distributed { op: op.to_string(), reason: lines.join(" ") }
}
