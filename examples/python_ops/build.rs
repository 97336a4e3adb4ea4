fn main() {
    println!("cargo::rustc-link-arg-cdylib=-Wl,-z,nodelete");
}
