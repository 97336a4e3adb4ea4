//! The library is loaded by Python, which has libtorch already.

fn main() {
    tch_extension_build::python_link_args();
}
