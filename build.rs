//! Compiles `csrc` into a static library that is linked with libtorch.

fn main() {
    let extension = tch_extension_build::Extension::new("tch_extension").source_dir("csrc");
    extension.cuda_library("cublasLt").build_or_exit();
    tch_extension_build::link_args();
}
