//! Tests of `tch_extension::cuda`: errors without a GPU, and streams, events, graphs and memory
//! with one.

use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{
    DeviceGuard, Event, Graph, Stream, StreamGuard, device_count, empty_cache, is_compiled,
    memory_stats, record_stream, reset_peak_memory_stats, synchronize,
};
use tch_extension::ops::f_lltm_cell;
use tch_extension::testing::{assert_close, cuda_or_skip};
use tch_extension::{Error, Result};

/// Lets only one test run at a time. Captures, waits for a whole device and memory statistics would
/// be disturbed by other threads.
fn serially() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

fn skip(test: &str, why: &str) {
    let _ = std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes());
}

/// Skips tests of the caching allocator when it is off, as it is under some sanitizers.
fn caching_or_skip(test: &str) -> Option<Device> {
    let device = cuda_or_skip(test)?;
    if std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_some() {
        skip(test, "no caching allocator");
        return None;
    }
    Some(device)
}

/// x, W, b, h and c. Their values are drawn on the CPU, so that the GPU's random generator is not
/// used.
fn arguments(device: Device, seed: i64) -> Vec<Tensor> {
    tch::manual_seed(seed);
    let (batch, features, hidden) = (16, 32, 128);
    [
        vec![batch, features],
        vec![3 * hidden, hidden + features],
        vec![3 * hidden],
        vec![batch, hidden],
        vec![batch, hidden],
    ]
    .map(|size| (Tensor::randn(size, (Kind::Float, Device::Cpu)) * 0.3).to_device(device))
    .into()
}

fn cell(arguments: &[Tensor]) -> Result<Vec<Tensor>> {
    let [x, w, b, h, c] = arguments else { unreachable!("five arguments") };
    f_lltm_cell(x, w, Some(b), (h, c)).map(|(h, c)| vec![h, c])
}

fn same_bits(found: &[Tensor], expected: &[Tensor]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.to_device(Device::Cpu).equal(&expected.to_device(Device::Cpu)), "other bits");
    }
}

fn refuses<T>(op: &str, says: &str, result: Result<T>) {
    let Err(error) = result else { panic!("{op} did not refuse") };
    assert!(matches!(error, Error::Cuda { .. }), "{op}: {error}");
    let text = error.to_string();
    assert!(text.starts_with(&format!("{op}: ")), "{op}: {text}");
    let says = if is_compiled() { says } else { "this build has no CUDA kernels" };
    assert!(text.contains(says) && !text.contains('\n'), "{op}: {text}");
}

#[test]
fn a_device_that_is_not_there_is_refused() {
    let missing = Device::Cuda(device_count().max(1) + 6);
    let says = "there is no CUDA device";
    for (device, says) in [(Device::Cpu, "expected a CUDA device, got Cpu"), (missing, says)] {
        refuses("Stream::current", says, Stream::current(device));
        refuses("Stream::default_of", says, Stream::default_of(device));
        refuses("Stream::new", says, Stream::new(device));
        refuses("Stream::with_priority", says, Stream::with_priority(device, true));
        refuses("Event::new", says, Event::new(device));
        refuses("Event::without_timing", says, Event::without_timing(device));
        refuses("Event::external", says, Event::external(device));
        refuses(
            "Graph::capture",
            says,
            Graph::capture(device, || -> Result<()> { panic!("was run") }),
        );
        refuses("memory_stats", says, memory_stats(device));
        refuses("reset_peak_memory_stats", says, reset_peak_memory_stats(device));
        refuses("synchronize", says, synchronize(device));
    }
    refuses("DeviceGuard::new", says, DeviceGuard::new(missing));
    if device_count() == 0 {
        refuses("empty_cache", says, empty_cache());
    }
}

#[test]
fn a_device_guard_on_the_cpu_does_nothing() {
    drop(DeviceGuard::new(Device::Cpu).expect("a guard"));
}

