//! Prints the C++ header of Rust files: `headers PREFIX PREAMBLE SOURCE…`. `cargo xtask headers`
//! uses it for the headers that this repository keeps.

use std::path::PathBuf;
use tch_extension_build::headers::Header;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let (Some(prefix), Some(preamble)) = (arguments.next(), arguments.next()) else {
        anyhow::bail!("usage: headers PREFIX PREAMBLE SOURCE…");
    };
    let sources = arguments.map(PathBuf::from);
    if let Some(text) = Header::new(sources, prefix).preamble(preamble).generate()? {
        print!("{text}");
    }
    Ok(())
}
