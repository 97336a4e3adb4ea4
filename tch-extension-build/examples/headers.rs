//! Prints the C++ header of Rust files: `headers PREFIX PREAMBLE SOURCE…`, or the names of their
//! functions: `headers --functions SOURCE…`. `cargo xtask headers` uses it for the headers that this
//! repository keeps.

use std::path::PathBuf;
use tch_extension_build::headers::Header;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let Some(prefix) = arguments.next() else {
        anyhow::bail!("usage: headers PREFIX PREAMBLE SOURCE…")
    };
    if prefix == "--functions" {
        let header = Header::new(arguments.map(PathBuf::from), "");
        header.function_names()?.iter().for_each(|name| println!("{name}"));
        return Ok(());
    }
    let preamble = arguments.next().unwrap_or_default();
    let header = Header::new(arguments.map(PathBuf::from), prefix.clone()).preamble(preamble);
    // C++ has namespaces for types that it declares itself.
    let is_declared = prefix.ends_with("::");
    let header = if is_declared { header.only_functions() } else { header.functions() };
    if let Some(text) = header.generate()? {
        print!("{text}");
    }
    Ok(())
}