#[test]
fn what_may_cross_threads() {
    fn crosses<T: Send>() {}
    fn is_shared<T: Sync>() {}
    crosses::<Stream>();
    is_shared::<Stream>();
    crosses::<Event>();
    is_shared::<Event>();
    crosses::<Graph>();
}

#[test]
fn cuda_streams_differ() {
    let Some(device) = cuda_or_skip("cuda_streams_differ") else { return };
    let _serial = serially();
    let default = Stream::default_of(device).expect("the default stream");
    assert_eq!(Stream::current(device).expect("the current stream"), default);
    let (first, second) =
        (Stream::new(device).expect("a stream"), Stream::new(device).expect("a stream"));
    let urgent = Stream::with_priority(device, true).expect("a stream");
    let streams = [default, first, second, urgent];
    for (index, stream) in streams.iter().enumerate() {
        assert_eq!(stream.device(), device);
        assert!(
            streams[..index]
                .iter()
                .all(|other| other != stream && other.as_ptr() != stream.as_ptr())
        );
        stream.synchronize().expect("synchronize");
        assert!(stream.is_idle().expect("is_idle"));
    }
}

#[test]
fn cuda_stream_guards_nest_and_restore() {
    let Some(device) = cuda_or_skip("cuda_stream_guards_nest_and_restore") else { return };
    let _serial = serially();
    let current = || Stream::current(device).expect("the current stream");
    let before = current();
    let (outer, inner) =
        (Stream::new(device).expect("a stream"), Stream::new(device).expect("a stream"));
    let outer_guard = StreamGuard::new(&outer).expect("a guard");
    assert_eq!(current(), outer);
    let inner_guard = StreamGuard::new(&inner).expect("a guard");
    assert_eq!(current(), inner);
    let elsewhere =
        std::thread::spawn(move || Stream::current(device).expect("the current stream"));
    assert_eq!(elsewhere.join().expect("a thread"), before, "another thread keeps its stream");
    drop(inner_guard);
    assert_eq!(current(), outer);
    let panic = catch_unwind(|| {
        let _guard = StreamGuard::new(&inner).expect("a guard");
        assert_eq!(current(), inner);
        panic!("on purpose");
    });
    assert!(panic.is_err());
    assert_eq!(current(), outer, "restored by unwinding");
    drop(outer_guard);
    assert_eq!(current(), before);
}

#[test]
fn cuda_an_operator_works_on_the_stream_of_the_guard() {
    let Some(device) = cuda_or_skip("cuda_an_operator_works_on_the_stream_of_the_guard") else {
        return;
    };
    let _serial = serially();
    let inputs = arguments(device, 3);
    let expected = cell(&inputs).expect("outputs");
    let (main, side) =
        (Stream::current(device).expect("current"), Stream::new(device).expect("a stream"));
    for _ in 0..10 {
        side.wait_stream(&main).expect("wait");
        let outputs = {
            let _guard = StreamGuard::new(&side).expect("a guard");
            // This keeps the side stream busy: without the wait below, the outputs would be read
            // too early.
            let busy = Tensor::ones([2048, 2048], (Kind::Float, device));
            let _ = (0..8).fold(busy.shallow_clone(), |product, _| product.matmul(&busy) / 2048.0);
            cell(&inputs).expect("outputs")
        };
        main.wait_stream(&side).expect("wait");
        same_bits(&outputs, &expected);
    }
}

#[test]
fn cuda_events_order_work_and_time_it() {
    let Some(device) = cuda_or_skip("cuda_events_order_work_and_time_it") else { return };
    let _serial = serially();
    let event = || Event::new(device).expect("an event");
    let (start, end) = (event(), event());
    assert!(start.is_done().expect("never recorded"), "nothing to wait for");
    let (main, side) =
        (Stream::current(device).expect("current"), Stream::new(device).expect("a stream"));
    let ready = Event::without_timing(device).expect("an event");
    let ones = Tensor::ones([2048, 2048], (Kind::Float, device));
    start.record().expect("record");
    let product = (0..8).fold(ones.shallow_clone(), |product, _| product.matmul(&ones) / 2048.0);
    ready.record_on(&main).expect("record_on");
    side.wait(&ready).expect("wait");
    let copy = {
        let _guard = StreamGuard::new(&side).expect("a guard");
        let copy = product.copy();
        end.record().expect("record");
        copy
    };
    end.synchronize().expect("synchronize");
    assert!(end.is_done().expect("is_done") && ready.is_done().expect("is_done"));
    assert!(start.elapsed(&end).expect("elapsed").as_nanos() > 0);
    assert!(copy.equal(&product), "the copy was made before the product");
    refuses("Event::elapsed", "has no time", start.elapsed(&ready));
}

