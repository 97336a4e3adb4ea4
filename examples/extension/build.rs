fn main() {
    tch_extension_build::Extension::new("extension_example")
        .source_dir("csrc")
        .params("src/linear/kernels.rs")
        .params("src/lltm/kernels.rs")
        .build_or_exit();
    tch_extension_build::link_args();
}
