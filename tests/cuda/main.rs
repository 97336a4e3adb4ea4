//! Tests of `tch_extension::cuda`: errors without a GPU, and streams, events, graphs, kernels and memory
//! with one.

mod device;
mod graphs;
mod kernel;
mod memory;
mod streams;

use libloading::os::unix::Library;
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use support::root;
use tch::{Device, Kind, Tensor};
use tch_extension::autograd::{GradOptions, grad};
use tch_extension::cuda::{
    DeviceGuard, Event, Graph, Stream, StreamGuard, device_count, device_properties, empty_cache,
    is_compiled, memory_stats, record_stream, reset_peak_memory_stats, synchronize,
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
        refuses("device_properties", says, device_properties(device));
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

/// The current device, as CUDA tells it.
fn current_device() -> i32 {
    let mut device = -1;
    // SAFETY: this is the function's type, and it writes only `device`.
    let status =
        unsafe { of_cuda::<unsafe extern "C" fn(*mut i32) -> i32>("cudaGetDevice")(&mut device) };
    assert_eq!(status, 0, "CUDA status");
    device
}

/// A function of CUDA's, which a program with CUDA kernels has loaded. It is not declared, because a
/// program without them could not be linked.
///
/// # Safety
/// The type is that of the function.
unsafe fn of_cuda<T: Copy>(name: &str) -> T {
    // SAFETY: the caller says so. CUDA is never unloaded.
    unsafe { *Library::this().get::<T>(name).expect("a function of CUDA's") }
}
