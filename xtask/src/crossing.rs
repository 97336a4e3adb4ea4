//! Compares what the kernel library exports with the functions that Rust declares.
//!
//! A function in a CUDA object that other objects or Rust call ends with `_cuda`; it is declared in Rust
//! even if only C++ calls it. The linker sees to the rest: a program does not link with a function that
//! is not exported, nor a kernel library that needs a function of the program.

use crate::{cargo, place, programs};
use anyhow::{Context, Result, bail};
use serde_json::Value;
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

/// The kernel library that a build has linked, from cargo's messages.
pub fn library(messages: &[Value]) -> Option<PathBuf> {
    let script = cargo::build_script(messages)?;
    let lines = |key: &str| script[key].as_array().into_iter().flatten().filter_map(Value::as_str);
    // Such as `dylib:+verbatim=libtch_extension_kernels-0123.so` and `native=/folder`.
    let value = |line: &str| Some(line.split_once('=')?.1.to_string());
    let is_kernels = |name: &String| name.starts_with(place::LIBRARY_PREFIX);
    let name = lines("linked_libs").filter_map(value).find(is_kernels)?;
    let folders = lines("linked_paths").filter_map(value);
    folders.map(|folder| Path::new(&folder).join(&name)).find(|path| path.is_file())
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
    fn the_library_is_the_one_that_the_build_has_linked() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("libtch_extension_kernels-01.so");
        let built = |id: &str, libraries: &[&str]| {
            serde_json::json!({
                "reason": "build-script-executed", "package_id": id, "linked_libs": libraries,
                "linked_paths": ["native=/nowhere", format!("native={}", scratch.path().display())],
            })
        };
        let kernels = "dylib:+verbatim=libtch_extension_kernels-01.so";
        for id in ["path+file:///clone#tch-extension@0.1.0", "path+file:///tch-extension#0.1.0"] {
            let messages = [built(id, &["static=tch_extension", kernels])];
            std::fs::write(&path, "").unwrap();
            assert_eq!(library(&messages), Some(path.clone()), "{id}");
            assert_eq!(library(&[built(id, &["static=tch_extension"])]), None, "an older one");
            std::fs::remove_file(&path).unwrap();
            assert_eq!(library(&messages), None);
        }
        let other = "path+file:///tch-extension/tests#tests@0.1.0";
        assert!(cargo::build_script(&[built(other, &[])]).is_none());
    }

    /// The text of a source and of all headers that it includes of this repository.
    fn with_headers(source: &Path, csrc: &Path, seen: &mut BTreeSet<PathBuf>) -> String {
        let mut text = std::fs::read_to_string(source).unwrap();
        let quoted = text.lines().filter_map(|line| line.trim_start().strip_prefix("#include \""));
        let names: Vec<String> =
            quoted.map(|rest| rest.trim_end().trim_end_matches('"').to_string()).collect();
        for name in names {
            let places = [source.parent().unwrap().join(&name), csrc.join("include").join(&name)];
            let place = places.iter().find_map(|place| place.canonicalize().ok());
            let place = place.unwrap_or_else(|| panic!("{name} in {}", source.display()));
            if seen.insert(place.clone()) {
                text += &with_headers(&place, csrc, seen);
            }
        }
        text
    }

    /// Debug builds share the objects of kernels with other builds, because no macro of debug builds is
    /// defined for them (tch-extension-build/src/extension/build.rs).
    #[test]
    fn no_kernel_is_another_one_in_debug_builds() {
        let csrc = Path::new(env!("CARGO_MANIFEST_DIR")).join("../csrc");
        let sources = crate::repo::files_below(&csrc, "");
        let mut sources =
            sources.iter().filter(|file| file.extension().is_some_and(|end| end == "cu"));
        let is_found = |file: &str| {
            with_headers(&csrc.join(file), &csrc, &mut BTreeSet::new())
                .contains("TCH_EXTENSION_DEBUG")
        };
        assert!(is_found("include/tch_extension/tensor.h"), "the search finds nothing at all");
        let dependent = sources.find(|file| is_found(&file.to_string_lossy()));
        assert_eq!(dependent, None, "it needs an object for debug builds");
    }

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
