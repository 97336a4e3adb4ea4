//! Tools to test an operator: [`gradcheck`](gradcheck()) for its gradients, [`gradgradcheck`] for
//! its second derivatives, [`assert_close`] and [`tolerance`] for its values, [`devices`] and
//! [`cuda_or_skip`] for the devices to test on. [`prove`](prove()) does all of it for an
//! [`Operator`](crate::operator::Operator).
//!
//! This crate's own operators are tested with them; use them for yours.

mod close;
mod compare;
mod conformance;
mod devices;
mod gradcheck;
mod prove;
mod replica;
mod samples;

pub use close::{assert_as_accurate, assert_close, tolerance};
pub use conformance::{ConformanceOptions, conformance};
pub use devices::{cuda_or_skip, devices};
pub use gradcheck::{GradcheckOptions, GradgradcheckOptions, gradcheck, gradgradcheck};
pub use prove::prove;
pub use samples::{Layout, Sample, SampleTable, Shape};

/// An operator that does nothing, written with C++'s `torch::autograd::Function`. Benchmarks
/// compare with it.
#[doc(hidden)]
pub fn cpp_identity(x: &tch::Tensor) -> crate::Result<tch::Tensor> {
    crate::ffi::testing::cpp_identity(x)
}

/// Runs `body`, and returns the names and sequence numbers that a profiler sees in this thread
/// meanwhile.
#[doc(hidden)]
pub fn recorded<T>(body: impl FnOnce() -> T) -> (T, Vec<(String, i64)>) {
    let recording = crate::ffi::testing::Recording::new().expect("libtorch takes an observer");
    let result = body();
    let (events, open) = recording.end();
    assert_eq!(open, 0, "every record ends");
    (result, events)
}
