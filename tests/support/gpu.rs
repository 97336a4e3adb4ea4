//! Which GPU the tests run on, determined independently of the library.

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
