//! Tests of one kernel for all steps, forced where it exists: they check what other tests check for
//! the default ways. Test names begin with `cuda_half_kinds` if those kinds are among the tested
//! ones, because initcheck does not see what libtorch's products in half kinds write.

use super::*;
use std::io::Write;
use support::gpu::caching_or_skip;
use tch_extension::cuda::{
    Graph, Stream, StreamGuard, matmul_allow_tf32, set_matmul_allow_tf32, synchronize,
};
use tch_extension::testing::cuda_or_skip;

/// H of each kernel's size, below it, and of one column; rows for one cluster, for several, and for
/// a part of one; enough steps that both buffers are used again.
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

/// The outputs, and the gradients from all of them.
pub fn everything(sequence: support::Operator<'_>, inputs: &[Tensor]) -> Vec<Tensor> {
    let outputs = sequence(inputs).expect("outputs");
    let gradients = support::gradients(sequence, &leaves(inputs), &[0, 1, 2]);
    outputs.into_iter().chain(gradients.into_iter().flatten()).collect()
}

/// Runs the sequence from two streams at once, again and again. All runs must finish, with the same
/// bits.
pub fn assert_two_streams_finish_and_repeat(
    sequence: support::Operator<'_>,
    inputs: &[Tensor],
    times: usize,
    device: Device,
) {
    let expected = everything(sequence, inputs);
    synchronize(device).expect("an end");
    let streams = [(); 2].map(|()| Stream::new(device).expect("a stream"));
    let mut results = Vec::new();
    for _ in 0..times {
        for stream in &streams {
            let _guard = StreamGuard::new(stream).expect("a guard");
            results.push(everything(sequence, inputs));
        }
    }
    for stream in &streams {
        stream.synchronize().expect("an end");
    }
    for (found, expected) in results.iter().flatten().zip(expected.iter().cycle()) {
        assert!(found.equal(expected), "{:?} {:?}", inputs[0].kind(), inputs[0].size());
    }
}

fn device(test: &str) -> Option<Device> {
    device_with(RnnWay::Resident, test)
}

