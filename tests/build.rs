//! Lets the test programs find libtorch.

fn main() {
    tch_extension_build::link_args();
}