#[test]
fn cuda_external_events_are_part_of_a_graph() {
    let test = "cuda_external_events_are_part_of_a_graph";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let event = || Event::external(device).expect("an event");
    let (ready, start, end) = (event(), event(), event());
    let (main, side) =
        (Stream::current(device).expect("current"), Stream::new(device).expect("a stream"));
    let mut source = Tensor::zeros([2048, 2048], (Kind::Float, device));
    let ones = Tensor::ones([2048, 2048], (Kind::Float, device));
    synchronize(device).expect("synchronize");
    let (graph, copy) = Graph::capture(device, || {
        Stream::current(device)?.wait(&ready)?;
        start.record()?;
        let copy = source.copy();
        end.record()?;
        Ok(copy)
    })
    .expect("a graph");
    for value in [2.0, 3.0] {
        let product = (0..16).fold(&ones * value, |product, _| product.matmul(&ones) / 2048.0);
        source.copy_(&product);
        // Outside a capture, this is an ordinary event.
        ready.record_on(&main).expect("record_on");
        let _guard = StreamGuard::new(&side).expect("a guard");
        graph.replay().expect("replay");
        assert!(start.elapsed(&end).expect("recorded by the replay").as_nanos() > 0);
        assert!(copy.equal(&product), "the graph did not wait");
    }
    synchronize(device).expect("synchronize");
    // The graph still refers to these events.
    drop((ready, start, end));
    let _others: Vec<Event> = (0..8).map(|_| event()).collect();
    graph.replay().expect("a replay without its events");
    synchronize(device).expect("synchronize");
    assert!(copy.equal(&source));
}

#[test]
fn cuda_memory_in_use_on_another_stream_is_not_given_away() {
    let test = "cuda_memory_in_use_on_another_stream_is_not_given_away";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let size = [2048, 2048];
    let (main, side) =
        (Stream::current(device).expect("current"), Stream::new(device).expect("a stream"));
    let busy = Tensor::ones(size, (Kind::Float, device));
    let tensor = Tensor::full(size, 3.0, (Kind::Float, device));
    side.wait_stream(&main).expect("wait");
    record_stream(&tensor, &side).expect("record_stream");
    let copy = {
        let _guard = StreamGuard::new(&side).expect("a guard");
        let _ = (0..32).fold(busy.shallow_clone(), |product, _| product.matmul(&busy) / 2048.0);
        tensor.copy()
    };
    drop(tensor);
    // This tensor has exactly the size that was freed, and is written at once on the other stream.
    let usurper = Tensor::full(size, 7.0, (Kind::Float, device));
    synchronize(device).expect("synchronize");
    assert!(copy.equal(&Tensor::full(size, 3.0, (Kind::Float, device))));
    drop(usurper);
    let on_cpu = Tensor::zeros([1], (Kind::Float, Device::Cpu));
    refuses(
        "record_stream",
        "expected a tensor on Cuda(0), as the stream, got Cpu",
        record_stream(&on_cpu, &side),
    );
}

