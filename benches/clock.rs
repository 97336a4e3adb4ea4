//! Time, as it can be believed: of calls in a row, of the host alone, and of the GPU alone.

use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Event, Graph, Stream, synchronize};

/// How long one provider is timed in one round: a GPU's calls differ less, and its time costs more.
fn round(device: Device) -> Duration {
    Duration::from_millis(if device == Device::Cpu { 60 } else { 20 })
}

/// Below this much data, a call finds it in the L2 cache, where the call before left it; above, it
/// does not.
pub const SMALL: usize = 32 << 20;
/// More than any L2 cache holds.
const FLUSH: i64 = 256 << 20;
/// Calls in one graph where the data are small: so many that starting the graph does not count.
const CALLS_IN_A_GRAPH: usize = 20;
/// Calls beyond so many microseconds, of many kernels, are alone in their graph.
const LONG: f64 = 500.0;
/// Calls of which the host's time is taken: not so many that the queue of launches fills up and the
/// host waits.
const CALLS_OF_THE_HOST: u32 = 20;

/// Times `iterations` calls in a row: on the CPU by the clock, on a GPU by CUDA events around all
/// of them. Where the host is slower than the device, as with small sizes, that is the host's pace:
/// what a training loop sees.
pub fn in_a_row(device: Device, iterations: u64, mut call: impl FnMut()) -> Duration {
    if device == Device::Cpu {
        let start = Instant::now();
        (0..iterations).for_each(|_| call());
        return start.elapsed();
    }
    // The first call after a pause finds the device asleep.
    call();
    between_events(device, || (0..iterations).for_each(|_| call()))
}

fn between_events(device: Device, body: impl FnOnce()) -> Duration {
    let (start, end) =
        (Event::new(device).expect("an event"), Event::new(device).expect("an event"));
    start.record().expect("a recorded event");
    body();
    end.record().expect("a recorded event");
    start.elapsed(&end).expect("the time between two events")
}

/// Microseconds a call, of calls in a row.
pub fn per_call(device: Device, iterations: u64, call: &mut impl FnMut()) -> f64 {
    micros(in_a_row(device, iterations, call)) / iterations as f64
}

/// As many calls as fill one round; also the warm-up.
pub fn iterations_for(device: Device, call: &mut impl FnMut()) -> u64 {
    per_call(device, 10, call);
    let one = per_call(device, 10, call);
    ((round(device).as_secs_f64() * 1e6 / one) as u64).max(3)
}

/// Microseconds until a call on a GPU returns, while the GPU works on those before.
pub fn host(device: Device, call: &mut impl FnMut()) -> f64 {
    synchronize(device).expect("an idle device");
    let start = Instant::now();
    (0..CALLS_OF_THE_HOST).for_each(|_| call());
    let elapsed = start.elapsed();
    synchronize(device).expect("an idle device");
    micros(elapsed) / f64::from(CALLS_OF_THE_HOST)
}

/// A call as a CUDA graph: nothing of the host's is in its time, nor the graph's launch, which is
/// not the operator's.
pub struct OnTheGpu {
    graph: Graph,
    start: Event,
    end: Event,
    calls: usize,
    flush: Option<Tensor>,
}

impl OnTheGpu {
    /// `bytes` is the size of what the call reads and writes. Small: many calls in a row, with the
    /// data in the L2 cache; otherwise one call, after the cache was flushed.
    ///
    /// # Errors
    /// What cannot be captured on this stream.
    pub fn capture(stream: &Stream, bytes: usize, call: &mut impl FnMut()) -> Result<Self> {
        let long = host(stream.device(), call) > LONG;
        let calls = if bytes < SMALL && !long { CALLS_IN_A_GRAPH } else { 1 };
        let flush = (bytes >= SMALL).then(|| Tensor::empty([FLUSH], (Kind::Int8, stream.device())));
        let (start, end) = (Event::external(stream.device())?, Event::external(stream.device())?);
        let (graph, ()) = Graph::capture_on(stream, || {
            start.record()?;
            (0..calls).for_each(|_| call());
            end.record()
        })?;
        Ok(OnTheGpu { graph, start, end, calls, flush })
    }

    /// Microseconds a call.
    pub fn time(&mut self) -> f64 {
        const REPLAYS: usize = 5;
        let times = (0..REPLAYS).map(|_| {
            // Behind the flush, or behind a first replay, the device is awake and the host ahead.
            match &mut self.flush {
                Some(flush) => drop(flush.zero_()),
                None => self.graph.replay().expect("a replay"),
            }
            self.graph.replay().expect("a replay");
            let time = self.start.elapsed(&self.end).expect("the time between two events");
            micros(time) / self.calls as f64
        });
        median(times.collect())
    }

    /// Kernels in a call.
    pub fn kernels(&self) -> usize {
        self.graph.kernels() / self.calls
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The one in the middle.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
