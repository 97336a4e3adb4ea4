//! CUDA graphs: capture, replay, and the memory that they hold.

use super::*;
use std::sync::atomic::{AtomicBool, Ordering};
use support::gpu::caching_or_skip;
use tch_extension::optim::{AdamW, OptimizerConfig};

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

/// Before a capture, libtorch sets on the capture's stream where the random numbers of a replay begin,
/// and for each replay again on the replay's stream. Here the GPU is so busy that the second overtakes
/// the first if nothing orders them.
#[test]
fn cuda_the_first_replay_draws_the_next_numbers() {
    let test = "cuda_the_first_replay_draws_the_next_numbers";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let draw = || Ok(Tensor::f_rand([256], (Kind::Float, device))?);
    tch::manual_seed(11);
    let (_, expected): (Tensor, Tensor) = (draw().expect("numbers"), draw().expect("numbers"));
    let urgent = Stream::with_priority(device, true).expect("a stream");
    let is_over = AtomicBool::new(false);
    // Here, because a thread without memory would empty the cache in the middle of a capture.
    let mut x = Tensor::ones([1 << 28], (Kind::Float, device));
    synchronize(device).expect("ones");
    std::thread::scope(|scope| {
        scope.spawn(|| occupy(device, &mut x, &is_over));
        // Also if an assertion fails, so that the thread ends.
        let _end = End(&is_over);
        let _guard = StreamGuard::new(&urgent).expect("a guard");
        for round in 0..60 {
            tch::manual_seed(11);
            let _ = draw().expect("numbers");
            let (graph, drawn) = Graph::capture(device, draw).expect("a graph");
            graph.replay().expect("replay");
            assert!(drawn.equal(&expected), "round {round}: {drawn:?}");
            // A capture that fails sets the same.
            tch::manual_seed(11);
            let _ = draw().expect("numbers");
            let failed = Graph::capture(device, || -> Result<()> { Err(Error::msg("given up")) });
            assert!(failed.is_err());
            graph.replay().expect("replay");
            assert!(drawn.equal(&expected), "round {round}, after a failure: {drawn:?}");
        }
    });
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Keeps all multiprocessors busy with kernels that go before those of other streams.
fn occupy(device: Device, x: &mut Tensor, is_over: &AtomicBool) {
    let stream = Stream::with_priority(device, true).expect("a stream");
    let _guard = StreamGuard::new(&stream).expect("a guard");
    let mut last: Option<Event> = None;
    while !is_over.load(Ordering::Relaxed) {
        let _ = x.lgamma_();
        let event = Event::new(device).expect("an event");
        event.record().expect("recorded");
        if let Some(last) = last.replace(event) {
            last.synchronize().expect("waited");
        }
    }
    stream.synchronize().expect("waited");
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

/// Memory that was given back is taken by others, who must find their own values in it.
struct Junk(Vec<Tensor>);

impl Junk {
    fn fill(device: Device) -> Junk {
        let sizes = [1, 64, 128, 512, 1 << 10, 1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20];
        let fill = |size: &i64| Tensor::full([*size], f64::NAN, (Kind::Float, device));
        Junk(sizes.iter().flat_map(|size| (0..40).map(move |_| fill(size))).collect())
    }

    fn assert_untouched(&self, what: &str) {
        let all = self.0.iter().map(|tensor| tensor.isnan().all());
        assert!(all.into_iter().all(|all| all.int64_value(&[]) == 1), "{what}: others' memory");
    }
}

fn sized(device: Device, size: &[i64]) -> Tensor {
    (Tensor::randn(size, (Kind::Float, Device::Cpu)) * 0.1).to_device(device)
}

fn leaves(device: Device) -> Vec<Tensor> {
    arguments(device, 3).into_iter().map(|input| input.set_requires_grad(true)).collect()
}

fn gradients(
    output: &Tensor,
    inputs: &[Tensor],
    grad_outputs: &[Option<&Tensor>],
) -> Result<Vec<Tensor>> {
    let retain_graph = Some(true);
    let options = GradOptions { grad_outputs, retain_graph, ..Default::default() };
    let inputs: Vec<&Tensor> = inputs.iter().collect();
    Ok(grad(&[output], &inputs, &options)?.into_vec().into_iter().flatten().collect())
}

/// What is captured is all that has these tensors, and is dropped with them.
type Body = Box<dyn Fn() -> Result<Vec<Tensor>>>;

type Case = (&'static str, fn(Device) -> Body);

const BODIES: [Case; 8] = [
    ("in place", |device| {
        let x = sized(device, &[1 << 14]);
        Box::new(move || Ok(vec![x.shallow_clone().f_add_scalar_(0.0)?.f_mul_scalar(2.0)?]))
    }),
    ("a list", |device| {
        let (x, y) = (sized(device, &[1 << 12]), sized(device, &[1 << 12]));
        Box::new(move || Ok(vec![Tensor::f_cat(&[&x, &y], 0)?]))
    }),
    ("our kernels", |device| {
        let arguments = arguments(device, 3);
        Box::new(move || cell(&arguments))
    }),
    ("our kernels with a graph", |device| {
        let inputs = leaves(device);
        Box::new(move || {
            let outputs = cell(&inputs)?;
            gradients(&(&outputs[0] * &outputs[1]).f_sum(Kind::Float)?, &inputs, &[])
        })
    }),
    ("what our kernels saved", |device| {
        let (inputs, vector) = (leaves(device), sized(device, &[16, 128]));
        let outputs = cell(&inputs).expect("outputs");
        Box::new(move || gradients(&outputs[0], &inputs, &[Some(&vector)]))
    }),
    ("page-locked memory", |device| {
        let x = sized(Device::Cpu, &[1 << 12]).pin_memory(device);
        Box::new(move || Ok(vec![x.f_to_device_(device, Kind::Float, true, false)?]))
    }),
    ("an index", |device| {
        let (x, index) = (sized(device, &[64, 64]), Tensor::arange(64, (Kind::Int64, device)));
        Box::new(move || Ok(vec![x.f_index(&[Some(&index)])?]))
    }),
    ("an optimizer", |device| {
        let vs = tch::nn::VarStore::new(device);
        let x = vs.root().var("x", &[1 << 14], tch::nn::Init::Const(1.0));
        let mut optimizer = AdamW::default().build(&vs, 1e-9).expect("an optimizer");
        let gradient = sized(device, &[1 << 14]);
        optimizer.step_with(&[Some(&gradient)]).expect("a step");
        let optimizer = std::cell::RefCell::new((optimizer, vs));
        Box::new(move || {
            optimizer.borrow_mut().0.step_with(&[Some(&gradient)])?;
            Ok(vec![x.f_detach()?.f_mul_scalar(2.0)?])
        })
    }),
];

#[test]
fn cuda_a_graph_keeps_what_it_uses() {
    let Some(device) = caching_or_skip("cuda_a_graph_keeps_what_it_uses") else { return };
    let _serial = serially();
    for (name, body) in BODIES {
        tch::manual_seed(7);
        let stream = Stream::new(device).unwrap();
        let on_stream = || StreamGuard::new(&stream).unwrap();
        let (body, expected) = {
            let _guard = on_stream();
            let body = body(device);
            let outputs = body().unwrap();
            (body, outputs.iter().map(|x| x.to_device(Device::Cpu)).collect::<Vec<_>>())
        };
        synchronize(device).unwrap();
        let (graph, outputs) = Graph::capture_on(&stream, body).unwrap();
        let _guard = on_stream();
        let junk = Junk::fill(device);
        for _ in 0..2 {
            graph.replay().unwrap();
        }
        synchronize(device).unwrap();
        junk.assert_untouched(name);
        assert_eq!(outputs.len(), expected.len(), "{name}");
        for (output, expected) in outputs.iter().zip(&expected) {
            assert_close(&output.to_device(Device::Cpu), expected, 1e-5, 1e-6);
        }
    }
}

/// Work that another thread launches on the stream is in the graph, too.
#[test]
fn cuda_a_graph_keeps_what_another_thread_captured() {
    let test = "cuda_a_graph_keeps_what_another_thread_captured";
    let Some(device) = caching_or_skip(test) else { return };
    let _serial = serially();
    let stream = Stream::new(device).unwrap();
    let x = Tensor::ones([1 << 14], (Kind::Float, device));
    synchronize(device).unwrap();
    let (graph, y) = Graph::capture_on(&stream, || {
        let thread = std::thread::spawn(move || {
            let _guard = StreamGuard::new(&stream)?;
            Ok::<_, Error>(x.f_mul_scalar(2.0)?)
        });
        thread.join().expect("a thread")
    })
    .unwrap();
    let junk = Junk::fill(device);
    graph.replay().unwrap();
    synchronize(device).unwrap();
    junk.assert_untouched(test);
    assert_close(&y, &y.full_like(2.0), 0.0, 0.0);
}

#[test]
fn cuda_memory_that_was_exchanged_ends_a_graph() {
    let Some(device) = caching_or_skip("cuda_memory_that_was_exchanged_ends_a_graph") else {
        return;
    };
    let _serial = serially();
    let mut x = Tensor::ones([1 << 10], (Kind::Float, device));
    let (graph, y) = Graph::capture(device, || Ok(x.f_add_scalar(1.0)?)).unwrap();
    // The former memory is the graph's.
    x.set_data(&Tensor::zeros([1 << 10], (Kind::Float, device)));
    graph.replay().unwrap();
    assert_close(&y, &y.full_like(2.0), 0.0, 0.0);
    let (graph, _) = Graph::capture(device, || Ok(x.f_add_scalar(1.0)?)).unwrap();
    let _ = x.resize_([1 << 20]);
    refuses("Graph::replay", "has other memory than when the graph read", graph.replay());
    // Also within a capture.
    let capture = Graph::capture(device, || {
        let _ = x.f_add_scalar(1.0)?;
        Ok(x.f_resize_([1 << 22]).map(drop)?)
    });
    refuses("Graph::capture", "has other memory than when the graph read", capture);
    let (graph, y) = Graph::capture(device, || Ok(x.f_zeros_like()?)).unwrap();
    graph.replay().unwrap();
    assert_close(&y, &y.zeros_like(), 0.0, 0.0);
}

/// The memory is given back, although it was not made on the stream that used it last.
#[test]
fn cuda_a_dropped_graph_lets_go_of_what_it_kept() {
    let Some(device) = caching_or_skip("cuda_a_dropped_graph_lets_go_of_what_it_kept") else {
        return;
    };
    let _serial = serially();
    let allocated = || {
        synchronize(device).unwrap();
        empty_cache().unwrap();
        memory_stats(device).unwrap().allocated
    };
    let before = allocated();
    let x = Tensor::ones([16 << 20], (Kind::Float, device));
    let (graph, y) = Graph::capture(device, move || Ok(x.f_sum(Kind::Float)?)).unwrap();
    assert!(allocated() >= before + (64 << 20), "the graph keeps x");
    let stream = Stream::new(device).unwrap();
    {
        let _guard = StreamGuard::new(&stream).unwrap();
        graph.replay().unwrap();
    }
    drop((graph, y));
    assert_eq!(allocated(), before);
}

/// Only libtorch's native allocator tells which memory is the graph's own. Here a child has another.
#[test]
fn cuda_a_capture_with_another_allocator_is_refused() {
    const TEST: &str = "graphs::cuda_a_capture_with_another_allocator_is_refused";
    const CHILD: &str = "TCH_EXTENSION_TEST_CHILD";
    let Some(device) = caching_or_skip(TEST) else { return };
    if std::env::var_os(CHILD).is_some() {
        let x = Tensor::ones([8], (Kind::Float, device));
        let error = Graph::capture(device, || Ok(x.f_neg()?)).expect_err("refused").to_string();
        let words = "expected libtorch's native allocator of CUDA memory, got cudaMallocAsync";
        assert!(error.starts_with("Graph::capture: ") && error.contains(words), "{error}");
        assert_eq!(x.f_sum(Kind::Float).expect("nothing is captured").double_value(&[]), 8.0);
        return;
    }
    let child = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args([TEST, "--exact", "--nocapture"])
        .env(CHILD, "1")
        .env("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
        .output()
        .expect("a child");
    let text = String::from_utf8_lossy(&child.stdout).into_owned()
        + &String::from_utf8_lossy(&child.stderr);
    assert!(child.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
fn cuda_a_graph_names_its_kernels() {
    let Some(device) = caching_or_skip("cuda_a_graph_names_its_kernels") else { return };
    let _serial = serially();
    let x = Tensor::ones([64], (Kind::Float, device));
    let (graph, _) =
        Graph::capture(device, || Ok(x.f_exp()?.f_exp()?.f_cumsum(0, None)?)).expect("a graph");
    let names = graph.kernel_names().expect("names");
    assert_eq!(names.iter().map(|(_, count)| count).sum::<usize>(), graph.kernels());
    let of_exp: Vec<_> = names.iter().filter(|(name, _)| name.contains("exp_kernel")).collect();
    assert!(of_exp.len() == 1 && of_exp[0].1 == 2, "{names:?}");
    // As C++ writes them.
    assert!(of_exp[0].0.contains("at::native::"), "{names:?}");
}
