//! Several GPUs and several machines: ranks that compute together, by libtorch's own c10d.
//!
//! A *rank* is a process (in tests: a thread) that runs the same program as the others and knows its
//! number. `torch.distributed` is mostly known from Python, but its stores, its process groups, Gloo
//! and NCCL are in libtorch itself, and run here without Python. Needs the feature `distributed`.
//!
//! ```
//! use tch::Tensor;
//! use tch_extension::distributed::{Env, GroupOptions, ProcessGroup, ReduceOp};
//!
//! // What the launcher says: torchrun, Slurm, or nobody, for a group of one.
//! let env = Env::from_env()?;
//! let group = ProcessGroup::init(&env, &GroupOptions::default())?;
//!
//! let x = Tensor::from_slice(&[1.0, group.rank() as f64]).to_device(env.device());
//! group.all_reduce(&x, ReduceOp::Sum)?; // in place, as in PyTorch
//! assert_eq!(x.double_value(&[0]), group.size() as f64);
//! group.shutdown()?;
//! # Ok::<(), tch_extension::Error>(())
//! ```
//!
//! # What there is
//!
//! | here | in Python |
//! |---|---|
//! | [`Env`] | the variables of torchrun; here also those of Slurm |
//! | [`Store`] | `TCPStore`, `FileStore`, `HashStore`, `PrefixStore` |
//! | [`ProcessGroup::init`] | `init_process_group("cpu:gloo,cuda:nccl")` |
//! | [`ProcessGroup::subgroup`] | `new_group` |
//! | [`all_reduce`](ProcessGroup::all_reduce), [`broadcast`](ProcessGroup::broadcast), [`reduce`](ProcessGroup::reduce), … | the same names |
//! | [`all_reduce_async`](ProcessGroup::all_reduce_async) and [`Work`] | `async_op=True` |
//! | [`functional`]: collectives with gradients | `torch.distributed.nn.functional` |
//! | [`Ddp`]: data-parallel training | `torch.nn.parallel.DistributedDataParallel` |
//! | [`run_ranks`]: ranks as threads, for tests | `MultiThreadedTestCase` |
//!
//! CPU tensors go through Gloo. CUDA tensors go through NCCL, which needs a build with CUDA and the
//! `nccl.h` that libtorch was compiled with: it is next to a libtorch from wheels, or named by
//! `NCCL_HOME`. [`nccl_missing`] says why there is none, and so does `cargo xtask doctor`.
//!
//! # Tensors
//!
//! Any strides are right: a tensor that is not contiguous is copied, because Gloo would reduce the
//! memory next to its elements. Kinds are `Half`, `BFloat16`, `Float`, `Double`, the integers and
//! `Bool`. Shapes and kinds must be the same on all ranks. In-place operations raise the version
//! counter, so that autograd refuses a tensor that was saved before; a tensor that is the result of
//! recorded operations is refused, because its graph would be wrong: see [`functional`].
//!
//! # What can go wrong
//!
//! Networks fail, so every function returns a [`Result`](crate::Result), and none has a variant that
//! panics. The errors say which rank, of which group, and what.
//!
//! | what | the others see |
//! |---|---|
//! | a rank ends or is killed | an error at once, in operations that involve it |
//! | a rank is late | an error after the timeout; the group is then dead on all ranks |
//! | a rank returns an error and ends | as for a rank that ends, and that it dropped the group; its message with [`ProcessGroup::run`] |
//! | a rank fails a step and goes on | wrong values, unless it says so: [`ProcessGroup::poison`], as [`Ddp`] and [`ProcessGroup::run`] do |
//! | a rank sets another learning rate, or loads another state | an error on every rank, before its step: [`Ddp::guard`], [`ShardedOptimizer`] |
//! | ranks call different operations, or with different shapes | an error on every rank, with [`GroupOptions::check`]; without it wrong values, an error after the timeout, or the end of the process |
//! | the process with the store ends | errors of [`Store`] and of new groups; operations between the others go on |
//! | the process with the store is stopped, or another program has its port | the same after the timeout, or up to ten seconds later |
//! | not all ranks come | an error after the timeout |
//! | the port is taken, or a variable is wrong | an error that names it |
//! | NCCL fails, or waits too long | the process ends, or an error: [`OnNcclError`] |
//!
//! A group that failed stays so. Make a new one under another name, or end the process: a launcher
//! with restarts starts all ranks again.
//!
//! # Order
//!
//! All ranks must start the same operations in the same order, also those of a backward pass. Two
//! threads of a rank that use one group at the same time have no order; give each a group of its
//! own.
//!
//! Source: `csrc/distributed`, over `torch/csrc/distributed/c10d`.

mod agree;
mod checks;
mod collectives;
mod ddp;
mod env;
pub mod functional;
mod group;
mod ranks;
mod report;
mod sampler;
mod sharded;
mod store;
mod watch;
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
    let reason = lines.join(" ");
    if report::peer_has_ended(&reason) {
        report::consequence(&format!("{op}: {reason}"));
    }
    Error::Distributed { op: op.to_string(), reason }
}
