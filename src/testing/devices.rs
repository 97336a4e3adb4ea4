//! The devices that tests run on, and what happens without a GPU.

use std::io::Write;
use tch::Device;

const REQUIRE_CUDA: &str = "TCH_EXTENSION_REQUIRE_CUDA";

/// The devices that a test should cover: the CPU and, if this build has CUDA kernels and there is a
/// GPU, the first GPU.
///
/// # Panics
/// When the environment has `TCH_EXTENSION_REQUIRE_CUDA=1` and CUDA cannot be used, so that tests
/// never pass without CUDA on a machine that is meant to test it.
pub fn devices() -> Vec<Device> {
    std::iter::once(Device::Cpu).chain(usable_cuda()).collect()
}

/// The first GPU, for a test that needs one. If there is none, it prints a line `SKIPPED test_name:
/// no CUDA device` to standard error and returns `None`. The test should then return, and its
/// result should not be taken for a success.
///
/// ```
/// # use tch_extension::testing::cuda_or_skip;
/// fn works_on_a_side_stream() {
///     let Some(device) = cuda_or_skip("works_on_a_side_stream") else { return };
///     // …
/// # let _ = device;
/// }
/// # works_on_a_side_stream();
/// ```
///
/// # Panics
/// As for [`devices`].
pub fn cuda_or_skip(test_name: &str) -> Option<Device> {
    let device = usable_cuda();
    if device.is_none() {
        // eprintln! is not used, because the test harness captures it and discards it when the test
        // passes. The line is one write, so that lines of tests in other threads do not mix. A
        // closed stderr is no reason to fail.
        let line = format!("SKIPPED {test_name}: no CUDA device\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    device
}

fn usable_cuda() -> Option<Device> {
    let missing = match (crate::cuda::is_compiled(), tch::Cuda::is_available()) {
        (true, true) => return Some(Device::Cuda(0)),
        (false, _) => "this build has no CUDA kernels",
        (true, false) => "libtorch sees no CUDA device",
    };
    let required = std::env::var_os(REQUIRE_CUDA).is_some_and(|value| value == "1");
    assert!(!required, "{REQUIRE_CUDA}=1, but {missing}; unset it to skip what needs CUDA");
    None
}
