//! Watches how long the GPU takes for a graph with collectives. NCCL's own watchdog does not see
//! what a captured graph does: without this, a rank whose peer has gone would wait forever.

use super::{OnNcclError, ProcessGroup};
use crate::cuda::Event;
use crate::{Error, Result};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tch::Device;

/// The replays of an optimizer's graphs, watched once there is one.
#[derive(Default)]
pub(super) struct Replays(OnceLock<Watch<Event>>);

impl Replays {
    /// Watches that what was launched so far on the current stream ends within the group's timeout.
    ///
    /// # Errors
    /// When the group was given up, or an error of CUDA.
    pub fn add(&self, op: &str, group: &ProcessGroup, device: Device) -> Result<()> {
        if group.size() == 1 {
            return Ok(());
        }
        drop(group.starting(op)?);
        let event = Event::without_timing(device)?;
        event.record()?;
        let watch = match self.0.get() {
            Some(watch) => watch,
            None => {
                let (weak, op) = (group.downgrade(), op.to_string());
                let stalled = move |reason: String| {
                    if let Some(group) = weak.upgrade() {
                        stalled(&op, &group, &reason);
                    }
                };
                let made = Watch::new(group.timeout(), stalled)?;
                self.0.get_or_init(|| made)
            }
        };
        watch.add(event);
        Ok(())
    }
}

/// Ends what waits for a rank that does not come, as NCCL's watchdog does outside of graphs.
fn stalled(op: &str, group: &ProcessGroup, reason: &str) {
    let line = cause_of(op, group, reason);
    if group.on_nccl_error() == OnNcclError::Abort {
        return group.poison(&line);
    }
    // The GPU is busy forever, and an orderly end of the process would wait for it.
    eprintln!("tch-extension: {line}. The process aborts.");
    std::process::abort();
}

/// What the rank that failed has said, if it could say something.
fn cause_of(op: &str, group: &ProcessGroup, reason: &str) -> String {
    let (rank, size) = (group.rank(), group.size());
    match group.others_failed() {
        true => group.error(op, reason).to_string(),
        false => format!("rank {rank} of {size}: {reason}; another rank has failed or is too slow"),
    }
}

/// What a device will reach.
trait Milestone: Send + 'static {
    /// Whether it has been reached.
    fn is_reached(&self) -> Result<bool>;
}

impl Milestone for Event {
    fn is_reached(&self) -> Result<bool> {
        self.is_done()
    }
}

/// A thread that waits for milestones, one after the other. It has ended when the watch is dropped.
struct Watch<M> {
    sender: Option<Sender<(M, Instant)>>,
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl<M: Milestone> Watch<M> {
    /// Calls `stalled` once, with the reason, if a milestone is not reached in time after the one
    /// before, and then ends.
    fn new(timeout: Duration, stalled: impl FnOnce(String) + Send + 'static) -> Result<Self> {
        let (sender, receiver) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let run = move || {
            if let Some(reason) = watch(&receiver, timeout, &over) {
                stalled(reason);
            }
        };
        let thread = std::thread::Builder::new()
            .name("tch-extension replays".to_string())
            .spawn(run)
            .map_err(|error| Error::Other(error.into()))?;
        Ok(Watch { sender: Some(sender), is_over, thread: Some(thread) })
    }

    fn add(&self, milestone: M) {
        if let Some(sender) = &self.sender {
            // After a stall, nobody receives.
            let _ = sender.send((milestone, Instant::now()));
        }
    }
}

/// The thread must not ask a device that a process which ends has left.
impl<M> Drop for Watch<M> {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.sender = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// How often a milestone is looked at.
const EVERY: Duration = Duration::from_millis(20);

/// Returns why it gave up, or `None` when no more milestones come or the watch is over.
fn watch<M: Milestone>(
    receiver: &Receiver<(M, Instant)>,
    timeout: Duration,
    is_over: &AtomicBool,
) -> Option<String> {
    let mut last = Instant::now();
    loop {
        let (milestone, since) = receiver.recv().ok()?;
        // The device can only have begun with it when it had reached the one before.
        let since = since.max(last);
        loop {
            if is_over.load(Ordering::Relaxed) {
                return None;
            }
            match milestone.is_reached() {
                Ok(true) => break,
                Ok(false) if since.elapsed() > timeout => {
                    return Some(format!("a replayed step did not end within {timeout:?}"));
                }
                Ok(false) => std::thread::sleep(EVERY),
                Err(error) => return Some(error.to_string()),
            }
        }
        last = Instant::now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::distributed::run_ranks;
    use std::sync::mpsc::RecvTimeoutError;

    struct Flag(Arc<AtomicBool>);

    impl Milestone for Flag {
        fn is_reached(&self) -> Result<bool> {
            Ok(self.0.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn a_stall_is_reported_and_steps_in_time_are_not() {
        let timeout = Duration::from_millis(200);
        let (sender, reports) = channel();
        let watch = Watch::new(timeout, move |reason| {
            let _ = sender.send(reason);
        });
        let watch = watch.expect("a thread");
        // Each takes a part of the time that is allowed, and together they take longer.
        for _ in 0..4 {
            let flag = Arc::new(AtomicBool::new(false));
            watch.add(Flag(Arc::clone(&flag)));
            std::thread::sleep(timeout / 3);
            flag.store(true, Ordering::Relaxed);
        }
        assert_eq!(reports.try_recv().ok(), None);
        watch.add(Flag(Arc::new(AtomicBool::new(false))));
        let reason = reports.recv_timeout(10 * timeout).expect("a report");
        assert!(reason.contains("did not end within 200ms"), "{reason}");
    }

    #[test]
    fn a_stall_names_what_another_rank_failed_with() {
        let lines = run_ranks(2, |group| {
            let cause = || cause_of("step", &group, "it did not end");
            let before = cause();
            group.barrier()?;
            if group.rank() == 1 {
                group.poison("out of data");
            }
            let begun = Instant::now();
            while !group.others_failed() && begun.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok([before, cause()])
        });
        let [before, after] = &lines.expect("all ranks")[0];
        assert!(before.contains("it did not end; another rank has failed"), "{before}");
        assert!(after.contains("rank 1: out of data (it did not end)"), "{after}");
    }

    #[test]
    fn a_watch_that_is_dropped_reports_nothing() {
        let (sender, reports) = channel();
        let watch = Watch::new(Duration::from_secs(5), move |reason| {
            let _ = sender.send(reason);
        });
        let watch: Watch<Flag> = watch.expect("a thread");
        drop(watch);
        assert_eq!(
            reports.recv_timeout(Duration::from_secs(5)),
            Err(RecvTimeoutError::Disconnected)
        );
    }

    #[test]
    fn a_watch_that_is_dropped_waits_for_no_milestone() {
        let (sender, reports) = channel();
        let timeout = Duration::from_secs(60);
        let watch = Watch::new(timeout, move |reason| {
            let _ = sender.send(reason);
        });
        let watch = watch.expect("a thread");
        watch.add(Flag(Arc::new(AtomicBool::new(false))));
        let start = Instant::now();
        drop(watch);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        // The thread has ended, and said nothing.
        assert_eq!(reports.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected));
    }
}
