//! Ranks as threads of one process.

use super::{GroupOptions, ProcessGroup, Store, failed};
use crate::error::panic_text;
use crate::{Error, Result};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How long a rank of [`run_ranks`] waits for the others.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Runs `n` ranks as threads of this process, and returns their results in the order of ranks. No
/// launcher is needed, so this is the way to test what is written for several ranks.
///
/// Each thread calls `run` with its group, whose operations wait at most 30 s for one another. When
/// a rank returns an error or panics, the operations of the others fail.
///
/// ```
/// use tch::Tensor;
/// use tch_extension::distributed::{ReduceOp, run_ranks};
///
/// let sums = run_ranks(3, |group| {
///     let x = Tensor::from(group.rank() as f64 + 1.0);
///     group.all_reduce(&x, ReduceOp::Sum)?;
///     Ok(x.double_value(&[]))
/// })?;
/// assert_eq!(sums, [6.0, 6.0, 6.0]);
/// # Ok::<(), tch_extension::Error>(())
/// ```
///
/// # Errors
/// The error of the first rank that failed by itself; a panic is an error here.
pub fn run_ranks<T: Send>(
    n: usize,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    run_ranks_with(n, &GroupOptions::with_timeout(TIMEOUT), run)
}

/// [`run_ranks`] with other options.
pub(crate) fn run_ranks_with<T: Send>(
    n: usize,
    options: &GroupOptions,
    run: impl Fn(ProcessGroup) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    if n == 0 {
        return Err(Error::argument("run_ranks", "n", "at least one rank", "0", ""));
    }
    let store = Store::hash(options.timeout)?;
    // What a rank returned, whether it failed because another one did, and its group. All groups
    // live until all ranks have ended: one that is dropped closes connections from which a slower
    // rank may still read.
    type Outcome<T> = (Result<T>, bool, Option<ProcessGroup>);
    let one = |rank: usize| -> Outcome<T> {
        let group = match ProcessGroup::with_store(&store, rank, n, options) {
            Ok(group) => group,
            Err(error) => return (Err(error), false, None),
        };
        let outcome =
            catch_unwind(AssertUnwindSafe(|| run(group.clone()))).unwrap_or_else(|payload| {
                Err(failed("run_ranks", format!("rank {rank} panicked: {}", panic_text(&*payload))))
            });
        let follows = match &outcome {
            Ok(_) => false,
            Err(error) => {
                let follows = group.others_failed();
                group.poison(&error.to_string());
                follows
            }
        };
        (outcome, follows, Some(group))
    };
    let outcomes: Vec<Outcome<T>> = std::thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = (0..n).map(|rank| scope.spawn(move || one(rank))).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Outcome<T>>| {
            thread.join().unwrap_or_else(|payload| {
                (Err(failed("run_ranks", panic_text(&*payload))), false, None)
            })
        };
        threads.into_iter().map(join).collect()
    });
    let mut results = Vec::with_capacity(n);
    let (mut first, mut following) = (None, None);
    for (outcome, follows, _) in outcomes {
        match outcome {
            Ok(value) => results.push(value),
            Err(error) if follows => following = following.or(Some(error)),
            Err(error) => first = first.or(Some(error)),
        }
    }
    first.or(following).map_or(Ok(results), Err)
}
