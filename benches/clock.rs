//! Measures time reliably: of calls in a row, of the host alone, and of the GPU alone.

use std::time::{Duration, Instant};
use tch::{Device, Kind, Tensor};
use tch_extension::Result;
use tch_extension::cuda::{Event, Graph, Stream, synchronize};

/// The time for which one provider is measured in one round. It is shorter on a GPU, whose calls
/// vary less and whose time is more expensive.
fn round(device: Device) -> Duration {
    Duration::from_millis(if device == Device::Cpu { 60 } else { 20 })
}

/// A call with less data than this finds them in the L2 cache, where the previous call left them. A
/// call with more does not.
pub const SMALL: usize = 32 << 20;
/// The size of a write that flushes the cache; no L2 cache holds as much.
const FLUSH: i64 = 256 << 20;
/// The number of calls in one graph if the data are small. It is so large that the graph's start
/// does not matter.
const CALLS_IN_A_GRAPH: usize = 20;
/// A call that takes the host longer than this, in microseconds, has many kernels and is the only
/// one in its graph.
const LONG: f64 = 500.0;
/// The number of calls over which the host's time is measured. It is small enough that the queue of
/// launches does not fill up and make the host wait.
const CALLS_OF_THE_HOST: u32 = 20;

/// Times `iterations` calls in a row: on the CPU by the clock, on a GPU by CUDA events around all
/// calls. If the host is slower than the device, as with small sizes, this is the host's pace, as a
/// training loop sees it.
pub fn in_a_row(device: Device, iterations: u64, mut call: impl FnMut()) -> Duration {
    if device == Device::Cpu {
        let start = Instant::now();
        (0..iterations).for_each(|_| call());
        return start.elapsed();
    }
    // After a pause, the first call has to wake the device.
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

/// The time of a call, in microseconds, when calls follow one another.
pub fn per_call(device: Device, iterations: u64, call: &mut impl FnMut()) -> f64 {
    micros(in_a_row(device, iterations, call)) / iterations as f64
}

/// The number of calls that fill one round. Measuring it is also the warm-up.
pub fn iterations_for(device: Device, call: &mut impl FnMut()) -> u64 {
    per_call(device, 10, call);
    let one = per_call(device, 10, call);
    ((round(device).as_secs_f64() * 1e6 / one) as u64).max(3)
}

/// The time, in microseconds, until a call on a GPU returns, while the GPU works on the previous
/// calls.
pub fn host(device: Device, call: &mut impl FnMut()) -> f64 {
    synchronize(device).expect("an idle device");
    let start = Instant::now();
    (0..CALLS_OF_THE_HOST).for_each(|_| call());
    let elapsed = start.elapsed();
    synchronize(device).expect("an idle device");
    micros(elapsed) / f64::from(CALLS_OF_THE_HOST)
}

/// A call that was captured as a CUDA graph. Its time contains neither the host's time nor the
/// launch of the graph, which is not part of the operator.
pub struct OnTheGpu {
    graph: Graph,
    start: Event,
    end: Event,
    calls: usize,
    flush: Option<Tensor>,
}

impl OnTheGpu {
    /// Captures the call. `bytes` is the size of the data that the call reads and writes. If it is
    /// small, the graph contains many calls, which find the data in the L2 cache; otherwise it
    /// contains one call, and the cache is flushed before it.
    ///
    /// # Errors
    /// If the call cannot be captured on this stream.
    pub fn capture(stream: &Stream, bytes: usize, call: &mut impl FnMut()) -> Result<Self> {
        let long = host(stream.device(), call) > LONG;
        Self::capture_calls(stream, bytes, if long { 1 } else { CALLS_IN_A_GRAPH }, call)
    }

    /// The same with this many calls, if the data are small.
    ///
    /// # Errors
    /// As for `capture`.
    pub fn capture_calls(
        stream: &Stream,
        bytes: usize,
        calls: usize,
        call: &mut impl FnMut(),
    ) -> Result<Self> {
        let calls = if bytes < SMALL { calls } else { 1 };
        let flush = (bytes >= SMALL).then(|| Tensor::empty([FLUSH], (Kind::Int8, stream.device())));
        let (start, end) = (Event::external(stream.device())?, Event::external(stream.device())?);
        let (graph, ()) = Graph::capture_on(stream, || {
            start.record()?;
            (0..calls).for_each(|_| call());
            end.record()
        })?;
        Ok(OnTheGpu { graph, start, end, calls, flush })
    }

    /// The time of a call in microseconds.
    pub fn time(&mut self) -> f64 {
        const REPLAYS: usize = 5;
        let times = (0..REPLAYS).map(|_| {
            // After the flush or a first replay, the device is awake and the host is ahead of it.
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

    /// The kernels of the graph, each with the number of its launches in a call. Names are without
    /// namespaces and template arguments.
    pub fn kernel_names(&self) -> Vec<String> {
        let short = |name: &str| {
            let name = name.strip_prefix("void ").unwrap_or(name);
            let name = name.replace("(anonymous namespace)::", "");
            let name = name.split(['<', '(']).next().unwrap_or_default();
            name.rsplit("::").next().unwrap_or_default().to_string()
        };
        let names = self.graph.kernel_names().unwrap_or_default();
        names
            .iter()
            .map(|(name, count)| match count / self.calls {
                0 | 1 => short(name),
                count => format!("{count} × {}", short(name)),
            })
            .collect()
    }

    /// The whole names of the kernels, and how often each is launched.
    pub fn all_kernel_names(&self) -> Vec<String> {
        let names = self.graph.kernel_names().unwrap_or_default();
        names.iter().map(|(name, count)| format!("{} {name}", count / self.calls)).collect()
    }

    /// The number of kernels in a call.
    pub fn kernels(&self) -> usize {
        self.graph.kernels() / self.calls
    }
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The median.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(f64::NAN)
}
