//! Compares what the CUDA objects define for the rest of the program with the functions that Rust
//! declares. A function in a CUDA object that other objects or Rust call ends with `_cuda`; it is
//! declared in Rust even if only C++ calls it. So the declarations are a complete list of them.

use crate::programs;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// How the name of a function in a CUDA object ends.
const SUFFIX: &str = "_cuda";

/// Checks the archive that the build script of these messages of cargo's made.
pub fn check(messages: &[Value], declared: &[String]) -> Result<String> {
    let archive = archive(messages).context("cargo did not say where libtch_extension.a is")?;
    let path = archive.to_string_lossy();
    let output = programs::output("nm", &["--extern-only", &path])?;
    let output = output.context("nm was not found; it comes with binutils")?;
    if !output.status.success() {
        bail!("nm cannot read {path}: {}", programs::last_line(&output.stderr));
    }
    compare(&String::from_utf8_lossy(&output.stdout), declared)
}

fn archive(messages: &[Value]) -> Option<PathBuf> {
    let scripts = messages.iter().filter(|message| message["reason"] == "build-script-executed");
    let folders = scripts.filter_map(|message| message["out_dir"].as_str()).map(Path::new);
    folders.map(|folder| folder.join("libtch_extension.a")).find(|archive| archive.exists())
}

/// Compares nm's listing of an archive.
fn compare(listing: &str, declared: &[String]) -> Result<String> {
    let (mut defined, mut called) = (BTreeSet::new(), BTreeSet::new());
    let mut is_cuda = false;
    for line in listing.lines() {
        if let Some(member) = line.strip_suffix(':') {
            is_cuda = member.contains(".cu-");
            continue;
        }
        let mut words = line.split_whitespace().rev();
        match (words.next(), words.next()) {
            (Some(name), Some("T")) if is_cuda => defined.insert(name),
            (Some(name), Some("U")) if !is_cuda => called.insert(name),
            _ => false,
        };
    }
    let ours = defined.iter().filter(|name| name.starts_with("tch_extension_"));
    let found: BTreeSet<&str> = defined.intersection(&called).chain(ours).copied().collect();
    let expected: BTreeSet<&str> =
        declared.iter().map(String::as_str).filter(|name| name.ends_with(SUFFIX)).collect();
    let list =
        |names: Vec<&&str>| names.iter().map(|name| format!("\n  {name}")).collect::<String>();
    let undeclared = list(found.difference(&expected).collect());
    if !undeclared.is_empty() {
        bail!(
            "CUDA objects define what no `unsafe extern \"C\"` block of Rust declares with a name that ends with \
             {SUFFIX}:{undeclared}"
        );
    }
    let undefined = list(expected.difference(&found).collect());
    if !undefined.is_empty() {
        bail!("Rust declares functions that no CUDA object defines:{undefined}");
    }
    Ok(format!("{} functions of CUDA objects, all declared", found.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "
small.cu-26dd316a96a5a6ae.o:
0000000000000010 T tch_extension_small_cuda
0000000000000030 T _ZN13tch_extension6helperEv
                 U cudaLaunchKernel

cpu.cpp-e4488128112a525b.o:
0000000000000000 T tch_extension_small_cpu
                 U tch_extension_small_cuda
";

    fn compared(listing: &str, declared: &[&str]) -> Result<String> {
        compare(listing, &declared.iter().map(ToString::to_string).collect::<Vec<_>>())
    }

    #[test]
    fn declarations_and_objects_have_the_same_functions() {
        let both = ["tch_extension_small_cpu", "tch_extension_small_cuda"];
        let report = compared(LISTING, &both).unwrap();
        assert_eq!(report, "1 functions of CUDA objects, all declared");

        let error = compared(LISTING, &both[..1]).unwrap_err().to_string();
        assert!(error.ends_with("with _cuda:\n  tch_extension_small_cuda"), "{error}");

        let more = [both[1], "tch_extension_gone_cuda"];
        let error = compared(LISTING, &more).unwrap_err().to_string();
        assert!(error.ends_with("no CUDA object defines:\n  tch_extension_gone_cuda"), "{error}");
    }

    #[test]
    fn a_call_of_a_mangled_function_crosses_too() {
        let listing = format!("{LISTING}                 U _ZN13tch_extension6helperEv\n");
        let error = compared(&listing, &["tch_extension_small_cuda"]).unwrap_err().to_string();
        assert!(error.ends_with("\n  _ZN13tch_extension6helperEv"), "{error}");
    }

    #[test]
    fn the_archive_is_that_of_the_build_script() {
        let scratch = tempfile::tempdir().unwrap();
        let message = |folder: &Path| serde_json::json!({"reason": "build-script-executed", "out_dir": folder});
        std::fs::create_dir(scratch.path().join("other")).unwrap();
        let messages = [message(&scratch.path().join("other")), message(scratch.path())];
        assert_eq!(archive(&messages), None);
        std::fs::write(scratch.path().join("libtch_extension.a"), "").unwrap();
        assert_eq!(archive(&messages), Some(scratch.path().join("libtch_extension.a")));
    }
}
