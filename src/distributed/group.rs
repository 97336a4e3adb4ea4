//! Groups of ranks: what one is, and how it is ended and abandoned. `join.rs` makes them.

mod join;

use super::{Store, failed, report};
use crate::ffi::distributed as ffi;
use crate::{Error, Result};
use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tch::Device;

/// What happens when NCCL reports an error, or an operation on GPUs takes longer than the timeout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum OnNcclError {
    /// The process ends, as in PyTorch. A launcher ends the other ranks and starts all again. The
    /// CPU never waits for NCCL.
    #[default]
    Exit,
    /// [`Work::wait`](super::Work::wait) waits on the CPU until the operation has ended on the GPU,
    /// and returns an error. That costs the overlap of communication and computation, except for
    /// operations that are captured in a CUDA graph, for which nothing waits on the CPU. It sets
    /// `TORCH_NCCL_BLOCKING_WAIT=1` and `TORCH_NCCL_ASYNC_ERROR_HANDLING=2` for the process, unless
    /// they are set, so the first group of a process should be made before other threads read
    /// variables.
    Abort,
}

/// How a group works.
#[derive(Clone, Debug)]
pub struct GroupOptions {
    /// How long an operation waits for the other ranks, and how long ranks wait for one another at
    /// the start. Default: 10 minutes.
    pub timeout: Duration,
    /// The group's name, by which its ranks find one another in the store. A store can serve many
    /// groups with different names. Default: `0`, as in Python.
    pub name: String,
    /// Compares on all ranks what they are about to do, before they do it: the operation, the
    /// reduction, the shapes and kinds. A difference is an error on every rank.
    ///
    /// Without it, ranks that differ get wrong values, wait until the timeout, or end: Gloo ends the
    /// process when a message has an unexpected size. With it, every operation first waits for all
    /// ranks and takes longer by a small all-gather on the CPU: 0.2 ms between two processes of one
    /// machine. Operations then do not overlap with what a late rank still computes. All ranks must
    /// have the same setting, and a rank in Python cannot take part in it. Messages of CUDA tensors
    /// are not compared.
    ///
    /// Default: true if this crate is compiled with debug assertions, or if the variable
    /// `TORCH_DISTRIBUTED_DEBUG` is `DETAIL`.
    pub check: bool,
    /// The GPU of this rank, whose tensors go through NCCL; `Device::Cpu` for a group without NCCL.
    /// Default: `None`, which stands for [`Env::device`](super::Env::device) in
    /// [`ProcessGroup::init`], and for the CPU
    /// elsewhere.
    pub device: Option<Device>,
    /// What happens when NCCL fails. Default: [`OnNcclError::Exit`].
    pub on_nccl_error: OnNcclError,
}

impl Default for GroupOptions {
    fn default() -> Self {
        let detail = std::env::var("TORCH_DISTRIBUTED_DEBUG").is_ok_and(|level| level == "DETAIL");
        GroupOptions {
            timeout: Duration::from_secs(600),
            name: "0".to_string(),
            check: cfg!(debug_assertions) || detail,
            device: None,
            on_nccl_error: OnNcclError::default(),
        }
    }
}

impl GroupOptions {
    /// The default options with another timeout.
    pub fn with_timeout(timeout: Duration) -> Self {
        GroupOptions { timeout, ..GroupOptions::default() }
    }
}

/// Why this build has no NCCL, and so no groups for CUDA tensors; `None` if it has.
pub fn nccl_missing() -> Option<String> {
    ffi::no_nccl()
}

