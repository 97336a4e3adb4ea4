//! What every operator's bench needs: devices, and time as the device sees it.

use std::time::{Duration, Instant};
use tch::Device;
use tch_extension::cuda::Event;

/// Times `iterations` calls in a row: on the CPU by the clock, on a GPU by CUDA events around all of them. Where
/// the host is slower than the device, as with small sizes, that is the host's pace: what a training loop sees.
pub fn time(device: Device, iterations: u64, mut call: impl FnMut()) -> Duration {
    if device == Device::Cpu {
        let start = Instant::now();
        (0..iterations).for_each(|_| call());
        return start.elapsed();
    }
    let events = (Event::new(device).expect("an event"), Event::new(device).expect("an event"));
    // The first call after a pause finds the device asleep.
    call();
    events.0.record().expect("a recorded event");
    (0..iterations).for_each(|_| call());
    events.1.record().expect("a recorded event");
    events.0.elapsed(&events.1).expect("the time between two events")
}

/// `cpu` or `cuda`.
pub fn name(device: Device) -> &'static str {
    if device.is_cuda() { "cuda" } else { "cpu" }
}
