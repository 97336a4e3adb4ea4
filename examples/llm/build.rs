//! Tells the loader of the program and of its tests where libtorch is.

fn main() {
    tch_extension_build::link_args();
}
