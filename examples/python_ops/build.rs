//! Python loads the library, and has loaded libtorch already.

fn main() {
    tch_extension_build::python_link_args();
}