#[test]
fn cuda_a_graph_does_the_work_again_with_new_values() {
    let test = "cuda_a_graph_does_the_work_again_with_new_values";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let mut inputs = arguments(device, 3);
    cell(&inputs).expect("warm-up");
    let before = Stream::current(device).expect("current");
    let (graph, outputs) = Graph::capture(device, || cell(&inputs)).expect("a graph");
    assert_eq!(Stream::current(device).expect("current"), before);
    for seed in [4, 5] {
        for (input, value) in inputs.iter_mut().zip(arguments(device, seed)) {
            input.copy_(&value);
        }
        graph.replay().expect("replay");
        for (output, expected) in outputs.iter().zip(&cell(&inputs).expect("outputs")) {
            assert_close(output, expected, 1e-5, 1e-5);
        }
    }
    // A graph can also be replayed from another thread.
    std::thread::spawn(move || graph.replay()).join().expect("a thread").expect("replay");
    synchronize(device).expect("synchronize");
}

#[test]
fn cuda_a_backward_is_captured_alone_on_the_stream_of_its_forward() {
    let test = "cuda_a_backward_is_captured_alone_on_the_stream_of_its_forward";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let inputs: Vec<Tensor> =
        arguments(device, 3).into_iter().map(|input| input.set_requires_grad(true)).collect();
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    let side = Stream::new(device).expect("a stream");
    side.wait_stream(&Stream::current(device).expect("current")).expect("a wait");
    let guard = StreamGuard::new(&side).expect("a guard");
    let values: Vec<Tensor> = inputs.iter().map(|input| input.shallow_clone()).collect();
    let outputs = cell(&values).expect("outputs");
    let vector = Tensor::ones_like(&outputs[0]);
    let backward = || {
        let options = GradOptions {
            grad_outputs: &[Some(&vector)],
            retain_graph: Some(true),
            ..Default::default()
        };
        grad(&[&outputs[0]], &inputs, &options)
    };
    backward().expect("warm-up");
    drop(guard);
    let (graph, found) = Graph::capture_on(&side, backward).expect("a graph");
    // The replay reads the vector's new values and repeats nothing of the forward pass.
    let expected = backward().expect("gradients");
    let _ = vector.shallow_clone().g_mul_scalar_(3.0);
    graph.replay().expect("replay");
    for (found, expected) in found.into_vec().iter().zip(&expected.into_vec()) {
        assert_close(
            found.as_ref().expect("one"),
            &(expected.as_ref().expect("one") * 3.0),
            1e-5,
            1e-5,
        );
    }
    let (forward, _) = Graph::capture(device, || cell(&values)).expect("a graph");
    let (both, _) = Graph::capture(device, || {
        let leaves: Vec<Tensor> =
            values.iter().map(|value| value.detach().set_requires_grad(true)).collect();
        let outputs = cell(&leaves)?;
        let options = GradOptions { grad_outputs: &[Some(&vector)], ..Default::default() };
        grad(&[&outputs[0]], &leaves.iter().collect::<Vec<_>>(), &options)
    })
    .expect("a graph");
    assert_eq!(graph.kernels() + forward.kernels(), both.kernels());

    refuses(
        "Graph::capture_on",
        "CUDA's default stream cannot be captured",
        Graph::capture_on(&Stream::default_of(device).expect("a stream"), || Ok(())),
    );
    let again = Graph::capture_on(&side, || Graph::capture_on(&side, || Ok(())).map(drop));
    refuses("Graph::capture_on", "a capture cannot hold another", again);
}

#[test]
fn cuda_random_numbers_differ_from_replay_to_replay() {
    let test = "cuda_random_numbers_differ_from_replay_to_replay";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let draw = || Ok(Tensor::f_rand([256], (Kind::Float, device))?);
    let _ = draw().expect("warm-up");
    let (graph, numbers) = Graph::capture(device, draw).expect("a graph");
    graph.replay().expect("replay");
    let first = numbers.copy();
    graph.replay().expect("replay");
    assert!(!first.equal(&numbers));
}

