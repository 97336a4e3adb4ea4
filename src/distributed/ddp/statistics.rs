//! What c10d has measured.

use crate::ffi::distributed::ddp as ffi;
use std::time::Duration;

/// What c10d's logger has measured: averages over the synchronised passes that it sampled, which are
/// the first 10 and then one in 100 (see [`Ddp::sample_every`](super::Ddp::sample_every)). A pass is
/// counted when the next one begins. Passes in a captured graph are not measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DdpStatistics {
    /// From the beginning of `Ddp::forward` to the beginning of the backward pass.
    pub forward: Duration,
    /// The computation of the backward pass.
    pub backward: Duration,
    /// From the start of the first bucket to the end of the last.
    pub communication: Duration,
    /// How long computation and communication went on at the same time.
    pub overlap: Duration,
    /// The size of each bucket in bytes, in the order of their communication. After the first pass,
    /// buckets are made anew in the order in which gradients arrive.
    pub buckets: Vec<usize>,
    /// Whether buckets were made anew.
    pub rebuilt: bool,
    /// Whether all passes so far used the same parameters, so that
    /// [`static_graph`](super::DdpOptions::static_graph) may be set. It says something only with
    /// [`find_unused_parameters`](super::DdpOptions::find_unused_parameters).
    pub can_be_static: bool,
}

impl DdpStatistics {
    /// The share of the communication that went on during the computation, from 0 to 1.
    pub fn overlap_share(&self) -> f64 {
        if self.communication.is_zero() {
            return 0.0;
        }
        self.overlap.as_secs_f64() / self.communication.as_secs_f64()
    }

    pub(super) fn of(numbers: ffi::Statistics, sizes: &[i64]) -> Self {
        let time = |nanoseconds: i64| Duration::from_nanos(nanoseconds.max(0).unsigned_abs());
        DdpStatistics {
            forward: time(numbers.forward),
            backward: time(numbers.backward),
            communication: time(numbers.communication),
            overlap: time(numbers.overlap),
            buckets: sizes.iter().map(|&bytes| usize::try_from(bytes).unwrap_or(0)).collect(),
            rebuilt: numbers.rebuilt,
            can_be_static: numbers.can_be_static,
        }
    }
}
