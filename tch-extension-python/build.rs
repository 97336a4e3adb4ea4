//! What the linker needs to know of a library that Python loads.

fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
