fn main() {
    tch_extension_build::Extension::new("extension_example").source_dir("csrc").build_or_exit();
    tch_extension_build::link_args();
}
