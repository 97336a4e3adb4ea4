//! Tests that a downstream program is linked correctly. This program names no CUDA function at all.

#[test]
fn libtorch_is_found_without_ld_library_path() {
    // It is already half the proof that this test runs at all: its rpath comes from `link_args` in
    // the build script.
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the loaded libraries");
    assert!(maps.contains("libtorch_cpu.so"));
    assert_eq!(tch_extension::autograd::live_nodes(), 0);
}

/// This is a frequent complaint about tch: the linker drops libtorch_cuda.so, and the program then
/// finds no GPU.
#[test]
#[cfg(tch_extension_cuda)]
fn libtorch_cuda_is_kept() {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("the loaded libraries");
    assert!(maps.contains("libtorch_cuda.so"));
}
