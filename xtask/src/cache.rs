//! The compile cache that this user's builds share: its size, what it was good for, and an end to it.

use crate::commands::Usage;
use crate::place::{self, KERNELS, MOST_BYTES, OBJECTS};
use crate::report::say;
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Shows the cache, or empties it.
pub fn run(args: &[String]) -> Result<ExitCode> {
    match args {
        [] => say(describe()?),
        [flag] if flag == "--clear" => say(clear(&folder()?)?),
        _ => return Err(Usage("`cache` takes nothing, or `--clear`".to_string()).into()),
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the cache is and what it has, in one line.
pub fn describe() -> Result<String> {
    let folder = folder()?;
    let off = std::env::var(place::SWITCH).is_ok_and(|value| value == "0");
    let off = if off { format!("; switched off by {}", place::SWITCH) } else { String::new() };
    Ok(format!("{}{off}", contents(&folder)))
}

fn folder() -> Result<PathBuf> {
    Ok(place::folder(None).context("there is no compile cache")?.join(OBJECTS))
}

fn contents(folder: &Path) -> String {
    let objects = place::stored(folder);
    let bytes = objects.iter().map(|object| object.bytes).sum();
    let (found, compiled) = place::served(folder);
    let libraries = place::stored_in(&folder.with_file_name(KERNELS));
    let kernels = match libraries.iter().map(|library| library.bytes).sum() {
        0 => String::new(),
        bytes => format!(
            "; kernel libraries: {}, {}, which `--clear` keeps because programs load them (the newest {} and those of \
             the last {} days)",
            libraries.len(),
            size(bytes),
            place::MOST_LIBRARIES,
            place::LIBRARY_DAYS,
        ),
    };
    format!(
        "{}: {} objects, {} of at most {}; builds found {found} and compiled {compiled}{kernels}",
        folder.display(),
        objects.len(),
        size(bytes),
        size(MOST_BYTES)
    )
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{} KB", bytes.div_ceil(1000)),
        1_000_000..1_000_000_000 => format!("{} MB", bytes / 1_000_000),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

/// Removes all objects. Builds that run meanwhile compile what they do not find.
fn clear(folder: &Path) -> Result<String> {
    let before = contents(folder);
    match std::fs::remove_dir_all(folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot empty {}", folder.display()))
        }
        _ => Ok(format!("emptied {before}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_described_and_emptied() {
        let scratch = tempfile::tempdir().unwrap();
        let folder = scratch.path().join(OBJECTS);
        let end = "0 objects, 0 KB of at most 2.1 GB; builds found 0 and compiled 0";
        assert!(contents(&folder).ends_with(end), "{}", contents(&folder));
        for entry in ["a", "b"] {
            std::fs::create_dir_all(folder.join(entry)).unwrap();
            std::fs::write(folder.join(entry).join("lock"), "").unwrap();
            std::fs::write(folder.join(entry).join("1"), vec![0; 1_500_000]).unwrap();
        }
        std::fs::write(folder.join("log"), "1 a: current=0 found=3 compiled=4\n").unwrap();
        let all = "2 objects, 3 MB of at most 2.1 GB; builds found 3 and compiled 4";
        assert!(contents(&folder).ends_with(all), "{}", contents(&folder));
        assert!(clear(&folder).unwrap().ends_with(all));
        assert!(!folder.exists());
        assert!(clear(&folder).unwrap().ends_with(end), "it may be empty already");
        let kernels = scratch.path().join(KERNELS);
        std::fs::create_dir(&kernels).unwrap();
        std::fs::write(kernels.join("a.so"), vec![0; 1_500_000]).unwrap();
        let text = clear(&folder).unwrap();
        assert!(
            text.contains("compiled 0; kernel libraries: 1, 1 MB, which `--clear` keeps"),
            "{text}"
        );
        assert!(kernels.join("a.so").exists());
    }
}