/// Checks that captures, products and random numbers still work.
fn assert_usable(device: Device, inputs: &[Tensor]) {
    let (graph, outputs) = Graph::capture(device, || cell(inputs)).expect("a graph");
    graph.replay().expect("replay");
    for (output, expected) in outputs.iter().zip(&cell(inputs).expect("outputs")) {
        assert_close(output, expected, 1e-5, 1e-5);
    }
    let numbers = Tensor::f_rand([8], (Kind::Float, device)).expect("random numbers");
    assert!(numbers.f_sum(Kind::Float).expect("a sum").double_value(&[]) > 0.0);
    synchronize(device).expect("synchronize");
}

#[test]
fn cuda_a_capture_that_fails_leaves_nothing_behind() {
    let test = "cuda_a_capture_that_fails_leaves_nothing_behind";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let inputs = arguments(device, 3);
    cell(&inputs).expect("warm-up");
    let before = Stream::current(device).expect("current");

    let error = Graph::capture(device, || -> Result<()> {
        cell(&inputs)?;
        Err(Error::msg("no more"))
    });
    assert_eq!(error.expect_err("fails").to_string(), "no more");
    assert_eq!(Stream::current(device).expect("current"), before);
    assert_usable(device, &inputs);

    let panic = catch_unwind(AssertUnwindSafe(|| {
        Graph::capture(device, || -> Result<()> {
            cell(&inputs)?;
            panic!("on purpose")
        })
    }));
    assert!(panic.is_err());
    assert_eq!(Stream::current(device).expect("current"), before);
    assert_usable(device, &inputs);

    refuses(
        "Graph::capture",
        "a capture cannot hold another",
        Graph::capture(device, || Graph::capture(device, || cell(&inputs))),
    );
    assert_usable(device, &inputs);
}

#[test]
fn cuda_a_capture_that_waits_for_the_gpu_is_refused() {
    let test = "cuda_a_capture_that_waits_for_the_gpu_is_refused";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let inputs = arguments(device, 3);
    cell(&inputs).expect("warm-up");
    let current = || Stream::current(device).expect("current");
    let waits = || -> Result<()> {
        cell(&inputs)?;
        current().synchronize()
    };
    let error = Graph::capture(device, waits).expect_err("waits");
    assert!(matches!(error, Error::Cuda { .. }), "{error}");
    assert_usable(device, &inputs);

    // The capture fails even if the closure hides the error.
    let error = Graph::capture(device, || Ok(waits().is_err())).expect_err("waits");
    assert!(error.to_string().starts_with("Graph::capture: CUDA error: "), "{error}");
    assert_usable(device, &inputs);
}

#[test]
fn cuda_two_graphs_share_a_pool() {
    let Some(device) = caching_or_skip("cuda_two_graphs_share_a_pool") else { return };
    let _serial = serially();
    let mut inputs = arguments(device, 3);
    cell(&inputs).expect("warm-up");
    let (first, states) = Graph::capture(device, || cell(&inputs)).expect("a graph");
    let next =
        [&inputs[0], &inputs[1], &inputs[2], &states[0], &states[1]].map(Tensor::shallow_clone);
    let (second, outputs) = Graph::capture_in_pool_of(&first, || cell(&next)).expect("a graph");
    assert_eq!(second.device(), device);
    inputs[0].copy_(&arguments(device, 4)[0]);
    first.replay().expect("replay");
    second.replay().expect("replay");
    let expected = cell(&inputs).expect("outputs");
    let expected = cell(
        &[&inputs[0], &inputs[1], &inputs[2], &expected[0], &expected[1]]
            .map(Tensor::shallow_clone),
    );
    for (output, expected) in outputs.iter().zip(&expected.expect("outputs")) {
        assert_close(output, expected, 1e-5, 1e-5);
    }
    drop(first);
    second.replay().expect("replay without the first graph");
    synchronize(device).expect("synchronize");
}

