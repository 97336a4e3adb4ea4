//! What the linker needs to know of a library that Python loads.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    tch_extension_build::link_args();
}
