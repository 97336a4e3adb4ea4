//! Streams, their guards, and events.

use super::*;
use support::gpu::caching_or_skip;

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
