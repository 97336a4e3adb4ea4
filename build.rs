//! Compiles `csrc` into the static library beside libtorch.

fn main() {
    tch_extension_build::Extension::new("tch_extension").source_dir("csrc").build_or_exit();
    tch_extension_build::link_args();
}