/// The ranks that compute together.
///
/// Every rank must call the same collectives in the same order, with the same shapes and kinds.
/// Clones are handles of the same group, and threads may share it; operations that several threads
/// start at the same time have no order, so let one thread start them.
///
/// # When a rank fails
///
/// A rank that ends makes operations of the others fail at once. A rank that is late makes them fail
/// after the [`timeout`](GroupOptions::timeout). Either way the group cannot be used any more: make
/// another one under another name, or end the program and let the launcher start all ranks again. A
/// rank that goes on after an error of its own must say so by [`poison`](ProcessGroup::poison).
///
/// Let [`run`](ProcessGroup::run) call what may fail anywhere, such as the whole training: the other
/// ranks then get the message, and not only "Connection closed by peer".
///
/// Dropping the last handle waits for this rank's operations in flight, at most for the timeout; after
/// an error of an operation, or in a panic, it aborts them. What is lost after it, and a CUDA graph with
/// collectives that is still alive, are reported on stderr. Unlike [`shutdown`](ProcessGroup::shutdown)
/// it does not wait for the other ranks: operations that they still wait for then fail, and name this
/// rank.
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

struct Inner {
    /// Messages that were not waited for, whose memory must stay.
    abandoned: Mutex<Vec<ffi::Work>>,
    group: ffi::Group,
    rank: usize,
    size: usize,
    options: GroupOptions,
    /// The GPU of this rank.
    device: Device,
    /// The group's own part of the store.
    store: Store,
    /// The same, by a connection of its own: a store's client does one thing at a time, also while
    /// it waits for a key, and what failed must be said at once.
    signals: Store,
    /// Why the group cannot be used any more.
    failed: Mutex<Option<String>>,
    /// Whether an operation has failed here, so that another rank is the cause.
    follows: AtomicBool,
    /// Held while an operation is started: operations that start at the same time would have
    /// another order on each rank.
    start: Mutex<()>,
    subgroups: Mutex<Vec<Weak<Inner>>>,
    /// How many subgroups were asked for, which is the same number on all ranks.
    asked: AtomicUsize,
}

/// The key with the message of a rank that failed.
const FAILED: &str = "tch_extension/failed";

/// The key with what a rank says that drops its group.
const DROPPED: &str = "tch_extension/dropped";

/// How long rank 0, which may have the store's server, waits for the others at the end.
const FAREWELL: Duration = Duration::from_secs(5);

impl ProcessGroup {
    /// Is an error on every rank if some of them do something else, and operations are compared.
    fn compare(&self, op: &str, what: &str) -> Result<()> {
        let _start = self.starting(op)?;
        self.inner.group.compare(what).map_err(|reason| self.error(op, &reason))
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
        &self.inner.options.name
    }

    /// How long an operation waits for the other ranks.
    pub fn timeout(&self) -> Duration {
        self.inner.options.timeout
    }

    /// The GPU whose tensors the group takes, besides those on the CPU; or the CPU.
    pub fn device(&self) -> Device {
        self.inner.device
    }

    /// Whether operations are compared over the ranks: [`GroupOptions::check`].
    pub fn is_checked(&self) -> bool {
        self.inner.options.check
    }

    pub(super) fn on_nccl_error(&self) -> OnNcclError {
        self.inner.options.on_nccl_error
    }

    /// Why the group cannot be used any more, if this rank gave it up.
    pub fn failure(&self) -> Option<String> {
        lock(&self.inner.failed).clone()
    }

    /// The part of the store that belongs to this group, for values of your own.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Gives the group up on this rank, because something failed here: an operation of this rank
    /// alone, or a step of a training. Operations of the other ranks fail at once, with this message
    /// if the store can still be reached, and so do all later ones on every rank. If several ranks give
    /// up, the first message stays. Groups that were made of this one are given up, too.
    ///
    /// Without it, the other ranks would wait until the timeout, or take this rank's next collective
    /// for the one that it left out.
    pub fn poison(&self, message: &str) {
        if self.size() > 1 && self.failure().is_none() {
            report::failure(message);
        }
        self.end(message);
    }

