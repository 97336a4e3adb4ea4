//! What the linker needs to know of a library that Python loads.

fn main() {
    tch_extension_build::python_link_args();
}
