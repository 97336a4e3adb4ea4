//! Compiles `csrc` into a static library that is linked with libtorch.

fn main() {
    let extension = tch_extension_build::Extension::new("tch_extension").source_dir("csrc");
    extension
        .cuda_library("cublasLt")
        .for_hopper("gemm/hopper.cu")
        .for_hopper("lltm/grid_backward.cu")
        .for_hopper("lltm/grid_backward_plain.cu")
        .for_hopper("lltm/grid_forward.cu")
        .for_hopper("lltm/grid_forward_plain.cu")
        .for_hopper("lltm/wide_grid_backward.cu")
        .for_hopper("lltm/wide_grid_forward.cu")
        .for_hopper("lltm_cell/hopper_forward.cu")
        .build_or_exit();
    tch_extension_build::link_args();
}
