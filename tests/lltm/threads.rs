//! Tests how the CPU's threads share a sequence.

use super::*;

fn results(sample: &Sample) -> Vec<Tensor> {
    let outputs = fused(&sample.inputs).expect("outputs");
    let gradients = support::gradients(&fused, &leaves(&sample.inputs), &[0, 1, 2]);
    outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// Also uses more threads than the machine has processors, so that threads must let one another
/// run. Each number is repeated, because a barrier that lets a thread through too early does so
/// only now and then.
#[test]
fn any_number_of_threads_computes_the_same_in_time() {
    let before = tch::get_num_threads();
    // Threads share the rows; the columns; both; and weights that are larger than a core's cache.
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
                            // Our kernels compute the outputs completely, except for the product
                            // with the input.
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

/// Runs whole sequences in several threads at the same time; each sequence has barriers of its own.
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

/// Keeps this thread, and all threads that it starts from now on, on the processor on which it
/// runs.
fn stay_on_one_processor() {
    // SAFETY: the C function takes no arguments and accesses no memory of ours.
    let here = unsafe { sched_getcpu() };
    let here = usize::try_from(here).expect("a processor");
    let mut processors = [0_u64; 16];
    processors[here / 64] = 1 << (here % 64);
    // SAFETY: the pointer is valid for as many bytes as the size says, and thread 0 means the
    // calling thread.
    let failed = unsafe { sched_setaffinity(0, size_of_val(&processors), processors.as_ptr()) };
    assert_eq!(failed, 0, "{}", std::io::Error::last_os_error());
}

/// If two threads of a sequence and a busy thread share a processor, one of the two never runs
/// while the other does. If a thread waited for the other at each step and kept the processor, or
/// left it to the busy thread, it would wait for the scheduler every time.
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
    // This runs in a thread of its own, because its processor stays set for the rest of the
    // thread's life.
    let [alone, together] =
        std::thread::scope(|scope| scope.spawn(within).join().expect("no panic"));
    eprintln!("{STEPS} steps: {alone:.3} s with one thread, {together:.3} s with two");
    assert!(together < 6.0 * alone, "{together} s with two threads, {alone} s with one");
}
