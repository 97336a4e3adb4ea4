//! Work that runs at the same time as other work on one GPU, on a stream of its own.

use crate::Result;
use crate::cuda::{Stream, StreamGuard, record_stream};
use std::cell::RefCell;
use tch::{Device, Tensor};

thread_local! {
    /// A stream for each device. libtorch's allocator keeps memory for each stream, so calls share
    /// them.
    static STREAMS: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

/// A stream of the current stream's device that is another one.
fn stream_next_to(current: Stream) -> Result<Stream> {
    STREAMS.with(|streams| {
        let mut streams = streams.borrow_mut();
        let is_other =
            |stream: &&Stream| stream.device() == current.device() && **stream != current;
        if let Some(found) = streams.iter().find(is_other) {
            return Ok(*found);
        }
        let new = Stream::new(current.device())?;
        streams.push(new);
        Ok(new)
    })
}

/// Work that has been started. The current stream waits for it when this is dropped, however the
/// work ended: a capture would otherwise fail.
pub(super) struct OnSideStream {
    current: Stream,
    side: Stream,
}

impl OnSideStream {
    /// Starts `work`, which reads these tensors, after what the current stream has so far.
    pub(super) fn start<T>(
        device: Device,
        reads: &[&Tensor],
        work: impl FnOnce() -> Result<T>,
    ) -> Result<(OnSideStream, T)> {
        let current = Stream::current(device)?;
        let started = OnSideStream { current, side: stream_next_to(current)? };
        started.side.wait_stream(&started.current)?;
        // The backward pass reads them on this stream, too, and the current one may free them then.
        // A tensor on another device is refused by the work.
        for tensor in reads.iter().filter(|tensor| tensor.device() == device) {
            record_stream(tensor, &started.side)?;
        }
        let _guard = StreamGuard::new(&started.side)?;
        let result = work()?;
        Ok((started, result))
    }

    /// Ends the work, whose results the current stream reads.
    pub(super) fn end(self, results: &[&Tensor]) -> Result<()> {
        for tensor in results {
            record_stream(tensor, &self.current)?;
        }
        Ok(())
    }
}

impl Drop for OnSideStream {
    fn drop(&mut self) {
        let _ = self.current.wait_stream(&self.side);
    }
}
