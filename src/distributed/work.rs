//! Operations in flight.

use super::ProcessGroup;
use crate::Result;
use crate::ffi::distributed as ffi;
use std::time::{Duration, Instant};

/// An operation in flight. Until it has been waited for, the values of the tensors are undetermined,
/// and operations of tch that use them race with it. A [`view`](crate::view) of them is an error, and
/// so is another operation of a group: for CPU tensors, one that writes is alone.
///
/// It keeps them alive. If it is dropped without [`wait`](Work::wait), the operation goes on, but
/// results for a tensor that is not contiguous are lost, and errors stay unknown.
#[must_use = "the results are there after `wait`"]
pub struct Work {
    op: &'static str,
    /// `None` when it has been waited for.
    work: Option<ffi::Work>,
    /// The connections, which must live as long.
    group: ProcessGroup,
    is_cuda: bool,
}

impl Work {
    pub(super) fn new(
        op: &'static str,
        work: ffi::Work,
        group: &ProcessGroup,
        is_cuda: bool,
    ) -> Work {
        Work { op, work: Some(work), group: group.clone(), is_cuda }
    }

    /// Waits until the results are there. With CUDA tensors, only the current stream waits: what is
    /// launched on it afterwards sees the results.
    ///
    /// # Errors
    /// When another rank ended or failed, or did not take part until the timeout.
    pub fn wait(mut self) -> Result<()> {
        self.finish(None).map(drop)
    }

    /// Waits at most for this time, and returns whether the results are there. If they are not, the
    /// operation goes on and can be waited for again.
    ///
    /// With CUDA tensors, this waits on the CPU until the operation has ended on the GPU. A message
    /// ([`ProcessGroup::send_async`], [`ProcessGroup::recv_async`]) of CPU tensors does not survive a
    /// timeout: Gloo closes the connection, and the result is an error.
    ///
    /// # Errors
    /// As for [`Work::wait`].
    pub fn wait_timeout(&mut self, timeout: Duration) -> Result<bool> {
        if self.is_cuda {
            let end = Instant::now() + timeout;
            while !self.is_completed() {
                if Instant::now() >= end {
                    return Ok(false);
                }
                std::thread::sleep(Duration::from_micros(100));
            }
            return self.finish(None);
        }
        self.finish(Some(timeout))
    }

    /// Whether the operation has ended, well or badly. A message of CPU tensors does not know before it
    /// is waited for; then this is false.
    pub fn is_completed(&self) -> bool {
        self.work.as_ref().is_none_or(ffi::Work::is_completed)
    }

    /// The operation, or `None` when it has been waited for.
    pub(super) fn into_handle(mut self) -> Option<ffi::Work> {
        self.work.take()
    }

    /// Returns whether the operation has ended well.
    fn finish(&mut self, timeout: Option<Duration>) -> Result<bool> {
        let Some(work) = &mut self.work else { return Ok(true) };
        match work.wait(timeout) {
            Ok(()) => {
                self.work = None;
                Ok(true)
            }
            Err(_) if timeout.is_some() && !work.is_completed() => Ok(false),
            Err(reason) => {
                self.work = None;
                Err(self.group.error(self.op, &reason))
            }
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let is_message = matches!(self.op, "send" | "recv");
        if let Some(work) = self.work.take_if(|_| is_message) {
            self.group.abandon(work);
        }
    }
}

impl std::fmt::Debug for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("op", &self.op).finish_non_exhaustive()
    }
}
