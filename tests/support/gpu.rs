//! What CUDA tests run on: which GPU, determined independently of the library, and which allocator.

use std::io::Write;
use tch::Device;
use tch_extension::testing::cuda_or_skip;

/// Whether libtorch's caching allocator is on, which it is not under some sanitizers. Without it, no
/// memory is counted, an allocation ends a capture, and a replay writes to memory that was freed.
pub fn has_caching_allocator() -> bool {
    std::env::var_os("PYTORCH_NO_CUDA_MEMORY_CACHING").is_none()
}

/// The GPU, or `None` and a line on stderr if a test needs the caching allocator and it is off.
pub fn caching_or_skip(test: &str) -> Option<Device> {
    let device = cuda_or_skip(test)?;
    if has_caching_allocator() {
        return Some(device);
    }
    let line = format!("SKIPPED {test}: no caching allocator\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
    None
}

/// Whether the first GPU has compute capability 9.0.
pub fn is_hopper() -> bool {
    let query = ["--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"];
    let answer = std::process::Command::new("nvidia-smi").args(query).output();
    answer.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).trim() == "9.0")
}

/// Whether the kernels were built for compute capability 9.0. By default they are if the machine
/// has such a GPU or none.
pub fn is_built_for_hopper() -> bool {
    let names = |list: &str| ["9.0", "Hopper", "native"].iter().any(|name| list.contains(name));
    option_env!("TORCH_CUDA_ARCH_LIST").filter(|list| !list.is_empty()).is_none_or(names)
}
