//! Groups of ranks: how one is made, ended and abandoned.

use super::{Store, failed};
use crate::ffi::distributed as ffi;
use crate::{Error, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// How a group works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct GroupOptions {
    /// How long an operation waits for the other ranks, and how long ranks wait for one another at
    /// the start. Default: 10 minutes.
    pub timeout: Duration,
    /// The group's name, by which its ranks find one another in the store. A store can serve many
    /// groups with different names. Default: `0`, as in Python.
    pub name: String,
}

impl Default for GroupOptions {
    fn default() -> Self {
        GroupOptions { timeout: Duration::from_secs(600), name: "0".to_string() }
    }
}

impl GroupOptions {
    /// The default options with another timeout.
    pub fn with_timeout(timeout: Duration) -> Self {
        GroupOptions { timeout, ..GroupOptions::default() }
    }
}

/// The ranks that compute together.
///
/// Clones are handles of the same group. Every rank must call the same collectives in the same
/// order.
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

struct Inner {
    group: ffi::Group,
    rank: usize,
    size: usize,
    name: String,
    timeout: Duration,
    /// The group's own part of the store.
    store: Store,
    /// Why the group cannot be used any more.
    failed: Mutex<Option<String>>,
    /// Held while an operation is started: operations that start at the same time would have
    /// another order on each rank.
    start: Mutex<()>,
    subgroups: Mutex<Vec<Weak<Inner>>>,
}

/// The key with the message of a rank that failed.
const FAILED: &str = "tch_extension/failed";

impl ProcessGroup {
    /// Joins the ranks that call this with the same store. Returns when all have come.
    ///
    /// # Errors
    /// When the rank is not less than `size`, or not all ranks come until the timeout.
    pub fn with_store(
        store: &Store,
        rank: usize,
        size: usize,
        options: &GroupOptions,
    ) -> Result<ProcessGroup> {
        let op = "ProcessGroup::with_store";
        if size == 0 || rank >= size {
            let got = format!("rank {rank} of {size}");
            return Err(Error::argument(op, "rank", "a number less than the size", got, ""));
        }
        if options.timeout.is_zero() {
            return Err(Error::argument(op, "options.timeout", "more than zero", "zero", ""));
        }
        let own = store.prefix(&format!("{}/", options.name))?;
        let parts = ffi::Parts {
            rank,
            size,
            timeout: options.timeout,
            name: &options.name,
            loopback: store.is_local,
        };
        let group = ffi::Group::new(store.handle(), &parts)
            .map_err(|reason| failed(op, format!("rank {rank} of {size}: {reason}")))?;
        Ok(ProcessGroup {
            inner: Arc::new(Inner {
                group,
                rank,
                size,
                name: options.name.clone(),
                timeout: options.timeout,
                store: own,
                failed: Mutex::new(None),
                start: Mutex::new(()),
                subgroups: Mutex::new(Vec::new()),
            }),
        })
    }

    /// A group of one rank: a program that is written for several ranks then runs alone.
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn single() -> Result<ProcessGroup> {
        let options = GroupOptions::default();
        ProcessGroup::with_store(&Store::hash(options.timeout)?, 0, 1, &options)
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.inner.size
    }

    /// The group's name.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// How long an operation waits for the other ranks.
    pub fn timeout(&self) -> Duration {
        self.inner.timeout
    }

    /// The part of the store that belongs to this group, for values of your own.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Gives the group up on this rank, because something failed here: an operation of this rank
    /// alone, or a step of a training. Operations of the other ranks fail at once, with this message
    /// if the store can still be reached, and so do all later ones on every rank. Groups that were
    /// made of this one are given up, too.
    ///
    /// Without it, the other ranks would wait until the timeout, or take this rank's next collective
    /// for the one that it left out.
    pub fn poison(&self, message: &str) {
        {
            let mut failed = lock(&self.inner.failed);
            if failed.is_some() {
                return;
            }
            *failed = Some(message.to_string());
        }
        // The others read the message when their operation fails, so it is set first.
        let text = format!("rank {}: {message}", self.rank());
        drop(self.inner.store.set(FAILED, text.as_bytes()));
        drop(self.inner.group.abort());
        for subgroup in lock(&self.inner.subgroups).drain(..) {
            if let Some(inner) = subgroup.upgrade() {
                ProcessGroup { inner }.poison(message);
            }
        }
    }

    /// Makes all operations in flight fail, here and on the other ranks, and ends the group's use.
    ///
    /// # Errors
    /// When libtorch reports one.
    pub fn abort(&self) -> Result<()> {
        self.poison("the group was aborted");
        Ok(())
    }

    /// The handle for the bridges of this crate.
    #[allow(dead_code)]
    pub(crate) fn handle(&self) -> &ffi::Group {
        &self.inner.group
    }

    /// Locks the start of operations, unless the group has failed.
    pub(crate) fn starting(&self, op: &str) -> Result<MutexGuard<'_, ()>> {
        let start = lock(&self.inner.start);
        match &*lock(&self.inner.failed) {
            Some(message) => {
                Err(failed(op, self.place(&format!("the group has failed: {message}"))))
            }
            None => Ok(start),
        }
    }

    /// An error of an operation of this group. If a rank has left a message, that is the cause.
    pub(crate) fn error(&self, op: &str, reason: &str) -> Error {
        let own = lock(&self.inner.failed).clone();
        let cause = own.map(|message| format!("the group has failed: {message}")).or_else(|| {
            let store = &self.inner.store;
            let message = if self.others_failed() { store.get(FAILED).ok() } else { None };
            message.map(|message| String::from_utf8_lossy(&message).into_owned())
        });
        match cause {
            Some(cause) => failed(op, self.place(&format!("{cause} ({reason})"))),
            None => failed(op, self.place(reason)),
        }
    }

    /// Whether a rank has left a message.
    pub(super) fn others_failed(&self) -> bool {
        self.inner.store.check(FAILED).unwrap_or(false)
    }

    fn place(&self, reason: &str) -> String {
        format!("rank {} of {}: {reason}", self.rank(), self.size())
    }
}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProcessGroup({:?}, rank {} of {})", self.name(), self.rank(), self.size())
    }
}

/// Locks a mutex whose contents are right even after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
