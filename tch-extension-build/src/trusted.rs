//! Folders with code that will run in this process or be linked into a program.
//!
//! Whoever can write to such a folder can make the user run any code. So its owner must be the user
//! or root, and nobody else may be able to write to it. A folder is opened and then examined, so
//! that it cannot become another one in between; and whoever keeps code below a root that is checked
//! first can be sure that nobody exchanges what lies in it.

use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The flags of open(2), which std does not name. They are Linux's and differ between processors.
#[cfg(target_arch = "aarch64")]
mod flags {
    pub const DIRECTORY: i32 = 0o40_000;
    pub const NO_FOLLOW: i32 = 0o100_000;
}
#[cfg(not(target_arch = "aarch64"))]
mod flags {
    pub const DIRECTORY: i32 = 0o200_000;
    pub const NO_FOLLOW: i32 = 0o400_000;
}

/// Checks the root of such folders, and returns its path without links. The root may be a link of
/// the user's or of root's.
///
/// # Errors
/// When another user owns the folder or the link, when others may write to the folder, and when it
/// cannot be opened.
pub fn root(folder: &Path) -> Result<PathBuf> {
    let itself = folder.symlink_metadata()?;
    if itself.is_symlink() {
        check_owner(folder, &itself)?;
    }
    let folder = folder.canonicalize()?;
    check(&folder)?;
    Ok(folder)
}

/// Checks a folder, which must not be a link.
///
/// # Errors
/// As for [`root`], and when the folder is a link.
pub fn check(folder: &Path) -> Result<()> {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(flags::DIRECTORY | flags::NO_FOLLOW)
        .open(folder);
    let found = match opened.and_then(|opened| opened.metadata()) {
        // What the kernel says about a link depends on its version.
        Err(_) if folder.is_symlink() => return Err(untrusted(folder, "it is a link".to_string())),
        found => found?,
    };
    check_owner(folder, &found)?;
    let who = match (found.mode() & 0o020 != 0, found.mode() & 0o002 != 0) {
        (false, false) => return Ok(()),
        (true, false) => "g",
        (false, true) => "o",
        (true, true) => "go",
    };
    let way_out = format!(
        "others may write to it; if its contents are yours, run `chmod {who}-w {}`, otherwise delete it",
        folder.display()
    );
    Err(untrusted(folder, way_out))
}

/// Opens a file of a checked folder with these options. It must not be a link.
///
/// # Errors
/// When it cannot be opened, or is a link.
pub fn open(file: &Path, options: &mut OpenOptions) -> Result<File> {
    match options.custom_flags(flags::NO_FOLLOW).open(file) {
        Err(_) if file.is_symlink() => Err(untrusted(file, "it is a link".to_string())),
        opened => opened,
    }
}

fn check_owner(path: &Path, found: &Metadata) -> Result<()> {
    // The user of this process owns its entry in /proc.
    let own = Path::new("/proc/self").metadata()?.uid();
    match found.uid() {
        owner if owner == own || owner == 0 => Ok(()),
        owner => Err(untrusted(path, format!("it belongs to user {owner}"))),
    }
}

fn untrusted(path: &Path, why: String) -> Error {
    let text = format!("{} may contain code of another user's: {why}", path.display());
    Error::new(ErrorKind::PermissionDenied, text)
}
