//! How the CPU's threads share a sequence.

use super::*;

fn results(sample: &Sample) -> Vec<Tensor> {
    let outputs = fused(&sample.inputs).expect("outputs");
    let gradients = support::gradients(&fused, &leaves(&sample.inputs), &[0, 1, 2]);
    outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// Also more threads than the machine has processors, which have to let one another run; and the
/// same again, because a barrier that lets somebody through too early does so now and then.
#[test]
fn any_number_of_threads_computes_the_same_in_time() {
    let before = tch::get_num_threads();
    // Rows shared; columns shared; both; weights beyond a core's cache.
    for sizes in [[40, 16, 32, 128], [40, 7, 5, 129], [40, 20, 3, 64], [9, 9, 8, 330]] {
        for kind in [Kind::Double, Kind::Float] {
            let sample = one(sizes, kind, Device::Cpu);
            tch::set_num_threads(1);
            let alone = results(&sample);
            for threads in [2, 3, 4, 7, 16] {
                tch::set_num_threads(threads);
                for repetition in 0..5 {
                    for (index, (found, expected)) in
                        results(&sample).iter().zip(&alone).enumerate()
                    {
                        let what = format!("{index} of {sizes:?}, {threads} threads, {repetition}");
                        match index {
                            // Made in our kernels from end to end, but for the product with the
                            // input.
                            0..3 => assert_close(found, expected, 1e-4, 1e-5),
                            _ => assert_close(found, expected, 1e-3, 1e-3),
                        }
                        assert!(found.isfinite().all().int64_value(&[]) == 1, "{what}");
                    }
                }
            }
        }
    }
    tch::set_num_threads(before);
}

/// Whole sequences beside one another: each has its own barriers.
#[test]
fn sequences_in_several_threads_at_once() {
    let sample = one([30, 9, 8, 70], Kind::Double, Device::Cpu);
    let expected: Vec<Vec<u8>> = results(&sample).iter().map(bytes).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (inputs, expected) =
                (sample.inputs.iter().map(Tensor::copy).collect::<Vec<_>>(), &expected);
            scope.spawn(move || {
                for _ in 0..5 {
                    let outputs = fused(&inputs).expect("outputs");
                    for (found, expected) in outputs.iter().zip(expected) {
                        assert_eq!(&bytes(found), expected);
                    }
                }
            });
        }
    });
}

fn bytes(tensor: &Tensor) -> Vec<u8> {
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.contiguous().copy_data_u8(&mut bytes, tensor.numel());
    bytes
}

unsafe extern "C" {
    fn sched_getcpu() -> i32;
    fn sched_setaffinity(thread: i32, size: usize, processors: *const u64) -> i32;
}

/// Keeps this thread, and those that it starts from now on, on the processor on which it runs.
fn stay_on_one_processor() {
    // SAFETY: it takes nothing.
    let here = unsafe { sched_getcpu() };
    let here = usize::try_from(here).expect("a processor");
    let mut processors = [0_u64; 16];
    processors[here / 64] = 1 << (here % 64);
    // SAFETY: a set of as many bytes as stated; thread 0 is this one.
    let failed = unsafe { sched_setaffinity(0, size_of_val(&processors), processors.as_ptr()) };
    assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
}

/// Where two threads and a busy one have a single processor, one of the two never runs while the
/// other does. Whoever waits for it at each step, but keeps the processor or leaves it to the busy
/// one, waits for a turn of the scheduler each time.
#[test]
fn a_thread_that_does_not_run_is_not_waited_for_at_each_step() {
    const STEPS: i64 = 2000;
    let within = || {
        stay_on_one_processor();
        // Two threads share the columns.
        let inputs = one([STEPS, 4, 8, 256], Kind::Float, Device::Cpu).inputs;
        let stop = std::sync::atomic::AtomicBool::new(false);
        let is_over = || stop.load(std::sync::atomic::Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| while !is_over() {});
            let seconds = [1, 2].map(|threads| {
                tch::set_num_threads(threads);
                let run = || {
                    let begun = std::time::Instant::now();
                    fused(&inputs).expect("outputs");
                    begun.elapsed().as_secs_f64()
                };
                run();
                (0..3).map(|_| run()).fold(f64::INFINITY, f64::min)
            });
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            seconds
        })
    };
    // Of its own, because what is set there is set for the rest of a thread's life.
    let [alone, together] =
        std::thread::scope(|scope| scope.spawn(within).join().expect("no panic"));
    eprintln!("{STEPS} steps: {alone:.3} s with one thread, {together:.3} s with two");
    assert!(together < 6.0 * alone, "{together} s with two threads, {alone} s with one");
}
