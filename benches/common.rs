//! What every operator's bench needs: time as the device sees it, and ratios that can be believed.

use std::time::{Duration, Instant};
use tch::Device;
use tch_extension::cuda::Event;

/// Rounds of an interleaved comparison.
const ROUNDS: usize = 9;
/// How long one provider is timed in one round.
const ROUND: Duration = Duration::from_millis(60);

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

/// Times two providers in turn, so that a change of the machine's pace meets both, and prints their medians over
/// all rounds and the ratio of these.
pub fn compare(device: Device, title: &str, mut composite: impl FnMut(), mut fused: impl FnMut()) {
    let iterations = [iterations_for(device, &mut composite), iterations_for(device, &mut fused)];
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(per_call(device, iterations[0], &mut composite));
        times[1].push(per_call(device, iterations[1], &mut fused));
    }
    let [composite, fused] = times.map(median);
    println!(
        "{title:<52} composite {composite:>9.2} µs   fused {fused:>9.2} µs   ratio {:.2}",
        composite / fused
    );
}

fn per_call(device: Device, iterations: u64, call: &mut impl FnMut()) -> f64 {
    time(device, iterations, call).as_secs_f64() * 1e6 / iterations as f64
}

/// As many calls as fill one round; also the warm-up.
fn iterations_for(device: Device, call: &mut impl FnMut()) -> u64 {
    per_call(device, 10, call);
    let one = per_call(device, 10, call);
    ((ROUND.as_secs_f64() * 1e6 / one) as u64).max(3)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
