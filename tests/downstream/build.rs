//! What the build script of every crate with kernels looks like.

fn main() {
    tch_extension_build::Extension::new("downstream").source_dir("csrc").build_or_exit();
    tch_extension_build::link_args();
}
