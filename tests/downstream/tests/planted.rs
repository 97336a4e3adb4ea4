//! Faults that compute-sanitizer must find (a bundle's `run.sh sanitize` runs these tests under
//! it), and a launch that CUDA must refuse.
#![cfg(tch_extension_cuda)]

use downstream::planted;
use tch::{Cuda, Kind, Tensor};
use tch_extension::Error;
use tch_extension::cuda::Event;
use tch_extension::testing::cuda_or_skip;

#[test]
fn planted_overrun() {
    let Some(device) = cuda_or_skip("planted_overrun") else { return };
    // The script makes memcheck pad allocations, because the memory after this one might otherwise
    // be mapped.
    let data = Tensor::zeros([1 << 20], (Kind::Float, device));
    planted::overrun(&data).expect("a launch");
    Cuda::synchronize(0);
}

#[test]
fn planted_race() {
    let Some(device) = cuda_or_skip("planted_race") else { return };
    planted::race(&Tensor::zeros([256], (Kind::Float, device))).expect("a launch");
    Cuda::synchronize(0);
}

#[test]
fn cuda_a_failed_event_is_not_blamed_on_the_next_launch() {
    let Some(device) = cuda_or_skip("cuda_a_failed_event_is_not_blamed_on_the_next_launch") else {
        return;
    };
    let event = || Event::new(device).expect("an event");
    event().elapsed(&event()).expect_err("neither was recorded");
    planted::race(&Tensor::zeros([256], (Kind::Float, device))).expect("an innocent launch");
}

#[test]
fn cuda_a_refused_launch_names_the_kernel() {
    let Some(device) = cuda_or_skip("cuda_a_refused_launch_names_the_kernel") else { return };
    let data = Tensor::zeros([4], (Kind::Float, device));
    let error = planted::impossible_launch(&data).expect_err("2048 threads in a block");
    assert!(matches!(error, Error::Launch { .. }));
    let text = error.to_string();
    assert!(text.starts_with("CUDA kernel planted_launch: invalid "), "{text}");
    planted::race(&Tensor::zeros([256], (Kind::Float, device)))
        .expect("the next launch is not blamed");
}