    /// The same, without a word to the launcher.
    fn end(&self, message: &str) {
        {
            let mut failed = lock(&self.inner.failed);
            if failed.is_some() {
                return;
            }
            *failed = Some(message.to_string());
        }
        // The others read the message when their operation fails, so it is set first.
        let text = format!("rank {}: {message}", self.rank());
        // The first failure is the cause.
        drop(self.inner.signals.compare_set(FAILED, b"", text.as_bytes()));
        drop(self.inner.group.end(&text));
        for subgroup in lock(&self.inner.subgroups).drain(..) {
            if let Some(inner) = subgroup.upgrade() {
                ProcessGroup { inner }.end(message);
            }
        }
    }

    /// Runs the part of a program that needs the other ranks, such as its training. If it returns an
    /// error or panics, this rank gives the group up ([`poison`](ProcessGroup::poison)), so that the
    /// others get the message at once. In a group of one it only runs.
    ///
    /// ```
    /// use tch::Tensor;
    /// use tch_extension::Error;
    /// use tch_extension::distributed::{ReduceOp, run_ranks};
    ///
    /// let errors = run_ranks(2, |group| {
    ///     let trained = group.run(|| match group.rank() {
    ///         1 => Err(Error::msg("the data end early")),
    ///         _ => group.all_reduce(&Tensor::from(1.0), ReduceOp::Sum),
    ///     });
    ///     Ok(trained.expect_err("both fail").to_string())
    /// })?;
    /// assert!(errors[0].contains("rank 1: the data end early"));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of `body`.
    pub fn run<T, E: std::fmt::Display>(
        &self,
        body: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        let unless_done = PoisonUnlessDone { group: self };
        let outcome = body();
        std::mem::forget(unless_done);
        // Errors of anyhow show their causes in this way.
        outcome.inspect_err(|error| self.give_up(&format!("{error:#}")))
    }

    /// Gives the group up if there are other ranks.
    pub(super) fn give_up(&self, message: &str) {
        if self.size() > 1 {
            self.poison(message);
        }
    }

    /// Makes all operations fail, those in flight and later ones, on all ranks. It does not wait.
    pub fn abort(&self) {
        self.end("the group was aborted");
    }

    /// Ends the group in an orderly way, when all ranks call this: no rank ends while another one
    /// still waits for its data. Operations that are called later are errors.
    ///
    /// A program that ends after its last collective can leave it out, but then a rank that is
    /// slower may see that operation fail. If a CUDA graph that holds collectives, such as that of a
    /// `train::Step`, is not dropped before, NCCL's connections stay until the process ends.
    ///
    /// # Errors
    /// When not all ranks call it until the timeout, when a rank gives the group up, and when a rank
    /// calls another operation; without [`GroupOptions::check`] that is only known after the timeout.
    pub fn shutdown(&self) -> Result<()> {
        let op = "shutdown";
        self.compare(op, op)?;
        let _start = self.starting(op)?;
        let store = &self.inner.store;
        let count = |key: &str, amount: i64| -> Result<bool> {
            let sum = store.add(key, amount)?;
            Ok(usize::try_from(sum).is_ok_and(|sum| sum >= self.size()))
        };
        if count("tch_extension/ending", 1)? {
            store.set("tch_extension/ended", b"1")?;
        }
        self.read_in_time(op, "tch_extension/ended")?;
        *lock(&self.inner.failed) = Some("it was shut down".to_string());
        self.inner.group.shutdown().map_err(|reason| self.error(op, &reason))?;
        let mut all = count("tch_extension/left", 1)?;
        let end = Instant::now() + FAREWELL;
        while self.rank() == 0 && !all && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
            all = count("tch_extension/left", 0)?;
        }
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
        self.inner.follows.store(true, Ordering::Relaxed);
        let own = lock(&self.inner.failed).clone();
        let is_own = own.is_some();
        let cause = own
            .map(|message| format!("the group has failed: {message}"))
            .or_else(|| left_message(&self.inner.signals));
        let reason = without_source(reason);
        if let Some(cause) = cause.as_ref().filter(|_| !is_own) {
            report::consequence(cause);
        }
        match cause {
            Some(cause) => failed(op, self.place(&format!("{cause} ({reason})"))),
            None => failed(op, self.place(&format!("{reason}{}", way_out(reason)))),
        }
    }

    /// Keeps the memory of a message that nobody waits for: Gloo would stop at it.
    pub(super) fn abandon(&self, message: ffi::Work) {
        lock(&self.inner.abandoned).push(message);
    }

    /// Whether a rank has left a message.
    pub(super) fn others_failed(&self) -> bool {
        let has = |key| self.inner.signals.check(key).unwrap_or(false);
        has(FAILED) || has(DROPPED)
    }

    /// An error of this rank, or of the rank that failed before it.
    pub(super) fn cause_of(&self, op: &str, error: Error) -> Error {
        match self.others_failed() {
            true => self.error(op, &error.to_string()),
            false => error,
        }
    }

    /// A handle that does not keep the connections.
    pub(super) fn downgrade(&self) -> WeakGroup {
        WeakGroup(Arc::downgrade(&self.inner))
    }

    fn place(&self, reason: &str) -> String {
        format!("rank {} of {}: {reason}", self.rank(), self.size())
    }
}

