//! Looks for functions that an object compiled for one instruction set could provide to the rest of
//! the program.
//!
//! The linker keeps one copy of each weak function, from any object that has it. If it keeps the
//! copy of an AVX-512 object, unrelated code crashes on a processor without AVX-512. Only functions
//! in the inline namespace that is named after the object's instruction set are safe.

use crate::programs;
use crate::repo::files_below;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};

/// The instruction sets beyond the default one, whose functions run on every processor.
const ISAS: [&str; 2] = ["AVX2", "AVX512"];

/// Checks every object below `<out_dir>/isa/<ISA>`.
pub fn check(out_dir: &Path) -> Result<String> {
    let mut count = 0;
    for isa in ISAS {
        let folder = out_dir.join("isa").join(isa);
        let objects = objects(&folder);
        if objects.is_empty() {
            bail!("there is no object file in {}, so nothing was checked", folder.display());
        }
        count += objects.len();
        for object in &objects {
            check_object(object, isa)?;
        }
    }
    Ok(format!("{count} objects, no weak symbol outside {}", ISAS.join(" or ")))
}

// nm also translates C++ names, which would take two libraries instead.
fn check_object(object: &Path, isa: &str) -> Result<()> {
    let path = object.to_string_lossy();
    let output = programs::output("nm", &["-C", "--defined-only", &path])?;
    let output = output.context("nm was not found; it comes with binutils")?;
    if !output.status.success() {
        bail!("nm cannot read {path}: {}", programs::last_line(&output.stderr));
    }
    let listing = String::from_utf8_lossy(&output.stdout);
    let strays = strays(&listing, isa);
    if !strays.is_empty() {
        bail!("{path} has weak symbols outside the namespace {isa}:\n  {}", strays.join("\n  "));
    }
    Ok(())
}

/// The weak symbols in nm's listing that any other object may also define.
fn strays<'a>(listing: &'a str, isa: &str) -> Vec<&'a str> {
    let weak = listing.lines().filter_map(weak_symbol);
    weak.filter(|name| !name.contains(isa) && !is_harmless(name)).collect()
}

/// The name in a line such as `0000000000000000 W at::vec::AVX2::f(int)`, if the symbol is weak or
/// unique.
fn weak_symbol(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once(' ')?;
    let (kind, name) = rest.trim_start().split_once(' ')?;
    ["W", "w", "V", "v", "u"].contains(&kind).then_some(name)
}

/// This symbol is a pointer that every object with exceptions has, and not code.
fn is_harmless(name: &str) -> bool {
    name.starts_with("DW.ref.")
}

fn objects(folder: &Path) -> Vec<PathBuf> {
    let files = files_below(folder, "").into_iter();
    let objects = files.filter(|file| file.extension().is_some_and(|end| end == "o"));
    objects.map(|file| folder.join(file)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTING: &str = "\
0000000000000000 T lltm_cell_forward
0000000000000000 W at::vec::AVX2::Vectorized<float>::exp() const
0000000000000000 W std::vector<int>::push_back(int&&)
0000000000000000 V DW.ref.__gxx_personality_v0
0000000000000000 u std::some_unique
0000000000000010 t helper
";

    #[test]
    fn finds_what_is_outside_the_namespace() {
        assert_eq!(
            strays(LISTING, "AVX2"),
            ["std::vector<int>::push_back(int&&)", "std::some_unique"]
        );
        assert_eq!(strays(LISTING, "AVX512").len(), 3);
    }

    #[test]
    fn no_object_is_a_failure() {
        let message = check(Path::new("/no/such/folder")).err().unwrap().to_string();
        assert!(message.contains("nothing was checked"), "{message}");
    }
}
