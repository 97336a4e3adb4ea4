//! The build script of a library of operators for Python.

fn main() {
    tch_extension_build::python_link_args();
}
