//! The paths of this repository.

use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use walkdir::{DirEntry, WalkDir};

/// A checkout of this repository.
#[derive(Clone)]
pub struct Repo {
    /// The folder of the root `Cargo.toml`.
    pub root: PathBuf,
}

impl Repo {
    /// The checkout that this program was built from. Cargo says where it is now; the path from
    /// compile time serves a program that is started without cargo.
    pub fn find() -> Result<Self> {
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&package)
            .parent()
            .map(Path::to_path_buf)
            .context("xtask lies in no repository")?;
        Ok(Repo { root })
    }

    /// The folder that holds everything that set-up installs.
    pub fn venv(&self) -> PathBuf {
        self.root.join(".venv")
    }

    /// The value of LIBTORCH in `.cargo/config.toml`.
    pub fn libtorch(&self) -> PathBuf {
        self.root.join(".venv/libtorch")
    }

    /// The value of CUDA_HOME in `.cargo/config.toml`.
    pub fn cuda(&self) -> PathBuf {
        self.root.join(".venv/cuda")
    }
}

/// Whether a variable's value is not a choice of the user's: because it comes from
/// `.cargo/config.toml` (cargo applies that file to `cargo run`, so xtask always sees its values),
/// or because it is empty or unset.
pub fn is_ours(value: Option<&OsStr>, ours: &Path) -> bool {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return true };
    // Compared as paths, so that a trailing slash makes no difference, and with links resolved, for
    // a checkout that is reached through a link.
    let resolved = |path: &Path| path.canonicalize().ok();
    Path::new(value) == ours
        || (resolved(ours).is_some() && resolved(Path::new(value)) == resolved(ours))
}

/// The files below a folder of the root, sorted and relative to the root. Folders called `target`
/// are left out.
pub fn files_below(root: &Path, folder: impl AsRef<Path>) -> Vec<PathBuf> {
    let is_wanted = |entry: &DirEntry| entry.depth() == 0 || entry.file_name() != "target";
    let entries = WalkDir::new(root.join(folder)).sort_by_file_name().into_iter();
    let files = entries.filter_entry(is_wanted).flatten().filter(|entry| !entry.path().is_dir());
    files.filter_map(|file| Some(file.path().strip_prefix(root).ok()?.to_path_buf())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tells_its_own_value_from_a_users() {
        let ours = Path::new("/repo/.venv/libtorch");
        assert!(is_ours(None, ours));
        assert!(is_ours(Some(OsStr::new("")), ours));
        assert!(is_ours(Some(OsStr::new("/repo/.venv/libtorch")), ours));
        assert!(is_ours(Some(OsStr::new("/repo/.venv/libtorch/")), ours));
        assert!(!is_ours(Some(OsStr::new("/opt/libtorch")), ours));
        assert!(!is_ours(Some(OsStr::new("/repo/.venv/cuda")), ours));
    }
}
