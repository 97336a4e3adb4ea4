//! One kernel for all steps, forced where it can be: what other tests do on the paths that users get. Names begin with
//! `cuda_half_kinds` where those are among the kinds: initcheck does not see what libtorch's half products write.

use super::*;
use tch_extension::cuda::{Graph, Stream, StreamGuard};
use tch_extension::testing::cuda_or_skip;

/// H of each kernel's size, below it and of one column; rows of one cluster, of several, and of a part of one; steps
/// enough that both buffers are used again.
const SIZES: [[i64; 4]; 9] = [
    [1, 1, 2, 1],
    [2, 8, 3, 128],
    [7, 9, 5, 65],
    [33, 17, 8, 128],
    [6, 24, 4, 256],
    [5, 3, 7, 131],
    [9, 13, 6, 451],
    [5, 64, 16, 512],
    [6, 11, 3, 700],
];

fn samples(kind: Kind, device: Device) -> Vec<Sample> {
    let with = SampleTable::empty(DIMS, with_bias).with_sizes(&SIZES).with_layouts([3, 5, 4, 40]);
    let without = SampleTable::empty(DIMS, without_bias).with_sizes(&SIZES[2..4]);
    let samples = [with.samples(kind, device), without.samples(kind, device)];
    samples.into_iter().flat_map(|samples| samples.expect("samples")).collect()
}

/// Outputs, and gradients from all of them.
fn everything(sequence: support::Operator<'_>, inputs: &[Tensor]) -> Vec<Tensor> {
    let outputs = sequence(inputs).expect("outputs");
    let gradients = support::gradients(sequence, &leaves(inputs), &[0, 1, 2]);
    outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// The device, if it has such kernels: elsewhere another path is taken, which other tests cover.
fn device(test: &str) -> Option<Device> {
    let device = cuda_or_skip(test)?;
    let is_there = LltmPath::Persistent.is_on(device).expect("an answer");
    if !is_there {
        eprintln!("SKIPPED {test}: no persistent kernels for this GPU");
    }
    is_there.then_some(device)
}

#[test]
fn cuda_half_kinds_and_others_agree_by_persistent_kernels() {
    let Some(device) = device("cuda_half_kinds_and_others_agree_by_persistent_kernels") else { return };
    let suite = Suite { fused: &persistent, small: &samples, large: &|_, _| Vec::new(), ..suite_of(&fused) };
    assert!(device.is_cuda());
    suite.forward_agrees_with_the_reference();
    suite.gradients_agree_with_the_reference();
    suite.with_and_without_a_graph_the_bits_are_the_same();
}

#[test]
fn cuda_gradcheck_of_the_persistent_kernels() {
    let Some(_) = device("cuda_gradcheck_of_the_persistent_kernels") else { return };
    suite_of(&persistent).gradcheck_of_every_small_sample();
}

/// Under autocast the product's kind is not the state's.
#[test]
fn cuda_half_kinds_of_the_product_alone_by_persistent_kernels() {
    use tch_extension::amp::Autocast;
    let Some(device) = device("cuda_half_kinds_of_the_product_alone_by_persistent_kernels") else { return };
    for kind in [Kind::Half, Kind::BFloat16] {
        for sizes in SIZES {
            let inputs = one(sizes, Kind::Float, device).inputs;
            let _autocast = Autocast::new(device, kind).expect("autocast");
            let found = everything(&persistent, &inputs);
            let expected = everything(&per_step, &inputs);
            let (rtol, _) = tolerance(kind);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.kind(), expected.kind());
                let scale = expected.abs().max().double_value(&[]);
                assert_close(found, expected, 4.0 * rtol, 4.0 * rtol * scale);
            }
        }
    }
}

/// All steps of a direction are one kernel beside the products, and a replay of it computes.
#[test]
fn cuda_more_steps_are_no_more_persistent_kernels() {
    let test = "cuda_more_steps_are_no_more_persistent_kernels";
    let Some(device) = device(test) else { return };
    if std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some() {
        eprintln!("SKIPPED {test}: no caching allocator");
        return;
    }
    for kind in KINDS {
        let nodes = |steps| {
            let inputs = leaves(&one([steps, 16, 32, 128], kind, device).inputs);
            let expected = persistent(&inputs).expect("outputs");
            let (graph, outputs) = Graph::capture(device, || persistent(&inputs)).expect("a capture");
            for output in &outputs {
                let _ = output.detach().fill_(f64::NAN);
            }
            graph.replay().expect("a replay");
            for (output, expected) in outputs.iter().zip(&expected) {
                assert!(output.equal(expected), "{kind:?}");
            }
            graph.kernels()
        };
        // The product with the input, of all steps at once, may be cut into more parts when it is larger.
        let (few, many) = (nodes(10), nodes(200));
        assert!(many <= few + 2, "{kind:?}: {few} kernels of 10 steps, {many} of 200");
    }
}

/// More clusters than fit at a time, from two streams at once, again and again: all of it ends, with the same bits.
#[test]
fn cuda_half_kinds_by_persistent_kernels_on_two_streams_finish_and_repeat() {
    let Some(device) = device("cuda_half_kinds_by_persistent_kernels_on_two_streams_finish_and_repeat")
    else {
        return;
    };
    for sizes in [[40, 300, 8, 128], [20, 200, 8, 512], [20, 100, 8, 768]] {
        let inputs = one(sizes, Kind::Half, device).inputs;
        let expected = everything(&persistent, &inputs);
        tch::Cuda::synchronize(0);
        let streams = [(); 2].map(|()| Stream::new(device).expect("a stream"));
        let mut results = Vec::new();
        for _ in 0..10 {
            for stream in &streams {
                let _guard = StreamGuard::new(stream).expect("a guard");
                results.push(everything(&persistent, &inputs));
            }
        }
        for stream in &streams {
            stream.synchronize().expect("an end");
        }
        for (found, expected) in results.iter().flatten().zip(expected.iter().cycle()) {
            assert!(found.equal(expected), "{sizes:?}");
        }
    }
}