#[test]
fn cuda_another_thread_may_allocate_during_a_capture() {
    let test = "cuda_another_thread_may_allocate_during_a_capture";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let inputs = arguments(device, 3);
    cell(&inputs).expect("warm-up");
    synchronize(device).expect("synchronize");
    empty_cache().expect("empty_cache");
    let (graph, outputs) = Graph::capture(device, || {
        let outputs = cell(&inputs)?;
        let allocate = move || -> Result<i64> {
            let mut bytes = 0;
            for megabytes in [64, 96, 160, 320] {
                // The cache is empty, so this calls cudaMalloc.
                let tensor = Tensor::f_zeros([megabytes << 18], (Kind::Float, device))?;
                bytes += 4 * tensor.size()[0];
            }
            Ok(bytes)
        };
        let bytes = std::thread::spawn(allocate).join().expect("a thread")?;
        assert_eq!(bytes, 640 << 20);
        cell(
            &[&inputs[0], &inputs[1], &inputs[2], &outputs[0], &outputs[1]]
                .map(Tensor::shallow_clone),
        )
    })
    .expect("a graph");
    graph.replay().expect("replay");
    let expected = cell(&inputs).expect("outputs");
    let expected = cell(
        &[&inputs[0], &inputs[1], &inputs[2], &expected[0], &expected[1]]
            .map(Tensor::shallow_clone),
    );
    for (output, expected) in outputs.iter().zip(&expected.expect("outputs")) {
        assert_close(output, expected, 1e-5, 1e-5);
    }
}

#[test]
fn cuda_memory_statistics_go_up_and_down() {
    let Some(device) = caching_or_skip("cuda_memory_statistics_go_up_and_down") else { return };
    let _serial = serially();
    // This is larger than any free part of a segment that other tests may leave, so it gets a
    // segment of its own.
    let bytes = 1 << 30;
    let stats = || memory_stats(device).expect("statistics");
    reset_peak_memory_stats(device).expect("reset");
    let before = stats();
    let tensor = Tensor::zeros([bytes / 4], (Kind::Float, device));
    let during = stats();
    assert!(during.allocated >= before.allocated + bytes as u64, "{before:?} {during:?}");
    assert!(during.reserved >= during.allocated, "{during:?}");
    drop(tensor);
    let after = stats();
    assert_eq!(after.allocated, before.allocated);
    assert!(
        after.peak_allocated >= during.allocated && after.peak_reserved >= during.reserved,
        "{after:?}"
    );
    reset_peak_memory_stats(device).expect("reset");
    assert!(stats().peak_allocated < during.allocated);
    synchronize(device).expect("synchronize");
    empty_cache().expect("empty_cache");
    assert!(stats().reserved <= after.reserved - bytes as u64, "{after:?} {:?}", stats());
}

/// During a capture, libtorch cannot release its cached memory, so it must not begin with a cache
/// that fills the GPU.
#[test]
fn cuda_a_capture_begins_with_an_empty_cache() {
    let Some(device) = caching_or_skip("cuda_a_capture_begins_with_an_empty_cache") else { return };
    let _serial = serially();
    let bytes: i64 = 1 << 30;
    let reserved = || memory_stats(device).expect("statistics").reserved;
    drop(Tensor::zeros([bytes / 4], (Kind::Float, device)));
    let before = reserved();
    let x = Tensor::ones([16], (Kind::Float, device));
    let (_graph, during) = Graph::capture(device, || {
        let _ = x.f_exp()?;
        Ok(reserved())
    })
    .expect("a graph");
    // The graph's pool and the input each begin with a new segment.
    let segments = 32 << 20;
    assert!(during + bytes as u64 <= before + segments, "{during} of {before} bytes");
}

