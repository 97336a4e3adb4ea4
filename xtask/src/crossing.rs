//! Compares what the kernel library exports with the functions that Rust declares.
//!
//! A function in a CUDA object that other objects or Rust call ends with `_cuda`; it is declared in Rust
//! even if only C++ calls it. The linker sees to the rest: a program does not link with a function that
//! is not exported, nor a kernel library that needs a function of the program.

use crate::programs;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How the name of a function in a CUDA object ends.
pub const SUFFIX: &str = "_cuda";

/// The generated list of these functions, relative to the repository.
pub const EXPORTS: &str = "csrc/kernels.map";

/// Checks a library against the list in the repository.
pub fn check(root: &Path, library: &Path) -> Result<String> {
    let path = library.to_string_lossy();
    let output = programs::output("nm", &["--dynamic", "--defined-only", &path])?;
    let output = output.context("nm was not found; it comes with binutils")?;
    if !output.status.success() {
        bail!("nm cannot read {path}: {}", programs::last_line(&output.stderr));
    }
    let exports = root.join(EXPORTS);
    let declared = std::fs::read_to_string(&exports)
        .with_context(|| format!("cannot read {}", exports.display()))?;
    compare(&String::from_utf8_lossy(&output.stdout), &declared)
}

/// The kernel library below the output of the library's build script.
pub fn library(out_dir: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(out_dir.join("kernels")).into_iter().flatten().flatten();
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let is_library = |path: &PathBuf| {
        let name = name(path);
        name.starts_with("libtch_extension_kernels-") && name.ends_with(".so")
    };
    entries.map(|entry| entry.path()).find(is_library)
}

/// Compares nm's listing of a library with the list.
fn compare(listing: &str, declared: &str) -> Result<String> {
    let version = declared.split_once('{').and_then(|(head, _)| head.lines().last());
    let version = version.context("the list of exports has no version")?.trim();
    let names = declared.lines().filter_map(|line| line.trim().strip_suffix(';'));
    let mut expected: BTreeSet<String> = names
        .filter(|name| name.ends_with(SUFFIX))
        .map(|name| format!("{name}@@{version}"))
        .collect();
    expected.insert(version.to_string());
    let found = listing.lines().filter_map(|line| line.split_whitespace().last());
    let found: BTreeSet<String> = found.map(str::to_string).collect();
    let list =
        |names: Vec<&String>| names.iter().map(|name| format!("\n  {name}")).collect::<String>();
    let undeclared = list(found.difference(&expected).collect());
    if !undeclared.is_empty() {
        bail!("the kernel library exports what is not in {EXPORTS}:{undeclared}");
    }
    let undefined = list(expected.difference(&found).collect());
    if !undefined.is_empty() {
        bail!("Rust declares functions that no CUDA object defines:{undefined}");
    }
    Ok(format!("{} functions of CUDA objects, all declared", found.len() - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECLARED: &str =
        "/* Generated. */\nV_1 {\n  global:\n    a_cuda;\n    b_cuda;\n  local:\n    *;\n};\n";

    #[test]
    fn declarations_and_exports_are_the_same() {
        let listing = "0000000000000000 A V_1\n0000000000000010 T a_cuda@@V_1\n";
        let error = compare(listing, DECLARED).unwrap_err().to_string();
        assert!(error.ends_with("no CUDA object defines:\n  b_cuda@@V_1"), "{error}");
        let listing = format!("{listing}0000000000000030 T b_cuda@@V_1\n");
        assert_eq!(
            compare(&listing, DECLARED).unwrap(),
            "2 functions of CUDA objects, all declared"
        );
        let listing = format!("{listing}0000000000000050 T c_cuda\n");
        let error = compare(&listing, DECLARED).unwrap_err().to_string();
        assert!(error.ends_with("not in csrc/kernels.map:\n  c_cuda"), "{error}");
    }
}
