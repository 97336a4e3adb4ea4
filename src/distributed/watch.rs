//! Watches how long the GPU takes for a graph with collectives. NCCL's own watchdog does not see
//! what a captured graph does: without this, a rank whose peer has gone would wait forever.

use crate::cuda::Event;
use crate::{Error, Result};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// What a device will reach.
pub(super) trait Milestone: Send + 'static {
    /// Whether it has been reached.
    fn is_reached(&self) -> Result<bool>;
}

impl Milestone for Event {
    fn is_reached(&self) -> Result<bool> {
        self.is_done()
    }
}

/// A thread that waits for milestones, one after the other. It ends when the watch is dropped.
pub(super) struct Watch<M> {
    sender: Sender<(M, Instant)>,
}

impl<M: Milestone> Watch<M> {
    /// Calls `stalled` once, with the reason, if a milestone is not reached in time after the one
    /// before, and then ends.
    pub fn new(timeout: Duration, stalled: impl FnOnce(String) + Send + 'static) -> Result<Self> {
        let (sender, receiver) = channel();
        let run = move || {
            if let Some(reason) = watch(&receiver, timeout) {
                stalled(reason);
            }
        };
        let name = "tch-extension ddp".to_string();
        std::thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|error| Error::Other(error.into()))?;
        Ok(Watch { sender })
    }

    pub fn add(&self, milestone: M) {
        // After a stall, nobody receives.
        let _ = self.sender.send((milestone, Instant::now()));
    }
}

/// How often a milestone is looked at.
const EVERY: Duration = Duration::from_millis(20);

/// Returns why it gave up, or `None` when no more milestones come.
fn watch<M: Milestone>(receiver: &Receiver<(M, Instant)>, timeout: Duration) -> Option<String> {
    let mut last = Instant::now();
    loop {
        let (milestone, since) = receiver.recv().ok()?;
        // The device can only have begun with it when it had reached the one before.
        let since = since.max(last);
        loop {
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
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
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
}
