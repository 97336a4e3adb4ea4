//! Compiles the kernels to CUDA texts, which `src/lib.rs` includes. It needs no GPU.

mod kernels;
mod text;

use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build");
    let mut texts = format!("const THREADS: u32 = {};\n", text::THREADS);
    for (constant, slices, kind, element, made) in [
        ("FORWARD_F32", 2, "Float", "float", text::forward::<f32>()),
        ("FORWARD_F64", 2, "Double", "double", text::forward::<f64>()),
        ("BACKWARD_F32", 3, "Float", "float", text::backward::<f32>()),
        ("BACKWARD_F64", 3, "Double", "double", text::backward::<f64>()),
    ] {
        let text::Text { name, source } = made?;
        writeln!(
            texts,
            "pub(crate) static {constant}: Text = Text {{ name: {name:?}, kind: Kind::{kind}, \
             element: {element:?}, slices: {slices}, source: {source:?} }};"
        )?;
    }
    let folder = std::env::var_os("OUT_DIR").ok_or("cargo sets OUT_DIR")?;
    std::fs::write(PathBuf::from(folder).join("texts.rs"), texts)?;
    tch_extension_build::link_args();
    Ok(())
}
