//! Where things lie in this repository.

use anyhow::{Context, Result};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// A checkout of this repository.
pub struct Repo {
    /// The folder of the root `Cargo.toml`.
    pub root: PathBuf,
}

impl Repo {
    /// The checkout that this program was built from. Cargo says where it is now; the path at
    /// compile time is for a program that is started without cargo.
    pub fn find() -> Result<Self> {
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let root = Path::new(&package)
            .parent()
            .map(Path::to_path_buf)
            .context("xtask lies in no repository")?;
        Ok(Repo { root })
    }

    /// Holds everything that set-up installs.
    pub fn venv(&self) -> PathBuf {
        self.root.join(".venv")
    }

    /// What `.cargo/config.toml` sets LIBTORCH to.
    pub fn libtorch(&self) -> PathBuf {
        self.root.join(".venv/libtorch")
    }

    /// What `.cargo/config.toml` sets CUDA_HOME to.
    pub fn cuda(&self) -> PathBuf {
        self.root.join(".venv/cuda")
    }
}

/// Whether a variable's value comes from `.cargo/config.toml` (cargo applies that to `cargo run`,
/// so xtask always sees it) or is as good as unset, and not a user's choice.
pub fn is_ours(value: Option<&OsStr>, ours: &Path) -> bool {
    let Some(value) = value.filter(|value| !value.is_empty()) else { return true };
    // As paths, so that a slash at the end makes no difference; resolved, for a checkout behind a
    // link.
    let resolved = |path: &Path| path.canonicalize().ok();
    Path::new(value) == ours
        || (resolved(ours).is_some() && resolved(Path::new(value)) == resolved(ours))
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