/// A graph's memory is free again when the graph and its outputs are dropped. This includes the
/// memory of a warm-up on the stream.
#[test]
fn cuda_a_dropped_graph_gives_its_memory_back() {
    let Some(device) = caching_or_skip("cuda_a_dropped_graph_gives_its_memory_back") else {
        return;
    };
    let _serial = serially();
    let x = Tensor::ones([64 << 20], (Kind::Float, device));
    let stats = || {
        synchronize(device).expect("synchronize");
        empty_cache().expect("empty_cache");
        memory_stats(device).expect("statistics")
    };
    let stream = Stream::new(device).expect("a stream");
    let captured = |x: &Tensor| {
        let guard = StreamGuard::new(&stream).expect("a guard");
        drop(x.f_add_scalar(1.0).expect("a warm-up"));
        drop(guard);
        let (graph, y) =
            Graph::capture_on(&stream, || Ok(x.f_add_scalar(1.0)?.f_exp()?)).expect("a graph");
        graph.replay().expect("a replay");
        drop(y);
        drop(graph);
    };
    let before = stats();
    captured(&x);
    let after = stats();
    assert_eq!((after.allocated, after.reserved), (before.allocated, before.reserved));
    // Here, the stream also gets a workspace of cuBLAS.
    let square = x.view([8192, 8192]);
    let _ = square.matmul(&square);
    let before = stats();
    for _ in 0..3 {
        let (graph, y) = Graph::capture(device, || Ok(square.f_matmul(&square)?)).expect("a graph");
        drop((graph, y));
    }
    let after = stats();
    assert_eq!((after.allocated, after.reserved), (before.allocated, before.reserved));
}

/// Kernels and allocations must use the device of the tensors, whichever device is current.
#[test]
fn cuda_an_operator_on_the_second_gpu_stays_there() {
    let test = "cuda_an_operator_on_the_second_gpu_stays_there";
    if cuda_or_skip(test).is_none() {
        return;
    }
    if device_count() < 2 {
        return skip(test, "one CUDA device");
    }
    let _serial = serially();
    let run = |device| {
        let inputs: Vec<Tensor> =
            arguments(device, 3).into_iter().map(|tensor| tensor.set_requires_grad(true)).collect();
        let outputs = cell(&inputs).expect("outputs");
        let loss = (&outputs[0] * 2.0 + &outputs[1]).sum(Kind::Float);
        let gradients = grad(&[&loss], &inputs.iter().collect::<Vec<_>>(), &GradOptions::default());
        let gradients = gradients.expect("gradients").into_vec();
        outputs.into_iter().chain(gradients.into_iter().flatten()).collect::<Vec<_>>()
    };
    let _first = DeviceGuard::new(Device::Cuda(0)).expect("a guard");
    // libtorch makes a device current only after its first use.
    let _used = Tensor::zeros([1], (Kind::Float, Device::Cuda(0)));
    let before = memory_stats(Device::Cuda(0)).expect("statistics").allocated;
    let second = run(Device::Cuda(1));
    assert!(second.iter().all(|tensor| tensor.device() == Device::Cuda(1)));
    assert_eq!(second.len(), 7, "two outputs and five gradients");
    assert_eq!(
        memory_stats(Device::Cuda(0)).expect("statistics").allocated,
        before,
        "memory on the first GPU"
    );
    assert_eq!(current_device(), 0, "the current device is as it was");
    for (second, first) in second.iter().zip(&run(Device::Cuda(0))) {
        assert_close(&second.to_device(Device::Cpu), &first.to_device(Device::Cpu), 1e-5, 1e-5);
    }

    // A stream guard also changes the current device, and restores it.
    let side = Stream::new(Device::Cuda(1)).expect("a stream");
    let guard = StreamGuard::new(&side).expect("a guard");
    assert_eq!(current_device(), 1);
    assert_eq!(Stream::current(Device::Cuda(1)).expect("current"), side);
    drop(guard);
    assert_eq!(current_device(), 0);
    assert_ne!(Stream::current(Device::Cuda(1)).expect("current"), side);
}

#[cfg(tch_extension_cuda)]
fn current_device() -> i32 {
    unsafe extern "C" {
        fn cudaGetDevice(device: *mut i32) -> i32;
    }
    let mut device = -1;
    // SAFETY: the pointer is valid for the call, which writes only `device`.
    assert_eq!(unsafe { cudaGetDevice(&mut device) }, 0, "CUDA status");
    device
}

#[cfg(not(tch_extension_cuda))]
fn current_device() -> i32 {
    -1
}
