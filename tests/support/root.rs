//! Where the repository is.

use std::path::{Path, PathBuf};

/// The repository's folder, also where the tests run on another machine. Cargo says which package a
/// test belongs to, which is in a folder below; a bundle's script says where the files are.
pub fn root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from);
    let is_root = |folder: &&Path| folder.join("csrc").is_dir() && folder.join("src/ops").is_dir();
    let root = package.ancestors().find(is_root);
    root.unwrap_or_else(|| panic!("{} is not in the repository", package.display())).to_path_buf()
}
