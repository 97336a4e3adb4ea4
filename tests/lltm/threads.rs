//! How the CPU's threads share a sequence.

use super::*;

fn results(sample: &Sample) -> Vec<Tensor> {
    let outputs = fused(&sample.inputs).expect("outputs");
    let gradients = support::gradients(&fused, &leaves(&sample.inputs), &[0, 1, 2]);
    outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// Also more threads than the machine has processors, which have to let one another run; and the same again, because
/// a barrier that lets somebody through too early does so now and then.
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
                    for (index, (found, expected)) in results(&sample).iter().zip(&alone).enumerate() {
                        let what = format!("{index} of {sizes:?}, {threads} threads, {repetition}");
                        match index {
                            // Made in our kernels from end to end, but for the product with the input.
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
            let (inputs, expected) = (sample.inputs.iter().map(Tensor::copy).collect::<Vec<_>>(), &expected);
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
