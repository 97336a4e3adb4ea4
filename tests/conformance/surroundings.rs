//! Tests of the state that an operator leaves, and of the threads, streams and graphs that it runs
//! in.

use super::*;
use support::gpu::caching_or_skip;

#[test]
fn grad_mode_left_on() {
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        // SAFETY: the call only changes a setting of this thread.
        unsafe { torch_sys::at_grad_set_enabled(1) };
        Ok(output)
    };
    assert_breaks(leaving, &["state"], "the forward changed grad mode");
}

#[test]
fn autocast_left_on() {
    thread_local!(static LEFT: Cell<Option<Autocast>> = const { Cell::new(None) });
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        let guard = match LEFT.take() {
            None => Some(Autocast::new(Device::Cpu, Kind::BFloat16)?),
            Some(_) => None,
        };
        LEFT.set(guard);
        Ok(output)
    };
    assert_breaks(leaving, &["state"], "the forward changed autocast");
    drop(LEFT.take());
}

#[test]
fn what_only_one_thread_has() {
    static FIRST: OnceLock<ThreadId> = OnceLock::new();
    let homesick = |inputs: &[Tensor]| {
        let home =
            std::thread::current().id() == *FIRST.get_or_init(|| std::thread::current().id());
        Ok(&inputs[0] * &inputs[1] * if home { 1.0 } else { 0.5 })
    };
    assert_breaks(homesick, &["threads"], "in a new thread, output 0: element");
    thread_local!(static HOME: Cell<bool> = const { Cell::new(false) });
    HOME.set(true);
    let panicking = |inputs: &[Tensor]| {
        assert!(HOME.get(), "not at home");
        Ok(&inputs[0] * &inputs[1])
    };
    assert_breaks(panicking, &["threads"], "in a new thread: it panicked: not at home");
}

#[test]
fn cuda_work_on_another_stream() {
    let Some(device) = cuda_or_skip("cuda_work_on_another_stream") else { return };
    let elsewhere = |inputs: &[Tensor]| {
        let _guard = StreamGuard::new(&Stream::default_of(inputs[0].device())?)?;
        Ok(&inputs[0] * &inputs[1])
    };
    // The check of captures is left out, because a capture would not contain this work, either.
    let (names, report) =
        broken(elsewhere, device, &ConformanceOptions { cuda_graph: false, ..defaults() });
    assert_eq!(names, ["stream"], "{report}");
    let backward = |_: &Context<'_>, [x, w]: [&Tensor; 2], grad: &Tensor| {
        let _guard = StreamGuard::new(&Stream::default_of(x.device())?)?;
        Ok([grad * w, grad * x].into())
    };
    let options = ConformanceOptions { cuda_graph: false, ..defaults() };
    let (names, report) = broken(product(value, backward), device, &options);
    assert_eq!(names, ["stream"], "{report}");
    assert!(report.contains("on a side stream, the gradient of input"), "{report}");
    let leaving = |inputs: &[Tensor]| {
        let output = &inputs[0] * &inputs[1];
        std::mem::forget(StreamGuard::new(&Stream::new(inputs[0].device())?)?);
        Ok(output)
    };
    let home = Stream::current(device).expect("a stream");
    let (names, report) = broken(leaving, device, &options);
    std::mem::forget(StreamGuard::new(&home).expect("back"));
    assert!(names.contains(&"state".to_string()), "{report}");
    assert!(report.contains("changed the current CUDA stream"), "{report}");
}

#[test]
fn cuda_what_cannot_be_captured() {
    let Some(device) = caching_or_skip("cuda_what_cannot_be_captured") else { return };
    let waiting = |inputs: &[Tensor]| {
        let sum = inputs[0].f_sum(Kind::Double)?.f_double_value(&[])?;
        Ok(&inputs[0] * &inputs[1] + 0.0 * sum)
    };
    let (names, report) = broken(waiting, device, &defaults());
    assert_eq!(names, ["CUDA graph"], "{report}");
    assert!(report.contains("it cannot be captured"), "{report}");
    assert!(
        broken(waiting, device, &ConformanceOptions { cuda_graph: false, ..defaults() })
            .0
            .is_empty()
    );
    // A value that the CPU computes during the capture is outdated in the replay.
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let counting = |inputs: &[Tensor]| {
        let captured = tch_extension::cuda::Graph::capture(inputs[0].device(), || Ok(())).is_err();
        CALLS.fetch_add(1, Ordering::Relaxed);
        Ok(&inputs[0] * &inputs[1] * if captured { 2.0 } else { 1.0 })
    };
    let (names, report) = broken(counting, device, &defaults());
    assert_eq!(names, ["CUDA graph"], "{report}");
    assert!(report.contains("replayed with other values, output 0: element"), "{report}");
}
