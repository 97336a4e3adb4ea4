fn main() {
    // Python has loaded libtorch already, so this library has no path to it.
    tch_extension_build::python_link_args();
    // The test is a program of its own, which has to find it.
    tch_extension_build::link_args();
}