/// What a rank has left in the group's store that failed or dropped its group.
fn left_message(store: &Store) -> Option<String> {
    let key = [FAILED, DROPPED].into_iter().find(|key| store.check(key).unwrap_or(false))?;
    Some(String::from_utf8_lossy(&store.get(key).ok()?).into_owned())
}

/// Ends a group that was neither shut down nor given up. No other rank is waited for: this one may
/// have left because of an error, while the others wait for it in an operation.
impl Drop for Inner {
    fn drop(&mut self) {
        if lock(&self.failed).is_some() {
            return;
        }
        let (rank, size) = (self.rank, self.size);
        let (follows, panics) = (self.follows.load(Ordering::Relaxed), std::thread::panicking());
        let why = if panics { "it panicked" } else { "it dropped the group" };
        let text = format!("rank {rank}: {why} without shutdown or poison");
        if size > 1 && !follows {
            // It waits for no answer: the store may have ended.
            drop(self.signals.set(DROPPED, text.as_bytes()));
        }
        if follows || panics {
            // Nobody takes the results any more, and operations may never end.
            drop(self.group.end(&text));
        } else if let Err(lost) = self.group.leave() {
            let _ = writeln!(
                std::io::stderr(),
                "tch-extension: rank {rank} of {size} dropped its group: {lost}; call \
                 ProcessGroup::shutdown before, after the CUDA graphs were dropped"
            );
        }
    }
}

/// When dropped, which only a panic does, gives the group up.
struct PoisonUnlessDone<'a> {
    group: &'a ProcessGroup,
}

impl Drop for PoisonUnlessDone<'_> {
    fn drop(&mut self) {
        self.group.give_up("it panicked");
    }
}

/// A group, if somebody else keeps it.
pub(super) struct WeakGroup(Weak<Inner>);

impl WeakGroup {
    pub fn upgrade(&self) -> Option<ProcessGroup> {
        self.0.upgrade().map(|inner| ProcessGroup { inner })
    }
}

impl std::fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ProcessGroup({:?}, rank {} of {})", self.name(), self.rank(), self.size())
    }
}

/// A message of Gloo's without the place in its sources.
fn without_source(reason: &str) -> &str {
    let is_place = |place: &str| place.contains(".cc:") || place.contains(".h:");
    match reason.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((place, rest)) if is_place(place) => rest,
        _ => reason,
    }
}

/// What to do when c10d reports this.
fn way_out(reason: &str) -> &'static str {
    if report::peer_has_ended(reason) {
        "; a rank ended or gave up: make a new group under another name, or end and let the launcher start all ranks again"
    } else if ["imed out", "imeout"].iter().any(|word| reason.contains(word)) {
        "; a rank did not take part in time: see what it does, or raise GroupOptions::timeout"
    } else {
        ""
    }
}

/// Locks a mutex whose contents are right even after a panic.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
