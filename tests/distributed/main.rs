//! Tests of `tch_extension::distributed`, with ranks as threads and as processes.

mod children;
mod collectives;
mod cuda;
mod ddp;
mod ddp_cuda;
mod ddp_faults;
mod ddp_guard;
mod ddp_hooks;
mod ddp_python;
mod ddp_support;
mod ddp_train;
mod faults;
mod functional;
mod group;
mod processes;
mod refused;
mod replay_faults;
mod sampler;
mod sharded;
mod stalls;

use std::io::Write;
use std::time::Duration;
use tch_extension::Result;
use tch_extension::distributed::{GroupOptions, ProcessGroup, Store, nccl_missing, run_ranks};
use tch_extension::testing::cuda_or_skip;

/// Whether there are so many GPUs and NCCL. If not, it says that the test is skipped.
fn gpus_or_skip(test: &str, gpus: usize) -> bool {
    if cuda_or_skip(test).is_none() {
        return false;
    }
    let missing = match nccl_missing() {
        Some(missing) => missing,
        None if tch_extension::cuda::device_count() < gpus => format!("fewer than {gpus} GPUs"),
        None => return true,
    };
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {missing}\n").as_bytes());
    false
}

/// [`run_ranks`] with groups that have another timeout, and compare operations or not.
fn ranks_with<T: Send>(
    n: usize,
    options: &GroupOptions,
    run: impl Fn(&ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let store = Store::hash(options.timeout)?;
    run_ranks(n, |outer| {
        let group = ProcessGroup::with_store(&store, outer.rank(), n, options)?;
        let value = run(&group)?;
        // No rank may close its connections before the others have ended.
        outer.barrier()?;
        Ok(value)
    })
}

/// Ranks whose operations are not compared.
fn unchecked<T: Send>(
    n: usize,
    timeout: Duration,
    run: impl Fn(&ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    ranks_with(n, &GroupOptions { check: false, ..GroupOptions::with_timeout(timeout) }, run)
}

/// Ranks whose operations are compared.
fn checked<T: Send>(
    n: usize,
    timeout: Duration,
    run: impl Fn(&ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    ranks_with(n, &GroupOptions { check: true, ..GroupOptions::with_timeout(timeout) }, run)
}