/// The device, if it has such kernels. Elsewhere another way is taken, which other tests cover.
pub fn device_with(way: RnnWay, test: &str) -> Option<Device> {
    let device = cuda_or_skip(test)?;
    let is_there = way.is_on(device).expect("an answer");
    if !is_there {
        assert!(
            !support::gpu::is_hopper() || !support::gpu::is_built_for_hopper(),
            "the kernels are not found"
        );
        let line = format!("SKIPPED {test}: no persistent kernels for this GPU\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    is_there.then_some(device)
}

/// Checks that a captured call computes the same in every replay, and returns its number of
/// kernels.
pub fn assert_replays(
    sequence: support::Operator<'_>,
    inputs: &[Tensor],
    expected: &[Tensor],
) -> usize {
    let device = inputs[0].device();
    let (graph, outputs) = Graph::capture(device, || sequence(inputs)).expect("a capture");
    for _ in 0..3 {
        for output in &outputs {
            let _ = output.detach().fill_(f64::NAN);
        }
        graph.replay().expect("a replay");
        assert_eq!(outputs.len(), expected.len());
        for (output, expected) in outputs.iter().zip(expected) {
            assert!(output.equal(expected), "{:?} {:?}", output.kind(), output.size());
        }
    }
    graph.kernels()
}

/// Checks that all steps of a sequence with (B, F, H) are one kernel in addition to the products,
/// and that a replay computes what `forced` computes.
pub fn assert_more_steps_are_no_more_kernels(
    sequence: support::Operator<'_>,
    forced: support::Operator<'_>,
    [batch, features, hidden]: [i64; 3],
    kind: Kind,
    device: Device,
) {
    let kernels = |steps| {
        let inputs = leaves(&one([steps, batch, features, hidden], kind, device).inputs);
        assert_replays(sequence, &inputs, &forced(&inputs).expect("outputs"))
    };
    // The product with the input is made for all steps at once and may be split into more parts
    // when it is larger.
    let (few, many) = (kernels(10), kernels(200));
    assert!(many <= few + 2, "{kind:?}: {few} kernels of 10 steps, {many} of 200");
}

/// The device, if it has such kernels and graphs can be captured on it.
pub fn device_with_cache(way: RnnWay, test: &str) -> Option<Device> {
    caching_or_skip(test).and_then(|_| device_with(way, test))
}

#[test]
fn cuda_half_kinds_and_others_agree_by_persistent_kernels() {
    let Some(device) = device("cuda_half_kinds_and_others_agree_by_persistent_kernels") else {
        return;
    };
    let suite = Suite {
        fused: &persistent,
        small: &samples,
        large: &|_, _| Vec::new(),
        ..suite_of(&fused)
    };
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

/// Under autocast, the product's kind differs from the state's.
#[test]
fn cuda_half_kinds_of_the_product_alone_by_persistent_kernels() {
    use tch_extension::amp::Autocast;
    let Some(device) = device("cuda_half_kinds_of_the_product_alone_by_persistent_kernels") else {
        return;
    };
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

/// Sets libtorch's tf32 switch and restores it in the end, however a test ends.
pub struct Tf32(bool);

impl Tf32 {
    pub fn set(allow: bool) -> Tf32 {
        let before = matmul_allow_tf32().expect("a switch");
        set_matmul_allow_tf32(allow).expect("a switch");
        Tf32(before)
    }
}

impl Drop for Tf32 {
    fn drop(&mut self) {
        let _ = set_matmul_allow_tf32(self.0);
    }
}

/// tf32 is used only where it is allowed. Otherwise the bits are those of the way with a kernel for
/// each step, or those of the exact kernel.
#[test]
fn cuda_float_in_tf32_by_persistent_kernels() {
    let Some(device) = device("cuda_float_in_tf32_by_persistent_kernels") else { return };
    for sizes in [
        [7, 9, 5, 65],
        [33, 17, 8, 128],
        [6, 24, 4, 256],
        [9, 13, 6, 451],
        [5, 24, 16, 512],
        [4, 70, 3, 500],
        [6, 11, 3, 700],
        [5, 24, 16, 768],
    ] {
        let inputs = one(sizes, Kind::Float, device).inputs;
        let both = |allow| {
            let _switch = Tf32::set(allow);
            [everything(&per_step, &inputs), everything(&persistent, &inputs)]
        };
        let [exact, strict] = both(false);
        let [in_steps, found] = both(true);
        for ((found, strict), exact) in found.iter().zip(&strict).zip(&exact) {
            let scale = exact.abs().max().double_value(&[]);
            let (rtol, _) = tolerance(Kind::Float);
            assert_close(strict, exact, 16.0 * rtol, 16.0 * rtol * scale);
            assert_close(found, exact, 4e-3, 4e-3 * scale);
        }
        // Index 0 is the output, index 3 the input's gradient. One kernel for all steps computes
        // each of them.
        for index in [0, 3] {
            assert!(!found[index].equal(&strict[index]), "{sizes:?}: tf32 was not taken");
            assert!(!found[index].equal(&in_steps[index]), "{sizes:?}: the steps were taken");
        }
    }
}

/// A size for each kernel for tf32.
const SIZES_OF_TF32: [[i64; 4]; 6] = [
    [6, 11, 3, 100],
    [6, 9, 3, 128],
    [6, 19, 3, 200],
    [6, 24, 3, 512],
    [6, 70, 3, 500],
    [6, 11, 3, 700],
];

/// Halves have few binades, so the multiplied values have power-of-two scales of their own.
#[test]
fn cuda_float_of_any_range_by_persistent_kernels() {
    let Some(device) = device("cuda_float_of_any_range_by_persistent_kernels") else { return };
    for sizes in SIZES_OF_TF32 {
        scaled::assert_numbers_of_any_range(&persistent, sizes, device);
        scaled::assert_gradients_of_any_range(&persistent, sizes, device);
        scaled::assert_rows_of_any_range(&persistent, sizes, device);
    }
}

#[test]
fn cuda_float_that_is_no_number_stays_in_its_row_by_persistent_kernels() {
    let test = "cuda_float_that_is_no_number_stays_in_its_row_by_persistent_kernels";
    let Some(device) = device(test) else { return };
    for sizes in SIZES_OF_TF32 {
        scaled::assert_no_number_stays_in_its_row(&persistent, sizes, device);
    }
}

/// All steps of a direction are one kernel in addition to the products, and a replay of a captured
/// graph computes the right values.
#[test]
fn cuda_more_steps_are_no_more_persistent_kernels() {
    let test = "cuda_more_steps_are_no_more_persistent_kernels";
    let Some(device) = device_with_cache(RnnWay::Resident, test) else { return };
    for kind in KINDS {
        assert_more_steps_are_no_more_kernels(
            &persistent,
            &persistent,
            [16, 32, 128],
            kind,
            device,
        );
    }
}

/// The default way uses these kernels where they were measured to be faster, also when the state
/// needs no gradient.
#[test]
fn cuda_half_kinds_take_persistent_kernels() {
    let test = "cuda_half_kinds_take_persistent_kernels";
    let Some(device) = device_with_cache(RnnWay::Resident, test) else { return };
    for (sizes, kind) in [([200, 16, 32, 128], Kind::Half), ([200, 64, 32, 256], Kind::BFloat16)] {
        assert_are_taken(sizes, kind, device);
    }
}

#[test]
fn cuda_float_takes_persistent_kernels() {
    let test = "cuda_float_takes_persistent_kernels";
    let Some(device) = device_with_cache(RnnWay::Resident, test) else { return };
    for sizes in [[200, 16, 32, 128], [200, 16, 32, 256]] {
        assert_are_taken(sizes, Kind::Float, device);
    }
}

fn assert_are_taken(sizes: [i64; 4], kind: Kind, device: Device) {
    let inputs = one(sizes, kind, device).inputs;
    let state_alone_is_given = |sequence: support::Operator<'_>| {
        let leaves: Vec<Tensor> = inputs
            .iter()
            .enumerate()
            .map(|(index, input)| input.detach().set_requires_grad(index < 3))
            .collect();
        let outputs = sequence(&leaves)?;
        let wanted: Vec<&Tensor> = leaves[..3].iter().collect();
        let sum = outputs[0].to_kind(Kind::Float).sum(Kind::Float);
        let gradients = tch_extension::autograd::grad(&[&sum], &wanted, &Default::default())?;
        Ok(gradients.into_vec().into_iter().flatten().collect::<Vec<Tensor>>())
    };
    let expected = state_alone_is_given(&persistent).expect("gradients");
    let (graph, found) =
        Graph::capture(device, || state_alone_is_given(&fused)).expect("a capture");
    graph.replay().expect("a replay");
    assert!(graph.kernels() < 60, "{sizes:?} {kind:?}: {} kernels of 200 steps", graph.kernels());
    for (found, expected) in found.iter().zip(&expected) {
        assert!(found.equal(expected), "{sizes:?} {kind:?}");
    }
}

/// Sums are in double, so the results are no less accurate than those of the way with a kernel for
/// each step.
#[test]
fn cuda_float_by_persistent_kernels_is_as_exact_as_step_by_step() {
    let test = "cuda_float_by_persistent_kernels_is_as_exact_as_step_by_step";
    let Some(device) = device(test) else { return };
    for sizes in [[12, 16, 8, 128], [12, 16, 8, 256]] {
        plain_grid::assert_as_exact_as_step_by_step(&persistent, sizes, device);
    }
}

#[test]
fn cuda_float_and_double_of_what_is_no_number_by_persistent_kernels() {
    let test = "cuda_float_and_double_of_what_is_no_number_by_persistent_kernels";
    let Some(device) = device(test) else { return };
    for kind in [Kind::Float, Kind::Double] {
        for hidden in [100, 200] {
            grid::assert_no_number_agrees(&persistent, kind, hidden, device);
        }
    }
}

/// The same check as for the half kinds below.
#[test]
fn cuda_float_and_double_by_persistent_kernels_on_two_streams_finish_and_repeat() {
    let test = "cuda_float_and_double_by_persistent_kernels_on_two_streams_finish_and_repeat";
    let Some(device) = device(test) else { return };
    for kind in [Kind::Float, Kind::Double] {
        for sizes in [[20, 300, 8, 128], [20, 100, 8, 256]] {
            let inputs = one(sizes, kind, device).inputs;
            assert_two_streams_finish_and_repeat(&persistent, &inputs, 5, device);
        }
    }
}

/// An infinite gradient stays infinite in its place and is not spread by the padding of a size.
#[test]
fn cuda_half_kinds_and_others_keep_infinite_gradients_by_persistent_kernels() {
    let test = "cuda_half_kinds_and_others_keep_infinite_gradients_by_persistent_kernels";
    let Some(device) = device(test) else { return };
    for (kind, allow) in KINDS.map(|kind| (kind, false)).into_iter().chain([(Kind::Float, true)]) {
        let _switch = Tf32::set(allow);
        for hidden in [5, 100, 200] {
            let inputs = leaves(&one([9, 3, 4, hidden], kind, device).inputs);
            let gradients = |sequence: support::Operator<'_>| {
                let outputs = sequence(&inputs).expect("outputs");
                let vector = Tensor::zeros_like(&outputs[0]);
                let _ = vector.get(8).get(1).get(2).fill_(f64::INFINITY);
                let options = tch_extension::autograd::GradOptions {
                    grad_outputs: &[Some(&vector)],
                    ..Default::default()
                };
                let inputs: Vec<&Tensor> = inputs.iter().collect();
                tch_extension::autograd::grad(&[&outputs[0]], &inputs, &options)
                    .expect("gradients")
                    .into_vec()
            };
            let (found, expected) = (gradients(&persistent), gradients(&per_step));
            for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
                assert!(found.isfinite().equal(&expected.isfinite()), "{kind:?} {hidden}");
                assert!(found.isnan().equal(&expected.isnan()), "{kind:?} {hidden}");
            }
        }
    }
}

/// Runs two sizes of one kernel from two threads at once: the limit that one sets for the kernel
/// must not be too low for the other.
#[test]
fn cuda_half_kinds_by_persistent_kernels_from_two_threads() {
    let Some(device) = device("cuda_half_kinds_by_persistent_kernels_from_two_threads") else {
        return;
    };
    let threads = [16, 64].map(|batch| {
        std::thread::spawn(move || {
            let inputs = one([8, batch, 8, 512], Kind::Half, device).inputs;
            let expected = persistent(&inputs).expect("outputs");
            for _ in 0..200 {
                let found = persistent(&inputs).expect("outputs");
                assert!(found.iter().zip(&expected).all(|(found, expected)| found.equal(expected)));
            }
        })
    });
    for thread in threads {
        thread.join().expect("a thread's results");
    }
}

/// Runs more clusters than fit on the GPU, from two streams at once, again and again. All must
/// finish, with the same bits.
#[test]
fn cuda_half_kinds_by_persistent_kernels_on_two_streams_finish_and_repeat() {
    let Some(device) =
        device("cuda_half_kinds_by_persistent_kernels_on_two_streams_finish_and_repeat")
    else {
        return;
    };
    for sizes in [[40, 300, 8, 128], [20, 200, 8, 512], [20, 100, 8, 768]] {
        let inputs = one(sizes, Kind::Half, device).inputs;
        assert_two_streams_finish_and_repeat(&persistent, &inputs, 10, device);
    }
}
